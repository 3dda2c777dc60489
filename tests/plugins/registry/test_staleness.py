"""Staleness: an audit and a verdict are about a version until something they were made of changes."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest

from auditor.plugins.registry.model_record import ModelRecord
from auditor.plugins.registry.staleness import explainer_changes, outdated, stale_reason
from auditor.plugins.registry.tags import AuditTag, GateTag
from auditor.subject.identity import Identity

A, B = "a" * 64, "b" * 64


MODEL = Identity("w" * 64, "g" * 64, "p" * 64, "c" * 64)
AUDITED = {"digest": MODEL.digest, "identity": MODEL.to_json(), "classes": ["x", "y"]}


def audit(**changed):
    value = {
        "model": AUDITED,
        "explainers": {"parts": {"digest": B}, "broken": {"reason": "no"}},
        "data": {"digest": A, "spec": "sklearn:digits"},
    }
    return SimpleNamespace(**{**value, **changed})


def record(identity=MODEL, class_names=("x", "y"), files=None):
    return ModelRecord(identity, files or {}, class_names, "softmax", (1, 8, 8))


RECORD = record()
ATTACHED = {"parts": B, "broken": None}
DATA = SimpleNamespace(digest=A, labels_digest="")


def test_an_audit_of_what_is_there_is_fresh():
    read_alike = audit(model={**AUDITED, "output": "softmax"})
    assert stale_reason(read_alike, RECORD, ATTACHED, DATA) == ""
    read_otherwise = audit(model={**AUDITED, "output": "logits"})
    assert "outputs were read as logits, now as softmax" in stale_reason(read_otherwise, RECORD, ATTACHED, DATA)
    assert stale_reason(audit(), RECORD, ATTACHED, DATA) == ""
    assert stale_reason(audit(), RECORD, ATTACHED, None) == ""


@pytest.mark.parametrize(
    ("model", "attached", "data", "reason"),
    [
        (record(replace(MODEL, weights=B)), ATTACHED, DATA, "the model has other weights now"),
        (record(replace(MODEL, graph=B, preprocessing=B)), ATTACHED, DATA, "the model has other graph and prepro"),
        (record(class_names=("y", "x")), ATTACHED, DATA, "the class names have changed since"),
        (RECORD, {"parts": A, "broken": None}, DATA, "what is attached has changed since (parts)"),
        (RECORD, {"parts": None, "broken": None}, DATA, "what is attached has changed since (parts)"),
        (RECORD, {"parts": B, "broken": A}, DATA, "what is attached has changed since (broken)"),
        (RECORD, {"more": A}, DATA, "what is attached has changed since (broken, more, parts)"),
        (RECORD, ATTACHED, SimpleNamespace(digest=B), "it was made on other data (sklearn:digits)"),
        (RECORD, ATTACHED, SimpleNamespace(digest=A, labels_digest=B), "it was made with other --labels"),
    ],
)  # fmt: skip
def test_every_part_of_it_can_make_an_audit_stale(model, attached, data, reason):
    assert stale_reason(audit(), model, attached, data).startswith(reason)


def test_files_of_the_model_are_compared_where_the_audit_names_them():
    files = {"MLmodel": A, "data/model.pt2": B}
    of_files = audit(model={**AUDITED, "files": files})
    assert stale_reason(of_files, record(files=files), ATTACHED, DATA) == ""
    reason = stale_reason(of_files, record(files={**files, "MLmodel": B}), ATTACHED, DATA)
    assert reason == "files of the model have changed since (MLmodel)"
    assert stale_reason(audit(), record(files=files), ATTACHED, DATA) == ""


def test_an_audit_of_the_first_release_says_so():
    of_weights = audit(model={"digest": MODEL.weights, "classes": ["x", "y"]})
    assert "digest is of version 1" in stale_reason(of_weights, RECORD, ATTACHED, DATA)
    of_another = audit(model={"digest": B, "classes": ["x", "y"]})
    assert "of a model with digest bbbbbb" in stale_reason(of_another, RECORD, ATTACHED, DATA)


def test_changes_are_the_plain_comparison_of_two_tables():
    digests = (None, "1", "2", "absent")
    for a, b, c, d in product(digests, repeat=4):
        then = {k: v for k, v in (("x", a), ("y", b)) if v != "absent"}
        now = {k: v for k, v in (("x", c), ("y", d)) if v != "absent"}
        changes = explainer_changes(then, now)
        assert (changes.names == []) == (then == now)
        assert set(changes.names) == {k for k in "xy" if then.get(k, "-") != now.get(k, "-")}
        assert all(k in now and k not in then for k in changes.attached)
        assert all(k in then and k not in now for k in changes.detached)
        assert all(k in then and k in now for k in changes.replaced)
        by_tags = explainer_changes(then, now, verified=False)
        assert set(by_tags.replaced) == {k for k in changes.replaced if then[k] is not None}
        assert (by_tags.attached, by_tags.detached) == (changes.attached, changes.detached)


def test_several_explainers_stand_in_one_sentence():
    changes = explainer_changes({"c": A, "d": A}, {"b": A, "a": A, "d": B})
    assert changes.sentences() == [
        "a, b were attached after the audit.",
        "d was replaced after the audit.",
        "c was detached after the audit.",
    ]


def test_a_verdict_is_about_the_audit_it_names():
    stored = AuditTag(A, "audits/x", explainers={"parts": B, "broken": None})
    now = {"parts": B, "broken": A}
    assert outdated(now, stored, GateTag("pass", audit_digest=A)) == []
    assert outdated(now, stored, None) == []
    assert outdated({}, None, None) == []
    assert outdated(now, stored, GateTag("pass", audit_digest=B)) == ["The gate's verdict is about an earlier audit."]
    assert outdated({}, None, GateTag("pass", audit_digest=A)) == [
        "The gate's verdict refers to an audit that is no longer here."
    ]
    assert outdated({"parts": A, "broken": A}, stored, None) == ["parts was replaced after the audit."]


def test_tags_with_a_problem_say_nothing():
    broken = AuditTag(problem="unreadable")
    assert outdated({"parts": B}, broken, GateTag(problem="unreadable")) == []
