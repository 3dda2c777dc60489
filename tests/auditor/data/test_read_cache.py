"""The cache of readings: what was written comes back to its user alone, and anything else is read again."""

import json

import pytest

from auditor.data.read_cache import ReadCache


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("AUDITOR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_leaves_and_indexes_come_back_by_address_and_mark():
    cache = ReadCache("s3://bucket/a")
    assert cache.leaves() == {}
    cache.put_leaves({"mark": "leaf"})
    cache.put_index("file 12 etag", {"names": ["a"]})
    again = ReadCache("s3://bucket/a")
    assert again.leaves() == {"mark": "leaf"}
    assert again.index("file 12 etag") == {"names": ["a"]}
    assert again.index("file 13 etag") is None
    assert ReadCache("s3://bucket/b").leaves() == {}


def test_what_somebody_else_wrote_does_not_count(cache_folder, caplog):
    cache = ReadCache("here")
    cache.put_leaves({"mark": "leaf"})
    (file,) = cache_folder.rglob("leaves.json")
    code = file.read_bytes().partition(b"\n")[0]
    file.write_bytes(code + b"\n" + json.dumps({"mark": "another"}).encode())
    assert ReadCache("here").leaves() == {}
    assert "not written by this user" in caplog.text
    file.write_bytes(b"")
    assert ReadCache("here").leaves() == {}


def test_an_entry_of_one_source_cannot_be_put_into_anothers_place(cache_folder):
    ReadCache("one").put_leaves({"mark": "leaf"})
    (file,) = cache_folder.rglob("leaves.json")
    other = ReadCache("two")
    other.put_leaves({"x": "y"})
    (target,) = (path for path in cache_folder.rglob("leaves.json") if path != file)
    target.write_bytes(file.read_bytes())
    assert ReadCache("two").leaves() == {}


def test_a_folder_that_others_may_write_to_is_not_used(cache_folder, caplog):
    (cache_folder / "read").mkdir(parents=True)
    (cache_folder / "read").chmod(0o777)
    cache = ReadCache("here")
    cache.put_leaves({"mark": "leaf"})
    assert ReadCache("here").leaves() == {}
    assert "may be written by others" in caplog.text
