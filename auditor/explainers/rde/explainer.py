"""Rate-distortion explanations of single images (kind ``rde``): the pixels that suffice for a decision.

The artifact holds what replaces a pixel (statistics of the data), the rates, the solver's settings and a calibrated
distortion limit; the masks are found per request by Frank-Wolfe, within a budget, with the gap reached.

The concepts of an explanation are nested bands of cells: the k_1 most relevant, the next up to k_2, and so on. A band
contributes what the expected logit gains when it is shown on top of the bands before it, so that
``bias`` (the expected logit of pure noise) plus all contributions is the logit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from auditor.data.python_objects import pixels_of_any
from auditor.data.source import open_data
from auditor.errors import DataError, OptionError
from auditor.explainers.base import Explainer, ExplainerConfig
from auditor.explainers.explanation import Concept, Explanation, class_scores
from auditor.explainers.fitted_images import FittedImages
from auditor.explainers.notebook import shown
from auditor.explainers.rde.rate_curve import RateCurve, SmallestSet, descending, kept_up_to, measure, smallest_set
from auditor.explainers.rde.reading import gather
from auditor.explainers.rde.relevance_map import Budget, checked_rates
from auditor.explainers.rde.search import COARSE_SIDES, CURVE_SHARES, FINE, RdeConfig, Search, SearchResult, cells
from auditor.perturbation.pixel_flipping import pixel_flip
from auditor.perturbation.replacement import Obfuscation
from auditor.progress import Progress, silent
from auditor.subject.operations import operations
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)

ORDER_SHOWN = 4096  # cells of an ordering that an explanation lists
CALIBRATION_WORK = 100_000_000  # components through the network, so that a fit is as long whatever the image size
CALIBRATION_OPERATIONS = 10**12  # through the network: about half a minute of one core
LEAST_IMAGES, LEAST_STEPS, LEAST_DRAWS = 6, 4, 8  # of a calibration, however costly the network is
STEP_PASSES, SIZES = 12, 36  # forward passes that a step of one rate takes, and sizes at which a curve is measured
CALIBRATION_PATIENCE = 6  # times the time of a request: only a slow network meets this limit


@dataclass(frozen=True, slots=True)
class Calibration:
    """How many images, steps per rate and fresh draws a calibration may take of a network."""

    images: int
    steps: int
    draws: int

    @classmethod
    def of(cls, operations: int, rates: int, n_images: int) -> Calibration:
        """Share out what `CALIBRATION_OPERATIONS` allow: first images, then half to the search, half to measuring.

        >>> Calibration.of(1_000, 7, 12).images, Calibration.of(82_000_000, 7, 12), Calibration.of(10**9, 7, 12)
        (12, Calibration(images=9, steps=8, draws=18), Calibration(images=6, steps=4, draws=8))
        """
        passes = CALIBRATION_OPERATIONS // max(1, operations)
        each = 2 * LEAST_STEPS * rates * STEP_PASSES + 2 * LEAST_DRAWS * SIZES
        images = min(n_images, max(LEAST_IMAGES, passes // each))
        half = passes // (2 * images)
        return cls(images, max(LEAST_STEPS, half // (rates * STEP_PASSES)), max(LEAST_DRAWS, half // SIZES))


class RdeExplainer(Explainer):
    """Relevance by rate and distortion: which cells keep the decision when all others turn into noise.

    ``RdeExplainer(rates=(0.1, 0.3)).fit(subject, data).explain(subject, images, timeout_s=2.0)``
    """

    kind: ClassVar[str] = "rde"
    Config: ClassVar[type[ExplainerConfig]] = RdeConfig
    searches: ClassVar[bool] = True
    quick_options: ClassVar[Mapping[str, Any]] = {"max_steps": 15}
    adds_up_by_construction: ClassVar[bool] = True
    headline: ClassVar[tuple[str, ...]] = ("flip_area",)
    per_request: ClassVar[frozenset[str]] = frozenset({"timeout_s", "max_steps"})

    obfuscation_: Obfuscation
    limit_: float  # the calibrated distortion limit d

    def fit(self, subject: Subject, data: Any, progress: Progress = silent) -> RdeExplainer:
        """Gather the statistics of the data, then explain held-out images to calibrate the limit and measure.

        Where the limit enters a metric, each image is measured under the limit that the others set.
        """
        cfg: RdeConfig = self.config
        data = open_data(data)
        if cfg.layer is not None:
            raise OptionError(f"rde: it explains the image itself and takes no layer, got {cfg.layer!r}; leave it out.")
        if cfg.target is not None:
            subject.class_index(cfg.target)
        checked_rates(cfg.rates, cells(cfg, subject.input_shape, torch.zeros(1, *subject.input_shape)).size)
        statistics, held, parts = gather(subject, data, cfg, progress)
        learn = parts.learn
        if cfg.reference is not None:
            if cfg.obfuscation != "reference":
                raise OptionError(f"rde: a reference set needs obfuscation=reference, got {cfg.obfuscation}; set both.")
            reference = open_data(cfg.reference)
            statistics = gather(subject, reference, cfg, progress)[0]
            if reference.digest != data.digest:  # then nothing was learned from the data itself
                learn = torch.zeros_like(learn)
        self.obfuscation_ = Obfuscation.fitted(
            cfg.obfuscation, statistics, spread=cfg.spread, blur_sigma=cfg.blur_sigma
        )
        n_calibrated = self._calibrate(subject, held, progress)
        choose = parts.choose.nonzero()[:n_calibrated, 0]
        self.record_fit(subject, data, None, FittedImages.of_rows(len(parts), learn=learn, choose=choose))
        return self

    def explain(
        self,
        subject: Subject,
        images: Any,
        target: int | str | None = None,
        *,
        timeout_s: float | None = None,
        max_steps: int | None = None,
    ) -> list[Explanation]:
        """Explain each image; ``timeout_s`` (per image) and ``max_steps`` (per rate) replace those of the fit."""
        cfg: RdeConfig = self.config
        self.check_subject(subject)
        search = Search(cfg, self.obfuscation_, subject)
        seconds = cfg.timeout_s if timeout_s is None else timeout_s
        steps = cfg.max_steps if max_steps is None else max_steps
        explanations: list[Explanation] = []
        for x in torch.split(_pixels(subject, images), cfg.batch_size):
            with torch.no_grad():
                logits = subject.logits(x).float().cpu()
            targets = self.targets_for(subject, logits, target)
            budget = Budget(steps, None if seconds is None else seconds * len(x), cfg.gap_share)
            deadline = None if budget.timeout_s is None else time.monotonic() + budget.timeout_s
            maps = search.run(x, torch.tensor(targets), budget)
            explained = self._explanations(subject, maps, logits, targets, deadline)
            explanations.extend(replace(e, image=shown(image)) for e, image in zip(explained, x, strict=True))
        return explanations

    @property
    def search_s(self) -> float | None:
        """Seconds of search per image."""
        seconds: float | None = self.config.timeout_s
        return seconds

    def lines(self, explanation: Explanation) -> list[str]:
        """Return the smallest set of cells that keeps the decision, as a sentence."""
        return [str(explanation.extra["summary"])]

    def tensors(self) -> dict[str, Tensor]:
        """Return the statistics of the obfuscation."""
        o = self.obfuscation_
        return {"centre": o.centre, "spread": o.spread, "factor": o.factor, "reference": o.reference}

    def state(self) -> dict[str, Any]:
        """Return the calibrated limit."""
        return {"max_distortion": self.limit_}

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any], files: dict[str, bytes]) -> None:
        """Take back stored statistics and limit."""
        cfg: RdeConfig = self.config
        centre, spread, factor, reference = (tensors[name] for name in ("centre", "spread", "factor", "reference"))
        self.obfuscation_ = Obfuscation(cfg.obfuscation, centre, spread, factor, reference, cfg.blur_sigma)
        self.limit_ = float(state["max_distortion"])

    # inside

    def _explanations(
        self, subject: Subject, maps: SearchResult, logits: Tensor, targets: list[int], deadline: float | None
    ) -> list[Explanation]:
        cfg: RdeConfig = self.config
        predictions, target_scores = class_scores(logits, subject, targets)
        limit = self._limit()
        out: list[Explanation] = []
        for i, (prediction, goal) in enumerate(zip(predictions, target_scores, strict=True)):
            order, curve, bands = self._curve(maps, i)
            smallest, curve = smallest_set(maps.fresh, i, order, curve, limit, cfg.keep_probability, deadline=deadline)
            concepts = self._concepts(maps, i, order, curve, bands, goal.logit)
            bias = float(curve.logit[curve.at(0)])
            extra = {
                "summary": _summary(smallest, maps.partition.size, goal.label, limit),
                "method": cfg.method,
                "objective": maps.objective,
                "cells": maps.partition.size,
                "relevance": _rounded(maps.partition.heatmap(maps.score[i], i)),
                "ordering": order[:ORDER_SHOWN].tolist(),
                "curve": curve.to_json(),
                "smallest_set": None
                if smallest is None
                else {"cells": smallest.size, "distortion": smallest.distortion, "kept": smallest.kept_share},
                "max_distortion": limit,
                "solver": maps.solver[i],
                "draws": maps.fresh.noise.shape[1],
                "notes": maps.notes,
            }
            out.append(
                Explanation(
                    kind=self.kind,
                    name=self.name,
                    prediction=prediction,
                    target=goal,
                    target_value=goal.logit,
                    bias=bias,
                    residual=goal.logit - bias - sum(c.contribution or 0.0 for c in concepts),
                    concepts=concepts,
                    extra=extra,
                )
            )
        return out

    def _limit(self) -> float:
        limit: float | None = self.config.max_distortion
        return self.limit_ if limit is None else limit

    def _curve(self, maps: SearchResult, i: int) -> tuple[Tensor, RateCurve, list[int]]:
        """Return the ordering of one image, its measured curve, and the sizes that bound its bands."""
        m = maps.partition.size
        order = descending(maps.score[i], torch.Generator().manual_seed(self.config.seed))
        bands = [k for k in checked_rates(self.config.rates, m) if k < m]
        sizes = [round(share * m) for share in CURVE_SHARES]
        return order, measure(maps.fresh, i, order, [*sizes, *bands]), bands

    def _concepts(
        self, maps: SearchResult, i: int, order: Tensor, curve: RateCurve, bands: list[int], logit: float
    ) -> tuple[Concept, ...]:
        """Return the nested bands of cells with what each adds to the expected logit."""
        m, score = maps.partition.size, maps.score[i]
        concepts, low, before = [], 0, float(curve.logit[curve.at(0)])
        for index, high in enumerate([*bands, m]):
            after = logit if high == m else float(curve.logit[curve.at(high)])
            band = torch.zeros(m).index_fill_(0, order[low:high], 1.0)
            concepts.append(
                Concept(
                    index=index,
                    label=self.labels.get(index, f"cells {low + 1} to {high} of {m}, by relevance"),
                    activation=float(score[order[low:high]].mean()),
                    contribution=after - before,
                    heatmap=maps.partition.heatmap(band, i),
                )
            )
            low, before = high, after
        return tuple(concepts)

    def _calibrate(self, subject: Subject, x: Tensor, progress: Progress) -> int:
        """Explain held-out images: the limit is the largest distortion up to which the median one keeps its decision.

        Returns how many of the images it used. The work is counted, not timed, so that the same seed gives the same
        artifact; only a network so slow that a map takes several times the time of a request is cut short.
        """
        cfg: RdeConfig = self.config
        n, rates = x[0].numel(), len(cfg.rates)
        allowed = Calibration.of(operations(subject, x[:1]), rates, len(x))
        x = x[: max(2, min(allowed.images, CALIBRATION_WORK // (n * rates * cfg.draws * 8)))]
        levels = 1 if x[0, 0].numel() <= FINE else 1 + len(COARSE_SIDES)
        most = min(cfg.max_steps, allowed.steps)
        steps = max(2, min(most, CALIBRATION_WORK // (n * rates * cfg.draws * len(x) * levels)))
        patience = None if cfg.timeout_s is None else CALIBRATION_PATIENCE * cfg.timeout_s * len(x)
        with torch.no_grad():
            targets = torch.tensor(self.targets_for(subject, subject.logits(x).cpu(), None))
        progress("calibrating", 0, len(x))
        search = Search(cfg, self.obfuscation_, subject)
        draws = max(LEAST_DRAWS, min(cfg.eval_draws, allowed.draws, CALIBRATION_WORK // (n * len(x) * 32)))
        maps = search.run(x, targets, Budget(steps, patience, cfg.gap_share), draws)
        curves = []
        for i in range(len(x)):
            curves.append(self._curve(maps, i))
            progress("calibrating", i + 1, len(x))
        limits = torch.tensor([kept_up_to(curve, cfg.keep_probability) for _, curve, _ in curves])
        self.limit_ = float(limits.quantile(0.5))  # an image that is barely decided must not set it to nothing
        judged_by = medians_of_others(limits) if cfg.max_distortion is None else [cfg.max_distortion] * len(x)
        sets = [
            smallest_set(maps.fresh, i, order, curve, limit, cfg.keep_probability)[0]
            for i, ((order, curve, _), limit) in enumerate(zip(curves, judged_by, strict=True))
            if limit is not None
        ]
        self._measure(subject, maps, curves, [s.size for s in sets if s is not None])
        return len(x)

    def _measure(
        self,
        subject: Subject,
        maps: SearchResult,
        curves: list[tuple[Tensor, RateCurve, list[int]]],
        sets: list[int],
    ) -> None:
        """Say how good the maps of the held-out images are."""
        cfg: RdeConfig = self.config
        p, m = maps.fresh.problems, maps.partition.size
        blank = sum(float(curve.distortion[curve.at(0)]) for _, curve, _ in curves) / len(curves)
        noise = torch.rand(maps.score.shape, generator=torch.Generator().manual_seed(cfg.seed))
        by_score, random = (
            pixel_flip(
                p.network,
                p.images,
                p.targets,
                s,
                maps.partition,
                group=max(1, m // 16),
                draws=8,
                seed=cfg.seed,
                output=subject.output,
            )
            for s in (maps.score, noise)
        )
        self.metrics = {
            "flip_area": float(by_score.area().mean()),
            "flip_area_random": float(random.area().mean()),
            "max_distortion": self._limit(),
            "blank_distortion": blank,
            "n_held_out": float(len(curves)),
        }
        if sets:
            self.metrics["smallest_share"] = sum(sets) / len(sets) / m
        if cfg.method == "multi-rate" and blank > 0:
            rates = [rate for solver in maps.solver for rate in solver["rates"] if rate["gap"] is not None]
            scale = blank * len(rates)
            self.metrics["gap_share"] = sum(r["gap"] for r in rates) / scale
            self.metrics["distortion_share"] = sum(r["monte_carlo"] for r in rates) / scale
            self.metrics["surrogate_error"] = sum(abs(r["distortion"] - r["monte_carlo"]) for r in rates) / scale


def medians_of_others(values: Tensor) -> list[float | None]:
    """Return for each value the median of all the others; None for a single one.

    >>> medians_of_others(torch.tensor([1.0, 2.0, 6.0]))
    [4.0, 3.5, 1.5]
    """
    if len(values) < 2:
        return [None] * len(values)
    return [float(torch.cat([values[:i], values[i + 1 :]]).quantile(0.5)) for i in range(len(values))]


def _pixels(subject: Subject, images: Any) -> Tensor:
    """Return checked pixels; the error for a batch of tensors counts those out of range."""
    if isinstance(images, Tensor) and images.is_floating_point() and images.numel():
        flat = images.reshape(len(images) if images.dim() == 4 else 1, -1)
        outside = ~((flat >= 0) & (flat <= 1)).all(1)
        if bool(outside.any()):
            raise DataError(
                f"rde: {int(outside.sum())} of {len(flat)} images leave the range [0, 1] of pixels or hold NaN; "
                f"give pixels, the subject applies mean and std."
            )
    return pixels_of_any(subject, images)


def _summary(smallest: SmallestSet | None, cells: int, label: str, limit: float) -> str:
    if smallest is None:
        return f"no set of cells keeps {label!r} with distortion below {limit:.3g}: it is not what the model predicts"
    return (
        f"{smallest.size} of {cells} cells keep {label!r} in {smallest.kept_share:.0%} of draws with distortion "
        f"{smallest.distortion:.3g}, below {limit:.3g}"
    )


def _rounded(heat: Tensor) -> list[list[float]]:
    return [[round(float(v), 6) for v in row] for row in heat]
