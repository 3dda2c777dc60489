"""API keys: exactly those of the file, for what they are for, and the file may change at any time."""

import datetime
import os

import pytest

from auditor.errors import OptionError
from auditor.service import keys
from auditor.service.keys import Keys, hashed, parse_keys
from auditor.service.problems import Problem
from auditor.service.rate_limit import RateLimit


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


def accepts(accepted: Keys, key: str) -> bool:
    try:
        return accepted.admit(key, "/explain", "digits") is not None
    except Problem as problem:
        if problem.status != 401:
            raise
        return False


def test_every_key_of_the_file_and_nothing_else(keyed):
    accepted = Keys(keyed)
    assert all(accepts(accepted, key) for key in ("first-key", "second-key"))
    for key in ("", "first", "first-key ", "FIRST-KEY", "# staff", "first-keyx", "first-key\nsecond-key", "\udcff"):
        assert not accepts(accepted, key)


def test_all_keys_are_compared_in_constant_time(keyed, monkeypatch):
    compared = []
    real = keys.hmac.compare_digest
    monkeypatch.setattr(keys.hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or real(a, b))
    assert accepts(Keys(keyed), "first-key")
    assert compared == [(32, 32)] * 2  # hashes of one length, and the second key too though the first one fits


def test_spaces_around_a_key_and_comments_do_not_count(tmp_path):
    path = tmp_path / "keys"
    path.write_text("  padded \t\r\n   # not-a-key\nk#ey\n")
    accepted = Keys(path)
    assert accepts(accepted, "padded")
    assert accepts(accepted, "k#ey")
    assert not accepts(accepted, "# not-a-key")


def test_the_file_is_looked_at_once_a_second(keyed, clock):
    accepted = Keys(keyed)
    assert accepts(accepted, "first-key")
    keyed.write_text("third-key-is-longer\n")
    clock[0] += 0.9
    assert accepts(accepted, "first-key")  # not looked at yet
    clock[0] += 0.2
    assert accepts(accepted, "third-key-is-longer")
    assert not accepts(accepted, "first-key")


def test_the_first_look_is_made_at_once(keyed, clock):
    clock[0] = 0.5  # the clock counts from the start of the machine
    accepted = Keys(keyed)
    keyed.write_text("third-key-is-longer\n")
    assert accepts(accepted, "third-key-is-longer")


def test_a_file_that_did_not_change_is_not_read_again(keyed, clock, monkeypatch):
    accepted = Keys(keyed)
    assert accepts(accepted, "first-key")
    monkeypatch.setattr(keys, "read_keys", lambda path: pytest.fail("read again"))
    clock[0] += 10
    assert accepts(accepted, "first-key")


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
    assert accepts(accepted, "other-key")
    assert not accepts(accepted, "first-key")


def test_keys_are_read_again_when_the_file_changes(keyed, monkeypatch):
    monkeypatch.setattr(keys, "LOOK_EVERY_S", 0.0)
    accepted = Keys(keyed)
    assert accepts(accepted, "first-key")
    keyed.write_text("third-key-is-longer\n")
    assert accepts(accepted, "third-key-is-longer")
    assert not accepts(accepted, "first-key")
    keyed.rename(keyed.with_name("gone"))
    assert accepts(accepted, "third-key-is-longer")  # the last keys stay in force


def test_a_file_without_keys_is_refused(tmp_path):
    (tmp_path / "empty").write_text("\n# nothing\n")
    with pytest.raises(OptionError, match="holds no key"):
        Keys(tmp_path / "empty").check()
    with pytest.raises(OptionError, match="cannot be read"):
        Keys(tmp_path / "nosuch").check()
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(OptionError, match="can't decode"):
        Keys(tmp_path / "binary").check()
    (tmp_path / "large").write_bytes(b"k" * (keys.MAX_FILE + 1))
    with pytest.raises(OptionError, match="larger than 4 MB"):
        Keys(tmp_path / "large").check()


# secrets as Kubernetes mounts them: keys -> ..data/keys, ..data -> a folder with a time in its name


def mount(folder, name: str, text: str):
    """Write a new folder of secrets and turn the link ``..data`` to it, as one step."""
    (folder / name).mkdir()
    (folder / name / "keys").write_text(text)
    (folder / "..fresh").symlink_to(name)
    (folder / "..fresh").rename(folder / "..data")
    if not (folder / "keys").is_symlink():
        (folder / "keys").symlink_to("..data/keys")


def test_keys_behind_links_that_move_are_followed(tmp_path, clock):
    mount(tmp_path, "..2026_01", "the-old-key\n")
    accepted = Keys(tmp_path / "keys")
    assert accepts(accepted, "the-old-key")
    mount(tmp_path, "..2026_02", "the-new-key\n")
    clock[0] += 2
    assert accepts(accepted, "the-new-key")
    assert not accepts(accepted, "the-old-key")


@pytest.mark.parametrize("fault", ["gone", "empty", "not TOML", "unknown field"])
def test_while_the_file_cannot_be_read_the_last_keys_stay_for_a_while(keyed, clock, fault):
    accepted = Keys(keyed, grace_s=60)
    assert accepts(accepted, "first-key")
    broken = {"empty": "# none\n", "not TOML": "[[keys]]\nkey=\n", "unknown field": "[[keys]]\nkey='a'\nx=1\n"}
    if fault == "gone":
        keyed.rename(keyed.with_name("away"))
    else:
        keyed.write_text(broken[fault])
    clock[0] += 59
    assert accepts(accepted, "first-key")
    assert accepted.is_readable
    clock[0] += 2
    assert not accepted.is_readable
    with pytest.raises(Problem, match="cannot be read") as caught:
        accepted.admit("first-key", "/explain", "digits")
    assert (caught.value.status, caught.value.code) == (503, "keys_unreadable")
    keyed.write_text("first-key\n")
    clock[0] += 2
    assert accepts(accepted, "first-key")


