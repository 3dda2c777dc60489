"""Version page: what MLflow's own page of a version says to a person of its audit, verdict and explainers.

The description gets a section between two marks, which is written anew each time; what people wrote around it stays.
The tag ``auditor.verdict`` says the verdict in a few words. Both are for reading only: nothing here believes them.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from auditor.plugins.registry import tags
from auditor.plugins.registry.location import ModelVersion, resolve, set_tag

if TYPE_CHECKING:
    from auditor.auditing.record import Audit
    from auditor.plugins.registry.tags import AuditTag, GateTag

log = logging.getLogger(__name__)

BEGIN, END = "<!-- auditor: written by mlflow-auditor -->", "<!-- /auditor -->"
SECTION = re.compile(rf"\s*{re.escape(BEGIN)}.*?{re.escape(END)}\s*", re.DOTALL)
SHOWN = 5  # failed limits, findings
LONGEST = 4_000  # characters of the section; MLflow keeps 5,000 of a description


def without_section(description: str | None) -> str:
    r"""Return a description as people wrote it.

    >>> without_section(f"Birds.\n\n{BEGIN}\n**PASS**\n{END}")
    'Birds.'
    """
    return SECTION.sub("\n\n", description or "").strip()


def verdict_words(gate: GateTag | None, audit: AuditTag | None) -> str:
    """Return the verdict in a few words, for a tag.

    >>> verdict_words(tags.GateTag("pass", "2026-11-18T10:00:00", checks=12), None)
    'PASS: 12 of 12 checks hold, 2026-11-18'
    """
    if gate is not None and not gate.problem:
        held = gate.checks - len(gate.failed)
        return f"{gate.verdict.upper()}: {held} of {gate.checks} checks hold, {gate.time[:10]}"
    if audit is not None and not audit.problem:
        return f"no verdict yet; audited {audit.time[:10]}, {audit.n_metrics} metrics"
    return "no verdict, not audited"


def section(version: ModelVersion, audit: Audit | None = None) -> str:
    """Return the section of the description, in Markdown, from the version's tags and its latest audit."""
    gate, audited = tags.gate_tag(version.tags), tags.audit_tag(version.tags)
    lines = [f"**{verdict_words(gate, audited)}**"]
    if gate is not None and gate.failed and not gate.problem:
        more = f" and {len(gate.failed) - SHOWN} more" if len(gate.failed) > SHOWN else ""
        lines.append(f"Failed: {', '.join(f'`{name}`' for name in gate.failed[:SHOWN])}{more}.")
    lines += [f"- {sentence}" for sentence in _findings(audit)]
    explainers = [f"`{t.name}` ({t.kind}, attached {t.time[:10]})" for t in tags.explainer_tags(version.tags)]
    if explainers:
        lines.append(f"Explainers: {', '.join(explainers)}.")
    query = urlencode({"name": version.name, "version": version.version})
    links = [f"[Audits page](/auditor/version?{query})"]
    if audited is not None and not audited.problem:
        links.append(f"[report](/auditor/report?{query})")
        if version.model_id:
            files = f"/#/experiments/{version.experiment_id}/models/{version.model_id}/artifacts"
            links.append(f"[files]({files}) (`{audited.location}/report.html`)")
    lines.append(" · ".join(links) + " (page and report where the server runs with `--app-name auditor`)")
    return f"{BEGIN}\n" + "\n\n".join(lines)[:LONGEST] + f"\n{END}"


def update(version: ModelVersion, audit: Audit | None = None) -> None:
    """Write tag and section anew; what MLflow refuses is a warning, since what they are about is committed already."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    try:
        client, current = MlflowClient(), resolve(version.label, registered=True)
        set_tag(current, tags.VERDICT, verdict_words(tags.gate_tag(current.tags), tags.audit_tag(current.tags)))
        before = client.get_model_version(current.name, current.version).description or ""
        own_words = without_section(before)
        text = f"{own_words}\n\n{section(current, audit)}".strip()
        if text != before:
            client.update_model_version(current.name, current.version, text)
    except MlflowException as error:
        log.warning("the page of %s in MLflow was not updated: %s", version.label, " ".join(str(error).split())[:160])


def _findings(audit: Audit | None) -> list[str]:
    """Return the sentences of what an audit found that its classes hang on."""
    reliance: dict[str, Any] = (audit.reliance if audit is not None else None) or {}
    sentences = [str(f.get("sentence", "")) for f in reliance.get("findings", ()) if isinstance(f, dict)]
    return [sentence for sentence in sentences if sentence][:SHOWN]
