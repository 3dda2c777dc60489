"""A network with a non-negative factorization inside, as one module: layer, scores, head. It can be exported.

The projection on the basis is unrolled to a fixed number of accelerated projected gradient steps, since a graph has no
loop that ends when it is exact; how far that is from exact is measured when the network is made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from auditor.network.below_layer import first_tensor
from auditor.subject.layer_calls import on_call
from auditor.subject.layers import Layout


class ScoreLayer(nn.Module):
    """Activations to scores (batch, rank, height, width):  argmin_{S >= 0} |Z/scale - M S|^2  in ``n_steps`` steps."""

    def __init__(self, M: Tensor, scale: float, layout: Layout, n_steps: int) -> None:
        super().__init__()
        G = (M.double().T @ M.double()).to(M)
        top = float(torch.linalg.eigvalsh(G.double())[-1])
        step = 1.0 / max(top, 1e-12)
        self.layout, self.n_steps = layout, n_steps
        self.register_buffer("project", (step / scale * M.T).contiguous())
        self.register_buffer("decay", torch.eye(len(G), dtype=M.dtype) - step * G)
        self.project: Tensor
        self.decay: Tensor

    def forward(self, z: Tensor) -> Tensor:
        """Return the scores of a layer's native output."""
        p = self.layout.to_positions(z)
        drive = self.project @ p
        current = ahead = drive.clamp_min(0)
        t = 1.0
        for _ in range(self.n_steps):
            following = (self.decay @ ahead + drive).clamp_min(0)
            t_next = (1 + (1 + 4 * t * t) ** 0.5) / 2
            # a column that turned back starts its momentum anew [ODonoghueCandes2015]
            back = ((ahead - following) * (following - current)).sum(1, keepdim=True) > 0
            push = torch.where(back, torch.zeros_like(drive[:, :1]), torch.full_like(drive[:, :1], (t - 1) / t_next))
            ahead, current, t = following + push * (following - current), following, t_next
        return current.reshape(p.shape[0], current.shape[1], *self.layout.grid)


class FactorizedNetwork(nn.Module):
    """``body`` up to its layer, then ``scores``, then ``head`` on maps of scores."""

    def __init__(self, body: nn.Module, layer: str, scores: ScoreLayer, head: nn.Module) -> None:
        super().__init__()
        self.body, self.layer, self.scores, self.head = body, layer, scores, head

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits; what the body does after the layer has no effect and is dropped by an export."""
        outputs: list[Tensor] = []

        def keep(output: Any) -> None:
            outputs.append(first_tensor(output, self.layer).clone())

        handle = on_call(self.body, self.layer, keep)
        try:
            self.body(x)
        finally:
            handle.remove()
        logits: Tensor = self.head(self.scores(outputs[0]))
        return logits
