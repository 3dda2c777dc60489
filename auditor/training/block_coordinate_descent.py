"""Block coordinate descent without duals on an affine stack [Zeng2019], with proximal terms.

    min  1/2 |V_L - Y|^2 + gamma/2 sum |V_l - relu(Z_l)|^2 + rho/2 sum |Z_l - W_l V_{l-1} - b_l|^2

(the last layer has no ReLU). One cycle goes from output to input: V_L, Z_L, W_L, V_{L-1}, Z_{L-1}, W_{L-1}, …
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional as nf

from auditor.kernels.admm.subproblems import fit_affine, relu_coupling, solve_activations
from auditor.training.affine_stack import AffineStack, Inputs
from auditor.training.cycle import Cycle, Snapshot, Watch
from auditor.training.losses import Squared


class BcdConfig(BaseModel):
    """Settings of BCD; the defaults are those of the authors' public notebook."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gamma: float = Field(default=1.0, gt=0)
    rho: float = Field(default=1.0, gt=0)
    alpha: float = Field(default=5.0, ge=0, description="Weight of the proximal terms.")
    init: float = Field(default=0.01, gt=0, description="Deviation of the normal weights.")
    seed: int = Field(default=0, ge=0)


def bcd(blocks: Sequence[nn.Module], x: Tensor, y: Tensor, config: BcdConfig | None = None) -> Iterator[Cycle]:
    """Yield a cycle per sweep over all layers; the blocks are changed in place."""
    cfg = config or BcdConfig()
    net = AffineStack(blocks, x, y, "bcd", n_kept=2)
    watch, last_good = Watch("bcd"), Snapshot(blocks)
    net.draw("normal", cfg.init, torch.Generator().manual_seed(cfg.seed))
    net.b = [b + 0.1 for b in net.b]
    L, gamma, rho, alpha = len(net), cfg.gamma, cfg.rho, cfg.alpha
    target = nf.one_hot(y, len(net.b[-1])).to(x.dtype)
    inputs = Inputs(net.x)
    Z, V = net.run()
    V.append(Z[-1])
    for epoch in itertools.count(1):
        for layer in range(L - 1, -1, -1):
            m = net.affine(layer, V[layer])
            if layer == L - 1:
                V[L] = (target + gamma * Z[layer] + alpha * V[L]) / (1 + gamma + alpha)
                Z[layer] = (gamma * V[L] + rho * m) / (gamma + rho)
            else:
                upper = Z[layer + 1] - net.b[layer + 1]
                V[layer + 1] = solve_activations(net.W[layer + 1], upper, Z[layer].relu(), rho, gamma)
                centre = (rho * m + alpha * Z[layer]) / (rho + alpha)
                Z[layer] = relu_coupling(centre, V[layer + 1], rho + alpha, gamma)
            old = torch.cat([net.W[layer], net.b[layer][:, None]], 1)
            v, gram = inputs.of(V[layer])
            new = fit_affine(v, Z[layer], alpha / rho, towards=old, gram=gram)
            net.W[layer], net.b[layer] = new[:, :-1].contiguous(), new[:, -1].contiguous()
        residuals = [float((Z[i] - net.affine(i, V[i])).square().mean().sqrt()) for i in range(L)]
        value = float(Squared().value(net.run()[0][-1], y)) / len(x)
        with last_good.restored_on_error():
            watch.judge(epoch, value, residuals, [float(z.square().mean().sqrt()) for z in Z])
        net.write_back()
        last_good.take()
        yield Cycle(epoch, value, tuple(residuals), (rho,) * L)
