"""The updates of DeepFacto: a non-negative factorization  Z ~ M S  inside a network that is trained by Block-ADMM.

[Khorram2020], with two blocks around the factorization: f (image to layer) and a linear head h
(scores to logits). Per image, with scaled duals U and V,

    J(y, L) + (kappa/2)|L - h(S)|^2 + (gamma/2)|Z - M S + V|^2 + (beta/2)|Z - f + U|^2,      M, S >= 0.

Z, S and L are variables of each image: nothing but the quadratic terms ties the blocks together, so the projection
inside needs no derivative. Every function takes one batch and returns new tensors. Shapes: Z, f, U, V (batch, channels,
positions), S (batch, rank, positions), M (channels, rank), L (batch, classes).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from auditor.kernels.factorization.coordinate_descent import sweep
from auditor.kernels.factorization.projection import project

LOGIT_STEPS = 8  # the objective's curvature is at most 3/2 of the penalty's: the rest is below a thousandth


@dataclass(frozen=True, slots=True)
class LinearHead:
    """Logits that are linear in the scores:  h(S)_c = bias_c + sum_{k,q} weight_ckq (S pool)_kq.

    ``pool`` (positions, cells) averages positions into cells, so a factor's part of a logit is a plain sum.
    """

    weight: Tensor  # (classes, rank, cells)
    bias: Tensor  # (classes,)
    pool: Tensor  # (positions, cells)

    def pooled(self, S: Tensor) -> Tensor:
        """Return the scores averaged over the cells, (batch, rank, cells)."""
        return S @ self.pool

    def logits(self, S: Tensor) -> Tensor:
        """Return the logits of scores (batch, rank, positions)."""
        return self.of_pooled(self.pooled(S))

    def of_pooled(self, cells: Tensor) -> Tensor:
        """Return the logits of scores that are averaged already, (batch, rank, cells)."""
        return self.bias + torch.einsum("nkq,ckq->nc", cells, self.weight)

    def parts(self, S: Tensor, targets: Tensor) -> Tensor:
        """Return what every factor adds to the logit of each image's target class, (batch, rank)."""
        chosen = self.weight.to(S)[targets]  # (batch, rank, cells)
        return (chosen * (S @ self.pool.to(S))).sum(-1)

    def pulled_back(self, e: Tensor) -> Tensor:
        """Return  h'^T e  for errors ``e`` (batch, classes): what they ask of every score."""
        return torch.einsum("nc,ckq->nkq", e, self.weight) @ self.pool.T


def decoupled(*terms: tuple[float, Tensor]) -> Tensor:
    """Return the Z that minimises  sum_i (weight_i/2)|Z - term_i|^2.

    >>> float(decoupled((1.0, torch.tensor(2.0)), (3.0, torch.tensor(6.0))))
    5.0
    """
    total = sum(weight for weight, _ in terms)
    return sum((weight / total * term for weight, term in terms), torch.zeros_like(terms[0][1]))


def projected(X: Tensor, M: Tensor) -> Tensor:
    """Return  argmin_{S >= 0} |X - M S|^2  for X (batch, channels, positions), exact to rounding: the scores of X."""
    n, channels, positions = X.shape
    S = project(X.permute(1, 0, 2).reshape(channels, -1), M)
    return S.reshape(M.shape[1], n, positions).permute(1, 0, 2).contiguous()


def score_step(S: Tensor, X: Tensor, M: Tensor, linear: Tensor, n_sweeps: int = 8) -> Tensor:
    """Return the S >= 0 that minimises  (1/2)|X - M S|^2 - <linear, S>,  by coordinate passes from ``S``.

    ``linear`` is what the head asks of the scores,  (kappa/gamma) h'^T (L - h(S)):  its quadratic term is taken as
    linear here, one prox-linear step.
    """
    n, _, positions = X.shape
    return _columns(sweep(_rows(S), _rows(M.T @ X + linear), M.T @ M, n_sweeps), n, positions)


def _rows(S: Tensor) -> Tensor:
    return S.permute(1, 0, 2).reshape(S.shape[1], -1).contiguous()


def _columns(F: Tensor, n: int, positions: int) -> Tensor:
    return F.reshape(F.shape[0], n, positions).permute(1, 0, 2).contiguous()


def basis_step(M: Tensor, XS: Tensor, SS: Tensor, n_sweeps: int = 1) -> Tensor:
    """Return M >= 0 after HALS passes on  |X - M S|^2  with XS = X S^T and SS = S S^T; columns of norm at most 1."""
    new: Tensor = sweep(M.T.contiguous(), XS.T.contiguous(), SS, n_sweeps).T
    norms: Tensor = new.norm(dim=0).clamp_min(1.0)
    return (new / norms).contiguous()


def logit_steps(h: Tensor, labels: Tensor, kappa: float = 1.0) -> Tensor:
    """Return L after gradient steps from ``h`` on  J(L) + (kappa/2)|L - h|^2,  J the cross-entropy (-1: no label)."""
    hot = torch.nn.functional.one_hot(labels.clamp_min(0), h.shape[1]).to(h)
    is_labelled = (labels >= 0).to(h)[:, None]
    L = h
    for _ in range(LOGIT_STEPS):
        L = L - (is_labelled * (L.softmax(1) - hot) + kappa * (L - h)) / (kappa + 0.5)
    return L
