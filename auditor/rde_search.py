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

from auditor.assumed_density import ClosedFormError
from auditor.distortion import AssumedDensity, MonteCarlo, Problems, Resampled
from auditor.errors import OptionError
from auditor.explainer import ExplainerConfig
from auditor.obfuscation import Kind, Obfuscation
from auditor.partition import Partition, components, grid, pixels, refined, superpixels
from auditor.relevance import (
    Budget,
    Distortion,
    Method,
    Relevance,
    Rule,
    Variant,
    checked_rates,
    lagrangian,
    multi_rate,
    ordering,
)
from auditor.subject import Subject

log = logging.getLogger(__name__)

FINE = 1024  # pixels up to which an image is small: its pixels are the cells, and no coarser grid comes first
COMPONENTS_AT_ONCE = 2_000_000  # of images in one pass of the network with gradients
GRADIENTS_WANTED = 8  # per rate, at least, if draws can be spared for them
SOLVE_SHARE, MEASURE_SHARE = 0.65, 0.2  # of the time; the rest is slack
CURVE_SHARES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0)


class RdeConfig(ExplainerConfig):
    """Options of kind ``rde``."""

    method: Literal["multi-rate", "ordering", "lagrangian"] = Field(
        default="multi-rate", description="MR-RDE (RC-RDE with one rate), Ord-RDE, or the Lagrangian baseline."
    )
    rates: tuple[int | float, ...] = Field(
        default=(0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5), description="Cells to keep: integers count, floats are shares."
    )
    cells: Literal["auto", "component", "pixel", "grid", "superpixel"] = Field(
        default="auto", description="What a map speaks of; auto: pixels up to 32x32, else a grid."
    )
    grid: int = Field(default=28, ge=1, description="Cells per side of the grid; its square is the superpixel count.")
    coarse_first: bool = Field(default=True, description="Solve on a coarse grid before a fine one.")
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
    warm: bool = Field(default=True, description="Start each rate at the solution of the next smaller one.")
    max_steps: int = Field(default=60, ge=1, description="Steps per rate.")
    gap_share: float = Field(default=1e-3, gt=0, description="Stop when the gap is below this share of D(nothing).")
    timeout_s: float | None = Field(default=10.0, gt=0, description="Seconds per image, measurements included.")
    penalty: float = Field(default=0.5, gt=0, description="l1 penalty of the Lagrangian baseline.")
    max_distortion: float | None = Field(default=None, gt=0, description="The limit d; default: calibrated.")
    keep_probability: float = Field(default=0.95, gt=0, le=1, description="Share of draws that must keep the decision.")
    held_out_every: int = Field(default=5, ge=2, description="Each n-th image is held out for calibration.")
    calibration_images: int = Field(default=12, ge=2, description="Held-out images on which metrics are measured.")


