"""Sub-problems of ADMM training, each solved in closed form or by a short safe iteration. Samples are rows.

    relu_coupling       argmin_z  beta (z - m)^2 + gamma (t - relu(z))^2                elementwise
    fit_affine          argmin_W  |T - A W'|^2 + ridge |W|^2                            Cholesky on the Gram matrix
    solve_activations   argmin_A  beta |T - A W'|^2 + gamma |A - P|^2
    squared_prox        argmin_z  1/2 |z - y|^2 + beta/2 |z - v|^2
    cross_entropy_prox  argmin_z  CE(z; label) + beta/2 |z - v|^2                       FISTA, curvature <= 1/2 + beta

[Khorram2020]; [Taylor2016]; [Wang2019].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as nf

SOFTMAX_CURVATURE = 0.5  # the largest eigenvalue of diag(p) - pp' over all p


def relu_coupling(m: Tensor, t: Tensor, beta: float, gamma: float) -> Tensor:
    """Return the pre-activations nearest to ``m`` whose ReLU is near ``t``: the better of one candidate per branch.

    >>> relu_coupling(torch.tensor([-1, -0.2, 0.5, -2]), torch.tensor([0.3, 1, 2, 3]), 1, 1).tolist()
    [-1.0, 0.4000000059604645, 1.25, -2.0]
    """
    low = m.clamp(max=0)
    high = ((beta * m + gamma * t) / (beta + gamma)).clamp(min=0)
    at_low = beta * (low - m).square() + gamma * t.square()
    at_high = beta * (high - m).square() + gamma * (t - high).square()
    return torch.where(at_low <= at_high, low, high)


def fit_affine(
    A: Tensor, T: Tensor, ridge: float | Tensor, towards: Tensor | None = None, gram: Tensor | None = None
) -> Tensor:
    """Return W (out, in) that takes ``A`` (samples, in) to ``T`` (samples, out); ``towards`` centres the ridge.

    ``gram`` is A'A where the caller has it: the input layer's never changes.
    """
    gram = A.T @ A if gram is None else gram
    right = A.T @ T
    if towards is not None:
        right = right + ridge * towards.T
    return spd_solve(gram, right, ridge).T


def solve_activations(W: Tensor, T: Tensor, P: Tensor, beta: float, gamma: float) -> Tensor:
    """Return A (samples, in): near ``P``, and taken near ``T`` (samples, out) by ``W`` (out, in)."""
    right = beta * (T @ W) + gamma * P
    return spd_solve(beta * (W.T @ W), right.T, gamma).T


def spd_solve(gram: Tensor, right: Tensor, ridge: float | Tensor) -> Tensor:
    """Return (gram + ridge I)^-1 right by Cholesky, with a floor of 1e-8 of the mean diagonal."""
    lift = ridge + 1e-8 * gram.diagonal().mean().clamp(min=1e-30)
    lifted = gram.clone()
    lifted.diagonal().add_(lift)
    factor, failed = torch.linalg.cholesky_ex(lifted)
    if int(failed) and gram.dtype != torch.float64:  # rounding ate the floor: float64 has room
        return spd_solve(gram.double(), right.double(), ridge).to(right.dtype)
    return torch.cholesky_solve(right, factor)


def squared_prox(y: Tensor, v: Tensor, beta: float) -> Tensor:
    """Return the point between target and ``v``.

    >>> squared_prox(torch.tensor([1.0]), torch.tensor([0.0]), 3.0).item()
    0.25
    """
    return (y + beta * v) / (1 + beta)


def cross_entropy_prox(
    labels: Tensor, v: Tensor, beta: float, steps: int = 60, tol: float = 1e-7, start: Tensor | None = None
) -> Tensor:
    """Return logits near ``v`` (samples, classes) that favour ``labels`` (samples,).

    From a ``start`` no sample ends above it: FISTA is not monotone, so a row that rose is put back.
    """
    onehot = nf.one_hot(labels, v.shape[1]).to(v.dtype)
    length = 1 / (SOFTMAX_CURVATURE + beta)
    z = ahead = v if start is None else start
    momentum = 1.0
    for _ in range(steps):
        grad = ahead.softmax(1) - onehot + beta * (ahead - v)
        new = ahead - length * grad
        following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead = new + (momentum - 1) / following * (new - z)
        change = float((new - z).abs().max())
        z, momentum = new, following
        if change < tol:
            break
    if start is None:
        return z

    def value(point: Tensor) -> Tensor:
        loss = nf.cross_entropy(point, labels, reduction="none")
        return loss + 0.5 * beta * (point - v).square().sum(1)

    return torch.where((value(z) <= value(start))[:, None], z, start)


def soft(W: Tensor, threshold: float | Tensor) -> Tensor:
    """Return W shrunk towards zero: the prox of the l1 norm.

    >>> round(soft(torch.tensor([0.5]), 0.2).item(), 6)
    0.3
    """
    return W.sign() * (W.abs() - threshold).clamp(min=0)


def majorant_inverse(gram: Tensor, beta: float, above: float) -> Tensor:
    """Return (beta I + above W'W)^-1: a step matrix for  beta/2 |z - v|^2 + above/2 |t - relu(W z)|^2,  given W'W.

    ReLU only lowers the curvature, so a full step with this matrix descends while no unit changes its side. Weights
    that are not finite give a matrix that is not, and the caller's watch sees it.
    """
    lifted = above * gram
    lifted.diagonal().add_(beta)
    return torch.cholesky_inverse(torch.linalg.cholesky_ex(lifted).L)
