"""A study on disk: ``manifest.json``, ``study.json`` and ``pictures.zip``, sealed like an explainer; needs no torch.

The digest of a study is the sha256 of its manifest, which names the sha256 of the other two. Reading verifies all.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

from auditor.errors import ArtifactError, StudyError
from auditor.explainers.manifest import (
    MANIFEST,
    SCHEMA_VERSION,
    check_file,
    check_names,
    open_manifest,
    seal,
    sha256,
)
from auditor.study.design import Study

STUDY, PICTURES = "study.json", "pictures.zip"
KIND = "study"
EPOCH = (1980, 1, 1, 0, 0, 0)  # of the files in the archive: the same study has the same bytes
MOST_BYTES = 2 << 30  # of all pictures together


def write_study(folder: str | Path, study: Study, pictures: Mapping[str, bytes]) -> str:
    """Write a drawn study and return its digest; the manifest comes last."""
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ArtifactError(f"study folder {folder}: there is something in it already; choose another one.")
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        STUDY: (json.dumps(study.to_json(), sort_keys=True, indent=1, allow_nan=False) + "\n").encode(),
        PICTURES: _packed(pictures),
    }
    files = {name: {"sha256": sha256(content), "size": len(content)} for name, content in contents.items()}
    about = {"kind": KIND, "name": study.name, "models": study.models, "schema_version": SCHEMA_VERSION}
    sealed = seal({**about, "model_digests": [d.model_digest for d in study.data], "files": files})
    for name, content in {**contents, MANIFEST: sealed}.items():
        temporary = folder / f".{name}.{os.getpid()}.tmp"
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(folder / name)
    return sha256(sealed)


def read_study(folder: str | Path, digest: str | None = None) -> tuple[Study, dict[str, bytes], str]:
    """Return a study, its pictures and its digest, after verifying every byte."""
    folder = Path(folder)
    path = folder / MANIFEST
    if not path.is_file():
        raise StudyError(
            f"study {folder}: there is no {MANIFEST}, so it is no drawn study; auditor study new draws one."
        )
    sealed = path.read_bytes()
    manifest = open_manifest(sealed, folder.name, digest)
    if manifest.get("kind") != KIND:
        raise StudyError(f"study {folder}: it holds a {str(manifest.get('kind'))[:40]}, not a study.")
    present = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} - {MANIFEST}
    check_names(manifest, present, folder.name)
    contents = {name: (folder / name).read_bytes() for name in sorted(present)}
    for name, content in contents.items():
        check_file(manifest, name, sha256(content), len(content), folder.name)
    if set(contents) != {STUDY, PICTURES}:
        raise StudyError(
            f"study {folder}: want {STUDY} and {PICTURES}, got {', '.join(sorted(contents)) or 'nothing'}."
        )
    study = Study.from_json(json.loads(contents[STUDY]))
    return study, _unpacked(contents[PICTURES], folder.name), sha256(sealed)


def _packed(pictures: Mapping[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:  # PNGs are compressed already
        for name in sorted(pictures):
            archive.writestr(zipfile.ZipInfo(f"{name}.png", EPOCH), pictures[name])
    return stream.getvalue()


def _unpacked(content: bytes, where: str) -> dict[str, bytes]:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > MOST_BYTES:
                raise StudyError(f"study {where}: {PICTURES} unpacks to more than {MOST_BYTES >> 30} GB.")
            return {entry.filename.removesuffix(".png"): archive.read(entry) for entry in archive.infolist()}
    except zipfile.BadZipFile as error:
        raise StudyError(f"study {where}: {PICTURES} cannot be read ({error}).") from None
