"""Subjects: a subject from the registry and into it, with what others need to use it (``auditor/subject.json``)."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor.errors import AuditError, ModelError, OptionError, TamperError
from auditor.plugins.registry import history, model_files, pt2_archive, tags
from auditor.plugins.registry.flavors import Opened, is_torchscript, open_flavor, open_torchscript
from auditor.plugins.registry.location import ModelVersion, mlflow_errors, resolve, set_tag
from auditor.plugins.registry.origins import RegisteredSubject, Registry

if TYPE_CHECKING:
    from auditor.subject.subject import Subject

log = logging.getLogger(__name__)

SUBJECT_FILE = "auditor/subject.json"  # written once, with the model
SUBJECT_FOLDER = "auditor/subjects"  # later descriptions, each under its digest: copies of a version share the store


def load_subject(
    uri: str | ModelVersion,
    *,
    allow_pickle: bool | None = None,
    size: Sequence[int] | None = None,
    output: str | None = None,
    layer: str | None = None,
) -> Subject:
    """Load the model behind an MLflow URI as a subject: ``load_subject("models:/m@champion")``.

    Every file is compared with the version's pin, where it has one. A ``pt2`` model (MLflow's default) is checked
    record by record, and torch opens the copy that was checked. A pickled module can run any code on loading, so it is
    refused unless ``allow_pickle`` is true or the environment sets MLFLOW_ALLOW_PICKLE_DESERIALIZATION=true. Class
    names, size, mean and std come from the version's tag, else ``auditor/subject.json``, else the input shape is read
    off the model and pixels in [0, 1] are assumed. ``output`` says how its outputs are read (logits, softmax,
    log-softmax, sigmoid, multilabel), else its description, else one pass. It runs on the device of ``running_on``.
    """
    version = resolve(uri)
    uri = version.uri  # as it was typed, for messages
    with mlflow_errors(f"model {uri}"), tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        path = Path(folder) / "model"
        files = model_files.fetch(version, path)
        model_files.check(version, files)
        notes = _notes(version)
        opened = _open(path, uri, allow_pickle, notes)
        has_notes, notes = bool(notes), {**opened.notes, **notes}
        shape = notes.get("input_shape") or opened.input_shape or _signature_shape(path)
    if size is not None:
        channels = shape[0] if shape and shape[0] > 0 else 3
        shape = [channels, *(size if len(size) == 2 else (size[0], size[0]))]
    if shape is None or min(shape) < 1:
        raise ModelError(
            f"model {uri}: its input size is not recorded; say it with `auditor describe {uri} --size H,W`."
        )
    from auditor.subject.device import chosen_device
    from auditor.subject.subject import Subject

    if not has_notes and not opened.notes:
        log.info("model %s has no %s: pixels in [0, 1] without mean and std are assumed", version.label, SUBJECT_FILE)
    subject = Subject(
        opened.module,
        input_shape=shape,
        class_names=notes.get("class_names"),
        mean=notes.get("mean"),
        std=notes.get("std"),
        resize=notes.get("resize", "stretch"),
        output=output or notes.get("output"),
        layer=layer,
        name=version.name,
        version=version.version,
        graph=opened.graph,
        files=files,
    )
    if chosen_device().type != "cpu":
        subject.to(chosen_device())
    options = {"allow_pickle": allow_pickle, "size": size, "output": output, "layer": layer}
    subject.origin = RegisteredSubject(Registry.here(), version, options)
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
        root = client.get_logged_model(info.model_id).artifact_location
        _upload_notes(root, SUBJECT_FILE, notes)
        with tempfile.TemporaryDirectory(prefix="auditor-") as folder:
            logged = ModelVersion(root, "", "", root, info.model_id, experiment_id, {})
            pin = model_files.pinned(model_files.fetch(logged, Path(folder)))
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
            tags={tags.SUBJECT: tags.encode_subject(notes), tags.MODEL: pin.encode()},
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

    Explainers and audits of the version speak of the model as it was described then, so a change makes them stale.
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
    digests = {"description": hashlib.sha256(_notes_bytes(notes)).hexdigest()}
    with mlflow_errors(f"describe {uri}"), history.noted(version, "describe", digests):
        _upload_notes(version.root, _notes_file(notes), notes)
        model_files.pin(version, subject)
        set_tag(version, tags.SUBJECT, tags.encode_subject(notes))
    stale = subject.identity.differences(replace(changed.identity, graph=subject.identity.graph))
    return {**notes, "output_evidence": changed.output.evidence, "changed": stale}


def check_notes(version: ModelVersion) -> None:
    """Raise when the stored description is not what the version's tag says, or there is one and no tag to compare."""
    if tags.SUBJECT not in version.tags:
        _check_untagged(version)
        return
    what = f"{SUBJECT_FILE} of {version.label}"
    notes = tags.decode_subject(version.tags[tags.SUBJECT], f"the tag {tags.SUBJECT} of {version.label}")
    stored = _read(version, _notes_file(notes)) or _read(version, SUBJECT_FILE)
    if stored is None:
        raise TamperError(
            f"{what} is missing from the artifact store, as the tag {tags.SUBJECT} has it; run auditor describe again."
        )
    if stored != _notes_bytes(notes):
        raise TamperError(f"{what} is not what the tag {tags.SUBJECT} says; run auditor describe again.")


