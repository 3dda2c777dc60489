"""Forward pass of the service: by torch, or by ONNX Runtime where the version has an exported graph."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from auditor.errors import ArtifactError, OptionError, TamperError
from auditor.explainers.base import Explainer
from auditor.explainers.forward_pass import ForwardPass, TorchPass, layers_read
from auditor.plugins.registry.location import ModelVersion
from auditor.plugins.registry.onnx_exports import Exported, compare_with_torch, load_export
from auditor.service.settings import Settings
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)


class OnnxPass:
    """The exported graph in ONNX Runtime; its layers and the explainers' further outputs come with the logits."""

    engine: Literal["torch", "onnx"] = "onnx"

    def __init__(
        self, exported: Exported, explainers: Mapping[str, Explainer], device: torch.device, threads: int
    ) -> None:
        from auditor.explainers.onnx_export import open_session, output_names

        self.reason = f"exported graph {exported.digest[:12]}"
        self.device = device
        self.session = open_session(exported.content, threads=threads, use_gpu=device.type == "cuda")
        read = {key for e in explainers.values() for key in e.reads().keys}
        keys = [*exported.layers, *exported.features.values()]
        names = output_names(len(exported.layers), len(exported.features))[1:]
        used = [(name, key) for name, key in zip(names, keys, strict=True) if key in read]
        self.layers = [key for _, key in used if key in exported.layers]
        self.outputs, self.keys = ["logits", *(name for name, _ in used)], [key for _, key in used]

    def run(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return logits, activations and further outputs from one pass."""
        logits, *values = (
            torch.from_numpy(a).to(self.device) for a in self.session.run(self.outputs, {"pixels": x.numpy()})
        )
        return logits[:, None] if logits.ndim == 1 else logits, dict(zip(self.keys, values, strict=True))


def choose_pass(
    settings: Settings, version: ModelVersion, subject: Subject, explainers: Mapping[str, Explainer]
) -> ForwardPass:
    """Return the engine that was asked for; ``auto`` takes an exported graph when there is one that fits."""
    if settings.engine == "torch":
        return TorchPass(subject, explainers.values(), "asked for")
    exported = load_export(version, subject)
    if exported is None:
        reason = f"there is no exported graph; auditor export {version.label} makes one"
    elif exported.undone != subject.output.undone:
        undone = f"undone at the model's end is {subject.output.undone}, in the exported graph {exported.undone}"
        reason = f"{undone}; auditor export {version.label} makes one that fits"
    elif lacks := sorted(set(layers_read(explainers.values())) - set(exported.layers)):
        fitting = f"auditor export {version.label} makes one that fits"
        reason = f"the exported graph lacks layer {', '.join(lacks)}; {fitting}"
    else:
        try:
            compare_with_torch(exported, subject, version.label, explainers)
            return OnnxPass(exported, explainers, subject.device, settings.threads)
        except TamperError:
            raise
        except (OptionError, ArtifactError) as error:
            reason = f"there is an exported graph, but {error}"
    if settings.engine == "onnx":
        raise OptionError(f"engine onnx: {reason}.")
    if exported is not None:
        log.warning("the torch engine serves %s: %s", version.label, reason)
    return TorchPass(subject, explainers.values(), reason)
