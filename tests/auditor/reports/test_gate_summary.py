"""A verdict for CI: JUnit XML and Markdown."""

import math
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from xml.etree import ElementTree

from auditor.metrics.measure import Measure
from auditor.release.gate import Check, Gate, judge
from auditor.reports.gate_summary import junit, markdown
from tests.auditor.release.test_gate import audit_of, policy_of


def test_what_ci_reads():
    audit = audit_of({"model/accuracy": 0.9, "model/ece": Measure(math.nan, direction="down", status="failed")})
    gate = judge(audit, policy_of({"model/accuracy": {"min": 0.5}, "model/ece": {"max": 0.1}}))
    suite = ElementTree.fromstring(junit(gate)).find("testsuite")
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    cases = suite.findall("testcase")
    assert [c.get("name") for c in cases] == ["accuracy at least", "ece at most"]
    assert [c.find("failure") is not None for c in cases] == [False, True]
    text = markdown(gate)
    assert text.startswith("## Gate: FAIL")
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert "**FAIL**" in rows[0]
    assert "`model/ece`" in rows[0]
    assert gate.to_json()["verdict"] == "fail"
    assert set(gate.to_json()["checks"][0]) >= {"metric", "value", "limit", "verdict", "reason"}


def test_what_ci_cannot_read_is_taken_out_and_cells_stay_cells():
    checks = (
        Check("model/accuracy", 0.912345, "at least 0.9", "pass", baseline=0.9),
        Check("explainer/a|b/f_cls", 0.5, "at least 0.9", "fail", "0.5 is\x07 not\nat least | 0.9"),
        Check("alone", 1.0, "at most 2", "pass"),
    )
    gate = Gate(
        checks, model="m/2", baseline="m/1", policy="p.toml", policy_digest="abcdef0123456789", promoted="champion"
    )
    suite = ElementTree.fromstring(junit(gate)).find("testsuite")
    assert suite.get("name") == "auditor gate m"
    cases = suite.findall("testcase")
    assert [c.get("classname") for c in cases] == ["model", "explainer.a|b", "gate"]
    failure = cases[1].find("failure")
    assert failure.get("message").replace("\n", " ") == "0.5 is not at least | 0.9"
    lines = markdown(gate).splitlines()
    assert "`m/2` against `m/1`: 2 of 3 checks pass (policy `p.toml`, abcdef012345)." in lines
    assert "| **FAIL** | `explainer/a\\|b/f_cls` | 0.5 |  | at least 0.9 | 0.5 is\x07 not at least \\| 0.9 |" in lines
    assert "| pass | `model/accuracy` | 0.9123 | 0.9 | at least 0.9 |  |" in lines
    assert lines[-1] == "Alias `champion` is moved to this version once this summary is written."
    assert " against " not in markdown(Gate(checks, model="m/2"))
    assert "Alias" not in markdown(Gate(checks, model="m/2"))


def test_no_character_of_a_name_breaks_the_xml():
    """The hole: control characters and halves of pairs in a model's name or a reason."""
    odd = "m\x00\x0b\x1f\x7f\ud800\ufffe\uffff/2"
    gate = Gate((Check(f"model/{odd}", 0.5, odd, "fail", odd),), model=odd, policy="p")
    text = junit(gate)
    suite = ElementTree.fromstring(text.encode()).find("testsuite")
    assert suite.get("name") == "auditor gate m\x7f"
    assert suite.find("testcase/failure").get("message") == "m\x7f/2"


def test_names_stay_when_version_value_and_limit_change():
    """What a CI server shows over time: the same names, other numbers, and when each was."""
    suites = []
    for version, value, floor in (("1", 0.9, 0.5), ("2", 0.4, 0.625)):
        audit = audit_of({"model/accuracy": value})
        policy = policy_of({"model/accuracy": {"min": floor, "max": 1.5}})
        gate = replace(judge(audit, policy), model=f"birds/{version}")
        suites.append(ElementTree.fromstring(junit(gate, datetime(2026, 11, 18, 21, 5, tzinfo=timezone.utc))))
    names = [
        [(s.get("name"), c.get("classname"), c.get("name")) for s in r for c in s.iter("testcase")] for r in suites
    ]
    assert names[0] == names[1]
    assert [n for *_, n in names[0]] == ["accuracy at least", "accuracy at most"]
    (suite,) = suites[1]
    assert suite.get("timestamp") == "2026-11-18T21:05:00"
    assert {p.get("name"): p.get("value") for p in suite.iter("property")}["model"] == "birds/2"
    (failure,) = suite.iter("failure")
    assert failure.get("message") == "0.4 is not at least 0.625"
    assert "model/accuracy = 0.4, wanted at least 0.625" in failure.text


def test_the_time_of_another_zone_is_given_in_utc():
    when = datetime(2026, 11, 18, 23, 5, tzinfo=timezone(timedelta(hours=2)))
    text = junit(Gate((Check("pin/seed", math.nan, "seed 3", "pass"),)), when)
    assert 'timestamp="2026-11-18T21:05:00"' in text
    assert 'classname="pin" name="seed"' in text
