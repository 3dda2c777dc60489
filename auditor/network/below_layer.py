"""The part of a subject's network that ends at a layer, with weights of its own that can be trained.

The module is never copied or changed: the weights stand in for its own while it runs (an exported graph cannot be
copied), and a hook on the layer ends the pass there. Statistics of batch norms stay as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from auditor.errors import LayerError
from auditor.subject.layer_calls import on_call
from auditor.subject.subject import Subject


class _Reached(Exception):
    """The layer has put out its value; what comes after need not run."""


class BelowLayer:
    """The block below a layer: images to one layer's activation (batch, channels, positions)."""

    def __init__(self, subject: Subject, layer: str, weights: Mapping[str, Tensor] | None = None) -> None:
        self.subject, self.layer = subject, layer
        self.layout = subject.layout(layer)
        if weights is None:
            weights = self._weights_below()
        self.weights = {k: v.detach().clone().to(subject.device, subject.dtype) for k, v in weights.items()}

    def __call__(self, x: Tensor) -> Tensor:
        """Return the layer's activation of pixels ``x``; differentiable in the weights where gradients are enabled."""
        parts = [x] if self.subject.max_batch is None else list(torch.split(x, self.subject.max_batch))
        z = torch.cat([self._native(part, self.weights) for part in parts])
        return self.layout.to_positions(z.float() if z.dtype in (torch.float16, torch.bfloat16) else z)

    @contextmanager
    def trainable(self) -> Iterator[list[Tensor]]:
        """Track gradients of the weights and give them out; an optimiser may change them in place."""
        for value in self.weights.values():
            value.requires_grad_(True)
        try:
            yield list(self.weights.values())
        finally:
            for value in self.weights.values():
                value.requires_grad_(False)

    @contextmanager
    def in_place(self) -> Iterator[nn.Module]:
        """Give the subject's module with these weights in it, and put its own back afterwards."""
        module = self.subject.module
        with self.subject.at_rest(), torch.no_grad():
            parameters = {k: module.get_parameter(k) for k in self.weights}
            before = {k: p.detach().clone() for k, p in parameters.items()}
            try:
                for k, p in parameters.items():
                    p.copy_(self.weights[k])
                yield module
            finally:
                for k, p in parameters.items():
                    p.copy_(before[k])

    def _native(self, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        outputs: list[Tensor] = []

        def stop(output: Any) -> None:
            outputs.append(first_tensor(output, self.layer))
            raise _Reached

        fast = self.subject.in_fast_layout(x)
        with self.subject.at_rest():
            handle = on_call(self.subject.module, self.layer, stop)
            try:
                functional_call(self.subject.module, dict(weights), (self.subject.normalise(fast),))
            except _Reached:
                return outputs[0]
            finally:
                handle.remove()
        raise LayerError(f"layer {self.layer!r} did not run; take one that `auditor layers` marks as explainable.")

    def _weights_below(self) -> dict[str, Tensor]:
        """Return the parameters that the layer's output depends on."""
        parameters = {
            k: p.detach().clone().requires_grad_(True)
            for k, p in self.subject.module.named_parameters()
            if p.is_floating_point()
        }
        if not parameters:
            return {}
        with torch.enable_grad():
            z = self._native(self.subject.blank(self.subject.max_batch or 2), parameters)
            if not z.requires_grad:
                return {}
            gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
                z.sum(), list(parameters.values()), allow_unused=True
            )
        return {k: p.detach() for (k, p), g in zip(parameters.items(), gradients, strict=True) if g is not None}


def first_tensor(output: Any, layer: str) -> Tensor:
    """Return the tensor of a layer's output, which may be the first of several."""
    tensor = output if isinstance(output, Tensor) else output[0] if isinstance(output, (tuple, list)) else None
    if not isinstance(tensor, Tensor):
        raise LayerError(f"layer {layer!r} puts out {type(output).__name__}, not one tensor; take another layer.")
    return tensor
