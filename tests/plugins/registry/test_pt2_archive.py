"""pt2 archives: nothing runs that was not checked, whatever the two readers of an archive make of its names."""

import io
import json
import os
import pickle  # noqa: TID251  a test smuggles one in
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from auditor.errors import ModelError, TamperError
from auditor.plugins.registry.pt2_archive import check_expression, graph_digest, repack


class Net(nn.Module):
    """A small network with a constant that is no weight; ``shift`` changes what it computes with the same weights."""

    def __init__(self, shift: float = 0.0, scale: float = 2.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(4 * 6 * 6, 3)
        self.register_buffer("scale", torch.tensor(scale), persistent=False)
        self.shift = shift

    def forward(self, x):
        return self.fc(torch.relu(self.conv(x) * self.scale).flatten(1)) + self.shift


def exported(path: Path, net: nn.Module | None = None) -> Path:
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export((net or Net()).eval(), (torch.rand(2, 1, 8, 8),), dynamic_shapes=({0: batch},))
    torch.export.save(program, str(path))
    return path


def rewritten(source: Path, target: Path, change) -> Path:
    """The archive with records changed: ``change(name, content)`` gives a list of (name, content)."""
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as out:
        for info in archive.infolist():
            for name, content in change(info.filename, archive.read(info)):
                out.writestr(name, content)
    return target


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> Path:
    return exported(tmp_path_factory.mktemp("pt2") / "model.pt2")


class Runs:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def test_a_repacked_archive_computes_the_same(archive, tmp_path):
    x = torch.rand(5, 1, 8, 8)
    checked = torch.export.unflatten(torch.export.load(str(repack(archive, tmp_path))))
    torch.testing.assert_close(checked(x), Net().eval()(x), rtol=1e-5, atol=1e-6)


def test_two_records_that_differ_in_case_only_are_refused_and_nothing_runs(archive, tmp_path):
    """The hole: zipfile reads one of them, torch the other."""
    stream = io.BytesIO()
    torch.save(Runs(tmp_path / "ran"), stream, pickle_module=pickle)

    def change(name, content):
        if name.endswith("sample_inputs/model.pt"):
            return [(name.replace("model.pt", "Model.pt"), stream.getvalue()), (name, content)]
        return [(name, content)]

    bad = rewritten(archive, tmp_path / "bad.pt2", change)
    with pytest.raises(TamperError, match="but for upper and lower case"):
        repack(bad, tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["m/../data/x", "m//x", "/m/x", "m/a\\b", "m/ä", "other/x", "m/a b", "m/.."])
def test_odd_names_are_refused(archive, tmp_path, name):
    root = zipfile.ZipFile(archive).namelist()[0].partition("/")[0]
    wanted = name.replace("m/", f"{root}/", 1)
    changes = iter([[(wanted, b"1")]])
    bad = rewritten(archive, tmp_path / "bad.pt2", lambda n, c: [*next(changes, []), (n, c)])
    with pytest.raises(TamperError, match="a name that torch does not write"):
        repack(bad, tmp_path)


def test_a_pickle_that_runs_code_is_refused(archive, tmp_path):
    stream = io.BytesIO()
    torch.save(Runs(tmp_path / "ran"), stream, pickle_module=pickle)
    bad = rewritten(
        archive, tmp_path / "bad.pt2", lambda n, c: [(n, stream.getvalue() if n.endswith("model.pt") else c)]
    )
    with pytest.raises(TamperError, match="not a pickle-free payload"):
        repack(bad, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_packed_records_and_files_that_are_no_archive_are_refused(archive, tmp_path):
    packed = tmp_path / "packed.pt2"
    with zipfile.ZipFile(archive) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as out:
        for info in source.infolist():
            out.writestr(info.filename, source.read(info), compress_type=zipfile.ZIP_DEFLATED)
    with pytest.raises(TamperError, match="is packed or locked"):
        repack(packed, tmp_path)
    (tmp_path / "no.pt2").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(ModelError, match="no pt2 archive"):
        repack(tmp_path / "no.pt2", tmp_path)


def edited(archive: Path, target: Path, edit) -> Path:
    def change(name, content):
        return [(name, json.dumps(edit(json.loads(content))) if name.endswith("models/model.json") else content)]

    return rewritten(archive, target, change)


def test_an_expression_that_torch_would_evaluate_as_python_is_refused(archive, tmp_path):
    """torch hands sizes to sympy, which evaluates them: no pickle is needed to run code."""

    def edit(graph):
        text = json.dumps(graph)
        start = text.index('"expr_str": "') + len('"expr_str": "')
        return json.loads(text[:start] + f"[open('{tmp_path}/ran', 'w'), 4][1]" + text[text.index('"', start) :])

    bad = edited(archive, tmp_path / "bad.pt2", edit)
    with pytest.raises(TamperError, match="no arithmetic"):
        repack(bad, tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "target", ["torch.os.system", "torch.load", "torch.ops.aten.from_file.default", "#x:y", "eval"]
)
def test_a_node_that_is_no_operation_on_tensors_is_refused(archive, tmp_path, target):
    def edit(graph):
        graph["graph_module"]["graph"]["nodes"][0]["target"] = target
        return graph

    bad = edited(archive, tmp_path / "bad.pt2", edit)
    with pytest.raises(TamperError, match="no operation on tensors"):
        repack(bad, tmp_path)


@pytest.mark.parametrize(
    "text", ["s0", "2*s31 + 1", "FloorDiv(s0, 2)", "Symbol('s1', integer=True)", "Eq(Mod(s0, 2), 0)"]
)
def test_arithmetic_passes(text):
    check_expression(text)


@pytest.mark.parametrize(
    "text",
    [
        "print(1)",
        "a.b",
        "[1]",
        "(lambda: 1)()",
        "__import__",
        "Symbol('a b')",
        "f'{s0}'",
        "1 if s0 else 2",
        "",
        "(" * 500,
        "s0" * 9999,
    ],
)
def test_anything_else_does_not(text):
    with pytest.raises(TamperError, match="expression for a size"):
        check_expression(text)


def test_the_digest_is_of_graph_and_constants(archive, tmp_path):
    """The same model exported twice has one digest; another computation or constant with the same weights has not."""
    digest = graph_digest(repack(archive, tmp_path))
    assert digest == graph_digest(exported(tmp_path / "again.pt2"))
    assert digest != graph_digest(exported(tmp_path / "shifted.pt2", Net(shift=1.0)))
    assert digest != graph_digest(exported(tmp_path / "scaled.pt2", Net(scale=2.5)))
