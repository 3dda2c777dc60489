"""The coordinate pass and the multiplicative update as Triton kernels, for CUDA and for Triton's interpreter.

One program owns a block of columns and goes through the rows in order; columns are independent, so programs never
meet. Rows are read back by the lanes that wrote them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 128


@triton.jit
def _sweep_kernel(F, B, G, floor, rank, columns, n_sweeps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < columns
    for _ in range(n_sweeps):
        for k in range(rank):
            diagonal = tl.load(G + k * rank + k)
            if diagonal > floor:
                acc = tl.load(B + k * columns + lane, mask=inside, other=0.0)
                for j in range(rank):
                    if j != k:
                        acc -= tl.load(G + k * rank + j) * tl.load(F + j * columns + lane, mask=inside, other=0.0)
                tl.store(F + k * columns + lane, tl.maximum(acc / diagonal, 0.0), mask=inside)


@triton.jit
def _multiply_kernel(F, B, G, out, eps, rank, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < columns
    for k in range(rank):
        den = tl.load(G + k * rank) * tl.load(F + lane, mask=inside, other=0.0)
        for j in range(1, rank):
            den += tl.load(G + k * rank + j) * tl.load(F + j * columns + lane, mask=inside, other=0.0)
        num = tl.load(B + k * columns + lane, mask=inside, other=0.0)
        old = tl.load(F + k * columns + lane, mask=inside, other=0.0)
        tl.store(out + k * columns + lane, old * num / (den + eps), mask=inside)


def compiled(architecture: int) -> dict[str, Any]:
    """Return what the compiler makes of the coordinate pass for a CUDA architecture (80, 90), which need not be there.

    The stages by name: ``ptx`` is text, ``cubin`` the bytes that the driver would load.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = dict.fromkeys(("F", "B", "G"), "*fp32") | {"floor": "fp32"}
    types |= dict.fromkeys(("rank", "columns", "n_sweeps"), "i32") | {"BLOCK": "constexpr"}
    source = ASTSource(fn=_sweep_kernel, signature=types, constexprs={(7,): COLUMNS})
    return dict(triton.compile(source, target=GPUTarget("cuda", architecture, 32)).asm)


def _grid(columns: int) -> tuple[int]:
    return (triton.cdiv(columns, COLUMNS),)


def sweep_triton(F: Tensor, B: Tensor, G: Tensor, n_sweeps: int, floor: float) -> Tensor:
    """Return F after ``n_sweeps`` cyclic passes; see :func:`auditor.kernels.factorization.coordinate_descent.sweep`."""
    out: Any = F.detach().clone(memory_format=torch.contiguous_format)
    _sweep_kernel[_grid(F.shape[1])](
        out, B.contiguous(), G.to(F.dtype).contiguous(), floor, *F.shape, n_sweeps, BLOCK=COLUMNS
    )
    return out  # type: ignore[no-any-return]


def multiply_triton(F: Tensor, B: Tensor, G: Tensor, eps: float) -> Tensor:
    """Return the multiplicative update F * B / (G F + eps)."""
    F = F.contiguous()
    out = torch.empty_like(F)
    _multiply_kernel[_grid(F.shape[1])](
        F, B.contiguous(), G.to(F.dtype).contiguous(), out, eps, *F.shape, BLOCK=COLUMNS
    )
    return out
