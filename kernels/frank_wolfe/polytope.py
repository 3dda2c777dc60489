"""Feasible sets for projection-free optimisation, each given by its linear minimisation oracle.

A point is a batch ``(batch, *shape)`` of members of the set; ``vertex`` answers  argmin_{v in C} <g, v>  per batch row,
``violation`` says how far outside the set each row lies. All four sets have 0/1 vertices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor


class Polytope(Protocol):
    """What Frank-Wolfe asks of a feasible set."""

    def vertex(self, grad: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return a vertex of  argmin_v <grad, v>  for every row; ``rows`` names the problems ``grad`` belongs to."""
        ...

    def violation(self, s: Tensor) -> Tensor:
        """Return (batch,): the largest amount by which a row breaks one of the set's inequalities."""
        ...


def _outside_cube(s: Tensor) -> Tensor:
    flat = s.flatten(1).double()
    return torch.maximum(-flat.amin(1), flat.amax(1) - 1).clamp_min(0)


@dataclass(frozen=True, eq=False)
class KSparse:
    """The k-sparse polytope  {s : 0 <= s <= 1, sum(s) <= k};  ``k`` is one number, or one per batch row.

    >>> KSparse(2).vertex(torch.tensor([[-1.0, 3.0, -5.0, -2.0]]))
    tensor([[0., 0., 1., 1.]])
    """

    k: int | Tensor

    def vertex(self, grad: Tensor, rows: Tensor | None = None) -> Tensor:
        """Switch on the k smallest entries, and of those only the negative ones; a vertex may hold fewer than k."""
        flat = grad.flatten(1)
        if isinstance(self.k, int):
            best = flat.topk(min(self.k, flat.shape[1]), dim=1, largest=False, sorted=False)
            worth_it = best.values < 0
        else:
            k = (self.k if rows is None else self.k[rows]).to(flat.device)
            best = flat.topk(min(int(k.max()), flat.shape[1]), dim=1, largest=False, sorted=True)
            rank = torch.arange(best.values.shape[1], device=flat.device)
            worth_it = (best.values < 0) & (rank < k[:, None])
        return torch.zeros_like(flat).scatter_(1, best.indices, worth_it.to(flat.dtype)).view_as(grad)

    def violation(self, s: Tensor) -> Tensor:
        """Return the excess of the sum over k, or of an entry over the unit interval."""
        over = s.flatten(1).double().sum(1) - torch.as_tensor(self.k, dtype=torch.float64)
        return torch.maximum(over.clamp_min(0), _outside_cube(s))


@dataclass(frozen=True)
class Box:
    """The unit cube  {s : 0 <= s <= 1}."""

    def vertex(self, grad: Tensor, rows: Tensor | None = None) -> Tensor:
        """Switch on every negative entry."""
        return (grad < 0).to(grad.dtype)

    def violation(self, s: Tensor) -> Tensor:
        """Return how far an entry leaves the unit interval."""
        return _outside_cube(s)


@dataclass(frozen=True)
class Simplex:
    """The probability simplex  {s : s >= 0, sum(s) = 1}."""

    def vertex(self, grad: Tensor, rows: Tensor | None = None) -> Tensor:
        """Put all the mass on the smallest entry."""
        flat = grad.flatten(1)
        return torch.zeros_like(flat).scatter_(1, flat.argmin(1, keepdim=True), 1).view_as(grad)

    def violation(self, s: Tensor) -> Tensor:
        """Return how far the sum is from one, or an entry below zero."""
        return torch.maximum((s.flatten(1).double().sum(1) - 1).abs(), _outside_cube(s))


@dataclass(frozen=True)
class Birkhoff:
    """Doubly stochastic matrices  {P >= 0, P 1 = 1, P^T 1 = 1};  the vertices are the permutation matrices.

    A row of the batch is an (n, n) matrix. The oracle is a linear assignment problem, solved by SciPy's shortest
    augmenting paths in float64.
    """

    def vertex(self, grad: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the cheapest permutation matrix for every (n, n) cost."""
        v = torch.zeros_like(grad)
        for b, cost in enumerate(grad.detach().double().cpu()):
            # A constant per column changes every permutation's cost alike, and large ones eat the digits that matter.
            at_row, at_column = linear_sum_assignment((cost - cost.mean(0)).numpy())
            v[b, torch.from_numpy(at_row).to(v.device), torch.from_numpy(at_column).to(v.device)] = 1
        return v

    def violation(self, s: Tensor) -> Tensor:
        """Return how far a row or column sum is from one, or an entry from the unit interval."""
        s = s.double()
        sums = torch.cat([s.sum(1), s.sum(2)], 1)
        return torch.maximum((sums - 1).abs().amax(1), _outside_cube(s))
