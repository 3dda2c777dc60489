"""Model record: what a version's model is, by digests of its parts and files, read without torch where possible.

To list, to verify and to hold a stored audit against a policy, nobody needs the network itself, only to know that it is
the one that was fitted to or audited. A record that was read without torch only ever confirms: where it differs from
what is wanted, the model is loaded, and its own record counts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor.plugins.registry import model_files, tags
from auditor.plugins.registry.location import ModelVersion, mlflow_errors
from auditor.subject.identity import Identity, of_json

if TYPE_CHECKING:
    from auditor.subject.subject import Subject

ARCHIVE = "data/model.pt2"  # where MLflow's flavor pytorch puts an exported model
DESCRIPTION = {"schema_version", "class_names", "output", "input_shape", "mean", "std", "resize"}


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """What a model is: digests of its parts, sha256 of its files by path, class names, how its outputs are read."""

    identity: Identity
    files: Mapping[str, str]
    class_names: tuple[str, ...]
    output: str
    input_shape: tuple[int, ...]

    @classmethod
    def of(cls, subject: Subject) -> ModelRecord:
        """Return the record of a model that is loaded."""
        return cls(
            subject.identity, subject.files, subject.class_names, subject.output.name, tuple(subject.input_shape)
        )

    @property
    def digest(self) -> str:
        """Sha256 over weights, graph, preprocessing and class names."""
        return self.identity.digest


class VersionModel:
    """The model of a version: its record at once, the subject when something asks for a pass.

    ``subject`` is one that was loaded from the version already.
    """

    def __init__(self, version: ModelVersion, allow_pickle: bool | None = None, subject: Subject | None = None) -> None:
        self.version = version
        self._allow_pickle = allow_pickle
        self._subject = subject
        self._record: ModelRecord | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether the record is that of a model that was loaded."""
        return self._subject is not None

    @property
    def subject(self) -> Subject:
        """The model itself, loaded at the first question."""
        return self.load() if self._subject is None else self._subject

    def load(self) -> Subject:
        """Load the model; its own record counts from now on."""
        from auditor.plugins.registry.subjects import load_subject

        self._subject = load_subject(self.version, allow_pickle=self._allow_pickle)
        return self._subject

    @property
    def record(self) -> ModelRecord:
        """What the model is."""
        if self._subject is not None:
            return ModelRecord.of(self._subject)
        if self._record is None:
            self._record = read_record(self.version)
        return ModelRecord.of(self.subject) if self._record is None else self._record


def read_record(version: ModelVersion) -> ModelRecord | None:
    """Return the record of a version from its files and tags; None where only loading the model can say.

    Every file is compared with the version's pin; a version without one, or of another flavor, has to be loaded.
    """
    pin, description = tags.model_tag(version.tags), version.tags.get(tags.SUBJECT)
    if pin is None or pin.problem or description is None or ARCHIVE not in pin.files:
        return None
    notes = tags.decode_subject(description, f"the tag {tags.SUBJECT} of {version.label}")
    if set(notes) != DESCRIPTION or not isinstance(notes["class_names"], list):
        return None
    with mlflow_errors(f"model {version.uri}"), tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        path = Path(folder) / "model"
        files = model_files.fetch(version, path)
        model_files.check(version, files)
        return _read(path, files, notes) if _is_exported(path) else None


def _is_exported(path: Path) -> bool:
    """Whether the model is of MLflow's flavor pytorch, and its network the archive."""
    import yaml

    try:
        flavors = yaml.safe_load((path / "MLmodel").read_text(encoding="utf-8"))["flavors"]
        return bool(flavors["pytorch"].get("model_data", "data") == Path(ARCHIVE).parent.as_posix())
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def _read(path: Path, files: Mapping[str, str], notes: dict[str, Any]) -> ModelRecord | None:
    from auditor.plugins.registry.pt2_archive import graph_digest
    from auditor.plugins.registry.pt2_weights import digest_of_weights

    weights = digest_of_weights(path / ARCHIVE)
    if weights is None:
        return None
    class_names, shape = notes.pop("class_names"), tuple(int(n) for n in notes["input_shape"])
    identity = Identity(weights, graph_digest(path / ARCHIVE), of_json(notes), of_json(class_names))
    return ModelRecord(identity, files, tuple(str(name) for name in class_names), str(notes["output"]), shape)
