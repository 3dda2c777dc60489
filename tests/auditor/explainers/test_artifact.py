import io
import json
import pickle  # noqa: TID251  a test tries to smuggle one in
from dataclasses import replace

import numpy as np
import pytest
import torch

from auditor.errors import ArtifactError, TamperError
from auditor.explainers.artifact import MANIFEST, TENSORS, check_no_pickle, read_artifact, seal, write_artifact
from auditor.explainers.base import Explainer
from auditor.subject.identity import Identity

MODEL = Identity("w" * 64, "g" * 64, "p" * 64, "c" * 64)
DOCUMENT = {
    "kind": "nmf",
    "metrics": {"a": 1.5, "b": float("nan")},
    "subject_digest": MODEL.digest,
    "subject": MODEL.to_json(),
}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "artifact"
    write_artifact(path, DOCUMENT, {"w": torch.arange(12.0).reshape(3, 4)}, {"tree.json": b'{"a": 1}'})
    return path


def test_round_trip(folder):
    got = read_artifact(folder, identity=MODEL)
    assert torch.equal(got.tensors["w"], torch.arange(12.0).reshape(3, 4))
    assert got.files == {"tree.json": b'{"a": 1}'}
    assert got.manifest["metrics"] == {"a": 1.5, "b": None}
    assert not list(folder.glob(".*"))


def test_every_flipped_byte_of_every_file_is_caught_by_name(folder):
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for position in range(len(content)):
            for bit in (1, 32):
                flipped = bytearray(content)
                flipped[position] ^= bit
                path.write_bytes(flipped)
                with pytest.raises(ArtifactError, match=path.name if b"schema_version" in flipped else "."):
                    read_artifact(folder)
        path.write_bytes(content)
    read_artifact(folder)


@pytest.mark.parametrize("change", ["truncate", "append", "remove", "extra", "swap"])
def test_other_changes_are_caught(folder, change):
    path = folder / TENSORS
    if change == "truncate":
        path.write_bytes(path.read_bytes()[:-1])
    elif change == "append":
        path.write_bytes(path.read_bytes() + b"x")
    elif change == "remove":
        path.unlink()
    elif change == "extra":
        (folder / "more.bin").write_bytes(b"x")
    else:
        path.write_bytes((folder / "tree.json").read_bytes())
    with pytest.raises(TamperError, match=r"more\.bin" if change == "extra" else r"tensors\.safetensors"):
        read_artifact(folder)


def test_a_resealed_manifest_is_caught_by_the_digest(folder):
    digest = read_artifact(folder).digest
    manifest = json.loads((folder / MANIFEST).read_bytes())
    manifest["metrics"]["a"] = 9.9
    (folder / MANIFEST).write_bytes(seal(manifest))
    assert read_artifact(folder).manifest["metrics"]["a"] == 9.9
    with pytest.raises(TamperError, match=r"manifest\.json of artifact is not what was attached"):
        read_artifact(folder, digest=digest)


def test_unfinished_newer_and_unknown_are_refused(folder, tmp_path):
    with pytest.raises(TamperError, match="made for a model with other weights"):
        read_artifact(folder, identity=replace(MODEL, weights="t" * 64))
    manifest = json.loads((folder / MANIFEST).read_bytes())
    (folder / MANIFEST).write_bytes(seal({**manifest, "schema_version": 3}))
    with pytest.raises(ArtifactError, match="schema version 3 is newer than 2"):
        read_artifact(folder)
    (folder / MANIFEST).unlink()
    with pytest.raises(ArtifactError, match="never finished"):
        read_artifact(folder)
    with pytest.raises(ArtifactError, match="no such folder"):
        read_artifact(tmp_path / "nosuch")
    write_artifact(tmp_path / "b", {**DOCUMENT, "kind": "magic"}, {"w": torch.zeros(1)})
    with pytest.raises(ArtifactError, match="unknown explainer kind 'magic'"):
        Explainer.load(tmp_path / "b")
    with pytest.raises(ArtifactError, match="there is one already"):
        write_artifact(tmp_path / "b", DOCUMENT, {"w": torch.zeros(1)})


class Bomb:
    def __reduce__(self):
        return (print, ("the pickle ran",))


def test_a_pickle_in_place_of_tensors_never_runs(folder, capsys):
    """Even when its checksum is made to fit."""
    import hashlib

    content = pickle.dumps(Bomb())
    manifest = json.loads((folder / MANIFEST).read_bytes())
    manifest["files"][TENSORS] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    (folder / TENSORS).write_bytes(content)
    (folder / MANIFEST).write_bytes(seal(manifest))
    with pytest.raises(ArtifactError, match=r"tensors\.safetensors"):
        read_artifact(folder)
    assert "the pickle ran" not in capsys.readouterr().out


def test_options_of_an_earlier_release_do_not_stop_an_artifact(concepts, tmp_path, caplog):
    concepts.save(tmp_path / "now")
    now = read_artifact(tmp_path / "now")
    document = {k: v for k, v in now.manifest.items() if k not in ("schema_version", "files")}
    document["config"] = {**document["config"], "retired_option": 3}
    write_artifact(tmp_path / "then", document, now.tensors, now.files)
    with caplog.at_level("INFO"):
        loaded = Explainer.load(tmp_path / "then")
    assert loaded.config == concepts.config
    assert "retired_option" in caplog.text


