"""Folders of images: names, labels and shards, and that a change while it is read is noticed."""

import hashlib

import numpy as np
import pytest

from auditor.data.source import open_data
from auditor.errors import DataError
from tests.stores import COLOUR, picture, pixels_of, write_folder


def test_labels_are_the_first_folders_in_order(tmp_path):
    write_folder(tmp_path, 6)
    (tmp_path / "alone.png").write_bytes(picture(99))
    data = open_data(tmp_path)
    assert data.class_names == ("cat", "dog", "owl")
    assert data._labels().tolist() == [-1, 0, 0, 1, 1, 2, 2]
    assert next(data.batches(COLOUR, 4)).ids[0] == "alone.png"
    assert data.rows_of(["dog/001.png"]).tolist() == [3]
    with pytest.raises(DataError, match="nosuch is none of its images"):
        data.rows_of(["nosuch"])


def test_a_run_gives_the_images_that_the_whole_gives(tmp_path):
    data = open_data(write_folder(tmp_path, 12))
    whole = pixels_of(data)
    some = pixels_of(data.run(3, 8))
    assert list(some) == list(whole)[3:8]
    assert all(np.array_equal(some[name][0], whole[name][0]) for name in some)


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path):
    data = open_data(write_folder(tmp_path, 4))
    pixels_of(data)
    (tmp_path / "cat" / "000.png").write_bytes(picture(1000, size=(18, 13)))
    with pytest.raises(DataError, match=r"cat/000\.png changed while it was read"):
        _ = data.digest


def test_a_file_that_goes_while_it_is_read_is_an_error(tmp_path):
    data = open_data(write_folder(tmp_path, 4))
    pixels_of(data)
    (tmp_path / "cat" / "000.png").unlink()
    with pytest.raises(DataError, match="1 of its images changed while it was read"):
        _ = data.digest


def test_links_are_not_followed_into_other_folders(tmp_path):
    write_folder(tmp_path / "in", 3)
    write_folder(tmp_path / "out", 3)
    (tmp_path / "in" / "link").symlink_to(tmp_path / "out")
    assert len(open_data(tmp_path / "in")) == 3


def test_the_digest_of_earlier_releases_still_names_this_data(tmp_path):
    """Their definition, over names, class numbers and bytes, each behind its length."""
    data = open_data(write_folder(tmp_path, 5))
    h = hashlib.sha256()
    for name in sorted(pixels_of(data)):
        number = ("cat", "dog", "owl").index(name.partition("/")[0])
        for part in (f"{name}|{number}".encode(), (tmp_path / name).read_bytes()):
            h.update(len(part).to_bytes(8, "little"))
            h.update(part)
    assert data.holds(h.hexdigest())
    assert data.holds(data.content_digest)
    assert not data.holds("00" * 32)
    (tmp_path / "cat" / "000.png").write_bytes(picture(77))
    assert not open_data(tmp_path).holds(h.hexdigest())
