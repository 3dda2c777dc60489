"""Full ADMM for an affine stack, every step a closed form; and Taylor's variant, with duals on the last layer only.

    min  J(Y, Z_L) + sum_l decay |W_l|^2 + sum_l beta/2 |Z_l - W_l A_{l-1} + U_l|^2
                   + sum_{l<L} gamma/2 |A_l - relu(Z_l) + V_l|^2

[Khorram2020], algorithm 1; [Taylor2016]. One cycle is one iteration on all samples: W_1 … W_L; Z_l and A_l
upwards; Z_L; the duals.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from auditor.kernels.admm.subproblems import fit_affine, relu_coupling, solve_activations
from auditor.training.affine_stack import AffineStack, Inputs
from auditor.training.cycle import Cycle, Snapshot, Watch
from auditor.training.losses import loss_of


class FullAdmmConfig(BaseModel):
    """Settings of full ADMM."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    variant: Literal["full", "taylor"] = Field(default="full", description="taylor: duals on the last layer only.")
    loss: Literal["squared", "cross_entropy"] = "squared"
    beta: float = Field(default=10.0, gt=0, description="Penalty of Z = W A.")
    gamma: float = Field(default=10.0, gt=0, description="Penalty of A = relu(Z).")
    decay: float = Field(default=5e-5, ge=0, description="Weight decay.")
    dual_step: float = Field(default=1.0, ge=0, le=1.9, description="Damping of all duals.")
    start: Literal["forward", "uniform"] = Field(
        default="uniform", description="uniform: all drawn from 1e-4 U(0,1), as published; forward: from the blocks."
    )
    seed: int = Field(default=0, ge=0)


def full_admm(
    blocks: Sequence[nn.Module], x: Tensor, y: Tensor, config: FullAdmmConfig | None = None
) -> Iterator[Cycle]:
    """Yield a cycle per iteration; the blocks are changed in place."""
    cfg = config or FullAdmmConfig()
    where = "full-admm" if cfg.variant == "full" else "taylor"
    net = AffineStack(blocks, x, y, where, n_kept=4)
    loss, watch, last_good = loss_of(cfg.loss), Watch(where, cfg.dual_step), Snapshot(blocks)
    generator = torch.Generator().manual_seed(cfg.seed)
    L, beta, gamma = len(net), cfg.beta, cfg.gamma
    if cfg.start == "uniform":
        net.draw("uniform", 1e-4, generator)
    Z, A = net.run()
    if cfg.start == "uniform":
        Z = [1e-4 * torch.rand(z.shape, generator=generator, dtype=z.dtype).to(z.device) for z in Z]
        A[1:] = [1e-4 * torch.rand(a.shape, generator=generator, dtype=a.dtype).to(a.device) for a in A[1:]]
    inputs = Inputs(net.x)
    everywhere = cfg.variant == "full"
    U: list[Tensor | None] = [
        torch.zeros_like(z) if everywhere or layer == L - 1 else None for layer, z in enumerate(Z)
    ]
    V: list[Tensor | None] = [torch.zeros_like(a) if everywhere else None for a in A[1:]]
    for epoch in itertools.count(1):
        for layer in range(L):
            a, gram = inputs.of(A[layer])
            weights = fit_affine(a, _plus(Z[layer], U[layer]), 2 * cfg.decay / beta, gram=gram)
            net.W[layer], net.b[layer] = weights[:, :-1].contiguous(), weights[:, -1].contiguous()
        for layer in range(L - 1):
            m = _plus(net.affine(layer, A[layer]), U[layer], -1)
            Z[layer] = relu_coupling(m, _plus(A[layer + 1], V[layer]), beta, gamma)
            upper = _plus(Z[layer + 1], U[layer + 1]) - net.b[layer + 1]
            A[layer + 1] = solve_activations(net.W[layer + 1], upper, _plus(Z[layer].relu(), V[layer], -1), beta, gamma)
        Z[L - 1] = loss.prox(_plus(net.affine(L - 1, A[L - 1]), U[L - 1], -1), y, beta)
        residuals = []
        for layer in range(L):
            r = Z[layer] - net.affine(layer, A[layer])
            residuals.append(float(r.square().mean().sqrt()))
            dual = U[layer]
            if dual is not None:
                dual.add_(r, alpha=watch.dual_step)
        for layer in range(L - 1):
            dual = V[layer]
            if dual is not None:
                dual.add_(A[layer + 1] - Z[layer].relu(), alpha=watch.dual_step)
        value = float(loss.value(net.run()[0][-1], y)) / len(x)
        with last_good.restored_on_error():
            watch.judge(epoch, value, residuals, [float(z.square().mean().sqrt()) for z in Z])
        net.write_back()
        last_good.take()
        yield Cycle(epoch, value, tuple(residuals), (beta,) * L, watch.dual_step)


def _plus(a: Tensor, dual: Tensor | None, sign: int = 1) -> Tensor:
    return a if dual is None else torch.add(a, dual, alpha=sign)
