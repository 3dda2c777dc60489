"""Runner: gives logits and the layers' activations of a batch, by torch or by ONNX Runtime."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal, Protocol

import torch
from torch import Tensor

from auditor.errors import OptionError
from auditor.explainer import Explainer
from auditor.plugins.exports import Exported, load_export
from auditor.plugins.place import Place
from auditor.service.settings import Settings
from auditor.subject import Subject
from auditor.xnn import XnnExplainer

log = logging.getLogger(__name__)


class Runner(Protocol):
    """One forward pass for all explainers."""

    engine: Literal["torch", "onnx"]
    reason: str  # why this engine, for people

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
        from auditor.onnx_graph import open_session, output_names

        self.reason = f"exported graph {exported.digest[:12]}"
        self.device = device
        self.session = open_session(exported.content, threads=threads, use_gpu=device.type == "cuda")
        keys = list(exported.layers)
        for name, digest in exported.features.items():
            e = explainers.get(name)
            is_same = isinstance(e, XnnExplainer) and e.digest_ == digest
            keys.append(e.features_key() if is_same and isinstance(e, XnnExplainer) else "")
        names = output_names(len(exported.layers), len(exported.features))
        wanted = {layer for e in explainers.values() for layer in e.layers()}
        read = [(n, k) for n, k in zip(names[1:], keys, strict=True) if k in wanted or k.startswith("x-features ")]
        self.outputs, self.keys = ["logits", *(n for n, _ in read)], [k for _, k in read]

    def run(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return logits, activations and x-features (classes, batch, features, cells) from one pass."""
        logits, *rest = (
            torch.from_numpy(a).to(self.device) for a in self.session.run(self.outputs, {"pixels": x.numpy()})
        )
        found = dict(zip(self.keys, rest, strict=True))
        for key, value in found.items():
            if key.startswith("x-features "):
                found[key] = value.transpose(0, 1).cpu()
        return logits[:, None] if logits.ndim == 1 else logits, found


def choose_runner(settings: Settings, place: Place, subject: Subject, explainers: Mapping[str, Explainer]) -> Runner:
    """Return the engine that was asked for; ``auto`` takes an exported graph when there is one that fits."""
    if settings.engine == "torch":
        return TorchRunner(subject, explainers, "asked for")
    exported = load_export(place, subject, explainers)
    if exported is not None:
        try:
            return OnnxRunner(exported, explainers, subject.device, settings.threads)
        except OptionError as error:
            if settings.engine == "onnx":
                raise
            return TorchRunner(subject, explainers, f"there is a graph, but {error}")
    if settings.engine == "onnx":
        raise OptionError(
            f"engine onnx: {place.label} has no exported graph with all layers its explainers read; "
            f"run: auditor export {place.label}"
        )
    return TorchRunner(subject, explainers, "no exported graph fits; auditor export makes one")
