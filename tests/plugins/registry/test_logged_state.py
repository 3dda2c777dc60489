"""Logged state: what every change behind the log's back is called, and that a killed writer leaves none."""

import pytest

from auditor.plugins.registry.history import Entry
from auditor.plugins.registry.location import ModelVersion
from auditor.plugins.registry.logged_state import compare, contradiction
from auditor.plugins.registry.tags import AUDIT, AuditTag

A, B, C = "a" * 64, "b" * 64, "c" * 64
CONCEPTS = {"explainer/concepts": A}
HISTORY = [
    Entry(1, "", "begin attach", "1", CONCEPTS),
    Entry(2, "", "attach", "1", CONCEPTS),
    Entry(3, "", "audit", "1", {"audit.json": B, "data": C}),
    Entry(4, "", "gate", "1", {"verdict.json": C, "audit.json": B}, "pass"),
    Entry(5, "", "promote", "1", {}, "champion"),
    Entry(6, "", "attach", "2", {"explainer/old": C}),
    Entry(7, "", "detach", "2", {"explainer/old": C}),
    Entry(8, "", "export", "2", {"graph": A}),
]
STATE = {
    ("1", "explainer/concepts"): A,
    ("1", "audit.json"): B,
    ("1", "verdict.json"): C,
    ("", "champion"): "1",
    ("", "newest"): "2",  # an alias that was never promoted
    ("2", "graph"): A,
}


def problems(state, history=HISTORY, versions=("1", "2")):
    return [entry.problem for entry in compare(state, history, set(versions))]


def test_what_the_history_says_has_no_problem():
    assert problems(STATE) == []
    assert problems({}, []) == []


@pytest.mark.parametrize(
    ("thing", "now", "words"),
    [
        (("1", "explainer/concepts"), B, "explainer concepts of version 1 is bbbbbbbbbbbb, and entry 2 says aaaa"),
        (("1", "explainer/concepts"), "", "explainer concepts of version 1 is gone, and entry 2 says that it is aaaa"),
        (("1", "explainer/more"), B, "explainer more of version 1 (bbbbbbbbbbbb) is in no entry"),
        (("2", "explainer/old"), C, "explainer old of version 2 is there (cccccccccccc), and entry 7 took it away"),
        (("1", "audit.json"), A, "audit.json of version 1 is aaaaaaaaaaaa, and entry 3 says bbbb"),
        (("1", "verdict.json"), A, "verdict.json of version 1 is aaaaaaaaaaaa, and entry 4 says cccc"),
        (("2", "graph"), "", "graph of version 2 is gone, and entry 8 says"),
        (("", "champion"), "2", "alias champion is version 2, and entry 5 says version 1"),
        (("", "champion"), "", "alias champion is gone, and entry 5 says that it is version 1"),
    ],
)
def test_every_change_behind_its_back_is_named(thing, now, words):
    (problem,) = problems({k: v for k, v in {**STATE, thing: now}.items() if v})
    assert problem.startswith(words)


def test_what_was_begun_may_be_done_or_not_and_nothing_else():
    begun = [*HISTORY, Entry(9, "", "begin attach", "1", {"explainer/concepts": B})]
    for digest, n in ((A, 0), (B, 0), (C, 1)):
        assert len(problems({**STATE, ("1", "explainer/concepts"): digest}, begun)) == n
    done = [*begun, Entry(10, "", "attach", "1", {"explainer/concepts": B})]
    assert len(problems(STATE, done)) == 1  # set back to what it was
    first = [*HISTORY, Entry(9, "", "begin detach", "1", CONCEPTS)]
    assert problems({k: v for k, v in STATE.items() if k[1] != "explainer/concepts"}, first) == []
    only = [Entry(1, "", "begin export", "1", {"graph": A})]
    assert problems({}, only, "1") == []
    assert problems({("1", "graph"): A}, only, "1") == []
    assert problems({("1", "graph"): B}, only, "1") == [
        "graph of version 1 is bbbbbbbbbbbb, and no entry says that this was done"
    ]


def test_a_deleted_version_and_an_entry_that_does_not_stand_say_nothing():
    assert problems({k: v for k, v in STATE.items() if k[0] != "2"}, versions=("1",)) == []
    forged = Entry(9, "", "attach", "1", {"explainer/concepts": B}, problem="entry 9 was rewritten")
    assert problems(STATE, [*HISTORY, forged]) == []


@pytest.mark.parametrize(
    ("digest", "words"), [(B, ""), (A, "audit.json of version 1 is aaaaaaaaaaaa, and entry 3 says")]
)
def test_a_version_that_an_entry_contradicts_does_not_verify(digest, words):
    """The hole: a forged audit with a checksum of its own verified, since only ``auditor log verify`` compared."""
    tag = AuditTag(digest, "audits/1").encode()
    version = ModelVersion("models:/m/1", "m", "1", "", None, "0", {AUDIT: tag})
    history = [HISTORY[2], *HISTORY[4:]]
    problem = contradiction(version, history)
    assert problem.startswith(words)
    assert bool(problem) == bool(words)
    assert contradiction(version, []) == ""  # of a release that kept no log
