"""``auditor doctor``: what this machine has, and whether it works."""

from __future__ import annotations

import sys

from auditor.commands.group import JSON, auditor, example, reports_errors


@auditor.command(epilog=example("auditor doctor", "auditor doctor --json"))
@JSON
@reports_errors("nothing was changed")
def doctor(as_json: bool) -> None:
    """Say what this machine has, and try each part: CPU, GPU, kernels, ONNX, Ray, browser, the MLflow registry.

    Exit code 2 where something is there and does not work; what is absent is no fault.
    """
    from auditor.commands.machine_checks import as_rows, exit_code, run_checks
    from auditor.commands.terminal import as_text, say, table, waiting

    with waiting("trying each part"):
        checks = run_checks()
    if as_json:
        say(as_text(as_rows(checks)))
    else:
        table(["part", "", "what it says"], [[c.name, c.status, c.sentence] for c in checks])
    sys.exit(exit_code(checks))
