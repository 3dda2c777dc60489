"""Tar files of WebDataset: images with their labels, from where they lie; hostile archives end in a sentence."""

import gzip
import io
import json
import tarfile

import pytest

from auditor.data.source import open_data
from auditor.errors import DataError
from tests.stores import picture, pixels_of, travelled


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("AUDITOR_CACHE", str(tmp_path / "cache"))


def add(tar, name, content):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def write_tar(path, start, stop, label="cls"):
    with tarfile.open(path, "w") as tar:
        for k in range(start, stop):
            add(tar, f"set/{k:05d}.png", picture(k))
            if label == "cls":
                add(tar, f"set/{k:05d}.cls", str(k % 3).encode())
            elif label == "json":
                add(tar, f"set/{k:05d}.json", json.dumps({"label": ["cat", "dog"][k % 2], "id": k}).encode())
    return path


def test_images_and_labels_are_those_of_the_archive(tmp_path):
    write_tar(tmp_path / "a-000.tar", 0, 7)
    write_tar(tmp_path / "a-001.tar", 7, 10)
    data = open_data(f"{tmp_path}/a-{{000..001}}.tar")
    images = pixels_of(data)
    assert list(images)[6:8] == ["a-000.tar/set/00006.png", "a-001.tar/set/00007.png"]
    assert [label for _, label in images.values()] == [k % 3 for k in range(10)]
    assert data.image_file("a-001.tar/set/00008.png") == picture(8)
    assert list(pixels_of(travelled(data).run(6, 8))) == list(images)[6:8]
    assert [len(shard) for shard in data.shards] == [7, 3]
    assert open_data(tmp_path).digest == data.digest


def test_labels_from_json_by_its_own_name_or_the_one_asked_for(tmp_path):
    write_tar(tmp_path / "x.tar", 0, 4, "json")
    assert open_data(tmp_path / "x.tar").class_names == ("cat", "dog")
    numbered = open_data(f"{tmp_path / 'x.tar'}?label=json/id")
    assert [label for _, label in pixels_of(numbered).values()] == [0, 1, 2, 3]
    assert open_data(f"{tmp_path / 'x.tar'}?label=nosuch")._labels().tolist() == [-1] * 4


def test_a_compressed_archive_gives_the_same_images(tmp_path):
    plain = write_tar(tmp_path / "x.tar", 0, 5)
    (tmp_path / "y.tar.gz").write_bytes(gzip.compress(plain.read_bytes()))
    a, b = (pixels_of(open_data(tmp_path / name)) for name in ("x.tar", "y.tar.gz"))
    assert [label for _, label in a.values()] == [label for _, label in b.values()]
    assert all((x[0] == y[0]).all() for x, y in zip(a.values(), b.values(), strict=True))


@pytest.mark.parametrize("cut", [700, 1500, 5000])
def test_an_archive_that_ends_early_is_one_sentence(tmp_path, cut):
    whole = write_tar(tmp_path / "x.tar", 0, 5).read_bytes()
    (tmp_path / "x.tar").write_bytes(whole[:cut])
    with pytest.raises(DataError, match="is damaged"):
        pixels_of(open_data(tmp_path / "x.tar"))


def test_a_header_that_claims_gigabytes_and_a_bomb_are_refused(tmp_path):
    info = tarfile.TarInfo("x" * 10)
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 2**33
    (tmp_path / "long.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(4096))
    with pytest.raises(DataError, match=r"long\.tar is damaged"):
        open_data(tmp_path / "long.tar")
    with gzip.open(tmp_path / "bomb.tar.gz", "wb", 9) as stream:
        big = tarfile.TarInfo("a.png")
        big.size = 2**27
        stream.write(big.tobuf())
        for _ in range(2**7):
            stream.write(bytes(2**20))
    with pytest.raises(DataError, match="it unpacks to more than"):
        pixels_of(open_data(tmp_path / "bomb.tar.gz"))


def test_links_devices_and_paths_outside_are_no_images(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        link = tarfile.TarInfo("a.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        add(tar, "../../b.png", picture(1))
        add(tar, "note.txt", b"hello")
    data = open_data(tmp_path / "x.tar")
    assert list(pixels_of(data)) == ["x.tar/../../b.png"]  # a name, nothing is unpacked
    assert not (tmp_path.parent.parent / "b.png").exists()


def test_two_images_of_one_name_and_none_at_all_are_said(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for _ in range(2):
            add(tar, "a.png", picture(1))
            add(tar, "b.png", picture(2))
    with pytest.raises(DataError, match=r"x.tar holds two images called a.png"):
        open_data(tmp_path / "x.tar")
    with tarfile.open(tmp_path / "y.tar", "w") as tar:
        add(tar, "a.txt", b"hello")
    with pytest.raises(DataError, match="no image in it"):
        open_data(tmp_path / "y.tar")
