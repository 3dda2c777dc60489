"""MLflow as a platform team runs it: a server over HTTP, artifacts in S3.

.venv/bin/python -m pytest tests/auditor/commands/test_production_mlflow.py -m slow
"""

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout

import mlflow
import pytest

from auditor.cli import main
from tests.free_port import free_port
from tests.plugins.server import mlflow_server
from tests.stores import s3, s3_server  # noqa: F401  (fixtures)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
DATA = ("--data", "sklearn:digits", "--limit", "60")


@pytest.fixture
def version(s3, cli, trained, concepts, tmp_path):  # noqa: F811
    """models:/digits/1 with ``concepts``, on a server; its artifacts go straight to the bucket."""
    from auditor.plugins import attach, load_subject, log_subject

    before = mlflow.get_tracking_uri(), mlflow.get_registry_uri()
    options = ("--no-serve-artifacts", "--default-artifact-root", "s3://photos/mlflow")
    with mlflow_server(tmp_path, *options) as address:
        mlflow.set_tracking_uri(address)
        mlflow.set_registry_uri(address)
        try:
            uri = log_subject(trained[0], "digits", experiment="production")
            attach(concepts, uri, "concepts", subject=load_subject(uri))
            concepts.name = ""
            yield uri
        finally:
            mlflow.set_tracking_uri(before[0])
            mlflow.set_registry_uri(before[1])


def ended(monkeypatch, *arguments):
    """Run the program as its entry point does; return its exit code and standard output."""
    monkeypatch.setattr(sys, "argv", ["auditor", *map(str, arguments)])
    with redirect_stdout(io.StringIO()) as stdout, pytest.raises(SystemExit) as stopped:
        main()
    return stopped.value.code or 0, stdout.getvalue()


def test_standard_output_is_json_alone(cli, version, tmp_path, seven, monkeypatch):
    policy, audit = tmp_path / "policy.toml", (*DATA[:2], "--checks", "performance")
    commands = [
        ("layers", version),
        ("fit", "nmf", version, *DATA, "--name", "more", "--set", "rank=3", "--set", "refits=1"),
        ("list", version),
        ("explain", version, seven, "--explainers", "concepts", "--stability", "off"),
        ("audit", version, *audit),
        ("gate", version, "--policy", policy),
        ("compare", version, version, *DATA),
        ("explain-all", version, *DATA, "--out", tmp_path / "all", "--stability", "off"),
        ("verify", version),
        ("detach", version, "more"),
    ]
    for command in commands:
        if command[0] == "gate":
            policy.write_text('schema_version = 1\n[limits."model/accuracy"]\nmin = 0.1\n')
        code, stdout = ended(monkeypatch, *command, "--json")
        assert code in ((0, 1) if command[0] == "gate" else (0,)), command
        json.loads(stdout)  # nothing but the result


def test_a_dead_store_is_no_verdict(version, tmp_path):
    """In processes of their own: a client of S3 that is kept from before would hide the dead endpoint."""
    policy = tmp_path / "policy.toml"
    policy.write_text('schema_version = 1\n[limits."model/accuracy"]\nmin = 0.1\n')
    address = mlflow.get_tracking_uri()
    tracking = {**os.environ, "MLFLOW_TRACKING_URI": address, "MLFLOW_REGISTRY_URI": address}
    run = [sys.executable, "-c", "from auditor.cli import main; main()"]
    audited = subprocess.run(
        [*run, "audit", version, *DATA[:2], "--checks", "performance"],
        env=tracking, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert audited.returncode == 0, audited.stderr
    dead = f"http://127.0.0.1:{free_port()}"
    faults = {
        "endpoint": {"MLFLOW_S3_ENDPOINT_URL": dead, "AWS_ENDPOINT_URL": dead, "AWS_MAX_ATTEMPTS": "1"},
        "key": {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_EC2_METADATA_DISABLED": "true"},
    }
    for what, fault in faults.items():
        environment = {**tracking, **fault, "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none")}
        for command in (("gate", version, "--policy", policy), ("list", version), ("verify", version)):
            said = subprocess.run(
                [*run, *map(str, command)], env=environment, capture_output=True, text=True, check=False
            )
            assert said.returncode == 2, (what, command, said.stdout, said.stderr)
            assert said.stderr.count("\n") == 1, (what, command, said.stderr)
            assert "Traceback" not in said.stderr
