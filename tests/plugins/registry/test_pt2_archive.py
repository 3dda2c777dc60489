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
    "target",
    [
        *("torch.os.system", "torch.load", "torch.ops.aten.from_file.default", "#x:y", "eval"),
        *("torch.ops.load_library", "_operator.call", "_operator.attrgetter", "_operator.methodcaller"),
        *("torch.ops.image.write_file.default", "torch.ops.aten.__class__", "torch.ops.aten.add.overloads"),
        *("torch.ops.higher_order.while_loop", "torch.ops.higher_order.run_and_save_rng_state", "math.__loader__"),
    ],
)
def test_a_node_that_is_no_operation_on_tensors_is_refused(archive, tmp_path, target):
    def edit(graph):
        graph["graph_module"]["graph"]["nodes"][0]["target"] = target
        return graph

    bad = edited(archive, tmp_path / "bad.pt2", edit)
    with pytest.raises(TamperError, match="no operation on tensors"):
        repack(bad, tmp_path)


def test_python_is_not_run_by_names_that_torch_looks_up(archive, tmp_path):
    """torch takes any callable of its modules for an operation: without the check this graph makes a folder."""

    def edit(graph):
        arguments = [{"as_operator": "torch.os.mkdir"}, {"as_string": f"{tmp_path}/ran"}]
        node = {
            "target": "_operator.call",
            "inputs": [{"name": "", "arg": argument, "kind": 1} for argument in arguments],
            "outputs": [{"as_tensor": {"name": "made"}}],
            "metadata": {},
            "is_hop_single_tensor_return": True,
        }
        graph["graph_module"]["graph"]["nodes"].insert(0, node)
        return graph

    bad = edited(archive, tmp_path / "bad.pt2", edit)
    with pytest.raises(TamperError, match=r"'_operator.call', which is no operation"):
        repack(bad, tmp_path)

    def hidden(graph):
        graph = edit(graph)
        graph["graph_module"]["graph"]["nodes"][0]["target"] = "torch.ops.higher_order.cond"
        return graph

    bad = edited(archive, tmp_path / "hidden.pt2", hidden)
    with pytest.raises(TamperError, match=r"'torch.os.mkdir', which is no operation"):
        repack(bad, tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["models/model.jsom", "models/a/b.json", "MODELS/model.JSON"])
def test_a_graph_under_another_name_is_refused(archive, tmp_path, name):
    """torch takes everything below models/ for a graph; what was not checked is not opened."""

    def change(record, content):
        root, _, inside = record.partition("/")
        return [(f"{root}/{name}" if inside == "models/model.json" else record, content)]

    with pytest.raises(TamperError, match="would be opened as a graph"):
        repack(rewritten(archive, tmp_path / "bad.pt2", change), tmp_path)


@pytest.mark.parametrize(
    "name", ["data/aotinductor/m/x.json", "data/constants/Custom_obj_0", "data/constants/opaque_obj_1"]
)
def test_compiled_code_and_objects_are_refused(archive, tmp_path, name):
    root = zipfile.ZipFile(archive).namelist()[0].partition("/")[0]
    more = iter([[(f"{root}/{name}", b"{}")]])
    with pytest.raises(TamperError, match="which may run anything"):
        repack(rewritten(archive, tmp_path / "bad.pt2", lambda n, c: [*next(more, []), (n, c)]), tmp_path)


def test_records_that_share_their_bytes_are_refused(archive, tmp_path):
    """A zip bomb without packing: many names for the same bytes."""
    bad = tmp_path / "bad.pt2"
    with zipfile.ZipFile(archive) as source, zipfile.ZipFile(bad, "w", zipfile.ZIP_STORED) as out:
        for info in source.infolist():
            out.writestr(info.filename, source.read(info))
        first = out.infolist()[0]
        out.writestr(f"{first.filename.partition('/')[0]}/extra/big", b"0" * 100_000)
        big = out.infolist()[-1]
        for k in range(100):
            copied = zipfile.ZipInfo(f"{big.filename}{k}")
            copied.file_size, copied.compress_size, copied.CRC = big.file_size, big.compress_size, big.CRC
            copied.header_offset = big.header_offset
            out.filelist.append(copied)
    with pytest.raises((TamperError, ModelError), match="lie over each other"):
        repack(bad, tmp_path)


def test_what_exported_networks_call_passes(tmp_path):
    """Masks, sizes, branches and torchvision's own operations are in models that nobody tampered with."""
    import torchvision

    class Odd(nn.Module):
        def forward(self, x):
            mask = (x > 0.2) & (x < 0.9) | ~(x != 0.5)
            y = torch.where(mask, x, -x)
            boxes = torch.tensor([[0.0, 0.0, 4.0, 4.0]])
            pooled = torchvision.ops.roi_align(y, [boxes] * x.shape[0], 2)
            with torch.no_grad():
                scale = torch.einsum("nchw->n", x) / (x.shape[2] // 2 + 1)
            padded = nn.functional.pad(y, (1, 2, 0, 1), "reflect").mean((1, 2, 3))
            return torch.cat([pooled.flatten(1), padded[:, None]], 1) * scale[:, None]

    x = torch.rand(2, 1, 8, 8)
    program = torch.export.export(Odd().eval(), (x,))
    torch.export.save(program, str(tmp_path / "odd.pt2"))
    checked = torch.export.unflatten(torch.export.load(str(repack(tmp_path / "odd.pt2", tmp_path))))
    torch.testing.assert_close(checked(x), Odd()(x))


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
