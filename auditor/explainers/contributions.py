"""Contributions of concepts to a logit, complete by construction.

An activation of one layer is read as  z ~ W S  (basis W, scores S >= 0, one column per position). Scaling all concepts
by t from 0 to 1 walks from the empty activation to the reconstruction, and concept k gathers

    c_k = integral_0^1  sum_p S_kp (W^T g(t W S))_kp dt,      g = gradient of the target logit at the layer,

which is integrated gradients [IntegratedGradients] in concept coordinates. Where a layer is read as deviations from its
mean activation (`Deviations`) the walk begins there. Then

    logit(0) + sum_k c_k + (logit(z) - logit(W S)) = logit(z)
    bias       contributions   residual

Where the part above the layer is pooling and a linear map (`PooledHead`), or affine, the integral is known in closed
form. Else it is taken by Gauss-Legendre rules of few points on the part above the layer alone, never on the whole
network; an image whose sum is not right yet gets the next rule. What is then left is the integration error: it is known
exactly, always reported, and shared out in proportion to |c_k|, so that the identity holds to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from auditor.network.above_layer import AboveLayer, above_layer_of, prepare_above_layer, values_from
from auditor.subject.layers import Layout
from auditor.subject.subject import Subject

POINTS = (1, 3, 8, 20)  # of one rule after the other: one is exact for lines, three for polynomials of degree 5
MAX_ROWS, MAX_NUMBERS = 64, 8_000_000  # rows, and numbers at the layer, that go through the network at once
TOLERANCE = 1e-3  # of max(1, |logit|): below it no more points are spent


@dataclass(frozen=True, slots=True)
class Contributions:
    """Bias, contributions (batch, concepts), residual and the integration error that was shared out, per image.

    ``by_tokens`` (batch, concepts) is the share of a contribution that comes by class and register tokens, where these
    are positions of the layout.
    """

    bias: Tensor
    contributions: Tensor
    residual: Tensor
    error: Tensor
    by_tokens: Tensor
    stand_in: Callable[[], Tensor]

    @property
    def logits_hat(self) -> Tensor:
        """Logits (batch, classes) of the reconstructed activation; a pass above the layer where none was needed yet."""
        return self.stand_in()


def contributions(
    subject: Subject,
    layer: str,
    layout: Layout,
    z: Tensor,
    logits: Tensor,
    W: Tensor,
    S: Tensor,
    targets: list[int],
    points: tuple[int, ...] = POINTS,
) -> Contributions:
    """Return what each concept adds to the target logits.

    ``z`` is the layer's activation (batch, …), ``W`` (channels, concepts) or one per image (batch, channels, concepts),
    ``S`` (batch, concepts, positions). ``points`` are those of the rules that are tried in turn.
    """
    index = torch.tensor(targets, device=z.device)
    f = logits.gather(1, index[:, None])[:, 0].double()
    above = _above(subject, layer, z)
    head = None if above is None or layout.name != "map" or layout.has_start else above.head
    if head is not None and W.shape[-2] == head.weight.shape[1]:  # a column per position
        bias, c, f_hat = head.along_the_ray(W, S, index)
        return _complete(bias, torch.stack([torch.zeros_like(c), c], -1), f, f_hat, lambda: head.logits(W @ S))
    path = _Path(subject, layer, layout, z, W, S, index, above)
    f_hat = path.logits_hat.gather(1, index[:, None])[:, 0].double()
    bias = path.logits_at_zero().gather(1, index[:, None])[:, 0].double()
    c = path.integral(f_hat - bias, TOLERANCE * f.abs().clamp_min(1.0), points)
    return _complete(bias, c, f, f_hat, lambda: path.logits_hat)


def _above(subject: Subject, layer: str, z: Tensor) -> AboveLayer | None:
    """Return the part above the layer; it is made where the network would have to run below the layer for every row."""
    above = above_layer_of(subject, layer)
    if above is None and not subject.one_image_is_enough(layer, z):
        above = prepare_above_layer(subject, layer)
    return above


def _complete(bias: Tensor, parts: Tensor, f: Tensor, f_hat: Tensor, stand_in: Callable[[], Tensor]) -> Contributions:
    """Add up the ``parts`` (batch, concepts, 2) by tokens and by cells, and share out what the integral missed."""
    c = parts.sum(2)
    error = f_hat - bias - c.sum(1)
    weight = c.abs() + 1e-12
    c = c + error[:, None] * weight / weight.sum(1, keepdim=True)
    by_tokens = parts[..., 0].abs() / parts.abs().sum(2).clamp_min(1e-30)
    return Contributions(bias, c, f - f_hat, error.abs(), by_tokens, stand_in)


class _Path:
    """The way from the empty activation to the reconstruction  W S  of every image, for its target."""

    def __init__(
        self,
        subject: Subject,
        layer: str,
        layout: Layout,
        z: Tensor,
        W: Tensor,
        S: Tensor,
        index: Tensor,
        above: AboveLayer | None,
    ) -> None:
        self.layout, self.z, self.W, self.S, self.index, self.above = layout, z, W, S, index, above
        self.logits_from = values_from(subject, layer)
        self.z_hat = W @ S  # (batch, channels, positions)
        with torch.no_grad():
            self.logits_hat = self._logits(self.z_hat, z)
        self.keeps_tokens = layout.keeps_tokens  # they stay, so the empty activation differs by image
        self.n_tokens = layout.prefix if layout.has_start else 0

    def _logits(self, positions: Tensor, like: Tensor) -> Tensor:
        return self.logits_from(self.layout.from_positions(positions, like))

    def logits_at_zero(self) -> Tensor:
        """Return the logits of the empty activation."""
        with torch.no_grad():
            if self.layout.has_start:
                return self._logits(torch.zeros_like(self.z_hat[:1]), self.z[:1]).expand(len(self.z), -1)
            if self.above is None or self.keeps_tokens:
                return self._logits(torch.zeros_like(self.z_hat), self.z)
            return self.above.at_zero(self.z).expand(len(self.z), -1)

    def integral(self, goal: Tensor, tolerance: Tensor, points: tuple[int, ...]) -> Tensor:
        """Return parts (batch, concepts, 2) whose sums are ``goal`` up to the tolerance, as far as the rules reach.

        The first of the two comes by tokens that stand before the cells of the grid, the other by these.
        """
        c = torch.zeros((*self.S.shape[:2], 2), dtype=torch.float64, device=self.z.device)
        unfinished = torch.ones(len(c), dtype=torch.bool, device=self.z.device)
        if self.above is not None and self.above.is_affine and not self.keeps_tokens:
            slopes = self.layout.gradient_to_positions(self.above.slopes(self.index.tolist(), self.z))
            c = self._shares(slopes, slice(None))
            unfinished = (goal - c.sum((1, 2))).abs() > tolerance  # none, unless the part bends where it was not tried
        for n_points in points:
            if not bool(unfinished.any()):
                break
            rows = unfinished.nonzero()[:, 0]
            c[rows] = self._by_rule(rows, n_points)
            unfinished = unfinished & ((goal - c.sum((1, 2))).abs() > tolerance)
        return c

    def _shares(self, gradients: Tensor, rows: Tensor | slice) -> Tensor:
        """Return  sum_p S_kp (W^T g)_kp  for gradients (rows, channels, positions), of tokens and of cells."""
        W = self.W[rows] if self.W.ndim == 3 else self.W
        products, n = self.S[rows] * (W.mT @ gradients), self.n_tokens
        return torch.stack([products[..., :n].sum(-1), products[..., n:].sum(-1)], -1).double()

    def _by_rule(self, rows: Tensor, n_points: int) -> Tensor:
        """Return the integral of some images by the Gauss-Legendre rule; several points go through in one pass."""
        z, z_hat, index = self.z[rows], self.z_hat[rows], self.index[rows]
        at_once = max(1, min(MAX_ROWS, MAX_NUMBERS // max(1, z_hat[0].numel())) // len(rows))
        t, weights = (torch.tensor(v, dtype=z_hat.dtype, device=z.device) for v in gauss_legendre(n_points))
        total = torch.zeros_like(z_hat)
        for some, weight in zip(torch.split(t, at_once), torch.split(weights, at_once), strict=True):
            with torch.enable_grad():
                at = (some[:, None, None, None] * z_hat).flatten(0, 1).detach().requires_grad_(True)
                logit = self._logits(at, z.detach()).gather(1, index.repeat(len(some))[:, None]).sum()
                (g,) = torch.autograd.grad(logit, at)
            total += (weight[:, None, None, None] * g.reshape(len(some), *z_hat.shape)).sum(0)
        return self._shares(total, rows)


@cache
def gauss_legendre(n_points: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return points in (0, 1) and weights that integrate polynomials of degree 2 n - 1 exactly.

    >>> gauss_legendre(1)
    ((0.5,), (1.0,))
    """
    points, weights = np.polynomial.legendre.leggauss(n_points)
    return tuple(((points + 1) / 2).tolist()), tuple((weights / 2).tolist())
