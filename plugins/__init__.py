"""Everything that knows MLflow. Names load when first used: importing mlflow with this plugin installed stays light."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from auditor.plugins.registry.audits import latest_audit, run_audit, run_gate
    from auditor.plugins.image_dataset import ImageDataset
    from auditor.plugins.registry.subjects import describe, load_subject, log_subject
    from auditor.plugins.registry.attachments import attach, detach, list_attached, load, verify

_HOME = {
    "ImageDataset": "image_dataset",
    "attach": "registry",
    "describe": "models",
    "detach": "registry",
    "latest_audit": "audits",
    "list_attached": "registry",
    "load": "registry",
    "load_subject": "models",
    "log_subject": "models",
    "run_audit": "audits",
    "run_gate": "audits",
    "verify": "registry",
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