class Harmful:
    def __reduce__(self):
        return print, ("a pickle ran",)


def torch_saved():
    stream = io.BytesIO()
    torch.save({"w": torch.zeros(2)}, stream)
    return stream.getvalue()


def numpy_objects():
    stream = io.BytesIO()
    np.save(stream, np.array([None, {}], dtype=object), allow_pickle=True)
    return stream.getvalue()


PICKLES = {
    **{f"protocol{n}.json": pickle.dumps(Harmful(), protocol=n) for n in range(6)},
    "weights.pt": b"{}",
    "state.PKL": b"{}",
    "deep/er.joblib": b"",
    "weights.dat": torch_saved(),
    "array.npy": numpy_objects(),
    "numbers.bin": pickle.dumps([1, 2, 3], protocol=4),
}


@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_is_refused_when_saved_and_when_loaded(tmp_path, monkeypatch, capsys, name):
    with pytest.raises(ArtifactError, match=f"{name} in artifact a is a pickle"):
        write_artifact(tmp_path / "a", DOCUMENT, {}, {name: PICKLES[name]})
    assert not (tmp_path / "a" / MANIFEST).exists()
    monkeypatch.setattr("auditor.explainers.artifact.check_no_pickle", lambda *_: None)
    write_artifact(tmp_path / "b", DOCUMENT, {}, {name: PICKLES[name]})
    monkeypatch.undo()
    with pytest.raises(ArtifactError, match=f"{name} in artifact b is a pickle"):
        read_artifact(tmp_path / "b")
    assert "a pickle ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "content", [b"", b"0.5\n", b"{}", b"N.", b"PKnot a zip", b"<!doctype html>", b"\x80", b"\x08\x0a", b"c", b"cos\n"]
)
def test_plain_files_are_no_pickles(tmp_path, content):
    write_artifact(tmp_path / "a", DOCUMENT, {}, {"notes.txt": content})
    assert read_artifact(tmp_path / "a").files == {"notes.txt": content}


@pytest.mark.parametrize("name", ["../up.json", "/etc/x", "a/../b", "", "a//b", "./a", MANIFEST, TENSORS])
def test_a_further_file_stays_inside_and_has_a_name_of_its_own(tmp_path, name):
    with pytest.raises(ArtifactError, match="cannot be the name of a further file"):
        write_artifact(tmp_path / "a", DOCUMENT, {}, {name: b"{}"})
    assert not (tmp_path / "up.json").exists()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_tensors_whose_header_length_begins_like_a_pickle(tmp_path, protocol):
    from safetensors.torch import save

    tensors = {"x": torch.arange(3.0)}
    header = 0x80 + 256 * protocol  # as 8 bytes, lowest first: the magic number of this protocol
    frame = len(save(tensors, {"note": ""})) - 8 - tensors["x"].nbytes
    content = save(tensors, {"note": "n" * (header - frame)})
    assert content[:2] == bytes([0x80, protocol])
    check_no_pickle("tensors.safetensors", content, "artifact a")
    with pytest.raises(ArtifactError, match="is a pickle"):
        check_no_pickle("tensors.safetensors", pickle.dumps([1], protocol) + content, "artifact a")


@pytest.mark.parametrize("part", ["weights", "graph", "preprocessing", "classes"])
def test_each_part_of_the_model_is_compared_and_named(folder, part):
    with pytest.raises(TamperError, match="other class names" if part == "classes" else f"other {part}"):
        read_artifact(folder, identity=replace(MODEL, **{part: "x" * 64}))


def test_a_module_in_memory_has_no_graph_to_compare(folder):
    read_artifact(folder, identity=replace(MODEL, graph=""))


def test_a_digest_of_the_first_release_compares_weights_only(tmp_path):
    write_artifact(tmp_path / "a", {"kind": "nmf", "subject_digest": "w" * 64}, {"w": torch.zeros(1)})
    read_artifact(tmp_path / "a", identity=replace(MODEL, graph="other"))
    with pytest.raises(TamperError, match="was made for a model with digest wwww"):
        read_artifact(tmp_path / "a", identity=replace(MODEL, weights="v" * 64))


def test_a_manifest_whose_parts_are_not_of_its_digest_is_refused(tmp_path):
    document = {"kind": "nmf", "subject_digest": "0" * 64, "subject": MODEL.to_json()}
    write_artifact(tmp_path / "a", document, {"w": torch.zeros(1)})
    with pytest.raises(TamperError, match="made for a model with digest 0000"):
        read_artifact(tmp_path / "a", identity=MODEL)


def test_folders_above_the_artifact_are_made(tmp_path):
    folder = tmp_path / "a" / "b" / "c"
    write_artifact(folder, DOCUMENT, {"x": torch.zeros(2)})
    assert read_artifact(folder).tensors["x"].tolist() == [0, 0]
