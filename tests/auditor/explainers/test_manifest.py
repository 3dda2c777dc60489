"""Manifest: every changed byte is found, every file is held against its line."""

import json

import pytest

from auditor.errors import ArtifactError, TamperError
from auditor.explainers.manifest import (
    check_content,
    check_file,
    check_names,
    finite,
    open_manifest,
    seal,
    sha256,
    unseal,
)

FILES = {"a.bin": {"sha256": sha256(b"abc"), "size": 3}}
MANIFEST = {"schema_version": 1, "kind": "nmf", "files": FILES, "metrics": {"m": 0.25}}


def test_a_sealed_document_comes_back_and_every_flipped_byte_is_found():
    sealed = seal(MANIFEST)
    assert {k: v for k, v in unseal(sealed, "x").items() if k != "checksum"} == MANIFEST
    assert seal(unseal(sealed, "x")) == sealed  # the old checksum is not part of what is sealed
    for i in range(len(sealed)):
        with pytest.raises(TamperError, match=r"^here is not what was written"):
            unseal(sealed[:i] + bytes([sealed[i] ^ 1]) + sealed[i + 1 :], "here")
    with pytest.raises(TamperError, match="; do this"):
        unseal(json.dumps(json.loads(sealed)).encode(), "here", "do this")  # the same JSON, written in another way


@pytest.mark.parametrize("content", [b"[]", b"", b"\xff", b"[" * 5000, b"null"])
def test_what_is_no_sealed_object_is_refused(content):
    with pytest.raises(TamperError, match="is not what was written"):
        unseal(content, "here")


def test_a_manifest_is_held_against_its_digest():
    sealed = seal(MANIFEST)
    assert open_manifest(sealed, "x", sha256(sealed))["kind"] == "nmf"
    assert open_manifest(sealed, "x")["files"] == FILES
    with pytest.raises(TamperError, match=r"manifest\.json of x is not what was attached"):
        open_manifest(sealed, "x", sha256(sealed + b" "))


def test_a_newer_schema_is_said_before_the_seal_is_read():
    with pytest.raises(ArtifactError, match=r"artifact x: by its manifest\.json, schema version 3 is newer than 2"):
        open_manifest(b'{"schema_version": 3}', "x")
    with pytest.raises(TamperError, match="checksum"):
        open_manifest(b'{"schema_version": 1}', "x")


@pytest.mark.parametrize(
    "files", [None, [], {"a": 1}, {"a": {"sha256": 1, "size": 1}}, {"a": {"sha256": "", "size": ""}}]
)
def test_a_manifest_without_a_list_of_files_is_refused(files):
    with pytest.raises(TamperError, match="lists no files"):
        open_manifest(seal({"files": files}), "x")


def test_a_file_needs_both_its_digest_and_its_size():
    check_file(MANIFEST, "a.bin", sha256(b"abc"), 3, "x")
    for digest, size in ((sha256(b"abd"), 3), (sha256(b"abc"), 4)):
        with pytest.raises(TamperError, match=r"a\.bin in artifact x is not what was attached"):
            check_file(MANIFEST, "a.bin", digest, size, "x")


def test_no_file_is_missing_and_none_is_added():
    check_names(MANIFEST, {"a.bin"}, "x")
    with pytest.raises(TamperError, match=r"a\.bin is missing from artifact x"):
        check_names(MANIFEST, set(), "x")
    with pytest.raises(TamperError, match=r"b\.bin in artifact x is not listed"):
        check_names(MANIFEST, {"a.bin", "b.bin"}, "x")


def test_content_is_held_against_the_registry():
    assert check_content(b"ab", sha256(b"ab"), "audit.json", "run it") == b"ab"
    with pytest.raises(TamperError, match=r"^audit\.json is not what was stored: .*; run it\.$"):
        check_content(b"ab", sha256(b"ac"), "audit.json", "run it")


def test_numbers_that_json_lacks_become_null():
    assert finite({"a": [float("nan"), 1.5, float("inf")], 2: (True, None)}) == {
        "a": [None, 1.5, None],
        "2": [True, None],
    }
