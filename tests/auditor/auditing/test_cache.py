"""Finished parts on disk: theirs alone, whole or not at all."""

from auditor.auditing.cache import AuditCache
from auditor.data.user_cache import default_folder
from auditor.explainers.manifest import seal
from auditor.metrics.measure import of_value


def test_a_cached_part_that_was_edited_counts_for_nothing(tmp_path):
    cache = AuditCache(tmp_path, {"a": 1})
    cache.put("part", {"m": of_value(0.5, "up")})
    assert cache.get("part") == {"m": of_value(0.5, "up")}
    assert AuditCache(tmp_path, {"a": 2}).get("part") is None
    (file,) = cache.folder.iterdir()
    file.write_bytes(file.read_bytes().replace(b"0.5", b"0.9"))
    assert cache.get("part") is None


def test_without_a_folder_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = AuditCache(None, {"a": 1})
    cache.put("part", {"m": of_value(0.5, "up")})
    assert cache.get("part") is None
    cache.clear()
    assert not list(tmp_path.iterdir())


def test_parts_do_not_mix_and_are_cleared_together(tmp_path):
    first, second = AuditCache(tmp_path, {"a": 1, "b": 2}), AuditCache(tmp_path, {"b": 3, "a": 1})
    assert first.folder == AuditCache(tmp_path, {"b": 2, "a": 1}).folder  # the order of the key means nothing
    first.put("x", {"m": of_value(0.1, "up")})
    first.put("y", {"m": of_value(0.2, "up")})
    second.put("x", {"m": of_value(0.3, "up")})
    assert [first.get(p)["m"].value for p in "xy"] == [0.1, 0.2]
    assert first.get("z") is None
    first.clear()
    assert first.get("x") is None
    assert second.get("x")["m"].value == 0.3
    assert [p.suffix for p in second.folder.iterdir()] == [".json"]  # no temporary file is left


def test_where_caches_live(monkeypatch, tmp_path):
    for name in ("AUDITOR_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "mlflow-auditor"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_folder() == tmp_path / "xdg" / "mlflow-auditor"
    monkeypatch.setenv("AUDITOR_CACHE", str(tmp_path / "mine"))
    assert default_folder() == tmp_path / "mine"


def test_a_planted_part_counts_for_nothing(tmp_path):
    """The hole: a sealed file needs no key, so anybody could write the numbers of the next audit."""
    cache = AuditCache(tmp_path, {"a": 1})
    cache.folder.mkdir()
    planted = seal({"part": "part", "metrics": {"m": of_value(0.9999, "up").to_json()}})
    for content in (planted, b"0" * 64 + b"\n" + planted):
        cache._file("part").write_bytes(content)
        assert cache.get("part") is None


def test_a_part_of_another_audit_or_another_name_counts_for_nothing(tmp_path):
    one, two = AuditCache(tmp_path, {"a": 1}), AuditCache(tmp_path, {"a": 2})
    one.put("part", {"m": of_value(0.5, "up")})
    two.folder.mkdir()
    two._file("part").write_bytes(one._file("part").read_bytes())
    assert two.get("part") is None
    one._file("other").write_bytes(one._file("part").read_bytes())
    assert one.get("other") is None
    assert one.get("part") is not None


def test_folders_and_keys_that_others_may_write_are_not_used(tmp_path, caplog):
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    assert AuditCache(open_folder, {"a": 1}).folder is None
    assert "may be written by others" in caplog.text
    mine = tmp_path / "mine"
    assert AuditCache(mine, {"a": 1}).folder is not None
    assert (mine / "cache.key").stat().st_mode & 0o777 == 0o600
    (mine / "cache.key").chmod(0o666)
    assert AuditCache(mine, {"a": 1}).folder is None