@dataclass(frozen=True, eq=False)
class Found:
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

    def run(self, x: Tensor, targets: Tensor, budget: Budget, draws: int | None = None) -> Found:
        """Search within ``budget`` (its time is for the whole batch); ``draws`` fixes the number of fresh draws."""
        cfg = self.config
        if (budget.timeout_s is not None and budget.timeout_s <= 0) or budget.max_steps < 1:
            raise OptionError(
                f"rde: time and steps must be positive, got timeout_s={budget.timeout_s}, max_steps={budget.max_steps}."
            )
        chunk = max(1, min(256, COMPONENTS_AT_ONCE // x[0].numel()))
        partition = cells(cfg, self.subject.input_shape, x)
        rates = checked_rates(cfg.rates, partition.size)
        problems = Problems.of(lambda images: self.subject.logits(images).to(images), x, targets, partition)
        search, measure = self._affordable(problems, budget.timeout_s) if draws is None else (cfg.draws, draws)
        random = torch.Generator().manual_seed(cfg.seed + 1)
        fresh = MonteCarlo.drawn(problems, self.obfuscation, measure, random, 2 * chunk)
        objective, name, notes = self._objective(problems, search, chunk)
        if budget.timeout_s is not None:
            budget = replace(budget, timeout_s=SOLVE_SHARE * budget.timeout_s)
        if cfg.method == "ordering":
            score, solver = self._ordered(objective, len(x), partition.size, budget)
            return Found(score, partition, name, solver, notes, fresh)
        if cfg.method == "lagrangian":
            score, last = lagrangian(objective, len(x), partition.size, cfg.penalty, budget)
            sampled = fresh.value(score, torch.arange(len(x)))
            found = zip(score.sum(1).tolist(), last.value.tolist(), sampled.tolist(), last.gap.tolist(), strict=True)
            solver = [
                {"penalty": cfg.penalty, "kept": k, "objective": v, "monte_carlo": d, "gap": g, "steps": last.t}
                for k, v, d, g in found
            ]
            return Found(score, partition, name, solver, notes, fresh)
        start = None
        side = 7 if partition.size <= FINE else 14
        if cfg.coarse_first and x[0, 0].numel() > FINE and partition.size > side**2 and min(x.shape[2:]) >= side:
            rough = replace(problems, partition=grid(partition.shape, side, side))
            start, budget = self._coarse_start(
                rough, partition, self._objective(rough, search, chunk)[0], rates, budget
            )
        relevance = multi_rate(
            objective, len(x), partition.size, rates, budget, self._method(), start=start, is_warm=cfg.warm
        )
        if len(relevance.rates) < len(rates):
            notes.append(f"time was up before {len(rates) - len(relevance.rates)} of {len(rates)} rates had their turn")
        if relevance.failed():
            notes.append(f"{relevance.failed()} of {relevance.gap.numel()} solves met NaN gradients and were left out")
            log.warning("rde: %s", notes[-1])
        return Found(relevance.score, partition, name, _certificates(relevance, fresh), notes, fresh)

    def _method(self) -> Method:
        cfg = self.config
        return Method(cfg.variant, cfg.rule, cfg.lazy, cfg.lipschitz)

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

    def _coarse_start(
        self, problems: Problems, fine: Partition, objective: Distortion, rates: tuple[int, ...], budget: Budget
    ) -> tuple[Tensor, Budget]:
        """Solve on a coarse grid with a third of the time, and carry the masks over as starting points."""
        began = time.monotonic()
        coarse, n = problems.partition, len(problems.images)
        rough = [max(1, round(k * coarse.size / fine.size)) for k in rates]
        third = None if budget.timeout_s is None else budget.timeout_s / 3
        found = multi_rate(objective, n, coarse.size, rough, replace(budget, timeout_s=third), self._method())
        starts = []
        for k, near in zip(rates, rough, strict=True):
            i = found.rates.index(min(found.rates, key=lambda rate, near=near: abs(rate - near)))  # type: ignore[misc]
            starts.append(refined(coarse, fine, found.masks[:, i], torch.arange(n), torch.full((n,), k)))
        left = None if budget.timeout_s is None else max(1e-3, budget.timeout_s - (time.monotonic() - began))
        return torch.stack(starts, 1), replace(budget, timeout_s=left)

    def _ordered(self, objective: Distortion, n: int, size: int, budget: Budget) -> tuple[Tensor, list[dict[str, Any]]]:
        random = torch.Generator().manual_seed(self.config.seed)
        answer = ordering(objective, n, size, budget, sampled=size // 10 + 1, generator=random)
        done = answer.solution
        found = zip(done.value.tolist(), done.gap.tolist(), done.status, strict=True)
        return answer.score, [
            {"objective": v, "gap": g, "status": status.name.lower(), "steps": done.steps} for v, g, status in found
        ]

    def _affordable(self, problems: Problems, timeout_s: float | None) -> tuple[int, int]:
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
        gradients = GRADIENTS_WANTED * len(cfg.rates) * 3 * each  # a backward pass takes about two forward ones
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
