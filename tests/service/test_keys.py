"""API keys: exactly those of the file are accepted, and the file may change at any time."""

import os

import pytest

from auditor.errors import OptionError
from auditor.service import keys
from auditor.service.keys import Keys


@pytest.fixture
def keyed(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# staff\nfirst-key\n\nsecond-key\n")
    return path


@pytest.fixture
def clock(monkeypatch):
    """Time in seconds, moved by hand."""
    now = [1000.0]
    monkeypatch.setattr(keys.time, "monotonic", lambda: now[0])
    return now


def test_every_key_of_the_file_and_nothing_else(keyed):
    accepted = Keys(keyed)
    assert all(accepted.accepts(key) for key in ("first-key", "second-key"))
    for key in ("", "first", "first-key ", "FIRST-KEY", "# staff", "first-keyx", "first-key\nsecond-key", "\udcff"):
        assert not accepted.accepts(key)


def test_all_keys_are_compared_in_constant_time(keyed, monkeypatch):
    compared = []
    real = keys.hmac.compare_digest
    monkeypatch.setattr(keys.hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or real(a, b))
    assert Keys(keyed).accepts("first-key")
    assert compared == [(32, 32)] * 2  # hashes of one length, and the second key too though the first one fits


def test_spaces_around_a_key_and_comments_do_not_count(tmp_path):
    path = tmp_path / "keys"
    path.write_text("  padded \t\r\n   # not-a-key\nk#ey\n")
    accepted = Keys(path)
    assert accepted.accepts("padded")
    assert accepted.accepts("k#ey")
    assert not accepted.accepts("# not-a-key")


def test_the_file_is_looked_at_once_a_second(keyed, clock):
    accepted = Keys(keyed)
    assert accepted.accepts("first-key")
    keyed.write_text("third-key-is-longer\n")
    clock[0] += 0.9
    assert accepted.accepts("first-key")  # not looked at yet
    clock[0] += 0.2
    assert accepted.accepts("third-key-is-longer")
    assert not accepted.accepts("first-key")


def test_the_first_look_is_made_at_once(keyed, clock):
    clock[0] = 1.5  # the clock counts from the start of the machine
    accepted = Keys(keyed)
    keyed.write_text("third-key-is-longer\n")
    assert accepted.accepts("third-key-is-longer")


def test_a_file_that_did_not_change_is_not_read_again(keyed, clock, monkeypatch):
    accepted = Keys(keyed)
    monkeypatch.setattr(accepted, "_read", lambda: pytest.fail("read again"))
    clock[0] += 10
    assert accepted.accepts("first-key")


@pytest.mark.parametrize("change", ["time", "size", "inode"])
def test_any_sign_of_a_change_is_enough(keyed, clock, change):
    accepted = Keys(keyed)
    before = keyed.stat()
    if change == "time":
        keyed.write_text("# staff\nother-key\n\nsecond-key\n")
        os.utime(keyed, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    elif change == "size":
        keyed.write_text("other-key\n")
        os.utime(keyed, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        fresh = keyed.with_name("fresh")
        fresh.write_text("# staff\nother-key\n\nsecond-key\n")
        os.utime(fresh, ns=(before.st_atime_ns, before.st_mtime_ns))
        fresh.replace(keyed)
    clock[0] += 10
    assert accepted.accepts("other-key")
    assert not accepted.accepts("first-key")


def test_keys_are_read_again_when_the_file_changes(keyed, monkeypatch):
    monkeypatch.setattr(keys, "LOOK_EVERY_S", 0.0)
    accepted = Keys(keyed)
    assert accepted.accepts("first-key")
    keyed.write_text("third-key-is-longer\n")
    assert accepted.accepts("third-key-is-longer")
    assert not accepted.accepts("first-key")
    keyed.rename(keyed.with_name("gone"))
    assert accepted.accepts("third-key-is-longer")  # the last keys stay in force
    keyed.write_text("# none\n")
    assert not accepted.accepts("third-key-is-longer")  # no key lets nobody in


def test_a_file_without_keys_is_refused(tmp_path):
    (tmp_path / "empty").write_text("\n# nothing\n")
    with pytest.raises(OptionError, match="holds no key"):
        Keys(tmp_path / "empty")
    with pytest.raises(OptionError, match="cannot be read"):
        Keys(tmp_path / "nosuch")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(OptionError, match="cannot be read"):
        Keys(tmp_path / "binary")
