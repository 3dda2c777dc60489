"""Steps on the variables of Block-ADMM: how Z_t descends through the block above it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from auditor.kernels.admm.subproblems import majorant_inverse
from auditor.training.block_calculus import Around, Calculus

if TYPE_CHECKING:
    from auditor.training.block_admm import BlockAdmmConfig


class Moments:
    """Adam's running means of a gradient and of its square, for the samples of one visit."""

    def __init__(self, mean: Tensor | float = 0.0, square: Tensor | float = 0.0, counted: int = 0) -> None:
        self.mean, self.square, self.counted = mean, square, counted

    def step(self, grad: Tensor) -> Tensor:
        """Take the gradient in; return the step for a learning rate of 1."""
        self.counted += 1
        self.mean = 0.9 * self.mean + 0.1 * grad
        self.square = 0.999 * self.square + 0.001 * grad.square()
        mean, square = self.mean / (1 - 0.9**self.counted), self.square / (1 - 0.999**self.counted)
        return mean / (square.sqrt() + 1e-8)


def stepped(grad: Tensor, moments: Moments | None, lr: float) -> Tensor:
    """Return lr times the gradient, or what Adam makes of it."""
    return lr * (grad if moments is None else moments.step(grad))


class StepRule:
    """Descent on Z_t through the block above it; carries what it knows of that block's curvature."""

    def __init__(self, config: BlockAdmmConfig, above: Calculus) -> None:
        self.config, self.above = config, above
        self.matrix: Tensor | None = None
        self.norm: Tensor | None = None  # |W|^2
        self.vector: Tensor | None = None  # of the power iteration
        self.length = 1.0  # of the backtracking, in units of 1 / beta
        self.key: tuple[float, float, int] | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint stores."""
        state = {"matrix": self.matrix, "norm": self.norm, "vector": self.vector}
        return {k: v for k, v in state.items() if v is not None}

    def restore(self, tensors: dict[str, Tensor], length: float, key: Sequence[Any] | None) -> None:
        """Take the state over from a checkpoint."""
        self.matrix, self.norm, self.vector = (tensors.get(k) for k in ("matrix", "norm", "vector"))
        self.length = length
        self.key = None if key is None else (float(key[0]), float(key[1]), int(key[2]))

    def descend(
        self,
        around: Around,
        gap: Tensor,
        goal: Tensor,
        beta: float,
        above: float,
        batch: int,
        moments: Moments | None = None,
    ) -> Tensor:
        """Return the move m of Z_t: steps on  beta/2 |gap + m|^2 + above/2 |f(z + m) - f(z) - goal|^2.

        ``gap`` is Z_t - near_t at the start, ``goal`` that of the variable above after its steps.
        """
        cfg = self.config
        solved = around.solved(gap, goal, beta, above)
        if solved is not None:
            return solved
        if cfg.z_optimizer in ("adam", "sgd"):
            return self._printed(around, gap, goal, beta, above, moments)
        key = (beta, above, batch // cfg.refresh)
        if key != self.key:
            self.key, self.matrix = key, None
            gram = self.above.gram()
            if gram is not None:
                self._measure(gram, beta, above)
        if self.matrix is None and self.norm is None:
            return self._backtrack(around, gap, goal, beta, above)
        move: Tensor | None = None
        for _ in range(cfg.z_steps):
            _, pulled = around.pull(move, goal)
            grad = pulled.mul_(above).add_(gap if move is None else gap + move, alpha=beta)
            if self.matrix is not None:
                step = cfg.z_lr * (grad.flatten(1) @ self.matrix).view(grad.shape)
            else:
                assert self.norm is not None
                step = cfg.z_lr / (beta + above * self.norm) * grad
            move = -step if move is None else move - step
        assert move is not None
        return move

    def _measure(self, gram: Tensor, beta: float, above: float) -> None:
        if self.config.z_optimizer == "newton":
            self.matrix = majorant_inverse(gram, beta, above)
            return
        if self.vector is None:
            self.vector = torch.ones(len(gram), dtype=gram.dtype, device=gram.device)
        for _ in range(3):
            v = gram @ self.vector
            self.norm = v.norm()
            self.vector = v / self.norm.clamp(min=1e-30)
        assert self.norm is not None
        self.norm = self.norm * 1.05  # power iteration comes from below

    def _printed(
        self, around: Around, gap: Tensor, goal: Tensor, beta: float, above: float, moments: Moments | None
    ) -> Tensor:
        move = torch.zeros_like(gap)
        for _ in range(self.config.z_steps):
            _, pulled = around.pull(move, goal)
            move = move - stepped(above * pulled + beta * (gap + move), moments, self.config.z_lr)
        return move

    def _backtrack(self, around: Around, gap: Tensor, goal: Tensor, beta: float, above: float) -> Tensor:
        def value(point: Tensor, changed: Tensor) -> Tensor:
            return 0.5 * beta * (gap + point).square().sum() + 0.5 * above * (changed - goal).square().sum()

        move = torch.zeros_like(gap)
        for _ in range(self.config.z_steps):
            changed, pulled = around.pull(move, goal)
            grad = above * pulled + beta * (gap + move)
            now = value(move, changed)
            for _ in range(20):
                tried = move - self.config.z_lr * self.length / beta * grad
                if bool(value(tried, around.change(tried)) <= now):
                    move, self.length = tried, min(1.0, self.length * 1.2)
                    break
                self.length /= 2
        return move
