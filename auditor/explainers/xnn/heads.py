"""Explanation heads: encoder to a few x-features, decoder, linear predictor of one logit; many classes at once.

A fully connected head reads a vector  Z (examples, dims)  through  D - h1 - h2 - n  and ReLU. A convolutional head
reads maps  Z (examples, channels, height, width)  through 1x1 convolutions; its x-features are max-pooled to a small
grid and the predictor weighs every cell. Weights of all classes are stacked in front: ``(classes, out, in)``.

    ybar = c + sum_i v_i E_i          contribution of x-feature i:  v_i E_i, summed over the cells of a map
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class XHeads(nn.Module):
    """A stack of explanation heads that read the same activations.

    >>> heads = XHeads(n_classes=3, dims=8, hidden=(6,), n_features=2, generator=torch.Generator().manual_seed(0))
    >>> E = heads.encode(torch.rand(5, 8))
    >>> tuple(E.shape), tuple(heads.predict(E).shape)
    ((3, 5, 2, 1), (3, 5))
    """

    def __init__(
        self,
        n_classes: int,
        dims: int,
        hidden: Sequence[int],
        n_features: int,
        *,
        activation: str = "relu",
        cells: int = 1,
        signed_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.activation, self.cells, self.signed_output = activation, cells, signed_output
        widths = [dims, *hidden, n_features]
        self.encoder_w, self.encoder_b = _stack(n_classes, widths, generator)
        self.decoder_w, self.decoder_b = _stack(n_classes, widths[::-1], generator)
        with torch.no_grad():
            self.encoder_b[-1].fill_(0.1)  # a positive start: fewer x-features are born dead
        v = torch.randn(n_classes, n_features, cells, generator=generator) / math.sqrt(n_features * cells)
        self.v = nn.Parameter(v)
        self.c = nn.Parameter(torch.zeros(n_classes))
        self.register_buffer("scale", torch.ones(dims))  # root mean square of every dimension of Z
        self.scale: Tensor

    @cached_property
    def digest(self) -> str:
        """Return what distinguishes these heads: a hash of the encoder; ask for it once they are trained."""
        digest = hashlib.sha256(repr((self.activation, self.cells)).encode())
        for tensor in (self.scale, *self.encoder_w, *self.encoder_b):
            digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    @property
    def n_features(self) -> int:
        """Number of x-features."""
        return self.v.shape[1]

    def rows(self, Z: Tensor) -> Tensor:
        """Return activations as scaled rows (examples * positions, dims)."""
        if Z.dim() > 2:
            Z = Z.flatten(2).transpose(1, 2).reshape(-1, Z.shape[1])
        return Z / self.scale

    def encode(self, Z: Tensor) -> Tensor:
        """Return the embedding of raw activations, (classes, examples, features, cells)."""
        return self.pool(self.embed(self.rows(Z)), Z)

    def embed(self, rows: Tensor) -> Tensor:
        """Return the x-features of scaled rows, (classes, rows, features)."""
        return self._mlp(rows.unsqueeze(0), self.encoder_w, self.encoder_b, self._act)

    def pool(self, E: Tensor, Z: Tensor) -> Tensor:
        """Pool x-features of positions to the cells the predictor weighs."""
        if Z.dim() == 2:
            return E.unsqueeze(-1)
        k, n = E.shape[0], E.shape[2]
        maps = E.view(k, len(Z), -1, n).permute(0, 1, 3, 2).reshape(k * len(Z), n, *Z.shape[2:])
        side = math.isqrt(self.cells)
        return F.adaptive_max_pool2d(maps, side).reshape(k, len(Z), n, self.cells)

    def decode(self, E: Tensor) -> Tensor:
        """Return the reconstruction of scaled rows, (classes, rows, dims)."""
        last = (lambda x: x) if self.signed_output else F.relu
        return self._mlp(E, self.decoder_w, self.decoder_b, last)

    def contributions(self, E: Tensor) -> Tensor:
        """Return  v_i E_i  (classes, examples, features) of pooled embeddings."""
        return (E * self.v.unsqueeze(1)).sum(-1)

    def predict(self, E: Tensor) -> Tensor:
        """Return  c + sum_i v_i E_i  (classes, examples)."""
        return self.c.unsqueeze(-1) + self.contributions(E).sum(-1)

    def cell_mass(self, E: Tensor, k: int) -> Tensor:
        """Spread each x-feature's unit mass over its cells, for E (examples, features, cells) of class ``k``.

        By positive contribution, or by magnitude where there is none; (examples, features, features, side, side).
        """
        share = E * self.v[k]
        share = torch.where((share > 0).any(-1, keepdim=True), share.clamp(min=0), share.abs())
        share = torch.where(share.sum(-1, keepdim=True) > 0, share, 1.0)
        side = math.isqrt(self.cells)
        share = (share / share.sum(-1, keepdim=True)).view(*share.shape[:2], side, side)
        return torch.diag_embed(share.permute(0, 2, 3, 1)).permute(0, 3, 4, 1, 2)  # neuron f: its own map only

    def encoder_of(self, k: int, layout: str = "vector") -> nn.Sequential:
        """Return the encoder of class ``k`` as plain layers on raw activations, their scale folded into the first.

        For layers with positions it ends with the pooling to cells, (examples, features, side, side).
        """
        spatial = layout != "vector"
        layers: list[nn.Module] = [ChannelsFirst(layout)] if layout in ("tokens", "map-last") else []
        for i, (w, b) in enumerate(zip(self.encoder_w, self.encoder_b, strict=True)):
            weight = (w[k] / self.scale if i == 0 else w[k]).detach().clone()
            linear = nn.Conv2d(weight.shape[1], len(weight), 1) if spatial else nn.Linear(weight.shape[1], len(weight))
            linear.weight.data = weight.view_as(linear.weight)
            linear.bias.data = b[k, 0].detach().clone()  # type: ignore[union-attr]
            layers += [linear, _ACTIVATIONS[self.activation]()]
        if spatial:
            layers.append(nn.AdaptiveMaxPool2d(math.isqrt(self.cells)))
        return nn.Sequential(*layers).eval()

    def _act(self, x: Tensor) -> Tensor:
        return torch.tanh(x) if self.activation == "tanh" else x if self.activation == "identity" else F.relu(x)

    def _mlp(self, x: Tensor, ws: nn.ParameterList, bs: nn.ParameterList, last: object) -> Tensor:
        for i, (w, b) in enumerate(zip(ws, bs, strict=True)):
            x = x.expand(len(w), *x.shape[1:]) if len(x) == 1 and len(w) > 1 else x
            x = torch.baddbmm(b, x, w.transpose(1, 2))
            x = self._act(x) if i < len(ws) - 1 else last(x)  # type: ignore[operator]
        return x


class ChannelsFirst(nn.Module):
    """Tokens or channels-last maps as (examples, channels, height, width)."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout

    def forward(self, z: Tensor) -> Tensor:
        """Move the channels to the front."""
        if self.layout == "tokens":
            return z.transpose(1, 2).unsqueeze(-1)
        return z.permute(0, 3, 1, 2) if self.layout == "map-last" else z


