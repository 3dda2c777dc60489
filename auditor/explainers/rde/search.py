"""Search for relevance maps within a budget: what kind ``rde`` runs per request.

Which cells, which distortion, which solver, and how the time is shared: a coarse grid first, then the cells asked for,
then measurements on draws the search has not seen.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from auditor.attribution.baselines import METHODS
from auditor.errors import LayerError, OptionError
from auditor.explainers.base import HoldOutConfig
from auditor.explainers.rde.relevance_map import (
    WARM_T0,
    Budget,
    Distortion,
    Method,
    RatePath,
    Relevance,
    Rule,
    Variant,
    checked_rates,
    lagrangian,
    multi_rate,
    ordering,
)
from auditor.perturbation.cells import Partition, Regions, components, grid, pixels, refined, superpixels
from auditor.perturbation.distortion import AssumedDensity, MonteCarlo, Problems, Resampled
from auditor.perturbation.gaussian_moments import ClosedFormError
from auditor.perturbation.replacement import Kind, Obfuscation
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)

WARM_MAPS = {name: METHODS[name] for name in ("Grad-CAM", "occlusion")}

FINE = 1024  # pixels up to which an image is small: its pixels are the cells, and no coarser grid comes first
COMPONENTS_AT_ONCE = 2_000_000  # of images in one pass of the network with gradients
COARSE_SIDES = (7, 14, 28)  # of the grids that come before the cells of a large image
GRADIENTS_WANTED = 6  # per rate and level, at least, if draws can be spared for them
SOLVE_SHARE, MEASURE_SHARE = 0.65, 0.2  # of the time; the rest is slack
CURVE_SHARES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0)


class RdeConfig(HoldOutConfig):
    """Options of kind ``rde``."""

    method: Literal["multi-rate", "ordering", "lagrangian"] = Field(
        default="multi-rate", description="MR-RDE (RC-RDE with one rate), Ord-RDE, or the Lagrangian baseline."
    )
    rates: tuple[int | float, ...] = Field(
        default=(0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9), description="Cells to keep: integers count, floats are shares."
    )
    cells: Literal["auto", "component", "pixel", "grid", "superpixel"] = Field(
        default="auto", description="Cells of a map; auto: pixels up to 32x32, else a grid."
    )
    grid: int = Field(default=28, ge=1, description="Cells per side of the grid; its square is the superpixel count.")
    coarse_first: bool = Field(default=True, description="Solve on coarse grids (7, 14, 28) before a finer one.")
    distortion: Literal["auto", "monte-carlo", "adf", "adf-low-rank"] = Field(
        default="auto", description="What is minimised; auto: Gaussian moments where the network has closed forms."
    )
    strict: bool = Field(default=False, description="Fail, and do not sample, where adf was asked for and cannot be.")
    obfuscation: Kind = Field(default="gaussian", description="What replaces the cells that are not kept.")
    spread: Literal["pixel", "global"] = Field(default="pixel", description="Statistics per pixel, or one for all.")
    rank: int = Field(default=0, ge=0, description="Rank of the noise's covariance; 0: independent components.")
    blur_sigma: float = Field(default=4.0, gt=0, description="Width of the blur, pixels.")
    reference: str | None = Field(
        default=None, description="Data whose images are the reference set; default: the fit's."
    )
    reference_size: int = Field(default=64, ge=2, description="Images kept when obfuscating by a reference set.")
    draws: int = Field(default=16, ge=1, description="Fixed noise draws the sampled distortion is minimised on.")
    eval_draws: int = Field(default=64, ge=2, description="Fresh draws on which everything reported is measured.")
    variant: Variant = Field(
        default="vanilla", description="Frank-Wolfe variant; stochastic draws new noise each step."
    )
    rule: Rule = Field(default="monotone", description="Step size rule.")
    lipschitz: float = Field(default=1.0, gt=0, description="Curvature bound of the short step rule.")
    lazy: bool = Field(default=False, description="Reuse old vertices before asking the oracle.")
    warm_start: Literal["none", "grad-cam", "occlusion", "both"] = Field(
        default="none", description="A map whose first cells are where each rate begins; both: the mean of their ranks."
    )
    smooth: float = Field(
        default=0.0, ge=0, description="Masks are sums of soft regions so many cells wide; 0: of single cells."
    )
    path: RatePath = Field(
        default="down", description="A rate starts at the next larger one's solution, the next smaller one's, or zero."
    )
    max_steps: int = Field(default=60, ge=1, description="Steps per rate.")
    gap_share: float = Field(default=1e-3, gt=0, description="Stop when the gap is below this share of D(nothing).")
    timeout_s: float | None = Field(default=10.0, gt=0, description="Seconds per image, measurements included.")
    penalty: float = Field(default=0.5, gt=0, description="l1 penalty of the Lagrangian baseline.")
    max_distortion: float | None = Field(default=None, gt=0, description="The limit d; default: calibrated.")
    keep_probability: float = Field(default=0.95, gt=0, le=1, description="Share of draws that must keep the decision.")
    held_out_every: int = Field(default=5, ge=2, description="Each n-th image is held out for calibration.")
    calibration_images: int = Field(default=12, ge=2, description="Held-out images on which metrics are measured.")


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The maps of a batch: scores per cell, the certificates behind them, and what a reader should know."""

    score: Tensor  # (batch, m)
    partition: Partition
    objective: str  # what was minimised
    solver: list[dict[str, Any]]  # per image, ready for JSON
    notes: list[str]
    fresh: MonteCarlo  # draws the maps were not optimised on


