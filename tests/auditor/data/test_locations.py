"""Locations: which layout an address has, the options behind it, and the sentence where there is none."""

import numpy as np
import pytest

from auditor.data.locations import _choices, _pattern
from auditor.data.source import open_data
from auditor.errors import DataError
from tests.stores import picture, pixels_of, write_folder


@pytest.mark.parametrize(
    ("text", "yes", "no"),
    [
        ("part-{000..002}.tar", ["part-000.tar", "part-002.tar"], ["part-003.tar", "part-0.tar"]),
        ("{a,b}-*.parquet", ["a-1.parquet", "b-.parquet"], ["c-1.parquet", "a-1.parquet.x"]),
        ("x[12].tar", ["x1.tar"], ["x3.tar"]),
    ],
)
def test_patterns_match_whole_names(text, yes, no):
    pattern = _pattern(text, "here")
    assert all(pattern.fullmatch(name) for name in yes)
    assert not any(pattern.fullmatch(name) for name in no)


def test_braces_that_stand_for_too_much_are_refused():
    assert len(_choices("0..9")) == 10
    with pytest.raises(DataError, match="its braces stand for"):
        _pattern("{0..999999999}{0..999999999}.tar", "here")


def test_a_folder_whose_name_has_special_characters_is_that_folder(tmp_path):
    for name in ("a[1]", "b{x}", "c*", "d?label=1"):
        assert len(open_data(write_folder(tmp_path / name, 3))) == 3
    assert len(open_data(f"file://{write_folder(tmp_path / 'e', 3)}")) == 3
    assert len(open_data(f"folder:{tmp_path / 'e'}")) == 3


def test_a_split_is_a_folder_of_it(tmp_path):
    write_folder(tmp_path / "train", 6)
    write_folder(tmp_path / "test", 3)
    assert len(open_data(f"{tmp_path}?split=test")) == 3
    with pytest.raises(DataError, match="no image file"):
        open_data(f"{tmp_path}?split=nosuch")


def test_an_npz_is_read_from_a_store_too(s3, tmp_path):
    images = np.arange(5 * 13 * 17 * 3, dtype=np.uint8).reshape(5, 13, 17, 3)
    np.savez(tmp_path / "x.npz", images=images, labels=np.arange(5) % 2)
    s3.put_object(Bucket="photos", Key="x.npz", Body=(tmp_path / "x.npz").read_bytes())
    far, near = open_data("s3://photos/x.npz"), open_data(tmp_path / "x.npz")
    assert far.digest == near.digest
    assert len(pixels_of(far)) == 5
    with pytest.raises(DataError, match=r"an \.npz has the members images and labels"):
        open_data(f"{tmp_path / 'x.npz'}?label=y")


def test_bad_addresses_are_said(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "more.csv").write_text("x")
    listed = r"no image file among its files \(1 of type .csv, 1 of type .txt\); give a folder or prefix with images"
    with pytest.raises(DataError, match=listed):
        open_data(tmp_path)
    with pytest.raises(DataError, match="may stand in the last part of a name only"):
        open_data("/tmp/*/x.tar")
    with pytest.raises(DataError, match="unknown option images behind the question mark; there are image, label"):
        open_data("/tmp/x?images=a")
    with pytest.raises(DataError, match="image and label name columns; this source has none"):
        open_data("sklearn:digits", image="x")
    (tmp_path / "a.png").write_bytes(picture(1))
    assert len(open_data(tmp_path)) == 1