def test_a_worker_that_starts_without_its_file_lets_nobody_in_and_reads_it_later(tmp_path, clock):
    accepted = Keys(tmp_path / "keys")
    assert not accepted.is_readable
    with pytest.raises(Problem) as caught:
        accepted.admit("first-key", "/explain", "digits")
    assert caught.value.status == 503
    (tmp_path / "keys").write_text("first-key\n")
    clock[0] += 2
    assert accepts(accepted, "first-key")


# scopes

SCOPED = f"""
[[keys]]
name = "app"
hash = "{hashed("key-of-the-app")}"
routes = ["/explain", "/v1/models"]
models = ["birds"]

[[keys]]
key = "a-limited-key"
rate_per_minute = 3

[[keys]]
key = "until-noon"
expires = 2027-01-01T12:00:00Z

[[keys]]
key = "until-the-day"
expires = 2027-01-01

[[keys]]
key = "taken-back"
revoked = true
"""


@pytest.fixture
def scoped(tmp_path):
    (tmp_path / "keys.toml").write_text(SCOPED)
    os.utime(tmp_path / "keys.toml", (1_700_000_000, 1_700_000_000))
    return Keys(tmp_path / "keys.toml", limit=RateLimit(clock=lambda: 50.0))


def refusal(accepted, key, path="/explain", model="birds"):
    with pytest.raises(Problem) as caught:
        accepted.admit(key, path, model)
    return caught.value.status, caught.value.code, caught.value.message


def test_a_key_is_for_its_routes_and_models(scoped):
    assert scoped.admit("key-of-the-app", "/explain", "birds").name == "app"
    assert scoped.admit("key-of-the-app", "/v1/models/birds:explain", "birds").name == "app"
    assert refusal(scoped, "key-of-the-app", "/metrics")[:2] == (403, "route_not_allowed")
    assert refusal(scoped, "key-of-the-app", "/explain_batch")[:2] == (403, "route_not_allowed")
    assert refusal(scoped, "key-of-the-app", model="digits")[:2] == (403, "model_not_allowed")
    assert refusal(scoped, hashed("key-of-the-app"))[:2] == (401, "unauthorized")  # the hash is no key
    assert refusal(scoped, "")[:2] == (401, "unauthorized")


def test_a_key_has_its_rate(scoped):
    for _ in range(3):
        scoped.admit("a-limited-key", "/explain", "birds")
    status, code, message = refusal(scoped, "a-limited-key")
    assert (status, code) == (429, "rate_limited")
    assert "3 times a minute; wait 20 s" in message


@pytest.mark.parametrize(("key", "end"), [("until-noon", (2027, 1, 1, 12)), ("until-the-day", (2027, 1, 1, 0))])
def test_a_key_ends_with_its_time(scoped, monkeypatch, key, end):
    moment = datetime.datetime(*end, tzinfo=datetime.timezone.utc).timestamp()
    monkeypatch.setattr(keys.time, "time", lambda: moment - 1)
    scoped.admit(key, "/explain", "birds")
    monkeypatch.setattr(keys.time, "time", lambda: moment)
    assert refusal(scoped, key)[:2] == (401, "key_expired")
    monkeypatch.setattr(keys.time, "time", lambda: 1_700_000_000 - 301.0)
    assert refusal(scoped, key)[:2] == (401, "clock")  # a clock in the past would let an expired key in
    scoped.admit("a-limited-key", "/explain", "birds")  # which does not expire
    assert refusal(scoped, "taken-back")[:2] == (401, "key_revoked")


def test_hashes_stand_in_a_plain_file_too(tmp_path):
    (tmp_path / "keys").write_text(f"{hashed('a-hashed-key')}\na-plain-key\n")
    accepted = Keys(tmp_path / "keys")
    assert accepts(accepted, "a-hashed-key")
    assert accepts(accepted, "a-plain-key")
    assert not accepts(accepted, hashed("a-hashed-key"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[[keys]]\nname = 'x'\n", "give either key or hash"),
        ("[[keys]]\nkey = 'x'\nhash = 'sha256:" + "0" * 64 + "'\n", "give either key or hash"),
        ("[[keys]]\nhash = 'sha256:12'\n", r"keys\.0\.hash: string should match"),
        ("[[keys]]\nkey = 'x'\nroutes = ['/nosuch']\n", "there is no route '/nosuch'; there are /explain"),
        ("[[keys]]\nkey = 'x'\nrate_per_minute = 0\n", r"keys\.0\.rate_per_minute: input should be greater than 0"),
        ("[[keys]]\nkey = 'x'\nexpires = 'soon'\n", r"keys\.0\.expires"),
        ("[[keys]]\nkey = 'x'\nscope = 'all'\n", r"keys\.0\.scope: extra inputs"),
        ("[[keys]]\nkey = 'x'\n[other]\n", "nothing else"),
        ("[[keys]]\nkey = 'x'\n[[keys]]\nkey = 'x'\n", "stands there twice"),
        ("[keys]\nkey = 'x'\n", "nothing else"),
        ("[[keys]]\nkey = \n", "it is not TOML"),
    ],
)
def test_a_wrong_file_is_one_sentence(text, sentence):
    with pytest.raises(OptionError, match=sentence):
        parse_keys(text)
