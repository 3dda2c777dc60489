"""Artifact: an explainer on disk as a folder of checked files. Never a pickle.

``manifest.json`` holds the schema version, kind, config, the subject's digest, metrics, versions and a sha256 per file.
It is written last, so a folder without it is unfinished; and it is canonical JSON that carries its own checksum, so one
flipped byte anywhere, whitespace included, is found. The digest of an artifact is the sha256 of its manifest.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from auditor.errors import ArtifactError, TamperError

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
TENSORS = "tensors.safetensors"


@dataclass(frozen=True, slots=True)
class Artifact:
    """A verified artifact: its manifest, tensors, further files and digest."""

    manifest: dict[str, Any]
    tensors: dict[str, Tensor]
    files: dict[str, bytes]
    digest: str


def write_artifact(
    folder: str | Path,
    manifest: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    files: Mapping[str, bytes] | None = None,
) -> str:
    """Write an artifact and return its digest. Each file goes to a temporary name first; the manifest comes last."""
    folder = Path(folder)
    if (folder / MANIFEST).exists():
        raise ArtifactError(f"artifact {folder}: there is one already; choose a folder that does not exist yet.")
    folder.mkdir(parents=True, exist_ok=True)
    contents = {TENSORS: save_tensors({k: v.detach().cpu().contiguous() for k, v in sorted(tensors.items())})}
    contents.update(files or {})
    for name, content in contents.items():
        _write(folder / name, content)
    document = {
        **manifest,
        "schema_version": SCHEMA_VERSION,
        "files": {name: {"sha256": _sha(content), "size": len(content)} for name, content in sorted(contents.items())},
    }
    sealed = seal(document)
    _write(folder / MANIFEST, sealed)
    return _sha(sealed)


def seal(document: Mapping[str, Any]) -> bytes:
    """Return canonical JSON that carries its own checksum."""
    plain = {k: v for k, v in document.items() if k != "checksum"}
    return _canonical({**plain, "checksum": _sha(_canonical(plain))})


def unseal(content: bytes, where: str, remedy: str = "attach the explainer again") -> dict[str, Any]:
    """Return a sealed document, or an error that names ``where`` when any byte of it is not what was written."""
    try:
        document = json.loads(content)
    except (UnicodeDecodeError, ValueError) as error:
        raise TamperError(f"{where} is not what was written: it is no longer JSON ({str(error)[:60]}).") from error
    if not isinstance(document, dict) or seal(document) != content:
        raise TamperError(f"{where} is not what was written: its checksum does not match; {remedy}.")
    return document


def read_artifact(folder: str | Path, *, digest: str | None = None, subject_digest: str | None = None) -> Artifact:
    """Read an artifact after verifying everything: schema, every checksum, the digest and the subject when given."""
    folder = Path(folder)
    path = folder / MANIFEST
    if not folder.is_dir():
        raise ArtifactError(f"artifact {folder}: no such folder.")
    if not path.is_file():
        raise ArtifactError(f"artifact {folder}: it has no {MANIFEST}, so it was never finished; fit and attach again.")
    sealed = path.read_bytes()
    if digest is not None and _sha(sealed) != digest:
        raise TamperError(
            f"{MANIFEST} of {folder.name} is not what was attached: sha256 {_sha(sealed)[:12]}, wanted {digest[:12]}; "
            "attach the explainer again."
        )
    # the version first: a newer one may be sealed in another way
    _check_schema(sealed, folder)
    manifest = unseal(sealed, f"{MANIFEST} of artifact {folder.name}")
    contents = _read_files(folder, manifest)
    if subject_digest is not None and manifest.get("subject_digest") != subject_digest:
        raise TamperError(
            f"artifact {folder.name}: it was fitted to a model with digest {str(manifest.get('subject_digest'))[:12]}, "
            f"this model has {subject_digest[:12]}; fit the explainer to this model."
        )
    try:
        tensors = load_tensors(contents.pop(TENSORS))
    except SafetensorError as error:
        raise ArtifactError(f"{TENSORS} in artifact {folder.name} holds no safetensors ({error}).") from error
    return Artifact(manifest, tensors, contents, _sha(sealed))


def _read_files(folder: Path, manifest: dict[str, Any]) -> dict[str, bytes]:
    listed: dict[str, dict[str, Any]] = manifest["files"]
    present = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} - {MANIFEST}
    for name in sorted(present - set(listed)):
        raise TamperError(f"{name} in artifact {folder.name} is not listed in its manifest; remove it or attach again.")
    contents: dict[str, bytes] = {}
    for name, entry in sorted(listed.items()):
        if name not in present:
            raise TamperError(f"{name} is missing from artifact {folder.name}; attach the explainer again.")
        content = (folder / name).read_bytes()
        if len(content) != entry["size"] or _sha(content) != entry["sha256"]:
            raise TamperError(
                f"{name} in artifact {folder.name} is not what was attached: its sha256 does not match the manifest; "
                "attach the explainer again."
            )
        contents[name] = content
    if TENSORS not in contents:
        raise TamperError(f"{TENSORS} is missing from artifact {folder.name}; attach the explainer again.")
    return contents


def _check_schema(sealed: bytes, folder: Path) -> None:
    try:
        version = json.loads(sealed)["schema_version"]
    except (UnicodeDecodeError, ValueError, KeyError, TypeError):
        return  # unseal says it better
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise ArtifactError(
            f"artifact {folder.name}: schema version {version} is newer than {SCHEMA_VERSION}, the newest known here; "
            "upgrade mlflow-auditor."
        )


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def _canonical(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(finite(document), sort_keys=True, indent=1, ensure_ascii=True, allow_nan=False) + "\n").encode()


def finite(value: Any) -> Any:
    """Return the value with null for every number that is not finite; JSON has none, and null passes no gate."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
