"""The methods of the XNN paper's table: each fitted to the classes, with its predictions and its heatmaps.

SRAE, NN, SAE and CAE are heads trained by the same code, Lasso takes single dimensions of the layer and weighs them
linearly, 1-Heatmap is contrastive excitation backprop of the logit itself, and Z takes the neurons of the layer one by
one (64 of them, drawn by the seed): it predicts nothing and says how local neurons are by themselves. On a layer with
positions heads are 1 x 1 convolutions, and a neuron or a dimension is a channel, averaged over the positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from auditor.attribution.excitation import ExcitationBackprop, Heatmaps
from auditor.explainers.xnn.examples import Examples
from auditor.explainers.xnn.explainer import XnnConfig, srae_config
from auditor.explainers.xnn.head_design import make_heads
from auditor.explainers.xnn.head_training import Trained, fit_heads
from auditor.explainers.xnn.heads import XHeads
from auditor.network.aten_graph import graph_of
from auditor.subject.subject import Subject

METHODS = ("srae", "nn", "sae", "cae", "lasso", "z", "1-heatmap")
HEADS = ("srae", "nn", "sae", "cae")
NEURONS = 64  # of the layer, for the method Z
Predict = Callable[[Tensor], Tensor]  # activations (examples, dims) -> (classes, examples)


@dataclass(frozen=True)
class Shown:
    """Positives of one class on which heatmaps are judged: pixels, activations and the parts of each."""

    x: Tensor
    Z: Tensor
    parts: list[Tensor]


@dataclass(frozen=True)
class Heat:
    """Heatmaps of a class's features on the shown images, and which count (images, features): not the inactive ones."""

    k: int
    maps: Heatmaps
    counts: Tensor

    @property
    def counted(self) -> Tensor:
        """Return the maps (images, features, height, width), 0 where they do not count."""
        return self.maps.maps * self.counts[:, :, None, None]

    def union(self) -> Tensor:
        """Return one map per image: at every pixel the strongest of its features, each scaled to its own maximum."""
        maps = self.counted
        peak = maps.flatten(2).amax(2).clamp_min(1e-30)
        return (maps / peak[:, :, None, None]).amax(1)


@dataclass(frozen=True)
class FittedMethod:
    """One method fitted to the classes; ``predict`` is None where it predicts nothing."""

    name: str
    predict: Predict | None
    heat: list[Heat]
    features: float = math.nan  # per class: x-features that fire, or dimensions that Lasso chose
    pull_away: float = math.nan


