"""Make a registered image model explain itself, measure the explanations, and gate releases on them.

Names are loaded when first used, so that ``import auditor`` and ``auditor --help`` stay fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from auditor.auditing.audit import Audit, AuditConfig, audit
    from auditor.training.block_admm import BlockAdmm
    from auditor.block_config import BlockAdmmConfig
    from auditor.data.source import Data, open_data
    from auditor.errors import AuditError
    from auditor.explainers.base import Explainer, fit
    from auditor.explainers.explanation import Concept, Explanation
    from auditor.explainers.nmf.explainer import NmfExplainer
    from auditor.subject.subject import Subject
    from auditor.explainers.tree.explainer import TreeExplainer

_HOME = {
    "Audit": "audit",
    "AuditConfig": "audit",
    "AuditError": "errors",
    "BlockAdmm": "block_admm",
    "BlockAdmmConfig": "block_config",
    "Concept": "explanation",
    "Data": "data",
    "Explainer": "explainer",
    "Explanation": "explanation",
    "NmfExplainer": "nmf",
    "Subject": "subject",
    "TreeExplainer": "tree",
    "audit": "audit",
    "fit": "explainer",
    "open_data": "data",
}

__all__ = [
    "Audit",
    "AuditConfig",
    "AuditError",
    "BlockAdmm",
    "BlockAdmmConfig",
    "Concept",
    "Data",
    "Explainer",
    "Explanation",
    "NmfExplainer",
    "Subject",
    "TreeExplainer",
    "audit",
    "fit",
    "open_data",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"auditor.{_HOME[name]}"), name)
    raise AttributeError(f"module 'auditor' has no attribute {name!r}")
