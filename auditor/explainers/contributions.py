"""Contributions of concepts to a logit, complete by construction.

An activation of one layer is read as  z ~ W S  (basis W, scores S >= 0, one column per position). Scaling all concepts
by t from 0 to 1 walks from the empty activation to the reconstruction, and concept k gathers

    c_k = integral_0^1  sum_p S_kp (W^T g(t W S))_kp dt,      g = gradient of the target logit at the layer,

which is integrated gradients [IntegratedGradients] in concept coordinates. Then

    logit(0) + sum_k c_k + (logit(z) - logit(W S)) = logit(z)
    bias       contributions   residual

The integral is exact with one point where the network above the layer is linear in t (pooling and a linear head); else
the number of points doubles until the sum is right. What is then left of the error, always reported, is shared out in
proportion to |c_k|, so that the identity holds to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from auditor.network.above_layer import above_layer_of, values_from
from auditor.subject.layers import Layout
from auditor.subject.subject import Subject

MAX_POINTS = 64
MAX_ROWS, MAX_NUMBERS = 64, 8_000_000  # rows, and numbers at the layer, that go through the network at once
TOLERANCE = 1e-3  # of max(1, |logit|): below it no more points are spent


@dataclass(frozen=True, slots=True)
class Contributions:
    """Bias, contributions (batch, concepts), residual and the integration error that was shared out, per image."""

    bias: Tensor
    contributions: Tensor
    residual: Tensor
    error: Tensor
    logits_hat: Tensor  # (batch, classes) of the reconstructed activation


def contributions(
    subject: Subject, layer: str, layout: Layout, z: Tensor, logits: Tensor, W: Tensor, S: Tensor, targets: list[int]
) -> Contributions:
    """Return what each concept adds to the target logits.

    ``z`` is the layer's activation (batch, …), ``W`` (channels, concepts), ``S`` (batch, concepts, positions).
    """
    index = torch.tensor(targets, device=z.device)
    z_hat = W @ S  # (batch, channels, positions)
    logits_from, above = values_from(subject, layer), above_layer_of(subject, layer)

    def value(positions: Tensor, like: Tensor) -> Tensor:
        return logits_from(layout.from_positions(positions, like))

    has_class_token = layout.name == "tokens"  # it stays, so the empty activation differs from image to image
    with torch.no_grad():
        logits_hat = value(z_hat, z)
        f_hat = logits_hat.gather(1, index[:, None])[:, 0].double()
        if above is None or has_class_token:
            at_zero = value(torch.zeros_like(z_hat), z)
        else:
            at_zero = above.at_zero(z).expand(len(z), -1)
        bias = at_zero.gather(1, index[:, None])[:, 0].double()
    f = logits.gather(1, index[:, None])[:, 0].double()
    tolerance = TOLERANCE * f.abs().clamp_min(1.0)
    c = torch.zeros(S.shape[0], S.shape[1], dtype=torch.float64, device=z.device)
    unfinished = torch.ones(S.shape[0], dtype=torch.bool, device=z.device)
    error = torch.zeros_like(f)
    if above is not None and above.is_affine and not has_class_token:
        slopes = torch.cat([layout.to_positions(above.slope(k, z)) for k in targets])  # (batch, channels, positions)
        c = (S * (W.T @ slopes)).sum(-1).double()
        error = f_hat - bias - c.sum(1)
        unfinished = error.abs() > tolerance  # none, unless the part above bends where it was not tried
    n_points = 1
    while bool(unfinished.any()) and n_points <= MAX_POINTS:
        rows = unfinished.nonzero()[:, 0]
        c[rows] = _midpoint(value, z[rows], z_hat[rows], W, S[rows], index[rows], n_points)
        error[rows] = (f_hat - bias - c.sum(1))[rows]
        unfinished = unfinished & (error.abs() > tolerance)
        n_points *= 2
    weight = c.abs() + 1e-12
    c = c + error[:, None] * weight / weight.sum(1, keepdim=True)
    return Contributions(bias, c, f - f_hat, error.abs(), logits_hat)


def _midpoint(
    value: Callable[[Tensor, Tensor], Tensor],
    z: Tensor,
    z_hat: Tensor,
    W: Tensor,
    S: Tensor,
    index: Tensor,
    n_points: int,
) -> Tensor:
    """Return the integral by the midpoint rule with ``n_points`` points."""
    total = torch.zeros(S.shape[0], S.shape[1], dtype=torch.float64, device=z.device)
    n = S.shape[0]
    at_once = max(1, min(MAX_ROWS, MAX_NUMBERS // max(1, z_hat[0].numel())) // n)
    t = (torch.arange(n_points, device=z.device, dtype=z_hat.dtype) + 0.5) / n_points
    for some in torch.split(t, at_once):  # several points in one pass: what lies below the layer runs once for all
        with torch.enable_grad():
            points = (some[:, None, None, None] * z_hat).flatten(0, 1).detach().requires_grad_(True)
            wanted = index.repeat(len(some))
            logit = value(points, z.detach()).gather(1, wanted[:, None]).sum()
            (g,) = torch.autograd.grad(logit, points)
        g = g.reshape(len(some), *z_hat.shape).sum(0)
        total += (S * (W.T @ g)).sum(-1).double() / n_points
    return total
