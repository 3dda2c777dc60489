"""Explainer: fitted to a subject, explains images of it, and lives on disk as an artifact."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from auditor.explainers.artifact import Artifact, read_artifact, write_artifact
from auditor.data.source import Data
from auditor.errors import ArtifactError, OptionError, TamperError
from auditor.explainers.explanation import Explanation
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)

# Progress is told, never printed: (stage, done, total); the command line draws a bar, a test collects, most do nothing.
Progress = Callable[[str, int, int | None], None]

KINDS: Mapping[str, str] = {
    "nmf": "auditor.explainers.nmf.explainer:NmfExplainer",
    "coupled": "auditor.explainers.coupled.explainer:CoupledExplainer",
    "xnn": "auditor.explainers.xnn.explainer:XnnExplainer",
    "tree": "auditor.explainers.tree.explainer:TreeExplainer",
    "deepfacto": "auditor.explainers.deepfacto.explainer:DeepFactoExplainer",
    "rde": "auditor.explainers.rde.explainer:RdeExplainer",
}


def silent(stage: str, done: int, total: int | None) -> None:
    """Ignore progress."""


class ExplainerConfig(BaseModel):
    """Options every kind has; a kind adds its own. Unknown options are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layer: str | None = Field(default=None, description="Layer to explain; default: the one `auditor layers` suggests.")
    target: int | str | None = Field(default=None, description="Class to explain; default: the model's prediction.")
    seed: int = Field(default=0, ge=0, description="Seed of everything random.")
    batch_size: int = Field(default=64, ge=1, description="Images per forward pass.")


class Explainer(ABC):
    """Fitted to a subject, then explains a batch. Learned state ends in an underscore.

    A kind gives ``kind``, ``Config``, ``fit``, ``explain``, and what to store: ``tensors``, ``state`` (JSON) and, when
    it has more, ``files``; ``restore`` puts them back. Everything else (artifact, checks, table of kinds) is shared.
    """

    kind: ClassVar[str]
    Config: ClassVar[type[ExplainerConfig]] = ExplainerConfig
    per_request: ClassVar[frozenset[str]] = frozenset()  # keywords that ``explain`` takes beyond the target
    carries_network: ClassVar[bool] = False  # whether it reads a network kept in the artifact, not the model's weights

    def __init__(self, config: ExplainerConfig | None = None, /, **options: Any) -> None:
        if config is None:
            config = parse_config(type(self), options)
        self.config: Any = config
        self.name = ""
        self.labels: dict[int, str] = {}
        self.metrics: dict[str, float] = {}
        self.layer_: str | None = None
        self.subject_digest_: str | None = None
        self.data_digest_: str | None = None
        self.digest_: str | None = None

    @abstractmethod
    def fit(self, subject: Subject, data: Data, progress: Progress = silent) -> Any:
        """Fit to the subject on the data and return self; call ``_fitted_to`` when done."""

    @abstractmethod
    def explain(self, subject: Subject, images: Any, target: int | str | None = None) -> list[Explanation]:
        """Explain each image; ``target`` is a class; default: the one fitted for, else the prediction."""

    def layers(self) -> list[str]:
        """Return the layers whose activations ``explain_from`` reads; none where it runs the subject itself."""
        return []

    def explain_from(
        self,
        subject: Subject,
        images: Tensor,
        logits: Tensor,
        activations: Mapping[str, Tensor],
        targets: Sequence[int | None],
        *,
        heatmaps: bool = True,
        **options: Any,
    ) -> list[Explanation]:
        """Explain pixels whose logits and ``layers`` a shared pass has already given; None is the default target.

        Gives what ``explain`` gives, row by row, and without ``heatmaps`` may leave those out. A kind that does not
        read layers explains the rows of each target in one call.
        """
        found: dict[int, Explanation] = {}
        for target in dict.fromkeys(targets):
            rows = [i for i, t in enumerate(targets) if t == target]
            found.update(zip(rows, self.explain(subject, images[rows], target, **options), strict=True))
        return [found[i] for i in range(len(targets))]

    def _explain_by_passes(self, subject: Subject, images: Any, target: int | str | None) -> list[Explanation]:
        """Explain by a pass of one's own per batch, for kinds that read layers."""
        self._check(subject)
        asked = None if target is None else subject.class_index(target)
        found: list[Explanation] = []
        for part in torch.split(subject.pixels(images), self.config.batch_size):
            with torch.no_grad():
                logits, taken = subject.run(part, self.layers())
            found.extend(self.explain_from(subject, part, logits, taken, [asked] * len(part)))
        return found

    def can_explain(self, target: int) -> bool:
        """Whether there is an explanation of this class."""
        return True

    def stand_in(self, subject: Subject, images: Tensor) -> Tensor | None:
        """Return the logits (batch, classes) when the explanation stands in for the model; None: only the target's."""
        return None

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the learned tensors."""

    def state(self) -> dict[str, Any]:
        """Return learned state that is not a tensor, ready for JSON."""
        return {}

    def files(self) -> dict[str, bytes]:
        """Return further files of the artifact (``tree.json``, ``explain.onnx``)."""
        return {}

    @abstractmethod
    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any], files: dict[str, bytes]) -> None:
        """Take back what ``tensors``, ``state`` and ``files`` gave."""

    def label(self, index: int) -> str:
        """Return the name a person gave to a concept, or a plain one."""
        return self.labels.get(index, f"concept {index}")

    def _fitted_to(self, subject: Subject, data: Data, layer: str | None) -> None:
        self.layer_, self.subject_digest_, self.data_digest_ = layer, subject.digest, data.digest

    def _check(self, subject: Subject) -> None:
        if self.subject_digest_ is None:
            raise OptionError(f"the {self.kind} explainer is not fitted yet; call fit first.")
        if subject.digest != self.subject_digest_:
            raise TamperError(
                f"the {self.kind} explainer {self.name!r} was fitted to a model with digest "
                f"{self.subject_digest_[:12]}, "
                f"this model has {subject.digest[:12]}; fit it to this model."
            )

    def _targets(self, subject: Subject, logits: Tensor, target: int | str | Sequence[int | None] | None) -> list[int]:
        """Return the class to explain per row: the one asked for, else the one fitted for, else the prediction."""
        asked = [target] * len(logits) if target is None or isinstance(target, (int, str)) else target
        default = self.config.target
        chosen = [default if t is None else t for t in asked]
        predicted: list[int] = logits.argmax(1).tolist()
        return [p if t is None else subject.class_index(t) for t, p in zip(chosen, predicted, strict=True)]

    def save(self, folder: str | Path) -> str:
        """Write the artifact and return its digest; the same seed and input give the same bytes."""
        if self.subject_digest_ is None:
            raise OptionError(f"the {self.kind} explainer is not fitted yet; call fit before save.")
        manifest = {
            "kind": self.kind,
            "config": self.config.model_dump(mode="json"),
            "layer": self.layer_,
            "target": self.config.target,
            "seed": self.config.seed,
            "subject_digest": self.subject_digest_,
            "data_digest": self.data_digest_,
            "metrics": {k: float(v) for k, v in self.metrics.items()},
            "labels": {str(k): v for k, v in self.labels.items()},
            "state": self.state(),
            "versions": _versions(),
        }
        self.digest_ = write_artifact(folder, manifest, self.tensors(), self.files())
        return self.digest_

    @classmethod
    def load(cls, folder: str | Path, subject: Subject | None = None, digest: str | None = None) -> Explainer:
        """Read an artifact of any kind after verifying every checksum, and the subject's digest when given."""
        artifact = read_artifact(folder, digest=digest, subject_digest=subject.digest if subject else None)
        return _restore(artifact)


