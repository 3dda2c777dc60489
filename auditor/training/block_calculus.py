"""What ADMM asks of a block: its output, the gradients of  1/2 |f(z) - target|^2  in z and parameters, its curvature.

Any module answers by autograd. A linear map with or without a ReLU, the case of all published experiments, answers by
the formula, which is several times faster and gives its curvature W'W exactly.

Twenty blocks below the loss a variable moves by a billionth of its size, and f(z + m) - f(z) in single precision is
rounding alone: Adam would follow it. `Around` therefore works with moves: the affine one computes what a move changes
without ever subtracting two outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as nf


class Calculus(ABC):
    """A block and its derivatives."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block

    @abstractmethod
    def out(self, z: Tensor) -> Tensor:
        """Return f(z), detached."""

    @abstractmethod
    def pull(self, z: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return f(z) and the gradient in z of 1/2 |f(z) - target|^2."""

    @abstractmethod
    def learn(
        self, z: Tensor, target: Tensor, scale: float, out: Tensor | None = None, error: Tensor | None = None
    ) -> Tensor:
        """Set the parameters' ``.grad`` to that of scale/2 |f(z) - target|^2; return f(z).

        ``out`` may give f(z), and ``error`` f(z) - target where it is known more exactly than by subtraction.
        """

    dual = "U"  # name of its dual variable
    has_scores = False  # whether its variable are scores, tied to the variable below by a basis

    def dual_shape(self, inner: torch.Size, outer: torch.Size) -> torch.Size:
        """Return the shape of its dual for one sample, from those of its input and output."""
        return outer

    def around(self, z: Tensor, dual: Tensor | None = None) -> Around:
        """Return the block as seen from a point, and its coupling with the dual of these samples."""
        return Around(self, z, self.out(z), dual)

    def fresh(self, z: Tensor, made: Tensor) -> Tensor:
        """Return f(z) with the parameters as they are now."""
        return self.out(z)

    def residual(self, z: Tensor, out: Tensor, made: Tensor) -> Tensor:
        """Return by how much the variable ``out`` misses what the block made of ``z``."""
        return out - made

    def gather(self, z: Tensor, memory: float) -> None:
        """Take in samples as they come, before the first visit."""
        return  # only a factorization keeps sums

    def fit_basis(self, z: Tensor, dual: Tensor | None, out: Tensor, forget: float) -> None:
        """Learn by least squares from a mini-batch of variables."""
        return  # only a factorization has a basis

    def revive(self, above: nn.Module) -> int:
        """Start what died in the epoch anew; return how many."""
        return 0

    def tensors(self) -> dict[str, Tensor]:
        """Return what it keeps from visit to visit, for a checkpoint."""
        return {}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take over what ``tensors`` gave."""
        return

    def gram(self) -> Tensor | None:
        """Return W'W, which bounds the curvature in z, where the block is affine (with a ReLU or not); else None."""
        return None


class Around:
    """A block about z: what a move m of its input changes, f(z + m) - f(z)."""

    def __init__(self, calculus: Calculus, z: Tensor, out: Tensor, dual: Tensor | None = None) -> None:
        self.calculus, self.z, self.out = calculus, z, out
        self.near = out if dual is None else out - dual  # where its variable has no coupling error

    def goal(self, gap: Tensor) -> Tensor:
        """Return what its output should change by when its variable stands ``gap`` from ``near``."""
        return gap

    def follows(self, move: Tensor) -> Tensor:
        """Return what its output changes by when its input has moved."""
        return self.change(move)

    def solved(self, gap: Tensor, goal: Tensor, beta: float, above: float) -> Tensor | None:
        """Return the move of its input in closed form, where there is one."""
        return None

    def own_move(
        self, upper: Around, gap: Tensor, goal: Tensor, beta: float, above: float, steps: int
    ) -> Tensor | None:
        """Return the move of its variable, where that is bound to more than ``near``; None: the step rule finds it."""
        return None

    def change(self, move: Tensor) -> Tensor:
        """Return f(z + m) - f(z)."""
        return self.calculus.out(self.z + move) - self.out

    def pull(self, move: Tensor | None, goal: Tensor) -> tuple[Tensor, Tensor]:
        """Return the change and the gradient in m of 1/2 |f(z + m) - f(z) - goal|^2; no move is a move of zero."""
        out, grad = self.calculus.pull(self.z if move is None else self.z + move, self.out + goal)
        return out - self.out, grad


class AffineAround(Around):
    """relu(W z + b) about z: a unit that stays on changes by W m exactly, however small that is."""

    def __init__(self, calculus: AffineCalculus, z: Tensor, dual: Tensor | None = None) -> None:
        weight = calculus.linear.weight.detach()
        before = nf.linear(z.flatten(1) if calculus.flatten else z, weight, calculus.bias())
        super().__init__(calculus, z, before.relu() if calculus.has_relu else before, dual)
        self.weight, self.before = weight, before if calculus.has_relu else None

    def change(self, move: Tensor) -> Tensor:
        """Return what the move changes."""
        return self._changed(self._through(move))

    def _through(self, move: Tensor) -> Tensor:
        return (move if move.ndim == 2 else move.flatten(1)) @ self.weight.T

    def _changed(self, through: Tensor) -> Tensor:
        if self.before is None:
            return through
        # on: W m, at least -f(z); off: what rises above zero
        return torch.maximum(through + self.before.clamp(max=0), -self.out)

    def pull(self, move: Tensor | None, goal: Tensor) -> tuple[Tensor, Tensor]:
        """Return the change and the gradient."""
        if move is None:
            changed, error, active = torch.zeros_like(goal), -goal, self.out
        else:
            through = self._through(move)
            changed = self._changed(through)
            error, active = changed - goal, through if self.before is None else through + self.before
        if self.before is not None:
            error = error.mul_(active > 0)
        return changed, (error @ self.weight).view(self.z.shape)


class AutogradCalculus(Calculus):
    """Any differentiable module."""

    def out(self, z: Tensor) -> Tensor:
        """Return f(z), detached."""
        with torch.no_grad():
            result: Tensor = self.block(z)
        return result.clone() if result is z else result

    def pull(self, z: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return f(z) and the gradient in z."""
        with torch.enable_grad():
            z = z.detach().clone().requires_grad_()  # a copy: the block may start with an in-place ReLU
            out = self.block(z * 1)
            (grad,) = torch.autograd.grad(0.5 * (out - target).square().sum(), z)
        return out.detach(), grad

    def learn(
        self, z: Tensor, target: Tensor, scale: float, out: Tensor | None = None, error: Tensor | None = None
    ) -> Tensor:
        """Set the parameters' gradients; here alone batch norm updates its statistics and dropout drops."""
        parameters = [p for p in self.block.parameters() if p.requires_grad]
        self.block.train()
        with torch.enable_grad():
            made = self.block(z.detach().clone())
            self.block.eval()
            if parameters:
                loss = 0.5 * scale * (made - target).square().sum()
                grads = torch.autograd.grad(loss, parameters, allow_unused=True)
                for p, g in zip(parameters, grads, strict=True):
                    p.grad = g
        result: Tensor = made.detach()
        return result


class AffineCalculus(Calculus):
    """relu(z W' + b) or z W' + b, by formula."""

    def __init__(self, block: nn.Module, linear: nn.Linear, has_relu: bool, flatten: bool) -> None:
        super().__init__(block)
        self.linear, self.has_relu, self.flatten = linear, has_relu, flatten

    def out(self, z: Tensor) -> Tensor:
        """Return f(z), detached."""
        z = z.flatten(1) if self.flatten else z
        made = nf.linear(z, self.linear.weight.detach(), self.bias())
        return made.relu_() if self.has_relu else made

    def around(self, z: Tensor, dual: Tensor | None = None) -> Around:
        """Return the block as seen from a point."""
        return AffineAround(self, z, dual)

    def bias(self) -> Tensor | None:
        """Return the bias, detached."""
        bias: Tensor | None = self.linear.bias
        return None if bias is None else bias.detach()

    def _error(self, out: Tensor, target: Tensor) -> Tensor:
        error = out - target
        return error.mul_(out > 0) if self.has_relu else error

    def pull(self, z: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return f(z) and the gradient in z."""
        out = self.out(z)
        grad = self._error(out, target) @ self.linear.weight.detach()
        return out, grad.view(z.shape)

    def learn(
        self, z: Tensor, target: Tensor, scale: float, out: Tensor | None = None, error: Tensor | None = None
    ) -> Tensor:
        """Set the parameters' gradients."""
        out = self.out(z) if out is None else out
        if error is None:
            error = self._error(out, target).mul_(scale)
        else:
            error = error * scale
            error = error.mul_(out > 0) if self.has_relu else error
        self.linear.weight.grad = error.T @ (z.flatten(1) if self.flatten else z)
        bias: Tensor | None = self.linear.bias
        if bias is not None:
            bias.grad = error.sum(0)
        return out

    def gram(self) -> Tensor | None:
        """Return W'W."""
        W = self.linear.weight.detach()
        return W.T @ W


def calculus_of(block: nn.Module) -> Calculus:
    """Return the fastest calculus that fits the block: ``[Flatten] Linear [ReLU]`` by formula, all else by autograd."""
    parts = list(block) if isinstance(block, nn.Sequential) else [block]
    flatten = bool(parts) and isinstance(parts[0], nn.Flatten) and (parts[0].start_dim, parts[0].end_dim) == (1, -1)
    rest = parts[1:] if flatten else parts
    kinds = [type(part) for part in rest]
    plain = not any(p._forward_hooks or p._forward_pre_hooks for p in (block, *parts))
    trainable = all(p.requires_grad for p in block.parameters())
    if plain and trainable and kinds in ([nn.Linear], [nn.Linear, nn.ReLU]):
        assert isinstance(rest[0], nn.Linear)
        return AffineCalculus(block, rest[0], len(rest) == 2, flatten)
    return AutogradCalculus(block)
