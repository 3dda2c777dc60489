"""The per-sample variables: what was written is read, in memory and in files, and what will not fit is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch

from auditor.errors import OptionError
from auditor.training import block_variables
from auditor.training.block_variables import (
    GIB,
    Variables,
    check_room,
    names_of,
    room,
    size_text,
    variables_bytes,
)

SHAPES = {"Z1": torch.Size([3]), "U1": torch.Size([2, 5])}


@pytest.fixture(params=["memory", "files"])
def variables(request, tmp_path):
    like = torch.zeros(1, dtype=torch.float64)
    return Variables(7, SHAPES, like, tmp_path / "new" / "folder" if request.param == "files" else None)


def test_rows_are_read_as_they_were_written(variables):
    assert list(variables) == ["Z1", "U1"]
    assert len(variables) == 2
    assert "Z1" in variables
    assert "Z2" not in variables
    rows, value = torch.tensor([5, 0, 2]), torch.randn(3, 2, 5, dtype=torch.float64)
    variables.write("U1", rows, value)
    plain = np.zeros((7, 2, 5))
    for row, v in zip([5, 0, 2], value.numpy(), strict=True):
        plain[row] = v
    np.testing.assert_array_equal(variables["U1"].numpy(), plain)
    copy = variables.read("U1", rows)
    assert torch.equal(copy, value)
    copy.zero_()
    assert torch.equal(variables.read("U1", rows), value)
    assert torch.equal(variables["Z1"], torch.zeros(7, 3, dtype=torch.float64))


def test_other_precision_is_converted_and_whole_variables_are_swapped(variables):
    variables.write("Z1", torch.tensor([1]), torch.full((1, 3), 0.5, dtype=torch.float32))
    assert variables["Z1"].dtype == torch.float64
    variables.swap("Z1", torch.arange(21.0).view(7, 3))
    assert variables.read("Z1", torch.tensor([6])).tolist() == [[18, 19, 20]]


def test_closing_removes_our_files_and_nothing_else(tmp_path):
    folder = tmp_path / "variables"
    variables = Variables(7, SHAPES, torch.zeros(1), folder)
    assert (folder / "U1.bin").stat().st_size == 7 * 10 * 4
    (folder / "notes.txt").write_text("mine")
    variables.close()
    assert [p.name for p in folder.iterdir()] == ["notes.txt"]
    assert len(variables) == 0
    again = Variables(7, SHAPES, torch.zeros(1), tmp_path / "other")
    again.close()
    assert not (tmp_path / "other").exists()


def test_bytes_and_names():
    assert names_of("U", [torch.Size([3]), torch.Size([2, 5])]) == {"U1": (3,), "U2": (2, 5)}
    assert variables_bytes(7, SHAPES, 8) == 7 * 13 * 8
    like = torch.zeros(1, dtype=torch.float64)
    made = Variables(7, SHAPES, like)
    assert variables_bytes(7, SHAPES, 8) == sum(made[name].nbytes for name in made)


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (512, "0.5 KiB"),
        (2**19 - 1, "512.0 KiB"),
        (2**19, "0.5 MiB"),
        (GIB // 2 - 1, "512.0 MiB"),
        (GIB // 2, "0.5 GiB"),
        (5 * GIB, "5.0 GiB"),
    ],
)
def test_sizes_read_as_a_person_says_them(n_bytes, text):
    assert size_text(n_bytes) == text


def test_what_fits_to_the_byte_is_accepted(tmp_path):
    like = torch.zeros(1)
    check_room(1000, like, None, 1000, "here")
    with pytest.raises(
        OptionError, match=r"here: .* need 1\.0 KiB and 1\.0 KiB are free in the memory of cpu; keep them"
    ):
        check_room(1001, like, None, 1000, "here")
    with pytest.raises(OptionError, match="which needs fewer, use fewer samples"):
        check_room(1001, like, None, 1000, "here", mappable=False)
    with pytest.raises(OptionError, match=f"on the disk of {tmp_path}; free some space"):
        check_room(1001, like, tmp_path, 1000, "here")
    with pytest.raises(OptionError, match="need"):
        check_room(1, like, None, 0, "here")  # a limit of nothing is a limit


def test_without_a_limit_the_free_room_counts(monkeypatch):
    monkeypatch.setattr(block_variables, "room", lambda like, folder: 500)
    check_room(500, torch.zeros(1), None, None, "here")
    with pytest.raises(OptionError, match="need"):
        check_room(501, torch.zeros(1), None, None, "here")


def test_free_room_is_what_the_system_says(tmp_path, monkeypatch):
    like = torch.zeros(1)
    usage = block_variables.shutil.disk_usage(tmp_path)
    assert room(like, tmp_path / "not" / "yet") == pytest.approx(usage.free, rel=0.05)
    text = "MemTotal: 99 kB\nMemAvailable:   2048 kB\nMemFree: 7 kB\n"
    monkeypatch.setattr(Path, "read_text", lambda self: text)
    assert room(like, None) == 2048 * 1024
    monkeypatch.setattr(Path, "read_text", lambda self: "nothing of the kind")
    assert room(like, None) == 2**62  # unknown: nothing is refused
