"""A gate's verdict for others to read: JUnit XML for CI, Markdown for a summary."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from auditor.release.gate import Check, Gate, passed

FORBIDDEN = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(gate: Gate) -> str:
    """Return JUnit XML: one test suite, one test case per check."""
    failures = len(gate.checks) - passed(gate.checks)
    root = ElementTree.Element("testsuites", name="auditor gate", tests=str(len(gate.checks)), failures=str(failures))
    suite = ElementTree.SubElement(
        root, "testsuite", name=_xml(f"auditor gate {gate.model}"), tests=str(len(gate.checks)), failures=str(failures),
        errors="0", skipped="0",
    )  # fmt: skip
    for check in gate.checks:
        group = check.metric.rpartition("/")[0].replace("/", ".") or "gate"
        case = ElementTree.SubElement(suite, "testcase", classname=_xml(group), name=_xml(_title(check)), time="0")
        if check.verdict == "fail":
            ElementTree.SubElement(case, "failure", message=_xml(check.reason), type="limit").text = _xml(check.reason)
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
    return f"{check.metric.rpartition('/')[2]} {check.limit}"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _xml(text: str) -> str:
    """Return the text without characters that XML 1.0 forbids: controls, halves of pairs, and two non-characters."""
    return FORBIDDEN.sub("", text)
