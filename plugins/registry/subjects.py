"""Subjects: a subject from the registry and into it, with what others need to use it (``auditor/subject.json``)."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor.errors import AuditError, ModelError, OptionError, TamperError
from auditor.plugins.registry import tags
from auditor.plugins.registry.location import ModelVersion, mlflow_errors, resolve, set_tag

if TYPE_CHECKING:
    from torch import nn

    from auditor.subject.subject import Subject

log = logging.getLogger(__name__)

SUBJECT_FILE = "auditor/subject.json"
NOT_THE_MODEL = {"explainers", "audits", "auditor"}


def load_subject(
    uri: str | ModelVersion,
    *,
    allow_pickle: bool | None = None,
    size: Sequence[int] | None = None,
    output: str | None = None,
    layer: str | None = None,
) -> Subject:
    """Load the model behind an MLflow URI as a subject: ``load_subject("models:/m@champion")``.

    A ``pt2`` model (MLflow's default) is validated record by record before torch opens it. A pickled module can run any
    code on loading, so it is refused unless ``allow_pickle`` is true or the environment sets
    MLFLOW_ALLOW_PICKLE_DESERIALIZATION=true. Class names, size, mean and std come from ``auditor/subject.json``, else
    the input shape is read off the model and pixels in [0, 1] are assumed. ``output`` says how the model's outputs are
    read (logits, softmax, log-softmax, sigmoid, multilabel), else its description, else what one pass shows.
    """
    version = resolve(uri)
    uri = version.uri  # as it was typed, for messages
    with mlflow_errors(f"model {uri}"), tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        path = _fetch(version, Path(folder))
        notes = _notes(version, path)
        module, exported_shape = _open(path, uri, allow_pickle)
        shape = notes.get("input_shape") or exported_shape or _signature_shape(path)
    if size is not None:
        channels = shape[0] if shape and shape[0] > 0 else 3
        shape = [channels, *(size if len(size) == 2 else (size[0], size[0]))]
    if shape is None or min(shape) < 1:
        raise ModelError(
            f"model {uri}: its input size is not recorded; say it with `auditor describe {uri} --size H,W`."
        )
    from auditor.subject.subject import Subject

    if not notes:
        log.info("model %s has no %s: pixels in [0, 1] without mean and std are assumed", version.label, SUBJECT_FILE)
    subject = Subject(
        module,
        input_shape=shape,
        class_names=notes.get("class_names"),
        mean=notes.get("mean"),
        std=notes.get("std"),
        resize=notes.get("resize", "stretch"),
        output=output or notes.get("output"),
        layer=layer,
        name=version.name,
        version=version.version,
    )
    if subject.output.ending != "none" and not (output or notes.get("output")):
        log.warning("model %s: %s; auditor describe %s records it.", version.label, subject.output.evidence, uri)
    return subject


def log_subject(subject: Subject, registered_model_name: str, *, experiment: str | None = None) -> str:
    """Log the subject's module as pt2, register it with its subject.json, and return ``models:/name/version``."""
    import mlflow
    import numpy as np
    from mlflow import MlflowClient
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    c, h, w = subject.input_shape
    float32 = np.dtype("float32")
    signature = ModelSignature(
        inputs=Schema([TensorSpec(float32, (-1, c, h, w))]),
        outputs=Schema([TensorSpec(float32, (-1, 1 if subject.output.is_two_sided else subject.n_classes))]),
    )
    with mlflow_errors(f"log_subject {registered_model_name}"):
        client = MlflowClient()
        experiment_id = _experiment(client, experiment)
        run = client.create_run(experiment_id, run_name=f"register {registered_model_name}")
        try:
            nested = mlflow.active_run() is not None
            with mlflow.start_run(run_id=run.info.run_id, nested=nested), subject.at_rest():
                info = mlflow.pytorch.log_model(
                    subject.module,
                    name="model",
                    input_example=np.full((2, c, h, w), 0.5, dtype=np.float32),
                    signature=signature,
                    pip_requirements=_requirements(),
                )
        except AuditError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:160]
            raise ModelError(f"log_subject: torch.export cannot trace this module: {reason}") from error
        notes = subject.describe()
        _upload_notes(client.get_logged_model(info.model_id).artifact_location, notes)
        try:
            client.create_registered_model(registered_model_name)
        except mlflow.exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        version = client.create_model_version(
            registered_model_name,
            source=f"models:/{info.model_id}",
            run_id=run.info.run_id,
            model_id=info.model_id,
            tags={tags.SUBJECT: tags.encode_subject(notes)},
        )
    return f"models:/{registered_model_name}/{version.version}"


def describe(
    uri: str,
    *,
    class_names: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    size: Sequence[int] | None = None,
    resize: str | None = None,
    output: str | None = None,
    allow_pickle: bool | None = None,
) -> dict[str, Any]:
    """Add class names, size, mean, std and output to a version that exists; what is not given stays as it was.

    Without ``output`` in the description, one pass shows whether the model ends in softmax, log-softmax or sigmoid.
    """
    version = resolve(uri, registered=True)
    if class_names is not None and len(set(class_names)) != len(class_names):
        raise OptionError("describe: class names must differ from each other.")
    subject = load_subject(version, size=size, output=output, allow_pickle=allow_pickle)
    from auditor.subject.subject import Subject

    pre = subject.preprocessing
    changed = Subject(
        subject.module,
        input_shape=subject.input_shape,
        class_names=class_names if class_names is not None else subject.class_names,
        mean=mean if mean is not None else pre.mean,
        std=std if std is not None else pre.std,
        resize=resize or pre.resize,
        output=output or subject.output.name,
    )
    notes = changed.describe()
    with mlflow_errors(f"describe {uri}"):
        _upload_notes(version.root, notes)
        set_tag(version, tags.SUBJECT, tags.encode_subject(notes))
    return {**notes, "output_evidence": changed.output.evidence}


