"""Origins: how another process loads a model and its explainers from the registry, verified there byte by byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from auditor.plugins.registry.location import ModelVersion

if TYPE_CHECKING:
    from auditor.explainers.base import Explainer
    from auditor.subject.subject import Subject


@dataclass(frozen=True)
class Registry:
    """The addresses of the registry that a process uses."""

    tracking: str
    registry: str

    @classmethod
    def here(cls) -> Registry:
        """Return those of this process."""
        import mlflow

        return cls(mlflow.get_tracking_uri(), mlflow.get_registry_uri())

    def use(self) -> None:
        """Let this process use them."""
        import mlflow

        if Registry.here() != self:
            mlflow.set_tracking_uri(self.tracking)
            mlflow.set_registry_uri(self.registry)


@dataclass(frozen=True)
class RegisteredSubject:
    """A model version, loaded again where it is called."""

    registry: Registry
    version: ModelVersion
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> Subject:
        """Load the model; every file is compared with the version's pin."""
        from auditor.plugins.registry.subjects import load_subject

        self.registry.use()
        return load_subject(self.version, **self.options)


@dataclass(frozen=True)
class AttachedExplainer:
    """An attached explainer, loaded again where it is called, for the subject that travels with it."""

    registry: Registry
    version: ModelVersion
    name: str
    subject: Subject

    def __call__(self) -> Explainer:
        """Load the explainer; every checksum and the model's digest are verified."""
        from auditor.plugins.registry.attachments import load

        self.registry.use()
        explainer: Explainer = load(self.version, self.name, subject=self.subject)
        return explainer
