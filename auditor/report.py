"""Report: an audit as one self-contained HTML page that a person without special knowledge can read."""

from __future__ import annotations

import html
from pathlib import Path

from auditor.audit import Audit
from auditor.gate import label_of
from auditor.metric_names import words


def write_report(audit: Audit, path: str | Path) -> Path:
    """Write the page and return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report_html(audit), encoding="utf-8")
    return path


def report_html(audit: Audit) -> str:
    """Return the page as one HTML document."""
    rows = "".join(
        f"<tr><td>{html.escape(name)}<td>{html.escape(words(name)[1])}<td>{m.value:.4g}<td>{html.escape(m.reason)}"
        for name, m in audit.metrics.items()
    )
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>Audit of {html.escape(label_of(audit))}</title>"
        f"<h1>Audit of {html.escape(label_of(audit))}</h1><table>{rows}</table></html>\n"
    )
