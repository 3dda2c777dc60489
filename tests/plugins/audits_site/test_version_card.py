"""Version cards: what REST gives and the tags say, whatever is in them."""

import json

from auditor.plugins.audits_site.version_card import version_card
from auditor.plugins.registry.tags import AuditTag, ExplainerTag, GateTag

A, B = "a" * 64, "b" * 64


def entry(**tags):
    return {"name": "m", "version": 7, "tags": [{"key": k.replace("__", "."), "value": v} for k, v in tags.items()]}


def test_a_bare_version_has_nothing():
    card = version_card({"name": "m", "version": 7})
    assert (card.uri, card.explainers, card.audit, card.gate, card.outdated) == ("models:/m/7", (), None, None, [])
    assert (card.created_ms, card.description, card.run_id, card.aliases) == (0, "", "", ())


def test_fields_of_rest_are_taken_over():
    fields = {"creation_timestamp": "1790000000000", "description": "d", "run_id": "r", "aliases": ["b", "a"]}
    card = version_card({"name": "m", "version": "1", **fields})
    assert (card.created_ms, card.description, card.run_id, card.aliases) == (1_790_000_000_000, "d", "r", ("a", "b"))


def test_tags_become_entries_in_order_of_names():
    parts = ExplainerTag("parts", "nmf", A, "explainers/parts/a", "now")
    card = version_card(
        entry(
            auditor__explainer__parts=parts.encode(),
            auditor__explainer__a="{}",
            auditor__audit=AuditTag(A, "audits/a", explainers={"parts": A, "a": None}).encode(),
            auditor__gate=GateTag("pass", audit_digest=A).encode(),
            owner="me",
        )
    )
    assert [e.name for e in card.explainers] == ["a", "parts"]
    assert card.explainers[1] == parts
    assert "not what was attached" in card.explainers[0].problem
    assert card.audit.digest == A
    assert card.gate.verdict == "pass"
    assert card.outdated == []


def test_what_changed_after_the_audit_is_said():
    card = version_card(
        entry(
            auditor__explainer__parts=ExplainerTag("parts", "nmf", B, "explainers/parts/b", "now").encode(),
            auditor__audit=AuditTag(A, "audits/a", explainers={"parts": A}).encode(),
            auditor__gate=GateTag("pass", audit_digest=B).encode(),
        )
    )
    assert card.outdated == ["parts was replaced after the audit.", "The gate's verdict is about an earlier audit."]


def test_odd_tags_do_not_break_the_card():
    tags = [{}, {"key": "auditor.audit"}, {"key": "auditor.gate", "value": json.dumps([1])}]
    card = version_card({"name": "m", "version": "1", "tags": tags})
    assert card.audit.problem
    assert (card.gate.verdict, bool(card.gate.problem)) == ("unknown", True)
