"""The steps of docs/adding-a-metric.md, as they are printed there."""

import math
import re
from pathlib import Path

import pytest

from auditor import AuditConfig, audit
from auditor.auditing import audit as audit_module
from auditor.auditing import explanation_quality
from auditor.metrics import names

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-metric.md"


@pytest.fixture(scope="module")
def steps():
    """What the code blocks of the page define, run from top to bottom."""
    namespace: dict = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S):
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), namespace)
    return namespace


def test_the_number_counts_equal_concepts(steps):
    effective_concepts = steps["effective_concepts"]
    assert effective_concepts([3.0]) == 1
    assert effective_concepts([0.5, -0.5, 0.5, 0.0]) == pytest.approx(3)
    assert effective_concepts([8.0, -2.0]) == pytest.approx(effective_concepts([4.0, 1.0]))
    assert 1 < effective_concepts([8.0, -2.0]) < 2
    assert math.isnan(effective_concepts([0.0, 0.0]))


def test_the_audit_measures_it_and_a_policy_may_limit_it(steps, trained, digits_data, concepts, monkeypatch):
    monkeypatch.setattr(audit_module, "GROUPS", {"breadth": steps["added"]["breadth"]})
    monkeypatch.setattr(explanation_quality, "GROUPS", steps["added"])
    monkeypatch.setattr(names, "EXPLAINER", steps["names"])
    monkeypatch.setattr(names, "WORDS", steps["words"])
    result = audit(trained[0], digits_data, {"concepts": concepts}, AuditConfig(images=20, layers=False))
    measure = result.metrics["explainer/concepts/effective_concepts"]
    assert measure.status == "passed"
    assert 1 <= measure.low <= measure.value <= measure.high <= measure.null == 6
    assert names.can_exist("explainer/concepts/effective_concepts", ["concepts"])
    assert names.words("explainer/concepts/effective_concepts")[0] == "concepts used"
