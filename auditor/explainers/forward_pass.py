"""Forward pass: the logits of a batch with everything its explainers read, from one run of the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

import torch
from torch import Tensor

from auditor.explainers.base import Explainer
from auditor.subject.subject import Subject


class ForwardPass(Protocol):
    """One forward pass for all explainers."""

    engine: Literal["torch", "onnx"]
    reason: str  # why this engine, for people
    layers: list[str]  # whose activations it gives

    def run(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return logits and everything that an explainer reads, by its key, for pixels ``x``."""


class TorchPass:
    """The model as it is, with hooks on the layers."""

    engine: Literal["torch", "onnx"] = "torch"

    def __init__(self, subject: Subject, explainers: Iterable[Explainer], reason: str = "") -> None:
        self.subject, self.reason = subject, reason
        self.layers = layers_read(explainers)

    def run(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return logits and activations from one pass."""
        with torch.no_grad():
            return self.subject.run(x, self.layers)


def layers_read(explainers: Iterable[Explainer]) -> list[str]:
    """Return the layers that explainers read, each once."""
    return sorted({layer for explainer in explainers for layer in explainer.reads().layers})
