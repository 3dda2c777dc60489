"""Signal: how fast a value inside the network can change with the pixels, carried along by the certified bound.

``first`` is its Lipschitz constant in the Euclidean norm, ``second`` that of its Jacobian. With A linear and an
activation f applied entry by entry, |f'| <= s and |f''| <= t:

    A a        first = |A| first                      second = |A| second
    f(a)       first = s first                        second = t first^2 + s second
    a + b      sums of both                           [a, b]   roots of the sums of squares

Linear operations that follow each other are multiplied out while the product is small, so that a linear network
has its exact norm, skip connections included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from auditor.kernels.networks.operator_norm import matrix_norm

MOST_ENTRIES = 1 << 24  # of a product of linear operations that is still multiplied out
MOST_SIDE = 1600  # its shorter side

Op = Callable[[Tensor], Tensor]
Shape = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Signal:
    """A value as a linear ``matrix`` (base, *shape) applied to a base with known constants; None is the identity."""

    shape: Shape  # of one image
    base_first: float
    base_second: float
    kink: str = ""  # where the second constant became infinite
    matrix: Tensor | None = None
    scale: Tensor | None = None  # of the input only: 1 / std per channel, not yet applied
    origin: object = field(default_factory=object, repr=False)  # two signals of one origin have the same base
    _norm: float | None = field(default=None, repr=False)

    @property
    def first(self) -> float:
        """Lipschitz constant."""
        return times(self.base_first, self.norm())

    @property
    def second(self) -> float:
        """Lipschitz constant of the Jacobian; infinite where the gradient jumps."""
        return times(self.base_second, self.norm())

    def norm(self) -> float:
        """Return the norm of the linear part after the base."""
        if self._norm is None:
            self._norm = 1.0
            if self.matrix is not None:
                self._norm = matrix_norm(self.matrix.reshape(len(self.matrix), -1))
            elif self.scale is not None:
                self._norm = float(self.scale.max())
        return self._norm

    def explicit(self, n_out: int) -> Tensor | None:
        """Return the linear part as a matrix when one with ``n_out`` outputs is small, else None."""
        n = math.prod(self.shape) if self.matrix is None else len(self.matrix)
        if n * n_out > MOST_ENTRIES or min(n, n_out) > MOST_SIDE:
            return None
        if self.matrix is not None:
            return self.matrix
        if n * n > MOST_ENTRIES:
            return None
        eye = torch.eye(n, dtype=torch.float64).view(n, *self.shape)
        return eye if self.scale is None else eye * self.scale

    def mapped(self, op: Op | None, size: Callable[[], float], shape: Shape) -> Signal:
        """Return the signal after a linear ``op`` on a batch (None: it cannot be applied to another batch).

        Its own norm ``size`` is only asked for when the matrices cannot be multiplied out.
        """
        matrix = self.explicit(math.prod(shape)) if op is not None else None
        if op is not None and matrix is not None:
            return Signal(shape, self.base_first, self.base_second, self.kink, op(matrix), origin=self.origin)
        return self.scaled(size(), shape)

    def scaled(self, size: float, shape: Shape | None = None) -> Signal:
        """Return the signal after any map with Lipschitz constant ``size`` and constant Jacobian."""
        shape = self.shape if shape is None else shape
        return Signal(shape, times(self.first, size), times(self.second, size), self.kink)

    def bent(self, slope: float, curvature: float, where: str, shape: Shape | None = None) -> Signal:
        """Return the signal after a map with these bounds of its first two derivatives."""
        first = self.first
        second = times(curvature, first * first) + times(self.second, slope)
        kink = self.kink or (where if math.isinf(second) else "")
        return Signal(self.shape if shape is None else shape, times(slope, first), second, kink)


def added(parts: Sequence[tuple[Signal, float]], shape: Shape) -> Signal:
    """Return the sum of signals with their factors; branches from one base are added before the norm is taken."""
    n_out = math.prod(shape)
    same = len({id(s.origin) for s, _ in parts}) == 1 and all(s.shape == shape for s, _ in parts)
    matrices = [s.explicit(n_out) for s, _ in parts] if same else []
    if same and all(m is not None for m in matrices):
        total = sum(c * m for m, (_, c) in zip(matrices, parts, strict=True) if m is not None)
        s = parts[0][0]
        assert isinstance(total, Tensor)
        return Signal(shape, s.base_first, s.base_second, s.kink, total, origin=s.origin)
    grown = [(s, abs(c) * repeats(s.shape, shape)) for s, c in parts]
    kink = next((s.kink for s, _ in parts if s.kink), "")
    return Signal(shape, sum(times(s.first, c) for s, c in grown), sum(times(s.second, c) for s, c in grown), kink)


def joined(parts: Sequence[Signal], shape: Shape, join: Callable[[list[Tensor]], Tensor] | None) -> Signal:
    """Return the concatenation of signals; ``join`` does it to their matrices (None: constants stand between)."""
    matrices: list[Tensor] = []
    if join is not None and len({id(s.origin) for s in parts}) == 1:
        matrices = [m for s in parts if (m := s.explicit(math.prod(shape))) is not None]
    if join is not None and matrices and len(matrices) == len(parts):
        s = parts[0]
        return Signal(shape, s.base_first, s.base_second, s.kink, join(matrices), origin=s.origin)
    kink = next((s.kink for s in parts if s.kink), "")
    return Signal(shape, math.hypot(*(s.first for s in parts)), math.hypot(*(s.second for s in parts)), kink)


def repeats(small: Shape, large: Shape) -> float:
    """Return the norm of broadcasting one shape to another."""
    return math.sqrt(math.prod(large) / max(math.prod(small), 1))


def times(a: float, b: float) -> float:
    """Multiply, with  0 * infinity = 0:  what does not change has no kinks."""
    return 0.0 if a == 0 or b == 0 else a * b
