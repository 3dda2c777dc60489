"""Manifest: the sealed list of an artifact's files, and the checks of files against it. Needs no torch.

A sealed document is canonical JSON that carries its own checksum, so one flipped byte anywhere, whitespace included, is
found. The manifest lists a sha256 and a size per file; its own sha256, the digest of the artifact, stands in a tag.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from auditor.errors import ArtifactError, TamperError

SCHEMA_VERSION = 2  # 1: the subject's digest is that of its weights alone
MANIFEST = "manifest.json"
ATTACH_AGAIN = "attach the explainer again"


def sha256(content: bytes) -> str:
    """Return the digest of bytes."""
    return hashlib.sha256(content).hexdigest()


def check_content(content: bytes, digest: str, what: str, remedy: str) -> bytes:
    """Return bytes whose sha256 is the one in the registry, or an error that says what they are and what to do.

    >>> check_content(b"ab", sha256(b"ab"), "audit.json", "run the audit again")
    b'ab'
    """
    if sha256(content) != digest:
        raise TamperError(
            f"{what} is not what was stored: its sha256 is {sha256(content)[:12]}, the registry has {digest[:12]}; "
            f"{remedy}."
        )
    return content


def seal(document: Mapping[str, Any]) -> bytes:
    """Return canonical JSON that carries its own checksum."""
    plain = {k: v for k, v in document.items() if k != "checksum"}
    return _canonical({**plain, "checksum": sha256(_canonical(plain))})


def unseal(content: bytes, where: str, remedy: str = ATTACH_AGAIN) -> dict[str, Any]:
    """Return a sealed document, or an error that names ``where`` when any byte of it is not what was written."""
    try:
        document = json.loads(content)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise TamperError(f"{where} is not what was written: it is no longer JSON ({str(error)[:60]}).") from error
    if not isinstance(document, dict) or seal(document) != content:
        raise TamperError(f"{where} is not what was written: its checksum does not match; {remedy}.")
    return document


def open_manifest(content: bytes, where: str, digest: str | None = None) -> dict[str, Any]:
    """Return a manifest after checking its digest when given, its schema version, its seal and its list of files."""
    if digest is not None and sha256(content) != digest:
        raise TamperError(
            f"{MANIFEST} of {where} is not what was attached: sha256 {sha256(content)[:12]}, wanted {digest[:12]}; "
            f"{ATTACH_AGAIN}."
        )
    _check_schema(content, where)  # before the seal: a newer version may be sealed in another way
    manifest = unseal(content, f"{MANIFEST} of artifact {where}")
    if not _lists_files(manifest.get("files")):
        raise TamperError(f"{MANIFEST} of artifact {where} lists no files; {ATTACH_AGAIN}.")
    return manifest


def check_file(manifest: Mapping[str, Any], name: str, digest: str, size: int, where: str) -> None:
    """Raise when a file that the manifest lists does not have the sha256 and the size written there."""
    entry = manifest["files"][name]
    if size != entry["size"] or digest != entry["sha256"]:
        raise TamperError(
            f"{name} in artifact {where} is not what was attached: its sha256 does not match the manifest; "
            f"{ATTACH_AGAIN}."
        )


def check_names(manifest: Mapping[str, Any], present: Collection[str], where: str) -> None:
    """Raise when a file is missing, or there is one that the manifest does not list."""
    for name in sorted(set(present) - set(manifest["files"])):
        raise TamperError(f"{name} in artifact {where} is not listed in its manifest; remove it or attach again.")
    for name in sorted(set(manifest["files"]) - set(present)):
        raise TamperError(f"{name} is missing from artifact {where}; {ATTACH_AGAIN}.")


def finite(value: Any) -> Any:
    """Return the value with null for every number that is not finite; JSON has none, and null passes no gate."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value


def _check_schema(content: bytes, where: str) -> None:
    try:
        version = json.loads(content)["schema_version"]
    except (UnicodeDecodeError, ValueError, KeyError, TypeError, RecursionError):
        return  # unseal says it better
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise ArtifactError(
            f"artifact {where}: by its {MANIFEST}, schema version {version} is newer than {SCHEMA_VERSION}, the newest "
            "known here; upgrade mlflow-auditor."
        )


def _lists_files(files: Any) -> bool:
    return isinstance(files, dict) and all(
        isinstance(entry, dict) and isinstance(entry.get("sha256"), str) and isinstance(entry.get("size"), int)
        for entry in files.values()
    )


def _canonical(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(finite(document), sort_keys=True, indent=1, ensure_ascii=True, allow_nan=False) + "\n").encode()
