"""The user's key: made once, for this user alone, and bound to what it marks."""

import pytest

from auditor.data.user_cache import default_folder, marked, unmarked, user_key
from auditor.errors import TamperError


def test_the_folder_is_that_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("AUDITOR_CACHE", str(tmp_path))
    assert default_folder() == tmp_path
    monkeypatch.delenv("AUDITOR_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert default_folder() == tmp_path / "x" / "mlflow-auditor"


def test_a_key_is_made_once_and_readable_by_its_user_alone(tmp_path):
    key = user_key(tmp_path / "cache")
    assert len(key) == 32
    assert user_key(tmp_path / "cache") == key
    assert (tmp_path / "cache" / "cache.key").stat().st_mode & 0o777 == 0o600
    assert user_key(tmp_path / "other") != key


def test_what_is_marked_comes_back_for_its_purpose_only():
    stored = marked(b"content", "one", b"k" * 32)
    assert unmarked(stored, "one", b"k" * 32, "it") == b"content"
    for belongs_to, key, changed in (
        ("two", b"k" * 32, stored),
        ("one", b"x" * 32, stored),
        ("one", b"k" * 32, stored + b"!"),
    ):
        with pytest.raises(TamperError, match="it was not written by this user"):
            unmarked(changed, belongs_to, key, "it")