class XFeatures(nn.Module):
    """A layer's activations (native shape) to the x-features of all classes, (batch, classes, features, cells)."""

    def __init__(self, heads: XHeads, layout: str) -> None:
        super().__init__()
        self.heads, self.channels_first = heads, ChannelsFirst(layout)

    def forward(self, z: Tensor) -> Tensor:
        """Return the x-features, the batch first."""
        Z = self.channels_first(z)
        E = self._encode_by_slices(Z) if torch.compiler.is_exporting() else self.heads.encode(Z)
        return E.transpose(0, 1)

    def _encode_by_slices(self, Z: Tensor) -> Tensor:
        """Return ``heads.encode(Z)`` with the pooling written out, for which ONNX has no operator."""
        E = self.heads.embed(self.heads.rows(Z))  # (classes, rows, features)
        if Z.dim() == 2:
            return E.unsqueeze(-1)
        k, n, (h, w), side = E.shape[0], E.shape[2], Z.shape[2:], math.isqrt(self.heads.cells)
        maps = E.view(k, -1, h, w, n)
        cells = []
        for i, j in itertools.product(range(side), repeat=2):
            rows = slice(i * h // side, -(-(i + 1) * h // side))
            columns = slice(j * w // side, -(-(j + 1) * w // side))
            cells.append(maps[:, :, rows, columns].amax((2, 3)))
        return torch.stack(cells, dim=-1)  # (classes, examples, features, cells)


_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "identity": nn.Identity}


def _stack(
    n_classes: int, widths: Sequence[int], generator: torch.Generator | None
) -> tuple[nn.ParameterList, nn.ParameterList]:
    ws, bs = nn.ParameterList(), nn.ParameterList()
    for before, after in itertools.pairwise(widths):
        ws.append(nn.Parameter(torch.randn(n_classes, after, before, generator=generator) * math.sqrt(2 / before)))
        bs.append(nn.Parameter(torch.zeros(n_classes, 1, after)))
    return ws, bs
