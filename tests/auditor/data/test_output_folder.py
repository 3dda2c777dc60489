"""Output folders: a file is there as a whole or not at all, on disk and in a bucket."""

import pytest

from auditor.data.output_folder import open_output
from auditor.errors import DataError
from tests.stores import travelled


@pytest.mark.parametrize("where", ["disk", "bucket"])
def test_what_is_written_is_listed_and_read(where, s3, tmp_path):
    out = open_output(str(tmp_path / "new" / "folder") if where == "disk" else "s3://photos/new/folder")
    assert out.files() == {}
    out.write("a.bin", b"one")
    travelled(out).write("b.bin", b"two" * 1000)
    out.write("a.bin", b"another")
    files = out.files()
    assert sorted(files) == ["a.bin", "b.bin"]
    assert out.read(files["a.bin"]) == b"another"
    with out.open(files["b.bin"]) as stream:
        stream.seek(2997)
        assert stream.read() == b"two"


def test_a_folder_that_cannot_be_written_is_said(s3, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="the folder cannot be made"):
        open_output(str(tmp_path / "file" / "below"))
    with pytest.raises(DataError, match="output s3://nosuch/x: "):
        open_output("s3://nosuch/x").write("a", b"b")
    with pytest.raises(DataError, match="want a folder, or an address of s3, gs or az"):
        open_output("https://example.org/x")
    with pytest.raises(DataError, match="want a bucket behind s3://"):
        open_output("s3://")


def test_a_failed_write_leaves_nothing(tmp_path):
    out = open_output(str(tmp_path))
    (tmp_path / "a.bin").mkdir()
    with pytest.raises(DataError, match=r"a.bin cannot be written .*; what is finished stays"):
        out.write("a.bin", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]
