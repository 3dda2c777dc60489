"""Cyclic coordinate descent for  min_{F >= 0}  tr(F^T G F) - 2 tr(F^T B),  the step that HALS and projection share.

``F`` and ``B`` are (rank, columns), ``G`` is the (rank, rank) Gram matrix, any L2 penalty already on its diagonal.
The columns are independent problems, so they are cut into fixed blocks: the answer does not depend on how many
threads work on the blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 512  # columns per block: 512 x 32 floats stay in the second-level cache
ROWS = 32  # components per group at high rank
DEAD = 1e-12  # a diagonal entry below this share of the largest one belongs to a dead component


@cache
def _pool(n_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n_threads, thread_name_prefix="auditor-kernels")


def over_blocks(task: Callable[[int, int], Any], n_columns: int, block: int = BLOCK) -> list[Any]:
    """Run ``task(lo, hi)`` for every block of columns on torch's number of threads; results in block order."""
    edges = [(lo, min(lo + block, n_columns)) for lo in range(0, n_columns, block)]
    n_threads = min(torch.get_num_threads(), len(edges))
    if n_threads <= 1:
        return [task(lo, hi) for lo, hi in edges]
    return list(_pool(n_threads).map(lambda edge: task(*edge), edges))


def sweep_reference(F: Tensor, B: Tensor, G: Tensor, n_sweeps: int = 1) -> Tensor:
    """Return F after ``n_sweeps`` cyclic passes over its rows: the formula, row by row, on any device."""
    F, diagonal = F.clone(), G.diagonal()
    floor = float(diagonal.max()) * DEAD
    for _ in range(n_sweeps):
        for k in range(F.shape[0]):
            if diagonal[k] > floor:
                F[k] = (F[k] + (B[k] - G[k] @ F) / diagonal[k]).clamp_min(0)
    return F


@numba.njit(nogil=True, cache=True, fastmath={"contract"})
def _sweep_block(
    F: NDArray[Any], B: NDArray[Any], G: NDArray[Any], n_sweeps: int, floor: float, lo: int, hi: int
) -> None:
    rank, width = F.shape[0], hi - lo
    acc = np.empty(width, F.dtype)
    for _ in range(n_sweeps):
        for k in range(rank):
            if G[k, k] <= floor:
                continue
            target = F[k, lo:hi]
            for p in range(width):
                acc[p] = B[k, lo + p] + G[k, k] * target[p]
            j = 0
            while j + 4 <= rank:  # four rows at a time: a quarter of the traffic through acc
                a, b, c, d = G[k, j], G[k, j + 1], G[k, j + 2], G[k, j + 3]
                row_a, row_b, row_c, row_d = F[j, lo:hi], F[j + 1, lo:hi], F[j + 2, lo:hi], F[j + 3, lo:hi]
                for p in range(width):
                    acc[p] -= a * row_a[p] + b * row_b[p] + c * row_c[p] + d * row_d[p]
                j += 4
            while j < rank:
                a, row_a = G[k, j], F[j, lo:hi]
                for p in range(width):
                    acc[p] -= a * row_a[p]
                j += 1
            scale = F.dtype.type(1) / G[k, k]
            for p in range(width):
                target[p] = max(acc[p] * scale, F.dtype.type(0))


def sweep(F: Tensor, B: Tensor, G: Tensor, n_sweeps: int = 1) -> Tensor:
    """Return F after ``n_sweeps`` cyclic coordinate passes, by the fastest form for the device of ``F``.

    Above ``ROWS`` components the rows are taken in groups: one matrix product brings a group's right-hand side up to
    date with all other rows, coordinate passes within the group do the rest. That is the same cyclic order.

    Example
    -------
    >>> G, B = torch.eye(2), torch.tensor([[1.0, -1.0], [2.0, 3.0]])
    >>> sweep(torch.zeros(2, 2), B, G)
    tensor([[1., 0.],
            [2., 3.]])
    """
    floor = float(G.diagonal().max()) * DEAD
    if F.device.type == "cuda":
        from auditor.kernels.factorization.coordinate_descent_triton import (
            sweep_triton,  # Triton is only there with CUDA builds of torch
        )

        return sweep_triton(F, B, G, n_sweeps, floor)
    if F.device.type != "cpu":
        return sweep_reference(F, B, G, n_sweeps)
    out, B, G = F.detach().clone(memory_format=torch.contiguous_format), B.detach(), G.detach().to(F.dtype)
    if F.shape[0] <= ROWS + ROWS // 2:
        _sweep_rows(out, B, G, n_sweeps, floor)
        return out
    for _ in range(n_sweeps):
        for k in range(0, F.shape[0], ROWS):
            group = slice(k, k + ROWS)
            others = G[group].clone()
            others[:, group] = 0
            _sweep_rows(out[group], B[group] - others @ out, G[group, group], 1, floor)
    return out


def multiply_reference(F: Tensor, B: Tensor, G: Tensor, eps: float) -> Tensor:
    """Return the multiplicative update F * B / (G F + eps) [LeeSeung2001], which never raises the same objective."""
    return F * B / (G @ F + eps)


@numba.njit(nogil=True, cache=True, fastmath={"contract"})
def _multiply_block(F: NDArray[Any], B: NDArray[Any], H: NDArray[Any], eps: float, lo: int, hi: int) -> None:
    tiny = F.dtype.type(eps)
    for k in range(F.shape[0]):
        for p in range(lo, hi):
            H[k, p] = F[k, p] * B[k, p] / (H[k, p] + tiny)


def multiply(F: Tensor, B: Tensor, G: Tensor, eps: float = 1e-9) -> Tensor:
    """Return F * B / (G F + eps) for B, G >= 0, by the fastest form for the device of ``F``.

    Example
    -------
    >>> multiply(torch.ones(1, 2), torch.tensor([[4.0, 0.0]]), torch.tensor([[2.0]]))
    tensor([[2., 0.]])
    """
    if F.device.type == "cuda":
        from auditor.kernels.factorization.coordinate_descent_triton import multiply_triton

        return multiply_triton(F, B, G, eps)
    if F.device.type != "cpu":
        return multiply_reference(F, B, G, eps)
    H = G.to(F.dtype) @ F.detach()
    f, b, h = F.detach().contiguous().numpy(), B.detach().contiguous().numpy(), H.numpy()
    over_blocks(lambda lo, hi: _multiply_block(f, b, h, eps, lo, hi), F.shape[1], block=8 * BLOCK)
    return H


def _sweep_rows(F: Tensor, B: Tensor, G: Tensor, n_sweeps: int, floor: float) -> None:
    f, b, g = F.numpy(), B.contiguous().numpy(), G.contiguous().numpy()
    over_blocks(lambda lo, hi: _sweep_block(f, b, g, n_sweeps, floor, lo, hi), F.shape[1])
