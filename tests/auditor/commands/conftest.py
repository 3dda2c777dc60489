"""What the tests of the commands share: versions with explainers attached, and one image file."""

from __future__ import annotations

import mlflow
import pytest
from PIL import Image

from auditor.plugins import attach, load_subject, log_subject


@pytest.fixture(scope="session")
def shown(store, trained, concepts, heads):
    """models:/shown/1 with ``concepts`` (nmf) and ``heads`` (xnn) attached; for commands that change nothing."""
    mlflow.set_tracking_uri(store)
    mlflow.set_registry_uri(store)
    uri = log_subject(trained[0], "shown", experiment="tests")
    subject = load_subject(uri)
    attach(concepts, uri, "concepts", subject=subject)
    attach(heads, uri, "heads", subject=subject, attach_anyway=True)
    concepts.name = heads.name = ""
    return uri


@pytest.fixture
def scratch(registry, trained, concepts):
    """A version of its own with ``concepts`` attached; for commands that change it."""
    uri = log_subject(trained[0], "scratch", experiment="tests")
    attach(concepts, uri, "concepts", subject=load_subject(uri))
    concepts.name = ""
    return uri


@pytest.fixture
def seven(tmp_path, digits_data, digits):
    """A seven of the digits as a PNG file."""
    batch = next(digits_data.batches(digits, 64))
    row = int((batch.labels == 7).nonzero()[0, 0])
    Image.fromarray((batch.images[row, 0].numpy() * 255).astype("uint8")).save(tmp_path / "seven.png")
    return tmp_path / "seven.png"


@pytest.fixture
def policy(cli, gated, tmp_path):
    """A policy drafted from the audit of ``gated``."""
    (tmp_path / "policy.toml").write_text(cli("policy", "init", gated[0]).stdout)
    return tmp_path / "policy.toml"


@pytest.fixture(scope="session")
def strokes(tmp_path_factory):
    """Sixty digits held out of the concepts, in folders that are no classes of the model: mixed, round, straight."""
    from sklearn.datasets import load_digits

    digits, root = load_digits(), tmp_path_factory.mktemp("strokes")
    folder_of = dict.fromkeys((0, 6, 8, 9), "round") | dict.fromkeys((1, 4, 7), "straight")
    for i in range(4, 300, 5):
        folder = root / folder_of.get(int(digits.target[i]), "mixed")
        folder.mkdir(exist_ok=True)
        Image.fromarray((digits.images[i] * 15.9).astype("uint8")).save(folder / f"{i}.png")
    return root
