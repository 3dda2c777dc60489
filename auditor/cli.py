"""The ``auditor`` command: the one place that puts all parts together."""

from __future__ import annotations

import os

from auditor.commands import (  # noqa: F401, each registers its command
    audit,
    compare,
    compare_maps,
    concepts,
    curves,
    demo,
    describe,
    detach,
    doctor,
    explain,
    explain_all,
    export,
    fidelity,
    fit,
    gate,
    keys,
    kinds,
    label,
    layers,
    list,
    log,
    policy,
    revise,
    serve,
    sign,
    study,
    study_results,
    tcav,
    train,
    verify,
    xnn_sheet,
    xnn_table,
)
from auditor.commands.group import auditor

__all__ = ["auditor", "main"]


def main() -> None:
    """Run the command line."""
    # Threads that spin while waiting make everything crawl when cores are shared; set before torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # MLflow prints the address of every run to standard output, where --json has its document.
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    auditor(prog_name="auditor")
