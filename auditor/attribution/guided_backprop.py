"""Guided backprop [GuidedBackprop]: the gradient of a logit, passed by a ReLU only where it and the input are positive.

It works on what the network computes, however its ReLUs are written: as modules, functions, in place, or as operations
of a graph that was exported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from auditor.errors import LayerError
from auditor.subject.subject import Subject

aten = torch.ops.aten
RELUS = {
    torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_, torch.nn.functional.relu,
    aten.relu.default, aten.relu_.default,
}  # fmt: skip


class _Guided(torch.autograd.Function):
    """ReLU whose gradient is clipped at 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x > 0)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (fired,) = ctx.saved_tensors
        passed: Tensor = gradients[0].clamp(min=0) * fired
        return passed


class GuidedRelus(TorchFunctionMode):
    """Every ReLU that runs inside has the guided gradient; ``n`` counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace a ReLU, leave all else."""
        if func not in RELUS:
            return func(*args, **(kwargs or {}))
        self.n += 1
        return _Guided.apply(args[0])


def guided_backprop(subject: Subject, x: Tensor, targets: Tensor) -> Tensor:
    """Return the guided gradient (batch, C, H, W) of the target logit, signed."""
    relus = GuidedRelus()
    with torch.enable_grad():
        leaf = x.detach().clone().requires_grad_()
        with relus:
            logits = subject.logits(leaf)
        if not relus.n:
            raise LayerError("guided backprop: the network runs no ReLU, so there is nothing to guide; leave it out.")
        value = logits.gather(1, targets.to(subject.device)[:, None]).sum()
        return torch.autograd.grad(value, leaf)[0]
