"""Everything that knows MLflow. Names load when first used: importing mlflow with this plugin installed stays light.

May use: every room of auditor/ but commands, plugins/registry, plugins/audits_site.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from auditor.plugins.image_dataset import ImageDataset
    from auditor.plugins.registry.attachments import detach, list_attached, load
    from auditor.plugins.registry.audits import latest_audit, run_audit
    from auditor.plugins.registry.gates import run_gate
    from auditor.plugins.registry.onnx_exports import attach
    from auditor.plugins.registry.subjects import describe, load_subject, log_subject
    from auditor.plugins.registry.verification import verify

_HOME = {
    "ImageDataset": "image_dataset",
    "attach": "registry.onnx_exports",
    "describe": "registry.subjects",
    "detach": "registry.attachments",
    "latest_audit": "registry.audits",
    "list_attached": "registry.attachments",
    "load": "registry.attachments",
    "load_subject": "registry.subjects",
    "log_subject": "registry.subjects",
    "run_audit": "registry.audits",
    "run_gate": "registry.gates",
    "verify": "registry.verification",
}

__all__ = [
    "ImageDataset",
    "attach",
    "describe",
    "detach",
    "latest_audit",
    "list_attached",
    "load",
    "load_subject",
    "log_subject",
    "run_audit",
    "run_gate",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"auditor.plugins.{_HOME[name]}"), name)
    raise AttributeError(f"module 'auditor.plugins' has no attribute {name!r}")
