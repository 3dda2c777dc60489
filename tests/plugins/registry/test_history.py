"""History: what a changed, missing, added, cut-back or wrongly dated entry looks like, signed and unsigned."""

import json
import threading
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import mlflow
import pytest

from auditor import plugins
from auditor.errors import ClockError
from auditor.plugins.registry import history
from auditor.plugins.registry.history import Entry, digest_of, from_tags, verify
from auditor.plugins.registry.location import resolve

NOW = datetime(2026, 11, 18, 12, tzinfo=timezone.utc)


def chain(n: int) -> list[Entry]:
    entries: list[Entry] = []
    for number in range(1, n + 1):
        before = entries[-1].digest if entries else ""
        moment = (NOW - timedelta(hours=n - number)).isoformat()
        entry = Entry(number, moment, "audit", "1", {"audit.json": f"{number:064d}"}, "", before)
        entries.append(replace(entry, digest=digest_of(entry)))
    return entries


def stored(entries: list[Entry]) -> dict[str, str]:
    return {f"auditor.log.{e.number:06d}.{e.digest[:16]}": e.encode() for e in entries} | {"owner": "me"}


def problems(tags: dict[str, str], **options) -> list[str]:
    return [e.problem for e in verify(from_tags(tags), now=NOW, **options) if e.problem]


def test_a_whole_history_has_no_problem_and_comes_back_in_order():
    entries = chain(5)
    assert from_tags(stored(entries)) == entries
    assert problems(stored(entries), heads={"1": entries[-1].digest}, head=entries[2].digest[:12]) == []
    assert verify([]) == []


def test_a_rewritten_entry_is_noticed():
    entries = chain(4)
    tags = stored(entries)
    key = next(k for k in tags if k.startswith("auditor.log.000002"))
    tags[key] = json.dumps({**json.loads(tags[key]), "action": "promote"})
    assert "entry 2 was rewritten" in problems(tags)
    forged = replace(entries[1], action="promote")
    forged = replace(forged, digest=digest_of(forged))  # with a digest of its own, the next entry gives it away
    assert "entry 2 before it was replaced" in problems(stored([entries[0], forged, *entries[2:]]))


@pytest.mark.parametrize("gone", [(2,), (2, 3), (1,), (4,)])
def test_a_removed_entry_is_noticed(gone):
    entries = chain(5)
    (problem,) = problems(stored([e for e in entries if e.number not in gone]))
    assert problem == f"entry {gone[-1]} before it was removed"


def test_a_log_that_was_cut_back_is_noticed_by_what_remembers_its_end():
    entries = chain(5)
    cut = stored(entries[:3])
    assert problems(cut) == []  # nothing in the entries themselves says that there were more
    assert "cut back" in problems(cut, heads={"1": entries[4].digest})[0]
    assert "cut back" in problems(cut, head=entries[4].digest)[0]
    assert "cut back" in problems({}, heads={"1": entries[4].digest})[0]


def test_entries_of_writers_at_once_stand_and_one_put_in_later_does_not():
    entries = chain(9)
    late = replace(entries[8], detail="other")
    assert problems(stored([*entries, replace(late, digest=digest_of(late))])) == []
    early = replace(entries[2], detail="other")
    said = problems(stored([*entries, replace(early, digest=digest_of(early))]))
    assert said == ["no later entry follows it: it was put in afterwards"]


def test_odd_tags_and_damaged_json_are_noticed():
    entries = chain(3)
    assert "odd name" in problems(stored(entries) | {"auditor.log.x": "{}"})[0]
    tags = stored(entries)
    tags[next(k for k in tags if "000003" in k)] = "{"
    assert problems(tags) == ["entry 3 is not what was written"]


def test_clocks_in_the_future_and_in_the_past_are_noticed():
    one, two, three = chain(3)
    late = replace(three, time=(NOW + timedelta(hours=1)).isoformat())
    assert "after now by the clock here" in problems(stored([one, two, replace(late, digest=digest_of(late))]))[0]
    early = replace(three, time=(NOW - timedelta(days=9)).isoformat())
    assert "a clock was in the past" in problems(stored([one, two, replace(early, digest=digest_of(early))]))[0]


