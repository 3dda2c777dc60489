"""Relevance maps of one image side by side: what people know, beside the explainers attached to the model.

Every map comes with the seconds it took and with what pixel flipping says of it: the mean change of the class's
probability while the least relevant cells turn to noise first, and by how much that beats random orders of the same
cells under the same noise. One image is an anecdote: `tests/benchmarks/bench_maps.py` compares over many.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auditor.attribution.baselines import attribution
from auditor.auditing.case import relevance, resized
from auditor.auditing.explanation_quality import flip_cells
from auditor.auditing.performance import two_sided
from auditor.errors import AuditError, DataError
from auditor.explainers.answer import explanations_of
from auditor.explainers.base import Explainer
from auditor.perturbation.pixel_flipping import MaskedImages, flip_curve
from auditor.progress import Progress, silent
from auditor.subject.outputs import Output
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)

DEFAULT_METHODS = ("LIME", "SHAP", "Grad-CAM", "Grad-CAM++", "guided backprop", "integrated gradients", "SmoothGrad",
         "LRP-alpha-beta", "deep Taylor", "occlusion")  # fmt: skip
STEPS, DRAWS, RANDOM_MAPS = 8, 4, 8


@dataclass(frozen=True, slots=True)
class RelevanceMap:
    """One map (height, width), signed where the method is; None and a ``problem`` where the method gives none."""

    name: str
    kind: str  # of the explainer; empty for a method that needs no fit
    heat: Tensor | None
    seconds: float = math.nan
    flip_area: float = math.nan
    flip_gain: float = math.nan  # over the mean of random maps
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain Python for JSON, without the map itself."""
        numbers = {k: getattr(self, k) for k in ("seconds", "flip_area", "flip_gain")}
        finite = {k: v if math.isfinite(v) else None for k, v in numbers.items()}
        return {"name": self.name, "kind": self.kind, **finite, "problem": self.problem}


@dataclass(frozen=True, slots=True)
class MapComparison:
    """The maps of one image for one class; ``random_area`` is what random maps leave."""

    image: Tensor  # (channels, height, width)
    prediction: int
    target: int
    probability: float  # of the target
    random_area: float
    maps: tuple[RelevanceMap, ...]


def compare_maps(
    subject: Subject,
    image: Tensor,
    explainers: Mapping[str, Explainer] | None = None,
    *,
    methods: Sequence[str] = DEFAULT_METHODS,
    target: int | str | None = None,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> MapComparison:
    """Return the maps of ``image`` (channels, height, width) for a class, by default the predicted one.

    ``compare_maps(subject, image, {"concepts": concepts}).maps[0].heat``. ``options`` go to explainers that search. A
    method that cannot be used with this model, or is not installed, is there with the problem in one sentence.
    """
    chosen = {name: attribution(name) for name in methods}  # a wrong name ends it before any work
    explainers = dict(explainers or {})
    x = image[None]
    with torch.no_grad():
        logits = subject.logits(x).cpu()
    if not bool(logits.isfinite().all()):
        raise DataError("compare-maps: the model's logits of this image are not finite, so no map means anything.")
    prediction = int(two_sided(logits).argmax(1)) if logits.shape[1] > 1 else 0
    k = prediction if target is None else subject.class_index(target)
    targets, n = torch.tensor([k]), len(chosen) + len(explainers)
    judge = _Judge(subject, x, targets, seed)
    maps: list[RelevanceMap] = []
    for name, method in chosen.items():
        progress("comparing maps", len(maps), n)
        maps.append(judge.judged(name, "", lambda method=method: method(subject, x, targets)[0].sum(0)))
    for name, explainer in explainers.items():
        progress("comparing maps", len(maps), n)
        maps.append(judge.judged(name, explainer.kind, lambda e=explainer: _explained(subject, e, x, k, options or {})))
    progress("comparing maps", n, n)
    probability = float(subject.probabilities(logits)[0, k])
    return MapComparison(image, prediction, k, probability, judge.random_area, tuple(maps))


class _Judge:
    """Times a map and lets pixel flipping judge it, all under the same noise."""

    def __init__(self, subject: Subject, x: Tensor, targets: Tensor, seed: int) -> None:
        self.x, self.targets = x, targets
        output = subject.output if subject.n_classes > 1 else Output()

        def network(z: Tensor) -> Tensor:
            return two_sided(subject.logits(z).float().cpu())

        self.masked = MaskedImages(network, flip_cells(subject.input_shape), draws=DRAWS, seed=seed, output=output)
        self.random_area = sum(self._area(self.masked.random_scores(i)) for i in range(RANDOM_MAPS)) / RANDOM_MAPS

    def judged(self, name: str, kind: str, make: Any) -> RelevanceMap:
        """Return the map that ``make()`` gives, or the problem."""
        began = time.monotonic()
        try:
            heat: Tensor | None = make()
        except AuditError as error:
            return RelevanceMap(name, kind, None, problem=" ".join(str(error).split()))
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:  # a library met a model it cannot read
            log.info("%s", name, exc_info=True)
            text = " ".join(str(error).split())[:160]
            return RelevanceMap(name, kind, None, problem=f"it does not work with this model ({text}); leave it out.")
        seconds = time.monotonic() - began
        if heat is None or not bool(heat.isfinite().all()) or not bool(heat.any()):
            what = "no map" if heat is None else "an empty map" if bool(heat.isfinite().all()) else "a map with NaN"
            return RelevanceMap(name, kind, None, seconds, problem=f"it gives {what} for this image and class.")
        layout = self.masked.partition.layout
        assert layout is not None
        area = self._area(resized(heat.float(), layout).flatten())
        return RelevanceMap(name, kind, heat.float(), seconds, area, self.random_area - area)

    def _area(self, scores: Tensor) -> float:
        group = max(1, self.masked.partition.size // STEPS)
        return float(flip_curve(self.masked, self.x, self.targets, scores[None], [0], group=group).area())


def _explained(
    subject: Subject, explainer: Explainer, x: Tensor, target: int, options: Mapping[str, Any]
) -> Tensor | None:
    if not explainer.can_explain(target):
        raise DataError(f"it was not fitted for class {subject.class_names[target]}.")
    (explanation,) = explanations_of(
        explainer, subject, x, [target], **{k: v for k, v in options.items() if k in explainer.per_request}
    )
    size = (int(x.shape[2]), int(x.shape[3]))
    return relevance(explanation, size)
