"""A network with directions taken out of one layer, as one module that can be exported.

    z <- z - V V^T (z - m)      at every position of the layer,

V orthonormal directions (channels, n), m what the layer gives where nothing of them is seen. What the directions carry
is then the same for every image. Relatives in the literature: P-ClArC [ClArC].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from auditor.errors import ShapeError
from auditor.network.below_layer import first_tensor
from auditor.subject.layer_calls import on_call
from auditor.subject.layers import Layout


def orthonormal(directions: Tensor) -> Tensor:
    """Return an orthonormal basis (channels, at most n) of the span of ``directions`` (channels, n).

    >>> orthonormal(torch.tensor([[2.0, 4.0], [0.0, 0.0]])).abs().tolist()
    [[1.0], [0.0]]
    """
    U, values, _ = torch.linalg.svd(directions.double(), full_matrices=False)
    basis: Tensor = U[:, values > 1e-6 * values.max().clamp_min(1e-30)]
    return basis.to(directions)


class ProjectedLayer(nn.Module):
    """Activation to activation:  z - V V^T (z - m)."""

    def __init__(self, directions: Tensor, mean: Tensor, layout: Layout) -> None:
        super().__init__()
        if mean.shape != directions.shape[:1] or len(mean) != layout.channels:
            raise ShapeError(
                f"projected layer: want directions ({layout.channels}, n) and a mean ({layout.channels},), got "
                f"{tuple(directions.shape)} and {tuple(mean.shape)}."
            )
        V = orthonormal(directions)
        self.layout = layout
        self.register_buffer("V", V.contiguous())
        self.register_buffer("mean", mean.to(V).contiguous())
        self.V: Tensor
        self.mean: Tensor

    def forward(self, z: Tensor) -> Tensor:
        """Return the layer's native output without the directions."""
        p = self.layout.to_positions(z)
        put_back = p - self.V @ (self.V.T @ (p - self.mean[None, :, None]))
        return self.layout.from_positions(put_back, z)


class ProjectedNetwork(nn.Module):
    """``body`` whose ``layer`` puts out what ``projected`` makes of it."""

    def __init__(self, body: nn.Module, layer: str, projected: ProjectedLayer) -> None:
        super().__init__()
        self.body, self.layer, self.projected = body, layer, projected

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""

        def replace(output: Any) -> Any:
            new = self.projected(first_tensor(output, self.layer))
            return new if isinstance(output, Tensor) else type(output)([new, *output[1:]])

        handle = on_call(self.body, self.layer, replace)
        try:
            out: Tensor = self.body(x)
        finally:
            handle.remove()
        return out
