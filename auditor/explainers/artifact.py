"""Artifact: an explainer on disk as a folder of checked files. Never a pickle.

``manifest.json`` holds the schema version, kind, config, the subject's digest, metrics, versions and a sha256 per file.
It is written last, so a folder without it is unfinished. The digest of an artifact is the sha256 of its manifest. An
artifact is checked without torch; only its tensors need it.
"""

from __future__ import annotations

import io
import json
import os
import pickletools
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from auditor.errors import ArtifactError, TamperError
from auditor.explainers.manifest import (
    MANIFEST,
    SCHEMA_VERSION,
    check_file,
    check_names,
    open_manifest,
    seal,
    sha256,
)
from auditor.subject.identity import Identity

if TYPE_CHECKING:
    from torch import Tensor

TENSORS = "tensors.safetensors"
PICKLE_SUFFIXES = frozenset({".pkl", ".pickle", ".p", ".pt", ".pth", ".ckpt", ".joblib", ".dill", ".mar"})
RUNNING_OPCODES = frozenset({"GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "REDUCE", "EXT1", "EXT2", "EXT4"})


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
    from safetensors.torch import save as save_tensors

    folder = Path(folder)
    if (folder / MANIFEST).exists():
        raise ArtifactError(f"artifact {folder}: there is one already; choose a folder that does not exist yet.")
    folder.mkdir(parents=True, exist_ok=True)
    contents = {TENSORS: save_tensors({k: v.detach().cpu().contiguous() for k, v in sorted(tensors.items())})}
    for name, content in (files or {}).items():
        _check_name(name, folder)
        check_no_pickle(name, content, f"artifact {folder.name}")
        contents[name] = content
    for name, content in contents.items():
        _write(folder / name, content)
    document = {
        **manifest,
        "schema_version": SCHEMA_VERSION,
        "files": {
            name: {"sha256": sha256(content), "size": len(content)} for name, content in sorted(contents.items())
        },
    }
    sealed = seal(document)
    _write(folder / MANIFEST, sealed)
    return sha256(sealed)


def read_artifact(
    folder: str | Path,
    *,
    digest: str | None = None,
    identity: Identity | None = None,
    remedy: str = "fit the explainer to this model",
) -> Artifact:
    """Read an artifact after verifying everything: schema, every checksum, the digest and the subject when given.

    ``remedy`` is what to do about one that was made of another model.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load as load_tensors

    manifest, contents, sealed = _checked(Path(folder), digest, identity, remedy)
    try:
        tensors = load_tensors(contents.pop(TENSORS))
    except SafetensorError as error:
        raise ArtifactError(f"{TENSORS} in artifact {Path(folder).name} holds no safetensors ({error}).") from error
    return Artifact(manifest, tensors, contents, sealed)


def read_manifest(
    folder: str | Path, *, digest: str, identity: Identity, remedy: str = "fit the explainer to this model"
) -> dict[str, Any]:
    """Return the manifest of an artifact after verifying all that `read_artifact` verifies; no tensor is made."""
    return _checked(Path(folder), digest, identity, remedy)[0]


def _checked(
    folder: Path, digest: str | None, identity: Identity | None, remedy: str
) -> tuple[dict[str, Any], dict[str, bytes], str]:
    """Return manifest, files and digest of an artifact that is what it was when it was written."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise ArtifactError(f"artifact {folder}: no such folder.")
    if not path.is_file():
        raise ArtifactError(f"artifact {folder}: it has no {MANIFEST}, so it was never finished; fit and attach again.")
    sealed = path.read_bytes()
    manifest = open_manifest(sealed, folder.name, digest)
    contents = _read_files(folder, manifest)
    if identity is not None:
        problem = other_subject(manifest.get("subject_digest"), Identity.from_json(manifest.get("subject")), identity)
        if problem:
            raise TamperError(f"artifact {folder.name}: it {problem}; {remedy}.")
    return manifest, contents, sha256(sealed)


def other_subject(digest: Any, fitted: Identity | None, now: Identity) -> str:
    """Return how a model differs from the one that was fitted to, or nothing.

    ``fitted`` is None for a digest of the first release, which speaks of the weights alone.
    """
    if digest == now.digest or (fitted is None and digest == now.weights):
        return ""
    if fitted is not None and digest == fitted.digest:
        parts = fitted.differences(now)
        if not parts:
            return ""
        return f"was made for a model with other {' and '.join(parts)} (digest {digest[:12]}, now {now.digest[:12]})"
    return f"was made for a model with digest {str(digest)[:12]}, this model has {now.digest[:12]}"


def _read_files(folder: Path, manifest: dict[str, Any]) -> dict[str, bytes]:
    present = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} - {MANIFEST}
    check_names(manifest, present, folder.name)
    contents = {name: (folder / name).read_bytes() for name in sorted(present)}
    for name, content in contents.items():
        check_file(manifest, name, sha256(content), len(content), folder.name)
        check_no_pickle(name, content, f"artifact {folder.name}")
    if TENSORS not in contents:
        raise TamperError(f"{TENSORS} is missing from artifact {folder.name}; attach the explainer again.")
    return contents


def check_no_pickle(name: str, content: bytes, where: str) -> None:
    """Refuse a file that is a pickle by its name or by its bytes: loading one runs whatever its author wrote."""
    if Path(name).suffix.lower() in PICKLE_SUFFIXES or _is_pickle(content):
        raise ArtifactError(
            f"{name} in {where} is a pickle, which runs code when it is loaded; store safetensors, JSON or another "
            "plain format instead."
        )


def _is_pickle(content: bytes) -> bool:
    if _is_safetensors(content):  # the length of its header may begin like a pickle
        return False
    if content[:1] == b"\x80" and content[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return True
    if content[:6] == b"\x93NUMPY":  # an array of objects is a pickle inside
        return b"|O" in content[:256]
    if content[:2] == b"PK":
        try:
            names = zipfile.ZipFile(io.BytesIO(content)).namelist()
        except zipfile.BadZipFile:
            return False
        return any(Path(name).suffix.lower() in PICKLE_SUFFIXES for name in names)
    try:  # protocols 0 and 1 have no magic number: the opcodes are read, nothing is run
        return any(code.name in RUNNING_OPCODES for code, _, _ in pickletools.genops(content))
    except Exception:
        return False


def _is_safetensors(content: bytes) -> bool:
    length = int.from_bytes(content[:8], "little")
    if content[8:9] != b"{" or length > len(content) - 8:
        return False
    try:
        json.loads(content[8 : 8 + length])
    except ValueError:
        return False
    return True


def _check_name(name: str, folder: Path) -> None:
    parts = PurePosixPath(name).parts
    if not parts or name != "/".join(parts) or {"..", "/"} & set(parts) or name in (MANIFEST, TENSORS):
        raise ArtifactError(f"artifact {folder.name}: {name!r} cannot be the name of a further file; use a plain one.")


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