def check_notes(version: ModelVersion) -> None:
    """Raise when the stored ``subject.json`` is not what the version's tag says."""
    if tags.SUBJECT not in version.tags:
        return
    what = f"{SUBJECT_FILE} of {version.label}"
    expected = _notes_bytes(
        tags.decode_subject(version.tags[tags.SUBJECT], f"the tag {tags.SUBJECT} of {version.label}")
    )
    with tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        stored = _read_notes(version, Path(folder))
    if stored is None:
        raise TamperError(f"{what} is missing from the artifact store; run auditor describe again.")
    if stored != expected:
        raise TamperError(f"{what} is not what was attached; run auditor describe again.")


def _requirements() -> list[str]:
    from importlib.metadata import version

    return [f"{name}=={version(name).partition('+')[0]}" for name in ("torch", "torchvision", "numpy")]


def _experiment(client: Any, name: str | None) -> str:
    if name is None:
        from mlflow.tracking.fluent import _get_experiment_id

        return str(_get_experiment_id())
    experiment = client.get_experiment_by_name(name)
    return str(experiment.experiment_id if experiment is not None else client.create_experiment(name))


def _notes_bytes(notes: dict[str, Any]) -> bytes:
    return (json.dumps(notes, sort_keys=True, indent=1) + "\n").encode()


def _upload_notes(root: str, notes: dict[str, Any]) -> None:
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    with tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        file = Path(folder) / "subject.json"
        file.write_bytes(_notes_bytes(notes))
        repository: Any = get_artifact_repository(root)
        repository.log_artifact(str(file), "auditor")


def _fetch(version: ModelVersion, folder: Path) -> Path:
    """Download the model itself, without attached explainers, into a folder of its own."""
    repository = version.repository()
    entries = [entry.path for entry in repository.list_artifacts()]
    if "MLmodel" not in entries:
        raise ModelError(f"model {version.uri}: there is no MLmodel file at its source, so this is no MLflow model.")
    for entry in entries:
        if entry not in NOT_THE_MODEL:
            repository.download_artifacts(entry, str(folder))
    return folder


def _read_notes(version: ModelVersion, folder: Path) -> bytes | None:
    repository = version.repository()
    if not any(entry.path == SUBJECT_FILE for entry in repository.list_artifacts("auditor") or []):
        return None
    return Path(repository.download_artifacts(SUBJECT_FILE, str(folder))).read_bytes()


def _notes(version: ModelVersion, folder: Path) -> dict[str, Any]:
    """Return how to use the model: the version's tag, else the file beside the model."""
    text = version.tags.get(tags.SUBJECT) or _read_notes(version, folder)
    return tags.decode_subject(text, f"{SUBJECT_FILE} of {version.label}") if text else {}


def _open(path: Path, uri: str, allow_pickle: bool | None) -> tuple[nn.Module, list[int] | None]:
    """Return the module and, for an exported graph, its input shape."""
    import yaml

    flavors = yaml.safe_load((path / "MLmodel").read_text()).get("flavors", {})
    flavor = flavors.get("pytorch")
    if flavor is None:
        names = ", ".join(sorted(flavors)) or "none"
        raise ModelError(
            f"model {uri}: want an MLflow model of flavor pytorch, got {names}; log it with mlflow.pytorch."
        )
    data = path / flavor.get("model_data", "data")
    if (data / "model.pt2").is_file():
        return _open_exported(data / "model.pt2", uri)
    if allow_pickle is None:
        allow_pickle = os.environ.get("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "").lower() in ("1", "true")
    if not allow_pickle:
        raise ModelError(
            f"model {uri}: it is stored as a pickle, which can run any code on loading; log it again with "
            "serialization_format='pt2', or pass --allow-pickle if you trust its author."
        )
    import mlflow.pytorch
    from torch import nn

    before = os.environ.get("MLFLOW_ALLOW_PICKLE_DESERIALIZATION")
    os.environ["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] = "true"
    try:
        module = mlflow.pytorch.load_model(str(path), map_location="cpu", weights_only=False)
    except Exception as error:
        raise ModelError(
            f"model {uri}: its pickle cannot be loaded here: {' '.join(str(error).split())[:160]}"
        ) from error
    finally:
        if before is None:
            del os.environ["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"]
        else:
            os.environ["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] = before
    if not isinstance(module, nn.Module):
        raise ModelError(f"model {uri}: want a torch nn.Module, got {type(module).__name__}.")
    return module, None


def _open_exported(file: Path, uri: str) -> tuple[nn.Module, list[int] | None]:
    """Open a pt2 archive only after MLflow's validator has looked at every record, then give it its modules back."""
    import torch
    from mlflow.pytorch import _validate_pt2_archive_is_pickle_free

    _validate_pt2_archive_is_pickle_free(str(file))
    try:
        program = torch.export.load(str(file))
        module = torch.export.unflatten(program)
    except Exception as error:
        raise ModelError(
            f"model {uri}: torch cannot open its pt2 archive: {' '.join(str(error).split())[:160]}"
        ) from error
    names = set(program.graph_signature.user_inputs)
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in names:
            sizes = list(node.meta["val"].shape[1:])
            return module, [n if isinstance(n, int) else -1 for n in sizes]  # -1: any size, by the exported graph
    return module, None


def _signature_shape(path: Path) -> list[int] | None:
    from mlflow.models import Model

    model: Any = Model.load(str(path))
    schema = model.get_input_schema()
    if schema is not None and schema.is_tensor_spec():
        sizes = [int(n) for n in schema.inputs[0].shape[1:]]
        if len(sizes) == 3:
            return sizes
    return None
