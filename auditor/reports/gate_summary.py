"""A gate's verdict for others to read: JUnit XML for CI, Markdown for a summary."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from xml.etree import ElementTree

from auditor.release.gate import Check, Gate, passed

NUMBER = re.compile(r"\s*[-+]?\.?\d|\s*[-+]?(?:nan|inf)\b")
FORBIDDEN = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(gate: Gate, when: datetime | None = None) -> str:
    """Return JUnit XML: one test suite per model, one test case per check, with names that stay.

    Names hold no version, value or limit, so that a CI server follows a check from run to run; what was judged and by
    which policy are properties of the suite. ``when`` is its time stamp, in UTC; now, where it is left out.
    """
    when = (when or datetime.now(timezone.utc)).astimezone(timezone.utc)
    total, failures = str(len(gate.checks)), str(len(gate.checks) - passed(gate.checks))
    name = gate.model.rpartition("/")[0] or gate.model
    root = ElementTree.Element("testsuites", name="auditor gate", tests=total, failures=failures, errors="0", time="0")
    suite = ElementTree.SubElement(
        root, "testsuite", name=_xml(f"auditor gate {name}".strip()), tests=total, failures=failures, errors="0",
        skipped="0", time="0", timestamp=when.strftime("%Y-%m-%dT%H:%M:%S"), hostname="auditor",
    )  # fmt: skip
    properties = ElementTree.SubElement(suite, "properties")
    for key in ("model", "baseline", "policy", "policy_digest", "audit_digest"):
        if value := getattr(gate, key):
            ElementTree.SubElement(properties, "property", name=key, value=_xml(value))
    for check in gate.checks:
        group = check.metric.rpartition("/")[0].replace("/", ".") or "gate"
        case = ElementTree.SubElement(suite, "testcase", classname=_xml(group), name=_xml(_title(check)), time="0")
        if check.verdict == "fail":
            details = f"{check.metric} = {check.value:.6g}, wanted {check.limit}\n{check.reason}"
            ElementTree.SubElement(case, "failure", message=_xml(check.reason), type="limit").text = _xml(details)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def markdown(gate: Gate) -> str:
    """Return a summary with the failed checks first."""
    total, good = len(gate.checks), passed(gate.checks)
    against = f" against `{gate.baseline}`" if gate.baseline else ""
    lines = [
        f"## Gate: {gate.verdict.upper()}",
        "",
        f"`{gate.model}`{against}: {good} of {total} checks pass (policy `{gate.policy}`, {gate.policy_digest[:12]}).",
        "",
        "| | metric | value | baseline | limit | reason |",
        "|---|---|---:|---:|---|---|",
    ]
    for check in sorted(gate.checks, key=lambda c: c.verdict == "pass"):
        base = "" if check.baseline is None else f"{check.baseline:.4g}"
        mark = "pass" if check.verdict == "pass" else "**FAIL**"
        cells = (mark, f"`{check.metric}`", f"{check.value:.4g}", base, check.limit, check.reason)
        lines.append("| " + " | ".join(_cell(c) for c in cells) + " |")
    if gate.promoted:
        lines += ["", f"Alias `{gate.promoted}` is moved to this version once this summary is written."]
    return "\n".join(lines) + "\n"


def _title(check: Check) -> str:
    """Return a check's name without numbers: what is measured, and which way it is limited."""
    measured = check.metric.rpartition("/")[2]
    if check.metric.startswith(("pin/", "signer/")):
        return measured
    return f"{measured} {NUMBER.split(check.limit)[0]}".strip()


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _xml(text: str) -> str:
    """Return the text without characters that XML 1.0 forbids: controls, halves of pairs, and two non-characters."""
    return FORBIDDEN.sub("", text)