def _restore(artifact: Artifact) -> Explainer:
    manifest = artifact.manifest
    cls = explainer_class(manifest["kind"])
    retired = sorted(manifest["config"].keys() - cls.Config.model_fields.keys())
    if retired:  # the schema is not newer than ours, so these are options of an earlier release
        log.info("%s: options of an earlier release are left out: %s", cls.kind, ", ".join(retired))
    explainer = cls(**{k: v for k, v in manifest["config"].items() if k not in retired})
    explainer.layer_ = manifest["layer"]
    explainer.subject_digest_ = manifest["subject_digest"]
    explainer.data_digest_ = manifest["data_digest"]
    explainer.metrics = {k: float("nan") if v is None else float(v) for k, v in manifest["metrics"].items()}
    explainer.labels = {int(k): str(v) for k, v in manifest["labels"].items()}
    explainer.digest_ = artifact.digest
    explainer.restore(artifact.tensors, manifest["state"], artifact.files)
    return explainer


def explainer_class(kind: str) -> type[Explainer]:
    """Look a kind up in the closed table.

    >>> explainer_class("nmf").kind
    'nmf'
    """
    if kind not in KINDS:
        raise ArtifactError(f"unknown explainer kind {kind!r}; the kinds are {', '.join(available_kinds())}.")
    module, _, name = KINDS[kind].partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ArtifactError(
            f"kind {kind!r} is not part of this version of mlflow-auditor; it has {', '.join(available_kinds())}."
        ) from None
    assert isinstance(found, type)
    assert issubclass(found, Explainer)
    return found


def available_kinds() -> list[str]:
    """Return the kinds whose code is installed."""
    return [kind for kind, where in KINDS.items() if importlib.util.find_spec(where.partition(":")[0]) is not None]


def parse_config(cls: type[Explainer], options: Mapping[str, Any]) -> ExplainerConfig:
    """Check options against a kind's configuration; the first problem becomes one sentence."""
    try:
        return cls.Config(**options)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "options"
        known = ", ".join(sorted(cls.Config.model_fields))
        if first["type"] == "extra_forbidden":
            raise OptionError(f"{cls.kind}: unknown option {where!r}; the options are {known}.") from None
        raise OptionError(f"{cls.kind}: option {where!r}: {first['msg'].lower()}, got {first['input']!r}.") from None


def fit(kind: str, subject: Subject, data: Data, *, progress: Progress = silent, **options: Any) -> Any:
    """Fit an explainer of a kind to a subject on data; options are those of the kind's configuration.

    ``fit("nmf", subject, open_data("images.npz"), layer="layer3", rank=10, seed=0)``
    """
    explainer = explainer_class(kind)(**options)
    return explainer.fit(subject, data, progress)


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version(), "torch": torch.__version__.partition("+")[0]}
    for package in ("mlflow-auditor", "numpy", "scikit-learn"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