@pytest.fixture
def version(registry, tiny):
    return resolve(plugins.log_subject(tiny, "logged", experiment="tests"))


def test_entries_are_appended_and_the_version_names_the_newest(version):
    start = len(history.entries("logged"))
    first = history.append(version, "audit", {"audit.json": "1" * 64})
    second = history.append(version, "gate", {}, "pass")
    entries = history.entries("logged")[start:]
    assert [(e.number, e.action, e.detail) for e in entries] == [(start + 1, "audit", ""), (start + 2, "gate", "pass")]
    assert (second.before, history.heads_of("logged")[version.version]) == (first.digest, second.digest)
    assert not [e for e in verify(history.entries("logged"), heads=history.heads_of("logged")) if e.problem]


def test_writers_at_once_make_one_chain(version):
    start = len(history.entries("logged"))
    threads = [threading.Thread(target=history.append, args=(version, f"act {k}", {})) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entries = history.entries("logged")[start:]
    assert sorted(e.action for e in entries) == [f"act {k}" for k in range(4)]
    assert not [e.problem for e in verify(history.entries("logged")) if e.problem]


def test_a_signed_history_says_who_and_finds_a_forged_signature(version, tmp_path, monkeypatch):
    pytest.importorskip("securesystemslib")
    from auditor.signing.keys import new_key, read_trusted

    private, _ = new_key("alice", tmp_path / "keys")
    monkeypatch.setenv("AUDITOR_SIGN_KEY", str(private))
    mine = history.append(version, "audit", {"audit.json": "1" * 64})
    trusted = read_trusted(tmp_path / "keys")
    entry = next(e for e in verify(history.entries("logged"), trusted=trusted) if e.digest == mine.digest)
    assert (entry.signer, entry.problem) == ("alice", "")
    other = history.append(version, "gate", {}, "fail")
    forged = replace(mine, envelope=other.envelope)
    entries = [forged if e.digest == mine.digest else e for e in history.entries("logged")]
    assert any("is of another entry" in e.problem for e in verify(entries, trusted=trusted))
    new_key("bob", tmp_path / "others")
    strangers = verify(history.entries("logged"), trusted=read_trusted(tmp_path / "others"))
    assert any("does not trust" in e.problem for e in strangers)


def test_a_history_that_cannot_be_written_is_a_warning(version, caplog, monkeypatch):
    def refused(*_args, **_options):
        raise mlflow.exceptions.MlflowException("read only")

    monkeypatch.setattr(mlflow.MlflowClient, "set_registered_model_tag", refused)
    assert history.append(version, "audit", {}) is None
    assert "is not in the model's history" in caplog.text
    assert history.append(replace(version, name=""), "audit", {}) is None


def test_with_a_clock_in_the_past_nothing_is_done(version, monkeypatch):
    """The hole: a gate passed and promoted by a clock of years ago, and only the log looked odd afterwards."""
    history.append(version, "attach", {})
    n = len(history.entries(version.name))
    monkeypatch.setattr(history, "_now", lambda: "2020-01-01T00:00:00+00:00")
    done = []
    sentence = r"by the clock here it is 2020-01-01 00:00, but entry \d+ .* set the clock"
    with pytest.raises(ClockError, match=sentence), history.noted(version, "promote", {}):
        done.append(1)
    assert done == []
    assert len(history.entries(version.name)) == n


def test_a_deed_stands_between_two_entries_and_a_killed_one_after_its_beginning(version):
    start = len(history.entries("logged"))
    with pytest.raises(KeyboardInterrupt), history.noted(version, "audit", {"audit.json": "1" * 64}):
        raise KeyboardInterrupt
    with history.noted(version, "gate", {"verdict.json": "2" * 64}, "pass"):
        during = [e.action for e in history.entries("logged")[start:]]
    assert during == ["begin audit", "begin gate"]
    entries = history.entries("logged")[start:]
    assert [e.action for e in entries] == ["begin audit", "begin gate", "gate"]
    assert [e.action for e in history.shown(entries)] == ["begin audit", "gate"]
    again = replace(entries[1], number=99)  # a later beginning is not that of what was done before
    assert [e.action for e in history.shown([*entries, again])] == ["begin audit", "gate", "begin gate"]
