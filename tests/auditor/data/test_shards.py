"""Sharded data: a digest that no order of reading changes, known without reading again when nothing changed."""

import logging
import os

import pytest

from auditor.data.source import open_data
from auditor.errors import DataError
from tests.stores import picture, pixels_of, settle, travelled, write_folder


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("AUDITOR_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("auditor.data.folder_images.FILES", 5)
    monkeypatch.setattr("auditor.data.store.SETTLED_S", -1.0)  # else nothing counts as known within two seconds
    return write_folder(tmp_path / "photos", 23)


def test_whoever_reads_which_part_the_digest_is_the_same(folder, monkeypatch):
    monkeypatch.setattr("auditor.data.read_cache.user_key", lambda folder: b"")  # nothing is kept
    plain = open_data(folder)
    digest = plain.digest
    by_reading = open_data(folder)
    pixels_of(by_reading)
    assert by_reading.digest == digest
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        driver = open_data(folder)
        for k in order:
            shard = driver.shards[k]
            worker = open_data(folder).run(shard.start, shard.stop)
            pixels_of(worker)
            driver.add_leaves(worker.leaves)
        driver._contents = None  # nothing may be read for the digest now
        assert driver.digest == digest


def test_two_contents_of_one_shard_are_an_error(folder):
    data = open_data(folder)
    data.add_leaves({0: "aa" * 32})
    with pytest.raises(DataError, match="has two contents: aaaaaaaaaaaa was read here and bbbbbbbbbbbb elsewhere"):
        data.add_leaves({0: "bb" * 32})


def test_a_second_command_reads_nothing_for_the_digest_and_a_change_only_its_shard(folder):
    digest = open_data(folder).digest
    again = open_data(folder)
    assert again.digest == digest
    assert again.read_bytes == 0
    changed = folder / "cat" / "000.png"
    changed.write_bytes(picture(1000))
    third = open_data(folder)
    assert third.digest != digest
    assert 0 < third.read_bytes < sum(path.stat().st_size for path in folder.rglob("*.png")) / 2
    assert third.digest == open_data(folder).digest


def test_content_of_the_same_size_and_time_is_noticed_by_the_change_time(folder):
    """A program can set a file's time back, but not the time of its last change."""
    digest = open_data(folder).digest
    path = folder / "dog" / "001.png"
    before, status = path.read_bytes(), path.stat()
    path.write_bytes(before[:-20] + bytes(20))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert open_data(folder).digest != digest


def test_names_labels_and_rows_count(folder, tmp_path):
    digests = {open_data(folder).digest, open_data(folder, limit=7).digest, open_data(folder, limit=7, seed=1).digest}
    (folder / "cat" / "000.png").rename(folder / "dog" / "000.png")
    digests.add(open_data(folder).digest)
    assert len(digests) == 4
    assert open_data(folder, limit=7).content_digest == open_data(folder).content_digest


def test_broken_images_are_counted_named_and_part_of_the_digest(folder, caplog):
    (folder / "owl" / "002.png").write_bytes(b"no image at all")
    (folder / "owl" / "005.png").write_bytes(picture(5)[:150])
    (folder / "owl" / "008.png").write_bytes(b"")
    for path in folder.rglob("*.png"):
        settle(path)
    data = open_data(folder)
    digest = data.digest
    with caplog.at_level(logging.WARNING):
        images = pixels_of(data)
    assert len(images) == 20
    assert set(data.skipped) == {"owl/002.png", "owl/005.png", "owl/008.png"}
    assert data.skipped["owl/002.png"] == "cannot identify image file"
    assert "3 of 23 images could not be read and were skipped: owl/002.png, owl/005.png, owl/008.png" in caplog.text
    assert data.digest == digest == open_data(folder).digest
    with pytest.raises(DataError, match=r"owl/002.png is broken \(cannot identify image file\)"):
        pixels_of(open_data(folder, strict=True))


def test_marks_change_with_files_and_with_the_rows_taken(folder):
    data = open_data(folder)
    assert data.mark(0, 5) == open_data(folder).mark(0, 5) != ""
    assert data.mark(0, 5) != data.mark(0, 6)
    before = data.mark(0, 5)
    (folder / "cat" / "000.png").write_bytes(picture(1000))
    assert open_data(folder).mark(0, 5) != before
    assert open_data(folder).mark(10, 15) == data.mark(10, 15)


def test_image_files_and_sizes_are_given_back(folder):
    data = open_data(folder)
    assert data.image_size("cat/000.png") == (17, 13)
    assert data.image_file("cat/000.png") == (folder / "cat" / "000.png").read_bytes()
    assert data.image_file("nosuch.png") is None
    assert data.image_size("nosuch.png") is None


def test_it_travels_and_reads_the_same(folder):
    data = open_data(folder)
    assert list(pixels_of(travelled(data).run(2, 9))) == list(pixels_of(data))[2:9]