@dataclass(frozen=True)
class Search:
    """Finds the maps of a batch of images of one subject."""

    config: RdeConfig
    obfuscation: Obfuscation
    subject: Subject

    def run(self, x: Tensor, targets: Tensor, budget: Budget, draws: int | None = None) -> SearchResult:
        """Search within ``budget`` (its time is for the whole batch); ``draws`` fixes the number of fresh draws."""
        cfg = self.config
        if (budget.timeout_s is not None and budget.timeout_s <= 0) or budget.max_steps < 1:
            raise OptionError(
                f"rde: time and steps must be positive, got timeout_s={budget.timeout_s}, max_steps={budget.max_steps}."
            )
        chunk = max(1, min(256, COMPONENTS_AT_ONCE // x[0].numel()))
        partition = cells(cfg, self.subject.input_shape, x)
        rates = checked_rates(cfg.rates, partition.size)
        problems = Problems.of(self._network, x, targets, partition)
        levels = [*self._coarser(partition, x), partition]
        search, measure = (cfg.draws, draws) if draws else self._affordable(problems, len(levels), budget.timeout_s)
        random = torch.Generator().manual_seed(cfg.seed + 1)
        fresh = MonteCarlo.drawn(problems, self.obfuscation, measure, random, 2 * chunk)
        objective, name, notes = self._objective(problems, search, chunk)
        if budget.timeout_s is not None:
            budget = replace(budget, timeout_s=SOLVE_SHARE * budget.timeout_s)
        if cfg.method == "ordering":
            score, solver = self._ordered(objective, len(x), partition.size, budget)
            return SearchResult(score, partition, name, solver, notes, fresh)
        if cfg.method == "lagrangian":
            score, last = lagrangian(objective, len(x), partition.size, cfg.penalty, budget)
            sampled = fresh.value(score, torch.arange(len(x)))
            rows = zip(score.sum(1).tolist(), last.value.tolist(), sampled.tolist(), last.gap.tolist(), strict=True)
            solver = [
                {"penalty": cfg.penalty, "kept": k, "objective": v, "monte_carlo": d, "gap": g, "steps": last.t}
                for k, v, d, g in rows
            ]
            return SearchResult(score, partition, name, solver, notes, fresh)
        start = None
        if cfg.warm_start != "none":
            try:
                start, levels = self._warm(problems, rates), levels[-1:]
            except LayerError as error:
                notes.append(f"no warm start: {error}")
                log.warning("rde: %s", notes[-1])
        relevance = self._by_levels(objective, levels, len(x), rates, budget, start)
        if len(relevance.rates) < len(rates):
            notes.append(f"time was up before {len(rates) - len(relevance.rates)} of {len(rates)} rates had their turn")
        if relevance.failed():
            notes.append(f"{relevance.failed()} of {relevance.gap.numel()} solves met NaN gradients and were left out")
            log.warning("rde: %s", notes[-1])
        return SearchResult(relevance.score, partition, name, _certificates(relevance, fresh), notes, fresh)

    def _method(self, from_start: bool) -> Method:
        cfg = self.config
        return Method(cfg.variant, cfg.rule, cfg.lazy, cfg.lipschitz, t0=WARM_T0 if from_start else 0)

    def _warm(self, problems: Problems, rates: tuple[int, ...]) -> Tensor:
        """Return masks (batch, rates, m) of the first cells of a map of another school."""
        names = {"grad-cam": ("Grad-CAM",), "occlusion": ("occlusion",)}.get(self.config.warm_start, tuple(WARM_MAPS))
        cells, rows, rank = problems.partition, torch.arange(len(problems.images)), torch.zeros(())
        size = cells.gather(torch.ones_like(problems.images), rows).clamp_min(1)
        for name in names:
            heat = WARM_MAPS[name](self.subject, problems.images, problems.targets).to(size)
            order = (cells.gather(heat, rows) / size).argsort(dim=1, stable=True)
            rank = rank + order.argsort(1)  # the least relevant cell has 0
        position = rank.argsort(dim=1, descending=True, stable=True).argsort(1)
        return torch.stack([(position < k).to(size) for k in rates], 1)

    def _objective(self, problems: Problems, draws: int, chunk: int) -> tuple[Distortion, str, list[str]]:
        """Return the distortion to minimise, its name, and a note where it is not the one asked for."""
        cfg = self.config
        notes: list[str] = []
        if cfg.distortion != "monte-carlo":
            low_rank = cfg.distortion == "adf-low-rank"
            closed = replace(problems, network=self.subject.logits)
            try:
                surrogate = AssumedDensity.of(closed, self.obfuscation, low_rank=low_rank, chunk=chunk)
                return surrogate, "adf-low-rank" if low_rank else "adf", notes
            except ClosedFormError as error:
                if cfg.strict and cfg.distortion != "auto":
                    raise
                if cfg.distortion != "auto":
                    notes.append(f"fell back to Monte Carlo: {error}")
                    log.warning("rde: fell back to Monte Carlo: %s", error)
        random = torch.Generator().manual_seed(cfg.seed)
        sampled = MonteCarlo.drawn(problems, self.obfuscation, draws, random, chunk)
        if cfg.variant == "stochastic" and cfg.method == "multi-rate":
            return Resampled(sampled, self.obfuscation, random), "monte-carlo", notes
        return sampled, "monte-carlo", notes

    def _coarser(self, fine: Partition, x: Tensor) -> list[Partition]:
        """Return the grids to solve before the cells asked for: few cells find the object, many its outline."""
        if not (self.config.coarse_first and self.config.method == "multi-rate") or x[0, 0].numel() <= FINE:
            return []
        fits = [side for side in COARSE_SIDES if 2 * side**2 <= fine.size and side <= min(x.shape[2:])]
        return [grid(fine.shape, side, side) for side in fits]

    def _by_levels(
        self, objective: Distortion, levels: list[Partition], n: int, rates: tuple[int, ...], budget: Budget,
        start: Tensor | None = None,
    ) -> Relevance:  # fmt: skip
        """Solve level by level, each rate from its mask on the coarser one; a level may take half of the time left."""
        deadline = None if budget.timeout_s is None else time.monotonic() + budget.timeout_s
        fine, width = levels[-1], self.config.smooth
        blank, _ = _on(levels[0], objective).gradient(torch.zeros(n, levels[0].size), torch.arange(n))
        for i, level in enumerate(levels):
            rough = [max(1, round(k * level.size / fine.size)) for k in rates]
            share = 1.0 if level is fine else 0.5
            left = None if deadline is None else max(1e-3, share * (deadline - time.monotonic()))
            searched = Regions.around(level, width) if width else level
            maps = multi_rate(
                _on(searched, objective),
                n,
                level.size,
                rough,
                replace(budget, timeout_s=left),
                self._method(start is not None),
                start=start,
                path=self.config.path,
                blank=blank,
            )
            if isinstance(searched, Regions):
                maps = replace(maps, masks=searched.spread(maps.masks), score=searched.spread(maps.score))
            if level is fine:
                break
            following = levels[i + 1]
            coarse_rates = sorted({max(1, round(k * following.size / fine.size)) for k in rates})
            start = torch.stack([_carried(maps, level, following, k, n) for k in coarse_rates], 1)
        return maps

    def _network(self, images: Tensor) -> Tensor:
        """Return logits like ``images``, in the layout that is fastest."""
        return self.subject.logits(self.subject.in_fast_layout(images)).to(images)

    def _ordered(self, objective: Distortion, n: int, size: int, budget: Budget) -> tuple[Tensor, list[dict[str, Any]]]:
        random = torch.Generator().manual_seed(self.config.seed)
        answer = ordering(objective, n, size, budget, sampled=size // 10 + 1, generator=random)
        done = answer.solution
        rows = zip(done.value.tolist(), done.gap.tolist(), done.status, strict=True)
        return answer.score, [
            {"objective": v, "gap": g, "status": status.name.lower(), "steps": done.steps} for v, g, status in rows
        ]

    def _affordable(self, problems: Problems, levels: int, timeout_s: float | None) -> tuple[int, int]:
        """Return how many draws to search on and how many fresh ones to measure on, judged by one timed pass.

        A slow network gets fewer draws rather than fewer steps, and never less than a mirrored pair.
        """
        cfg = self.config
        if timeout_s is None:
            return cfg.draws, cfg.eval_draws
        began = time.monotonic()
        with torch.no_grad():
            problems.network(problems.images[:1].expand(4, -1, -1, -1))
        each = len(problems.images) * (time.monotonic() - began) / 4  # one forward pass of every image
        gradients = (
            GRADIENTS_WANTED * levels * len(cfg.rates) * 3 * each
        )  # a backward pass takes about two forward ones
        measured = (len(CURVE_SHARES) + 2 * len(cfg.rates) + 8) * each
        search, measure = int(SOLVE_SHARE * timeout_s / gradients), int(MEASURE_SHARE * timeout_s / measured)
        return max(2, min(cfg.draws, search)), max(4, min(cfg.eval_draws, measure))


def cells(cfg: RdeConfig, shape: tuple[int, int, int], images: Tensor) -> Partition:
    """Return the partition that the configuration asks for."""
    _, h, w = shape
    if cfg.cells == "component":
        return components(shape)
    if cfg.cells == "pixel" or (cfg.cells == "auto" and h * w <= FINE):
        return pixels(shape)
    if cfg.cells == "superpixel":
        return superpixels(images, min(cfg.grid**2, h * w))
    return grid(shape, min(cfg.grid, h), min(cfg.grid, w))


def _on(cells: Partition, objective: Distortion) -> Distortion:
    """Return the same distortion, under the same draws, of masks over other cells."""
    if isinstance(objective, Resampled):
        fixed = replace(objective.fixed, problems=replace(objective.fixed.problems, partition=cells))
        return replace(objective, fixed=fixed)
    assert isinstance(objective, MonteCarlo | AssumedDensity)
    return replace(objective, problems=replace(objective.problems, partition=cells))


def _carried(coarse_maps: Relevance, coarse: Partition, fine: Partition, k: int, n: int) -> Tensor:
    """Return the masks of the nearest rate solved on coarse cells as masks of ``k`` fine ones."""
    nearest = min(range(len(coarse_maps.rates)), key=lambda i: abs(coarse_maps.rates[i] * fine.size / coarse.size - k))
    return refined(coarse, fine, coarse_maps.masks[:, nearest], torch.arange(n), torch.full((n,), k))


def _certificates(relevance: Relevance, fresh: MonteCarlo) -> list[dict[str, Any]]:
    """Say for every image and rate what the solver reached, with the Monte-Carlo distortion next to its own."""
    n, r, m = relevance.masks.shape
    sampled = fresh.value(relevance.masks.view(n * r, m), torch.arange(n).repeat_interleave(r)).view(n, r)
    return [
        {
            "steps": relevance.steps,
            "seconds": relevance.seconds / n,
            "rates": [
                {
                    "cells": relevance.rates[j],
                    "distortion": _finite(relevance.distortion[i, j]),
                    "monte_carlo": _finite(sampled[i, j]),
                    "gap": _finite(relevance.gap[i, j]),
                    "status": relevance.status[i][j].name.lower(),
                }
                for j in range(r)
            ],
        }
        for i in range(n)
    ]


def _finite(value: Tensor) -> float | None:
    """JSON has no NaN: the gap of a solve that failed at its start is null."""
    return float(value) if bool(value.isfinite()) else None
