"""The pytest fixture that gates a registered model."""

import subprocess
import sys

import pytest

from auditor.errors import ModelError, OptionError
from auditor.plugins.pytest_plugin import audit_gate  # noqa: F401


@pytest.fixture
def policy(tmp_path):
    """Writes a policy and gives its path."""

    def write(text: str):
        (tmp_path / "policy.toml").write_text(text)
        return tmp_path / "policy.toml"

    return write


def test_the_fixture_passes_fails_and_refuses(registry, gated, policy, audit_gate):  # noqa: F811
    uri = gated[0]
    verdict = audit_gate(uri, policy('[limits."model/accuracy"]\nmin = 0.5\n'))
    assert (verdict.verdict, [c.metric for c in verdict.checks]) == ("pass", ["model/accuracy"])
    with pytest.raises(pytest.fail.Exception, match="Gate: FAIL"):
        audit_gate(uri, policy('[limits."model/accuracy"]\nmin = 1.01\n'))
    with pytest.raises(OptionError, match="no audit gives a metric called 'model/no_such_metric'"):
        audit_gate(uri, policy('[limits."model/no_such_metric"]\nmin = 0.0\n'))
    with pytest.raises(OptionError, match="sets no limits"):
        audit_gate(uri, policy(""))
    with pytest.raises(ModelError, match="no registered model"):
        audit_gate("models:/nosuch/1", policy('[limits."model/accuracy"]\nmin = 0.5\n'))


def test_the_pytest_plugin_is_light():
    heavy = "{'torch', 'mlflow', 'numpy', 'pydantic'}"
    code = f"import sys, auditor.plugins.pytest_plugin; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
