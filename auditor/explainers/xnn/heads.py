"""Explanation heads: encoder to a few x-features, decoder, linear predictor of one logit; many classes at once.

A fully connected head reads a vector  Z (examples, dims)  through  D - h1 - h2 - n  and ReLU. A convolutional head
reads maps  Z (examples, channels, height, width)  through 1x1 convolutions; its x-features are pooled to a small grid
and the predictor weighs every cell. [XNN] pools by the maximum; the mean is our default, since a network that averages
over positions cannot be followed by maxima (tests/benchmarks/bench_xnn_photos.py). Weights of all classes are stacked
in front: ``(classes, out, in)``.

    ybar = c + sum_i v_i E_i          contribution of x-feature i:  v_i E_i, summed over the cells of a map
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auditor.kernels.networks.reconstruction_errors import reconstruction_errors


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
        pooling: str = "max",
        signed_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.activation, self.cells, self.pooling, self.signed_output = activation, cells, pooling, signed_output
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

    def encode_each(self, Z: Tensor, classes: Sequence[int]) -> Tensor:
        """Return the embedding of each example by the head of its own class, (examples, features, cells)."""
        E = Z.new_empty(len(Z), self.n_features, self.cells)
        for k in dict.fromkeys(classes):
            rows = [i for i, c in enumerate(classes) if c == k]
            x = self.rows(Z[rows])
            for w, b in zip(self.encoder_w, self.encoder_b, strict=True):
                x = self._act(F.linear(x, w[k], b[k, 0]))
            E[rows] = self.pool(x.unsqueeze(0), Z[rows])[0]
        return E

    def embed(self, rows: Tensor) -> Tensor:
        """Return the x-features of scaled rows, (classes, rows, features)."""
        w, b = self.encoder_w[0], self.encoder_b[0]
        first = F.linear(rows, w.flatten(0, 1))  # all classes read the same rows: one product for all of them
        x = self._act(first.view(len(rows), len(w), -1).transpose(0, 1) + b)
        for w, b in zip(list(self.encoder_w)[1:], list(self.encoder_b)[1:], strict=True):
            x = self._act(torch.baddbmm(b, x, w.transpose(1, 2)))
        return x

    def pool(self, E: Tensor, Z: Tensor) -> Tensor:
        """Pool x-features of positions to the cells the predictor weighs."""
        if Z.dim() == 2:
            return E.unsqueeze(-1)
        k, n = E.shape[0], E.shape[2]
        if self.cells == 1 and self.pooling == "mean":
            return E.reshape(k, len(Z), -1, n).mean(2).unsqueeze(-1)
        maps = E.reshape(k, len(Z), -1, n).permute(0, 1, 3, 2).reshape(k * len(Z), n, *Z.shape[2:])
        pool = F.adaptive_avg_pool2d if self.pooling == "mean" else F.adaptive_max_pool2d
        return pool(maps, math.isqrt(self.cells)).reshape(k, len(Z), n, self.cells)

    def decode(self, E: Tensor) -> Tensor:
        """Return the reconstruction of scaled rows, (classes, rows, dims)."""
        P = torch.baddbmm(self.decoder_b[-1], self._decode_hidden(E), self.decoder_w[-1].transpose(1, 2))
        return P if self.signed_output else F.relu(P)

    def dimension_errors(self, E: Tensor, rows: Tensor) -> Tensor:
        """Return the mean squared error of every dimension when ``E`` reconstructs scaled rows, (classes, dims)."""
        w, b = self.decoder_w[-1].transpose(1, 2), self.decoder_b[-1]
        return reconstruction_errors(self._decode_hidden(E), w, b, rows, nonnegative=not self.signed_output)

    def select(self, classes: Sequence[int] | Tensor) -> XHeads:
        """Return copies of the heads of some classes, by number in the stack."""
        rows, some = torch.as_tensor(classes), XHeads.__new__(XHeads)  # no weights are drawn, they are set below
        nn.Module.__init__(some)
        some.activation, some.cells, some.pooling = self.activation, self.cells, self.pooling
        some.signed_output = self.signed_output
        for name in ("encoder_w", "encoder_b", "decoder_w", "decoder_b"):
            parts = [nn.Parameter(w.detach()[rows]) for w in getattr(self, name)]
            setattr(some, name, nn.ParameterList(parts))
        some.v, some.c = (nn.Parameter(w.detach()[rows]) for w in (self.v, self.c))
        some.register_buffer("scale", self.scale.clone())
        return some

    def replace(self, classes: Sequence[int] | Tensor, heads: XHeads) -> None:
        """Take the heads of some classes from another stack, in its order."""
        with torch.no_grad():
            for current, other in zip(self.parameters(), heads.parameters(), strict=True):
                current[torch.as_tensor(classes)] = other
            self.scale.copy_(heads.scale)

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
            pool = nn.AdaptiveAvgPool2d if self.pooling == "mean" else nn.AdaptiveMaxPool2d
            layers.append(pool(math.isqrt(self.cells)))
        return nn.Sequential(*layers).eval()

    def _act(self, x: Tensor) -> Tensor:
        return torch.tanh(x) if self.activation == "tanh" else x if self.activation == "identity" else F.relu(x)

    def _decode_hidden(self, E: Tensor) -> Tensor:
        for w, b in zip(list(self.decoder_w)[:-1], list(self.decoder_b)[:-1], strict=True):
            E = self._act(torch.baddbmm(b, E, w.transpose(1, 2)))
        return E


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


_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "identity": nn.Identity}


def _stack(
    n_classes: int, widths: Sequence[int], generator: torch.Generator | None
) -> tuple[nn.ParameterList, nn.ParameterList]:
    ws, bs = nn.ParameterList(), nn.ParameterList()
    for before, after in itertools.pairwise(widths):
        ws.append(nn.Parameter(torch.randn(n_classes, after, before, generator=generator) * math.sqrt(2 / before)))
        bs.append(nn.Parameter(torch.zeros(n_classes, 1, after)))
    return ws, bs