def fit_method(
    subject: Subject,
    examples: Examples,
    classes: list[int],
    layer: str,
    method: str,
    config: XnnConfig,
    shown: dict[int, Shown],
    alpha: float | None = None,
) -> FittedMethod:
    """Fit a method by name to the examples to learn from, and draw its heatmaps of the shown images."""
    if method == "1-heatmap":
        return _one_heatmap(subject, shown)
    if method == "z":
        return _neurons(subject, examples, layer, config, shown)
    if method == "lasso":
        return _lasso(subject, examples, classes, layer, config, shown, alpha)
    heads, trained = fitted_heads(subject, examples, classes, layer, config.model_copy(update={"variant": method}))

    def predict(Z: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([heads.predict(heads.encode(part)) for part in torch.split(Z, 1024)], 1)

    engine, heat, layout = _engine(subject), [], subject.layout(layer).name
    for i, k in enumerate(classes):
        s = shown.get(k)
        if s is not None:
            head = heads.encoder_of(i, layout)
            headed = ExcitationBackprop(engine.graph, head=head, layer=layer, floor=_floor(subject))
            mass = None
            if layout != "vector":
                with torch.no_grad():
                    mass = heads.cell_mass(heads.encode_each(s.Z, [i] * len(s.Z)), i)
            maps = headed.maps(subject.normalise(s.x), list(range(heads.n_features)), mass=mass)
            heat.append(Heat(k, maps, ~maps.empty & ~maps.inactive))
    alive = float((~trained.dead).sum(1).double().mean())
    return FittedMethod(method, predict, heat, alive, float(trained.pull_away.mean()))


def fitted_heads(
    subject: Subject, examples: Examples, classes: list[int], layer: str, config: XnnConfig
) -> tuple[XHeads, Trained]:
    """Train the heads of one variant."""
    heads, slope = make_heads(subject, examples, classes, layer, config)
    options = srae_config(config, examples)
    trained = fit_heads(
        heads, examples, classes, options, max_epochs=config.max_epochs, patience=config.patience, slope=slope
    )
    return heads, trained


def _one_heatmap(subject: Subject, shown: dict[int, Shown]) -> FittedMethod:
    heat = []
    for k, images in shown.items():
        maps = _engine(subject).maps(subject.normalise(images.x), [k])
        heat.append(Heat(k, maps, ~maps.empty))
    return FittedMethod("1-heatmap", None, heat)


def _neurons(
    subject: Subject, examples: Examples, layer: str, config: XnnConfig, shown: dict[int, Shown]
) -> FittedMethod:
    generator = torch.Generator().manual_seed(config.seed)
    drawn = torch.randperm(examples.Z.shape[1], generator=generator)[:NEURONS].sort().values
    heat = []
    for k, s in shown.items():
        maps = _engine(subject).maps(subject.normalise(s.x), drawn.tolist(), start=layer)
        heat.append(Heat(k, maps, ~maps.empty & (by_channel(s.Z)[:, drawn] > 0)))
    return FittedMethod("z", None, heat)


def _lasso(
    subject: Subject,
    examples: Examples,
    classes: list[int],
    layer: str,
    config: XnnConfig,
    shown: dict[int, Shown],
    alpha: float | None,
) -> FittedMethod:
    weights, heat = [lasso(examples.learned, k, alpha, config.n) for k in classes], []
    for k, (w, _) in zip(classes, weights, strict=True):
        s, chosen = shown.get(k), w.nonzero().flatten()
        if s is not None and len(chosen):
            maps = _engine(subject).maps(subject.normalise(s.x), chosen.tolist(), start=layer)
            heat.append(Heat(k, maps, ~maps.empty & (by_channel(s.Z)[:, chosen] > 0)))

    def predict(Z: Tensor) -> Tensor:
        return torch.stack([by_channel(Z) @ w + c for w, c in weights])

    used = sum(int(w.count_nonzero()) for w, _ in weights) / len(weights)
    return FittedMethod("lasso" if alpha is None else f"lasso {alpha:g}", predict, heat, used)


def by_channel(Z: Tensor) -> Tensor:
    """Return a number per example and dimension: the mean over positions where there are any."""
    return Z if Z.dim() == 2 else Z.flatten(2).mean(-1)


def lasso(examples: Examples, k: int, alpha: float | None, n: int) -> tuple[Tensor, float]:
    """Return weights and intercept of  min 1/(2M) |Zw + c - y|^2 + alpha |w|_1;  default alpha keeps about n dims."""
    import numpy as np
    from sklearn.linear_model import Lasso, lasso_path

    Z, y = by_channel(examples.Z).double().numpy(), examples.logits[:, k].double().numpy()
    if alpha is None:
        centred = Z - Z.mean(0)
        largest = float(abs(centred.T @ (y - y.mean())).max()) / len(y)
        alphas, coefs, _ = lasso_path(centred, y - y.mean(), alphas=np.geomspace(largest, largest / 100, 60))
        counts = (abs(coefs) > 1e-9).sum(0)
        alpha = float(alphas[max((i for i in range(len(alphas)) if counts[i] <= n), default=0)])
    model = Lasso(alpha=alpha, max_iter=5000).fit(Z, y)
    return torch.as_tensor(model.coef_, dtype=torch.float32), float(model.intercept_)


def _engine(subject: Subject) -> ExcitationBackprop:
    return ExcitationBackprop(graph_of(subject), floor=_floor(subject))


def _floor(subject: Subject) -> list[float]:
    return [-m / s for m, s in zip(subject.preprocessing.mean, subject.preprocessing.std, strict=True)]