def _check_untagged(version: ModelVersion) -> None:
    ours = (tags.MODEL, tags.EXPLAINER, tags.AUDIT, tags.ONNX)  # each is set beside or after the description's tag
    if any(key.startswith(ours) for key in version.tags) and _read(version, SUBJECT_FILE) is not None:
        raise TamperError(
            f"{SUBJECT_FILE} of {version.label} has no tag {tags.SUBJECT} to be compared with, so whoever can write to "
            "the artifact store could have written it; run auditor describe with class names, mean and std."
        )


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


def _notes_file(notes: dict[str, Any]) -> str:
    return f"{SUBJECT_FOLDER}/{hashlib.sha256(_notes_bytes(notes)).hexdigest()[:12]}.json"


def _upload_notes(root: str, name: str, notes: dict[str, Any]) -> None:
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    with tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        file = Path(folder) / Path(name).name
        file.write_bytes(_notes_bytes(notes))
        repository: Any = get_artifact_repository(root)
        repository.log_artifact(str(file), str(Path(name).parent))


def _read(version: ModelVersion, path: str) -> bytes | None:
    """Return a small file beside the model; None when there is none."""
    repository = version.repository()
    if not any(entry.path == path for entry in repository.list_artifacts(str(Path(path).parent)) or []):
        return None
    with tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        return Path(repository.download_artifacts(path, folder)).read_bytes()


def _notes(version: ModelVersion) -> dict[str, Any]:
    """Return how to use the model: the version's tag, else the file beside the model."""
    text = version.tags.get(tags.SUBJECT) or _read(version, SUBJECT_FILE)
    return tags.decode_subject(text, f"{SUBJECT_FILE} of {version.label}") if text else {}


def _open(path: Path, uri: str, allow_pickle: bool | None, notes: Mapping[str, Any]) -> Opened:
    """Return the module, and what its files say of it."""
    flavors = _flavors(path / "MLmodel", uri)
    flavor = flavors.get("pytorch")
    if flavor is None:
        opened = open_flavor(path, flavors, uri)
        if opened is None:
            names = ", ".join(sorted(flavors)) or "none"
            raise ModelError(
                f"model {uri}: want an MLflow model of flavor pytorch, transformers or onnx, got {names}; log it with "
                "mlflow.pytorch."
            )
        return opened
    data = path / str(flavor.get("model_data", "data"))
    if not data.resolve().is_relative_to(path.resolve()):
        raise TamperError(f"model {uri}: its MLmodel file names a folder outside the model; log it again.")
    if (data / "model.pt2").is_file():
        return _open_exported(data / "model.pt2", path.parent, uri)
    if not (data / "model.pth").is_file():
        raise ModelError(
            f"model {uri}: its files have neither {data.name}/model.pt2 nor {data.name}/model.pth; restore them in the "
            "artifact store, or log the model again."
        )
    if is_torchscript(data / "model.pth"):
        return open_torchscript(data / "model.pth", notes.get("input_shape") or _signature_shape(path), uri)
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
    return Opened(module, None, tags.digest_of_files(model_files.digests(data)))


def _flavors(file: Path, uri: str) -> dict[str, Any]:
    import yaml

    try:
        flavors = yaml.safe_load(file.read_text(encoding="utf-8"))["flavors"]
        return {str(name): entry if isinstance(entry, dict) else {} for name, entry in flavors.items()}
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:80]
        raise TamperError(f"model {uri}: its MLmodel file cannot be read ({reason}); log the model again.") from None


def _open_exported(file: Path, folder: Path, uri: str) -> Opened:
    """Open the copy of a pt2 archive that holds only what was checked, then give it its modules back."""
    import torch

    try:
        checked = pt2_archive.repack(file, folder)
        graph = pt2_archive.graph_digest(checked)
        program = torch.export.load(str(checked))
        module = torch.export.unflatten(program)
    except AuditError as error:
        raise type(error)(f"model {uri}: {error}") from None
    except Exception as error:
        raise ModelError(
            f"model {uri}: torch cannot open its pt2 archive: {' '.join(str(error).split())[:160]}"
        ) from error
    names = set(program.graph_signature.user_inputs)
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in names:
            sizes = list(node.meta["val"].shape[1:])
            shape = [n if isinstance(n, int) else -1 for n in sizes]  # -1: any size, by the exported graph
            return Opened(module, shape, graph)
    return Opened(module, None, graph)


def _signature_shape(path: Path) -> list[int] | None:
    from mlflow.models import Model

    model: Any = Model.load(str(path))
    schema = model.get_input_schema()
    if schema is not None and schema.is_tensor_spec():
        sizes = [int(n) for n in schema.inputs[0].shape[1:]]
        if len(sizes) == 3:
            return sizes
    return None
