"""Uniform quantisation to r bits with straight-through gradients: algorithm 2 of [Intersection].

    s = (hi - lo) / (2^r - 1),   z = round(clamp(-lo / s)),   q = round(clamp(z + x / s)),   clamp to [0, 2^r - 1]

Where this departs from the listing, on purpose: the range always holds zero (lo <= 0 <= hi; otherwise x in [5, 6] would
turn into a single code), s never is zero, and s and z are constants to the gradient (plain straight-through:
dq/dx = 1/s strictly inside the range, 0 outside and at the ends).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SMALLEST_STEP = 1e-8


@dataclass(frozen=True, slots=True)
class Range:
    """What is mapped onto the codes 0 to 2^bits - 1: a number each, or one per feature (last dimension)."""

    lo: Tensor
    hi: Tensor

    def holding_zero(self) -> Range:
        """Return the range widened to hold zero, so that real zero has an exact code."""
        return Range(self.lo.clamp(max=0), self.hi.clamp(min=0))

    def towards(self, other: Range, share: float) -> Range:
        """Return the exponential average: ``share`` of this range, the rest of the other."""
        return Range(torch.lerp(other.lo, self.lo, share), torch.lerp(other.hi, self.hi, share))


def range_of(x: Tensor, *, per_feature: bool = False, percentile: float = 100.0) -> Range:
    """Return the range of a batch ``x`` (rows, features): least and largest, or symmetric percentiles against outliers.

    >>> r = range_of(torch.tensor([[0.0, 4.0], [2.0, 8.0]]), per_feature=True)
    >>> r.lo.tolist(), r.hi.tolist()
    ([0.0, 4.0], [2.0, 8.0])
    """
    flat = x.detach() if per_feature else x.detach().reshape(-1, 1)
    if percentile >= 100:
        lo, hi = flat.amin(0), flat.amax(0)
    else:
        rank = max(1, round(percentile / 100 * len(flat)))  # kthvalue takes any length, quantile only 2^24
        hi, lo = flat.kthvalue(rank, dim=0).values, flat.kthvalue(len(flat) + 1 - rank, dim=0).values
    return Range(lo, hi) if per_feature else Range(lo[0], hi[0])


def quantise(x: Tensor, bits: int, scale: Range) -> Tensor:
    """Return the codes of ``x`` as floats with straight-through gradients; integers 0 to 2^bits - 1.

    >>> quantise(torch.tensor([-1.0, 0.0, 1.0, 2.0]), 2, Range(torch.tensor(-1.0), torch.tensor(2.0))).tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    step, zero = step_and_zero(bits, scale)
    return _Round.apply(x, step, zero, float(2**bits - 1))  # type: ignore[no-any-return]


def step_and_zero(bits: int, scale: Range) -> tuple[Tensor, Tensor]:
    """Return the width of a code and the code of real zero."""
    top = 2**bits - 1
    step = ((scale.hi - scale.lo) / top).clamp(min=SMALLEST_STEP)
    return step, (-scale.lo / step).clamp(0, top).round()


class _Round(torch.autograd.Function):
    """One pass forward; backward needs a mask and the step only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor, zero: Tensor, top: float) -> Tensor:
        raw = torch.addcdiv(zero.expand_as(x), x, step)
        ctx.save_for_backward((raw > 0) & (raw < top), step)
        return raw.clamp_(0, top).round_()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        inside, step = ctx.saved_tensors
        return grads[0] * inside / step, None, None, None


def quantise_reference(x: Tensor, bits: int, scale: Range) -> Tensor:
    """Do as :func:`quantise` does, by the formula, through autograd's clamp and a detached rounding error."""
    step, zero = step_and_zero(bits, scale)
    raw = zero + x / step
    top = 2**bits - 1
    held = torch.where((raw > 0) & (raw < top), raw, raw.detach().clamp(0, top))
    return held + (held.round() - held).detach()
