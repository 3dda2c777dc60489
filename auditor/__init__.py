"""Make a registered image model explain itself, measure the explanations, and gate releases on them.

Names are loaded when first used, so that ``import auditor`` and ``auditor --help`` stay fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Literal, overload

if TYPE_CHECKING:
    from auditor.auditing.audit import audit
    from auditor.auditing.config import AuditConfig
    from auditor.auditing.record import Audit
    from auditor.data.source import Batch, Data, open_data
    from auditor.errors import AuditError
    from auditor.explainers.base import Explainer, ExplainerConfig, FurtherOutput, Reads
    from auditor.explainers.coupled.explainer import CoupledExplainer
    from auditor.explainers.deepfacto.explainer import DeepFactoExplainer
    from auditor.explainers.explanation import Concept, Explanation, class_scores
    from auditor.explainers.fitted_images import FittedImages
    from auditor.explainers.gallery import Gallery
    from auditor.explainers.nmf.explainer import NmfExplainer
    from auditor.explainers.rde.explainer import RdeExplainer
    from auditor.explainers.tree.explainer import TreeExplainer
    from auditor.explainers.xnn.explainer import XnnExplainer
    from auditor.network.network_blocks import split
    from auditor.progress import Progress
    from auditor.release.drift import Drift, compare
    from auditor.subject.subject import Subject
    from auditor.training.block_admm import BlockAdmm, BlockAdmmConfig
    from auditor.training.factorization import Factorization, Lift

    @overload
    def fit(
        kind: Literal["nmf"],
        subject: Subject,
        data: Any,
        *,
        progress: Progress | bool = ...,
        cluster: str | None = ...,
        **options: Any,
    ) -> NmfExplainer: ...

    @overload
    def fit(
        kind: Literal["coupled"],
        subject: Subject,
        data: Any,
        *,
        progress: Progress | bool = ...,
        cluster: str | None = ...,
        **options: Any,
    ) -> CoupledExplainer: ...

    @overload
    def fit(
        kind: Literal["xnn"],
        subject: Subject,
        data: Any,
        *,
        progress: Progress | bool = ...,
        cluster: str | None = ...,
        **options: Any,
    ) -> XnnExplainer: ...

    @overload
    def fit(
        kind: Literal["tree"],
        subject: Subject,
        data: Any,
        *,
        progress: Progress | bool = ...,
        cluster: str | None = ...,
        **options: Any,
    ) -> TreeExplainer: ...

    @overload
    def fit(
        kind: Literal["deepfacto"],
        subject: Subject,
        data: Any,
        *,
        progress: Progress | bool = ...,
        cluster: str | None = ...,
        **options: Any,
    ) -> DeepFactoExplainer: ...

    @overload
    def fit(
        kind: Literal["rde"],
        subject: Subject,
        data: Any,
        *,
        progress: Progress | bool = ...,
        cluster: str | None = ...,
        **options: Any,
    ) -> RdeExplainer: ...

    @overload
    def fit(
        kind: str,
        subject: Subject,
        data: Any,
        *,
        progress: Progress | bool = ...,
        cluster: str | None = ...,
        **options: Any,
    ) -> Any: ...

    def fit(
        kind: str,
        subject: Subject,
        data: Any,
        *,
        progress: Progress | bool = ...,
        cluster: str | None = ...,
        **options: Any,
    ) -> Any:
        """Fit an explainer of a kind: the types of what `auditor.explainers.base.fit` returns."""


__version__ = "0.2.0"

_HOME = {
    "Audit": "auditing.record",
    "AuditConfig": "auditing.config",
    "AuditError": "errors",
    "Batch": "data.source",
    "BlockAdmm": "training.block_admm",
    "BlockAdmmConfig": "training.block_admm",
    "Concept": "explainers.explanation",
    "CoupledExplainer": "explainers.coupled.explainer",
    "Data": "data.source",
    "DeepFactoExplainer": "explainers.deepfacto.explainer",
    "Drift": "release.drift",
    "Explainer": "explainers.base",
    "ExplainerConfig": "explainers.base",
    "Explanation": "explainers.explanation",
    "Factorization": "training.factorization",
    "FittedImages": "explainers.fitted_images",
    "FurtherOutput": "explainers.base",
    "Gallery": "explainers.gallery",
    "Lift": "training.factorization",
    "NmfExplainer": "explainers.nmf.explainer",
    "RdeExplainer": "explainers.rde.explainer",
    "Reads": "explainers.base",
    "Subject": "subject.subject",
    "TreeExplainer": "explainers.tree.explainer",
    "XnnExplainer": "explainers.xnn.explainer",
    "audit": "auditing.audit",
    "class_scores": "explainers.explanation",
    "compare": "release.drift",
    "fit": "explainers.base",
    "open_data": "data.source",
    "split": "network.network_blocks",
}

__all__ = [
    "Audit",
    "AuditConfig",
    "AuditError",
    "Batch",
    "BlockAdmm",
    "BlockAdmmConfig",
    "Concept",
    "CoupledExplainer",
    "Data",
    "DeepFactoExplainer",
    "Drift",
    "Explainer",
    "ExplainerConfig",
    "Explanation",
    "Factorization",
    "FittedImages",
    "FurtherOutput",
    "Gallery",
    "Lift",
    "NmfExplainer",
    "RdeExplainer",
    "Reads",
    "Subject",
    "TreeExplainer",
    "XnnExplainer",
    "audit",
    "class_scores",
    "compare",
    "fit",
    "open_data",
    "split",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"auditor.{_HOME[name]}"), name)
    raise AttributeError(f"module 'auditor' has no attribute {name!r}")
