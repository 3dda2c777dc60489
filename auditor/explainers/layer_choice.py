"""Layer choice: candidate layers measured on a few images, and the one that makes most sense.

Every candidate is given a small shared basis, as `nmf` would make one, from half of the images, and judged on the rest:

``faithfulness``  share of images whose class survives when the basis stands in for the layer;
``locality``      1 - (share of the grid that concepts cover, as the perplexity of their scores): 0 is everywhere;
``cost``          operations above the layer over those of the whole network: what a point of a path integral costs.

The best has the largest  faithfulness + locality / 4 - cost / 4,  less a tenth for every candidate that stands after
it: of equals the later layer, nearer to the decision, wins. Costs are counted, not timed, so the choice is repeatable.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from auditor.data.source import Data
from auditor.errors import AuditError
from auditor.explainers.layer_activations import as_columns, check_varies
from auditor.kernels.factorization.nmf import factorize
from auditor.kernels.factorization.projection import prepare, project_images
from auditor.subject.layers import Layer, reading_of
from auditor.subject.operations import operations
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)

N_IMAGES = 16
N_CANDIDATES = 4
RANK = 10
COLUMNS = 3000
STEP = 0.1  # what a candidate loses for every one that stands after it


@dataclass(frozen=True, slots=True)
class MeasuredLayer:
    """One candidate with its figures; NaN with a reason where it cannot be measured."""

    layer: Layer
    faithfulness: float
    locality: float
    cost: float
    later: int  # candidates that stand after it
    reason: str = ""

    @property
    def score(self) -> float:
        """What decides; minus infinity for a layer that could not be measured."""
        if self.reason:
            return -math.inf
        return self.faithfulness + self.locality / 4 - self.cost / 4 - STEP * self.later


def candidates(subject: Subject) -> list[Layer]:
    """Return the layers worth measuring, in order: the suggested one, and the last of each earlier map.

    Only layers that compute something, stand for themselves and have the suggested one's form (a map, or none).
    """
    suggested = subject.layer(subject.default_layer())
    chosen = [suggested]
    before = subject.layers()
    before = before[: next(i for i, layer in enumerate(before) if layer.name == suggested.name)]
    shapes = {suggested.shape}
    for layer in reversed(before):
        usable = layer.explainable and not layer.is_passive and not layer.same_as
        if len(chosen) < N_CANDIDATES and usable and layer.is_spatial == suggested.is_spatial:
            if layer.shape not in shapes and layer.nonnegative >= suggested.nonnegative:
                chosen.append(layer)
            shapes.add(layer.shape)
    return chosen[::-1]


def measure_layers(subject: Subject, images: Tensor, layers: Sequence[Layer] | None = None) -> list[MeasuredLayer]:
    """Measure candidate layers on pixels (images, …); at least two images."""
    layers = list(layers) if layers is not None else candidates(subject)
    with torch.no_grad():
        logits, taken = subject.run(images, [layer.name for layer in layers])
    whole = operations(subject, images[:1])
    measured = []
    for i, layer in enumerate(layers):
        later = len(layers) - 1 - i
        try:
            faithfulness, locality = _stand_in(subject, layer, taken[layer.name], logits.argmax(1))
            cost = 1 - operations(subject, images[:1], up_to=layer.name) / max(1, whole)
            measured.append(MeasuredLayer(layer, faithfulness, locality, cost, later))
        except (AuditError, ValueError) as error:
            reason = " ".join(str(error).split())
            measured.append(MeasuredLayer(layer, math.nan, math.nan, math.nan, later, reason))
    return measured


def best_layer(measured: Sequence[MeasuredLayer]) -> str | None:
    """Return the name of the layer with the best score; None where none could be measured."""
    best = max(measured, key=lambda m: m.score, default=None)
    return None if best is None or best.reason else best.layer.name


def choose_layer(subject: Subject, data: Data, name: str | None, seed: int = 0) -> str:
    """Return the layer asked for, or the best of the candidates on a few images of the data."""
    if name is not None or subject.names_its_layer or len(data) < 4:
        return subject.layer(name).name
    layers = candidates(subject)
    if len(layers) < 2:
        return layers[-1].name
    measured = measure_layers(subject, some_images(subject, data, seed), layers)
    for m in measured:
        log.info("layer %s: %s", m.layer.name, m.reason or f"score {m.score:.3f}, class kept {m.faithfulness:.2f}")
    return best_layer(measured) or layers[-1].name


def some_images(subject: Subject, data: Data, seed: int = 0) -> Tensor:
    """Return the pixels of a few images, spread over the classes."""
    drawn = data.only(data.draw(N_IMAGES, seed))
    return torch.cat([batch.images for batch in drawn.batches(subject, N_IMAGES)])[:N_IMAGES]


def random_images(subject: Subject, seed: int = 0) -> Tensor:
    """Return smooth random pixels, for where there is no data."""
    g = torch.Generator().manual_seed(seed)
    coarse = torch.rand(N_IMAGES, subject.input_shape[0], 7, 7, generator=g)
    return torch.nn.functional.interpolate(coarse, size=subject.input_shape[1:], mode="bilinear")


def _stand_in(subject: Subject, layer: Layer, z: Tensor, classes: Tensor) -> tuple[float, float]:
    """Return faithfulness and locality of a basis made of every second image, on the others."""
    assert layer.layout is not None
    half = torch.arange(len(z)) % 2 == 0
    layout = reading_of(layer.layout, z[half])
    X = as_columns(layout, z[half]).float().cpu()
    check_varies(layer.name, X)
    if X.shape[1] > COLUMNS:
        X = X[:, torch.linspace(0, X.shape[1] - 1, COLUMNS).long()]
    fit = factorize(X.contiguous(), min(RANK, *X.shape), max_iter=40, tol=1e-3, signed=float(X.min()) < 0)
    rest = z[~half]
    S = project_images(layout.to_positions(rest), prepare(fit.W))
    with torch.no_grad():
        hat = subject.forward_from(layer.name, layout.from_positions(fit.W.to(rest) @ S, rest))
    faithfulness = float((hat.argmax(1) == classes[~half]).double().mean())
    return faithfulness, _locality(layout.on_grid(S))


def _locality(S: Tensor) -> float:
    """Return 1 - perplexity / positions of score maps (images, concepts, positions), weighted by their mass.

    >>> round(_locality(torch.ones(2, 3, 10)), 3), round(_locality(torch.eye(10)[None]), 3)
    (0.0, 0.9)
    """
    mass = S.double().sum(-1)
    p = S.double() / mass[..., None].clamp_min(1e-30)
    perplexity = (-(p * p.clamp_min(1e-30).log()).sum(-1)).exp()
    share = (perplexity * mass).sum() / mass.sum().clamp_min(1e-30) / S.shape[-1]
    return float(1 - share)
