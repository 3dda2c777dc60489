"""What keeping only the most relevant cells costs: distortion over rates, and the smallest set that suffices."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from auditor.perturbation.distortion import MonteCarlo


@dataclass(frozen=True, eq=False)
class RateCurve:
    """For nested sets of the most relevant cells of one image, under draws the map was not optimised on."""

    sizes: tuple[int, ...]  # cells kept, ascending
    distortion: Tensor  # (sizes,)
    standard_error: Tensor  # (sizes,) of the distortion, over draws
    kept_share: Tensor  # (sizes,) share of draws that still predict the target
    logit: Tensor  # (sizes,) mean target logit

    def at(self, size: int) -> int:
        """Return the index of a size on the curve."""
        return self.sizes.index(size)

    def to_json(self) -> list[dict[str, float]]:
        """Return one entry per size."""
        columns = (self.distortion, self.standard_error, self.kept_share, self.logit)
        names = ("distortion", "standard_error", "kept", "logit")
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [
            {"cells": size, **dict(zip(names, row, strict=True))} for size, row in zip(self.sizes, rows, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class SmallestSet:
    """The fewest leading cells of an ordering whose distortion stays below the limit and whose decision is kept."""

    size: int
    distortion: float
    kept_share: float


def descending(score: Tensor, generator: torch.Generator) -> Tensor:
    """Return the cells (m,) from most to least relevant, ties in random order."""
    shuffled = torch.randperm(len(score), generator=generator)
    return shuffled[score[shuffled].argsort(descending=True, stable=True)]


def measure(distortion: MonteCarlo, row: int, order: Tensor, sizes: list[int]) -> RateCurve:
    """Keep the first cells of ``order`` (m,), for each of ``sizes``, and look at the logits."""
    p = distortion.problems
    sizes = sorted(set(sizes))
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    masks = (rank[None] < torch.tensor(sizes)[:, None]).to(p.images.dtype)
    image = int(p.image_of[row])
    target = int(p.targets[image])
    logits = distortion.logits(masks, torch.full((len(sizes),), row))
    at_target = logits[..., target]
    squares = 0.5 * (at_target - p.target_values[image]).square()
    draws = squares.shape[1]
    error = squares.std(1) / draws**0.5 if draws > 1 else torch.full((len(sizes),), torch.nan)
    kept_share = (logits.argmax(2) == target).float().mean(1)
    whole = torch.tensor(sizes) == len(order)  # nothing is replaced: what is left is rounding
    return RateCurve(
        tuple(sizes),
        torch.where(whole, 0.0, squares.mean(1)),
        torch.where(whole, 0.0, error),
        kept_share,
        torch.where(whole, p.target_values[image], at_target.mean(1)),
    )


def joined(a: RateCurve, b: RateCurve) -> RateCurve:
    """Return both curves as one; sizes they share are taken from the first."""
    extra = [i for i, size in enumerate(b.sizes) if size not in a.sizes]
    sizes = [*a.sizes, *(b.sizes[i] for i in extra)]
    order = sorted(range(len(sizes)), key=sizes.__getitem__)

    def both(left: Tensor, right: Tensor) -> Tensor:
        return torch.cat([left, right[extra]])[order]

    return RateCurve(
        tuple(sizes[i] for i in order),
        both(a.distortion, b.distortion),
        both(a.standard_error, b.standard_error),
        both(a.kept_share, b.kept_share),
        both(a.logit, b.logit),
    )


def kept_up_to(curve: RateCurve, keep: float) -> float:
    """Return the largest distortion on the curve up to which every set keeps the decision in ``keep`` of the draws."""
    order = curve.distortion.argsort(stable=True)
    is_kept = (curve.kept_share[order] >= keep).to(torch.int8).cumprod(0)
    return float((curve.distortion[order] * is_kept).max())


def smallest_set(
    distortion: MonteCarlo,
    row: int,
    order: Tensor,
    curve: RateCurve,
    limit: float,
    keep: float,
    *,
    width: int = 8,
    deadline: float | None = None,
) -> tuple[SmallestSet | None, RateCurve]:
    """Return the smallest leading set with distortion <= ``limit`` that keeps the decision in ``keep`` of the draws.

    The first size on the curve that passes is narrowed down to its predecessor, ``width`` sizes at a time, so the
    answer is exact when passing is monotone in the size, unless another round would end after ``deadline`` (a reading
    of ``time.monotonic()``). None when not even the whole image passes: the target is not what the network predicts.
    The curve comes back with the sizes tried.
    """
    last = time.monotonic()
    while True:
        now = time.monotonic()
        is_late = deadline is not None and now + (now - last) >= deadline
        last = now
        passes = (curve.distortion <= limit) & (curve.kept_share >= keep)
        if not bool(passes.any()):
            return None, curve
        first = int(passes.to(torch.int8).argmax())
        size = curve.sizes[first]
        below = curve.sizes[first - 1] if first else -1
        if size - below <= 1 or is_late:
            return SmallestSet(size, float(curve.distortion[first]), float(curve.kept_share[first])), curve
        between = torch.linspace(below, size, min(width, size - below - 1) + 2)[1:-1].round().int().tolist()
        curve = joined(curve, measure(distortion, row, order, [s for s in between if below < s < size]))
