"""A pytest fixture that gates a registered model: ``def test_model(audit_gate): audit_gate("models:/m/3", …)``.

pytest imports this module in every project of an environment with mlflow-auditor, so its top stays light: torch and
mlflow load when a test first calls the fixture.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def audit_gate() -> Callable[..., Any]:
    """Return a function that fails the test unless the gate passes.

    ``audit_gate("models:/digits/2", policy="policy.toml", baseline="models:/digits@champion", data="sklearn:digits")``
    returns the verdict with all its checks. Bad input (a typo in the policy, stale data) is an error, never a pass.
    """

    def gate(model: str, policy: str | Path, **options: Any) -> Any:
        __tracebackhide__ = True
        from auditor.plugins import run_gate
        from auditor.reports.gate_summary import markdown

        verdict = run_gate(model, policy, **options)
        if verdict.verdict != "pass":
            pytest.fail(markdown(verdict), pytrace=False)
        return verdict

    return gate
