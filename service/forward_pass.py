"""Runner: gives logits and the layers' activations of a batch, by torch or by ONNX Runtime."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal, Protocol

import torch
from torch import Tensor

from auditor.errors import ArtifactError, OptionError
from auditor.explainers.base import Explainer
from auditor.plugins.registry.onnx_exports import Exported, load_export
from auditor.plugins.registry.location import Place
from auditor.service.settings import Settings
from auditor.subject.subject import Subject
from auditor.explainers.xnn.explainer import XnnExplainer

log = logging.getLogger(__name__)


class Runner(Protocol):
    """One forward pass for all explainers."""

    engine: Literal["torch", "onnx"]
    reason: str  # why this engine, for people
    layers: list[str]  # whose activations it gives

    def run(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return logits and everything that an explainer reads, for pixels ``x``."""


class TorchRunner:
    """The model as it is, with hooks on the layers."""

    engine: Literal["torch", "onnx"] = "torch"

    def __init__(self, subject: Subject, explainers: Mapping[str, Explainer], reason: str = "") -> None:
        self.subject, self.reason = subject, reason
        self.layers = sorted({layer for e in explainers.values() for layer in e.layers()})

    def run(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return logits and activations from one pass."""
        with torch.no_grad():
            return self.subject.run(x, self.layers)


class OnnxRunner:
    """The exported graph in ONNX Runtime; its layers and x-features come with the logits."""

    engine: Literal["torch", "onnx"] = "onnx"

    def __init__(
        self, exported: Exported, explainers: Mapping[str, Explainer], device: torch.device, threads: int
    ) -> None:
        from auditor.explainers.onnx_export import open_session, output_names

        self.reason = f"exported graph {exported.digest[:12]}"
        self.device = device
        self.session = open_session(exported.content, threads=threads, use_gpu=device.type == "cuda")
        read = {layer for e in explainers.values() for layer in e.layers()}
        read |= {e.features_key() for e in explainers.values() if isinstance(e, XnnExplainer)}
        keys = [*exported.layers, *(f"x-features {digest}" for digest in exported.features.values())]
        names = output_names(len(exported.layers), len(exported.features))[1:]
        taken = [(name, key) for name, key in zip(names, keys, strict=True) if key in read]
        self.layers = [key for _, key in taken if key in exported.layers]
        self.outputs, self.keys = ["logits", *(name for name, _ in taken)], [key for _, key in taken]

    def run(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return logits, activations and x-features (batch, classes, features, cells) from one pass."""
        logits, *rest = (
            torch.from_numpy(a).to(self.device) for a in self.session.run(self.outputs, {"pixels": x.numpy()})
        )
        found = dict(zip(self.keys, rest, strict=True))
        for key, value in found.items():
            if key.startswith("x-features "):
                found[key] = value.cpu()
        return logits[:, None] if logits.ndim == 1 else logits, found


def choose_runner(settings: Settings, place: Place, subject: Subject, explainers: Mapping[str, Explainer]) -> Runner:
    """Return the engine that was asked for; ``auto`` takes an exported graph when there is one that fits."""
    if settings.engine == "torch":
        return TorchRunner(subject, explainers, "asked for")
    exported = load_export(place, subject)
    if exported is None:
        reason = f"there is no exported graph; auditor export {place.label} makes one"
    elif lacks := sorted({layer for e in explainers.values() for layer in e.layers()} - set(exported.layers)):
        reason = f"the exported graph lacks layer {', '.join(lacks)}; auditor export {place.label} makes one that fits"
    else:
        try:
            return OnnxRunner(exported, explainers, subject.device, settings.threads)
        except (OptionError, ArtifactError) as error:
            reason = f"there is an exported graph, but {error}"
    if settings.engine == "onnx":
        raise OptionError(f"engine onnx: {reason}.")
    if exported is not None:
        log.warning("the torch engine serves %s: %s", place.label, reason)
    return TorchRunner(subject, explainers, reason)
