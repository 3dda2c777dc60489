"""Errors of a reconstruction per dimension, in the memory of a few classes however many there are.

    P = [A W + b]_+  or  A W + b        R = P - Z        Q_k = 1/M sum_i R_ik^2

for a stack of heads: ``A`` (classes, rows, width), ``W`` (classes, width, dims), ``b`` (classes, 1, dims), ``Z`` (rows,
dims). A stack's reconstruction (classes x rows x dims) is by far the largest tensor of a training step, and the plain
form (`reconstruction_losses.dimension_errors`) writes it seven times. Here a few classes at a time are reconstructed
while they fit into the cache, and once more in the backward pass: with a width of a few x-features computing R again
is cheaper than reading it from memory. ``W`` should be contiguous as it is named: its products are then several times
faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

IN_CACHE = 2**18  # numbers of a reconstruction at a time, 1 MB in float32


class _ReconstructionErrors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, A: Tensor, W: Tensor, b: Tensor, Z: Tensor, nonnegative: bool) -> Tensor:
        Q = A.new_empty(len(W), W.shape[2])
        for some in _chunks(A, W):
            Q[some] = _reconstruct(A[some], W[some], b[some], nonnegative).sub_(Z).square_().mean(1)
        ctx.save_for_backward(A, W, b, Z)
        ctx.nonnegative = nonnegative
        return Q

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        A, W, b, Z = ctx.saved_tensors
        slope = (g * (2 / A.shape[1])).unsqueeze(1)
        dA, dW, db = torch.empty_like(A), torch.empty_like(W), torch.empty_like(b)
        for some in _chunks(A, W):
            P = _reconstruct(A[some], W[some], b[some], ctx.nonnegative)
            R = (P - Z).mul_(slope[some])
            if ctx.nonnegative:
                R = torch.ops.aten.threshold_backward(R, P, 0)  # what the ReLU cut off has no gradient
            dA[some] = R @ W[some].transpose(1, 2)
            dW[some] = A[some].transpose(1, 2) @ R
            db[some] = R.sum(1, keepdim=True)
        return dA, dW, db, None, None


def _reconstruct(A: Tensor, W: Tensor, b: Tensor, nonnegative: bool) -> Tensor:
    P = torch.baddbmm(b, A, W)
    return P.relu_() if nonnegative else P


def _chunks(A: Tensor, W: Tensor) -> Iterator[slice]:
    """Yield slices of classes whose reconstructions fit into the cache, one at least."""
    at_once = max(1, IN_CACHE // max(1, A.shape[1] * W.shape[2]))
    for start in range(0, len(W), at_once):
        yield slice(start, start + at_once)


def reconstruction_errors(A: Tensor, W: Tensor, b: Tensor, Z: Tensor, *, nonnegative: bool) -> Tensor:
    """Return Q (classes, dims), differentiable once by ``A``, ``W`` and ``b``; ``Z`` is a constant.

    >>> A, W, b = torch.ones(1, 2, 1), torch.full((1, 1, 3), 2.0), torch.zeros(1, 1, 3)
    >>> reconstruction_errors(A, W, b, torch.zeros(2, 3), nonnegative=True).tolist()
    [[4.0, 4.0, 4.0]]
    """
    return cast(Tensor, _ReconstructionErrors.apply(A, W, b, Z, nonnegative))
