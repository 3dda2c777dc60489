"""The ``auditor`` command: the one place that puts all parts together."""

from __future__ import annotations

import os

from auditor.commands import audits, compare, curves, demo, explain, explainers, model, serve, xnn
from auditor.commands.group import auditor

__all__ = ["auditor", "audits", "compare", "curves", "demo", "explain", "explainers", "main", "model", "serve", "xnn"]


def main() -> None:
    """Run the command line."""
    # Threads that spin while waiting make everything crawl when cores are shared; set before torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    auditor(prog_name="auditor")
