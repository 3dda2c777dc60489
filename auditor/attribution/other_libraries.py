"""Relevance maps by other people's libraries, where they are installed: LIME, SHAP (partition), Captum, zennit.

None of them is a dependency; the extra ``maps`` installs all four. LIME and SHAP ask the network for many copies of the
image with parts of it hidden, so they take seconds.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from auditor.errors import DataError, OptionError
from auditor.subject.subject import Subject

Attribution = Callable[[Subject, Tensor, Tensor], Tensor]
INSTALL = "pip install 'mlflow-auditor[maps]'"
SMALL_SIDE = 64  # below it quickshift finds one superpixel or none
BATCH = 32


def lime(subject: Subject, x: Tensor, targets: Tensor, n_samples: int = 1000, seed: int = 0) -> Tensor:
    """Return LIME's weight of every superpixel, enlarged to the image [LIME]."""
    explainer_module = _library("lime.lime_image", "LIME", "lime")
    segmentation = _library("lime.wrappers.scikit_image", "LIME", "lime").SegmentationAlgorithm
    small = min(x.shape[2:]) < SMALL_SIDE
    cut = (
        segmentation("slic", n_segments=min(64, x.shape[2] * x.shape[3] // 4), compactness=0.1, start_label=0)
        if small
        else segmentation("quickshift", kernel_size=4, max_dist=200, ratio=0.2, random_seed=seed)  # LIME's own default
    )
    maps = []
    for image, target in zip(x, targets.tolist(), strict=True):
        explainer = explainer_module.LimeImageExplainer(random_state=seed, verbose=False)
        with redirect_stderr(io.StringIO()):  # it draws a progress bar that cannot be switched off
            explanation = explainer.explain_instance(
                _colours(image),
                _asked(subject, len(image)),
                labels=[target],
                top_labels=None,
                num_samples=n_samples,
                batch_size=BATCH,
                segmentation_fn=cut,
                random_seed=seed,
            )
        heat = torch.zeros(x.shape[2:])
        for segment, weight in explanation.local_exp[target]:
            heat[torch.from_numpy(explanation.segments == segment)] = float(weight)
        maps.append(heat.expand(image.shape))
    return torch.stack(maps)


def shap_partition(subject: Subject, x: Tensor, targets: Tensor, n_evaluations: int = 500) -> Tensor:
    """Return SHAP values of pixels by recursive halves of the image, hidden by the image's mean colour [SHAP]."""
    shap = _library("shap", "SHAP", "shap")
    maps = []
    for image, target in zip(x, targets.tolist(), strict=True):
        pixels = image.permute(1, 2, 0).cpu().numpy().astype(np.float32)
        grey = np.broadcast_to(pixels.mean((0, 1)), pixels.shape).copy()
        asked = _asked(subject, len(image))
        explain = shap.explainers.Partition(
            lambda rows, asked=asked, target=target: asked(rows)[:, [target]], shap.maskers.Image(grey, pixels.shape)
        )
        values = explain(pixels[None], max_evals=n_evaluations, batch_size=BATCH, silent=True).values
        maps.append(torch.from_numpy(np.asarray(values, dtype=np.float32).reshape(pixels.shape)).permute(2, 0, 1))
    return torch.stack(maps)


def from_captum(name: str) -> Attribution:
    """Return an attribution class of Captum that needs no further argument than input and target."""
    captum = _library("captum.attr", f"captum:{name}", "captum")
    method: Any = getattr(captum, name, None)
    if method is None:
        raise OptionError(f"maps: Captum has no method {name!r}; see captum.attr for the names.")

    def run(subject: Subject, x: Tensor, targets: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().clone().requires_grad_()
            relevance: Tensor = method(Logits(subject)).attribute(leaf, target=targets)
        return relevance.detach()

    return run


def from_zennit(name: str) -> Attribution:
    """Return what a composite of zennit gives (EpsilonPlusFlat, EpsilonAlpha2Beta1); layers must be modules."""
    composites = _library("zennit.composites", f"zennit:{name}", "zennit")
    make: Any = getattr(composites, name, None)
    if make is None:
        raise OptionError(f"maps: zennit has no composite {name!r}; see zennit.composites for the names.")

    def run(subject: Subject, x: Tensor, targets: Tensor) -> Tensor:
        with torch.enable_grad(), subject.at_rest(), make().context(subject.module):
            leaf = subject.normalise(x).detach().requires_grad_()
            logits = subject.forward_normalised(leaf)
            start = torch.zeros_like(logits).scatter_(1, targets.to(logits.device)[:, None], 1.0) * logits.detach()
            relevance: Tensor = torch.autograd.grad(logits, leaf, start)[0]
        return relevance.detach().cpu()

    return run


class Logits(nn.Module):
    """The subject as a module from pixels to logits."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.inner, self.subject = subject.module, subject

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of pixels."""
        return self.subject.logits(x)


def _library(module: str, method: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise OptionError(f"maps: {method} needs the package {package}; {INSTALL}, or leave this map out.") from error


def _colours(image: Tensor) -> Any:
    """Return an image as (height, width, 3) in double precision, which LIME asks for."""
    if len(image) not in (1, 3):
        raise DataError(f"maps: LIME takes images of 1 or 3 channels, got {len(image)}; leave this map out.")
    return image.expand(3, *image.shape[1:]).permute(1, 2, 0).cpu().double().numpy()


def _asked(subject: Subject, channels: int) -> Callable[[Any], Any]:
    """Return the logits as a function of arrays (n, height, width, colours)."""

    def logits(rows: Any) -> Any:
        pixels = torch.as_tensor(np.asarray(rows), dtype=torch.float32).permute(0, 3, 1, 2)
        pixels = pixels if pixels.shape[1] == channels else pixels[:, :channels]
        with torch.no_grad():
            return subject.logits(pixels).cpu().double().numpy()

    return logits
