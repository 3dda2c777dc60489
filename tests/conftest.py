"""Shared pieces: a trained digits CNN, an embedded MLflow store with it registered, and the command line."""

from __future__ import annotations

import json
import logging
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
# workers of pytest-xdist share the cores; the processes that they start inherit this
os.environ.setdefault(
    "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))
)

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from auditor import Subject, open_data
from auditor.demo import train_digits
from tests import quick_export

quick_export.install()


@pytest.fixture(scope="session")
def trained():
    """The demo's subject and its accuracy."""
    return train_digits(0)


@pytest.fixture
def digits(trained) -> Subject:
    return trained[0]


@pytest.fixture(scope="session")
def digits_data():
    return open_data("sklearn:digits")


@pytest.fixture(scope="session")
def store(tmp_path_factory, trained):
    """An embedded MLflow store in a folder of its own with models:/digits/1 registered; returns its tracking URI."""
    import mlflow

    from auditor.plugins import log_subject

    folder = tmp_path_factory.mktemp("store")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    mlflow.MlflowClient().create_experiment("tests", artifact_location=(folder / "artifacts").as_uri())
    os.environ["AUDITOR_CACHE"] = str(folder / "cache")  # interrupted audits leave nothing in the user's own folder
    assert log_subject(trained[0], "digits", experiment="tests") == "models:/digits/1"
    return uri


@pytest.fixture
def registry(store):
    """The store as the current one."""
    import mlflow

    mlflow.set_tracking_uri(store)
    mlflow.set_registry_uri(store)
    return store


@pytest.fixture(scope="session")
def concepts(trained, digits_data):
    """A small nmf explainer fitted to the digits subject."""
    from auditor import fit

    return fit("nmf", trained[0], digits_data, rank=6, seed=0, refits=1, max_eval=60)


@pytest.fixture(scope="session")
def audited(trained, digits_data, concepts):
    """An audit of the digits subject and its concepts on thirty held-out images."""
    from auditor import AuditConfig, audit

    return audit(trained[0], digits_data, {"concepts": concepts}, AuditConfig(images=30))


@pytest.fixture(scope="session")
def gated(store, trained, concepts, tmp_path_factory):
    """models:/gated/1 with concepts, audited once at the terminal; gives its URI and the folder of what was written.

    The folder has the page r.html, the sealed audit a.json and what was printed, stdout.txt.
    """
    import mlflow

    from auditor import plugins

    mlflow.set_tracking_uri(store)
    mlflow.set_registry_uri(store)
    uri = plugins.log_subject(trained[0], "gated", experiment="tests")
    subject = plugins.load_subject(uri)
    if subject.identity.differences(concepts.identity_):
        raise AssertionError("a registered model has another digest than the one it was made from")
    plugins.attach(concepts, uri, "concepts", subject=subject)
    concepts.name = ""
    folder = tmp_path_factory.mktemp("audit")
    files = ["--report", folder / "r.html", "--out", folder / "a.json"]
    result = Cli()("audit", uri, "--data", "sklearn:digits?split=test", "--images", "20", *files)
    assert result.exit_code == 0, result.output
    (folder / "stdout.txt").write_text(result.stdout)
    return uri, folder


@pytest.fixture(scope="session")
def heads(trained, digits_data):
    """Barely trained explanation heads of the digits subject: true to their form, quick to make."""
    from auditor import fit

    return fit("xnn", trained[0], digits_data, seed=0, max_epochs=2, max_images=200)


@pytest.fixture
def images(digits_data, digits):
    return next(digits_data.batches(digits, 7)).images


@pytest.fixture(autouse=True)
def own_logging():
    """Commands set up logging for a process of their own; here other tests live in it.

    A fixture of a module or of the session may have run a command before the first test, so every test starts from
    a logger as it is after import.
    """
    logger = logging.getLogger("auditor")
    logger.handlers[:], logger.propagate = [], True
    logger.setLevel(logging.NOTSET)


class Cli:
    """Runs commands in this process; ``json`` parses standard output."""

    def __call__(self, *args: str):
        from auditor.cli import auditor

        return CliRunner().invoke(auditor, [str(a) for a in args], catch_exceptions=False)

    def json(self, *args: str):
        result = self(*args, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    def fails(self, *args: str) -> str:
        """The command must answer with one line on standard error and exit code 2; returns the line."""
        result = self(*args)
        assert result.exit_code == 2, result.output
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        assert len(lines) == 1, lines
        assert "Traceback" not in result.output
        return lines[0]


@pytest.fixture
def cli(registry) -> Cli:
    return Cli()


class Tiny(nn.Module):
    """A CNN with an uneven input (13 x 17), a linear head after pooling, and a signed layer."""

    def __init__(self, channels: int = 1, classes: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 5, 3, padding=1)
        self.relu = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(5, classes)

    def forward(self, x):
        return self.fc(self.pool(self.relu(self.conv(x))).flatten(1))


@pytest.fixture
def tiny() -> Subject:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Tiny()
    return Subject(net, input_shape=(1, 13, 17), class_names=["a", "b", "c"])


@pytest.fixture
def tiny_npz(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "tiny.npz"
    np.savez(path, images=rng.integers(0, 256, (40, 13, 17), dtype=np.uint8), labels=rng.integers(0, 3, 40))
    return path
