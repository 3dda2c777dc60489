"""Weights of archives without torch: the digest is torch's own, and where there is doubt there is none."""

import json
import zipfile

import pytest
import torch
from torch import nn

from auditor.plugins.registry.pt2_weights import CONFIG, GRAPH, digest_of_weights
from auditor.subject.identity import of_weights
from tests.plugins.registry.test_pt2_archive import Net, exported, rewritten


class Odd(nn.Module):
    """Weights of several types and layouts: numbers alone, whole numbers, halves, one that is turned."""

    def __init__(self, extra: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.fc, self.norm = nn.Linear(12, 5), nn.BatchNorm1d(5)  # with a count of batches, a number alone
        value = {
            "half": torch.rand(5).half(),
            "brain": torch.rand(5).bfloat16(),
            "whole": torch.arange(5),
            "yes": torch.tensor([True, False, True, True, False]),
            "one": torch.tensor(3.5),
            "double": torch.rand(1, 5).double(),
            "turned": torch.rand(5, 5).T,
            "part": torch.rand(3, 5)[1],
            "none": torch.zeros(0, 5),
        }[extra]
        self.register_buffer("extra", value)

    def forward(self, x):
        return self.norm(self.fc(x.flatten(1))) + self.extra.to(x.dtype).sum(0)


def exported_odd(folder, extra):
    program = torch.export.export(Odd(extra).eval(), (torch.rand(2, 1, 3, 4),))
    torch.export.save(program, str(folder / "odd.pt2"))
    return folder / "odd.pt2"


def torchs(file):
    return of_weights(torch.export.load(str(file)).module())


@pytest.mark.parametrize("extra", ["half", "brain", "whole", "yes", "one", "double"])
def test_the_digest_is_that_of_what_torch_loads(tmp_path, extra):
    file = exported_odd(tmp_path, extra)
    assert digest_of_weights(file) == torchs(file)


@pytest.mark.parametrize("extra", ["turned", "part", "none"])
def test_of_an_unusual_layout_torch_is_asked(tmp_path, extra):
    file = exported_odd(tmp_path, extra)
    assert digest_of_weights(file) in (None, torchs(file))


def test_one_value_more_or_less_is_another_digest(tmp_path):
    one, other = exported(tmp_path / "a.pt2"), Net()
    with torch.no_grad():
        other.fc.bias[2] += 1e-6
    assert digest_of_weights(one) == torchs(one)
    assert digest_of_weights(exported(tmp_path / "b.pt2", other)) != digest_of_weights(one)


def _with(name, change):
    """Change one record's content."""

    def rewrite(path, content):
        return [(path, change(content) if path.endswith(name) else content)]

    return rewrite


def _config(change):
    def edit(content):
        document = json.loads(content)
        change(next(iter(document["config"].values())))
        return json.dumps(document).encode()

    return _with(CONFIG, edit)


DOUBTS = {
    "a second graph": lambda path, content: [(path, content), *([(path.replace("model.json", "b.json"), content)]
                                             if path.endswith(GRAPH) else [])],
    "names that differ in case": lambda path, content: [(path, content), *([(path.upper(), content)]
                                                        if path.endswith("weight_0") else [])],
    "a second root": lambda path, content: [(path, content), *([("other/x", b"")] if path.endswith(GRAPH) else [])],
    "another byte order": _with("byteorder", lambda content: b"big"),
    "too few bytes": _with("weight_0", lambda content: content[:-4]),
    "no JSON": _with(CONFIG, lambda content: b"{"),
    "a pickled weight": _config(lambda entry: entry.update(use_pickle=True)),
    "an unknown type": _config(lambda entry: entry["tensor_meta"].update(dtype=99)),
    "an offset": _config(lambda entry: entry["tensor_meta"].update(storage_offset={"as_int": 1})),
    "a record that is not there": _config(lambda entry: entry.update(path_name="weight_77")),
    "a weight that the graph does not name": _with(
        CONFIG, lambda content: content.replace(b'"fc.bias"', b'"fc.bios"')
    ),
}  # fmt: skip


@pytest.mark.parametrize("doubt", DOUBTS)
def test_where_torch_might_read_otherwise_there_is_no_digest(tmp_path, doubt):
    good = exported(tmp_path / "good.pt2")
    bad = rewritten(good, tmp_path / "bad.pt2", DOUBTS[doubt])
    assert bad.read_bytes() != good.read_bytes()
    assert digest_of_weights(good) is not None
    assert digest_of_weights(bad) is None


def test_packed_records_and_other_files_give_none(tmp_path):
    good = exported(tmp_path / "good.pt2")
    with zipfile.ZipFile(good) as archive, zipfile.ZipFile(tmp_path / "p.pt2", "w", zipfile.ZIP_DEFLATED) as out:
        for info in archive.infolist():
            out.writestr(info.filename, archive.read(info))
    (tmp_path / "text").write_text("no archive")
    assert [digest_of_weights(tmp_path / name) for name in ("p.pt2", "text", "absent")] == [None] * 3
