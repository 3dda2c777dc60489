"""Runner: gives logits and the layers' activations of a batch, by torch or by ONNX Runtime."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal, Protocol

import torch
from torch import Tensor

from auditor.errors import OptionError
from auditor.explainer import Explainer
from auditor.plugins.place import Place
from auditor.service.settings import Settings
from auditor.subject import Subject

log = logging.getLogger(__name__)


class Runner(Protocol):
    """One forward pass for all explainers."""

    engine: Literal["torch", "onnx"]
    reason: str  # why this engine, for people

    def run(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return logits and every layer that an explainer reads, for pixels ``x``."""


class TorchRunner:
    """The model as it is, with hooks on the layers."""

    engine: Literal["torch", "onnx"] = "torch"

    def __init__(self, subject: Subject, explainers: Mapping[str, Explainer], reason: str = "") -> None:
        self.subject, self.reason = subject, reason
        self.layers = sorted({layer for e in explainers.values() for layer in e.layers()})

    def run(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return logits and activations from one pass."""
        with torch.inference_mode(False), torch.no_grad():
            return self.subject.run(x, self.layers)


def choose_runner(settings: Settings, place: Place, subject: Subject, explainers: Mapping[str, Explainer]) -> Runner:
    """Return the engine that was asked for; ``auto`` takes an exported graph when there is one that verifies."""
    if settings.engine == "onnx":
        raise OptionError("engine onnx: this version has no exported graph; run auditor export first.")
    return TorchRunner(subject, explainers)
