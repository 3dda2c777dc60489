"""A point of a polytope as a convex combination of vertices  s = sum_a w_a v_a,  kept sparse.

Away steps and pairwise steps move weight between these vertices; lazified steps look an old vertex up instead of
calling the oracle. A vertex is stored by its non-zero entries: k numbers for the k-sparse polytope, n for an n x n
permutation matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

DROP_BELOW = 1e-12  # lighter vertices are rounding, not support


class ActiveSet:
    """Vertices with weights that sum to one; the first one is the starting point, which needs not be a vertex."""

    def __init__(self, start: Tensor) -> None:
        self.shape, self.dtype = start.shape, start.dtype
        self.weights: list[float] = []
        self._keys: dict[bytes, int] = {}
        self._entries: list[tuple[Tensor, Tensor]] = []  # (flat index, value) of the non-zeros
        self._packed: tuple[Tensor, Tensor, Tensor] | None = None
        self.weights.append(1.0)
        self._insert(start)

    def __len__(self) -> int:
        return len(self.weights)

    def _insert(self, v: Tensor) -> None:
        flat = v.detach().flatten()
        index = flat.nonzero().squeeze(1)
        self._keys[_key(index, flat[index])] = len(self._entries)
        self._entries.append((index, flat[index]))
        self._packed = None

    def scores(self, grad: Tensor) -> Tensor:
        """Return <grad, v_a> for every stored vertex, in one pass over their non-zeros."""
        if self._packed is None:
            owner = torch.repeat_interleave(
                torch.arange(len(self._entries)), torch.tensor([len(i) for i, _ in self._entries])
            )
            index, value = (torch.cat(part) for part in zip(*self._entries, strict=True))
            self._packed = owner.to(index.device), index, value
        owner, index, value = self._packed
        score = torch.zeros(len(self._entries), dtype=torch.float64, device=grad.device)
        return score.index_add_(0, owner, (grad.flatten()[index] * value).double())

    def vertex(self, a: int) -> Tensor:
        """Return vertex ``a`` as a dense tensor."""
        index, value = self._entries[a]
        v = torch.zeros(self.shape.numel(), dtype=self.dtype, device=value.device)
        return v.index_copy_(0, index, value).view(self.shape)

    def point(self) -> Tensor:
        """Return  s = sum_a w_a v_a  afresh: the cure for drift after many small steps."""
        s = torch.zeros(self.shape.numel(), dtype=torch.float64, device=self._entries[0][1].device)
        for w, (index, value) in zip(self.weights, self._entries, strict=True):
            s.index_add_(0, index, w * value.double())
        return s.to(self.dtype).view(self.shape)

    def towards(self, v: Tensor, gamma: float) -> None:
        """Step  s <- (1 - gamma) s + gamma v  (Frank-Wolfe)."""
        self._scale(1 - gamma)
        self._add(v, gamma)
        self._prune()

    def away(self, a: int, gamma: float) -> None:
        """Step  s <- (1 + gamma) s - gamma v_a;  at gamma = w_a / (1 - w_a) the vertex drops out."""
        self._scale(1 + gamma)
        self.weights[a] -= gamma
        self._prune()

    def swap(self, a: int, v: Tensor, gamma: float) -> None:
        """Step  s <- s + gamma (v - v_a)  (pairwise); at gamma = w_a the vertex drops out."""
        self.weights[a] -= gamma
        self._add(v, gamma)
        self._prune()

    def remember(self, v: Tensor) -> None:
        """Store a vertex without giving it weight: the cache of a lazified run that keeps no combination."""
        self._add(v, 0.0)

    def _scale(self, factor: float) -> None:
        self.weights = [w * factor for w in self.weights]

    def _add(self, v: Tensor, gamma: float) -> None:
        flat = v.detach().flatten()
        index = flat.nonzero().squeeze(1)
        a = self._keys.get(_key(index, flat[index]))
        if a is None:
            self._insert(v)
            self.weights.append(gamma)
        else:
            self.weights[a] += gamma

    def _prune(self) -> None:
        keep = [a for a, w in enumerate(self.weights) if w > DROP_BELOW]
        if len(keep) < len(self.weights):
            self.weights = [self.weights[a] for a in keep]
            self._entries = [self._entries[a] for a in keep]
            self._keys = {_key(i, v): a for a, (i, v) in enumerate(self._entries)}
            self._packed = None
        total = sum(self.weights)
        self.weights = [w / total for w in self.weights]


def _key(index: Tensor, value: Tensor) -> bytes:
    return index.cpu().numpy().tobytes() + value.cpu().numpy().tobytes()
