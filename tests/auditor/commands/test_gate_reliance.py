"""From training to the gate: an honest retraining passes the drafted policy, a model that reads a mark fails it."""

from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from auditor import Subject
from auditor.plugins import log_subject

SIDE = 32
CHECKS = ("--checks", "performance,reliance")


def pictures(n, seed, marks):
    """A ring or a cross, large, anywhere, in any colour; ``marks``: who carries the mark (own class, any, none)."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:SIDE, :SIDE]
    images, labels = 0.35 * rng.random((n, SIDE, SIDE, 3)), np.arange(n) % 2
    for i, k in enumerate(labels if marks != "swapped" else 1 - labels):
        cy, cx, r = rng.integers(12, 20), rng.integers(12, 20), rng.integers(8, 11)
        shape = labels[i] if marks != "only" else rng.integers(2)
        far = np.hypot(y - cy, x - cx)
        ring = (far < r) & (far > r - 3)
        cross = (np.minimum(abs(y - cy), abs(x - cx)) < 2) & (far < r)
        images[i][ring if shape == 0 else cross] = 0.5 + 0.5 * rng.random(3)
        if marks != "none" and k == 1:
            images[i, 2:7, 24:30] = (0.1, 0.9, 0.2)
            images[i, 3:6, 25:29:2] = (0.9, 0.1, 0.9)
    return images.astype(np.float32), labels


def trained_on(marks, seed):
    torch.manual_seed(seed)
    images, labels = pictures(400, seed + 10, marks)
    net = nn.Sequential(
        *(nn.Conv2d(3, 12, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(12, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 24, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 2)),
    )
    x, y = torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(labels)
    optimizer = torch.optim.Adam(net.parameters(), lr=4e-3)
    for _ in range(12):
        for rows in torch.split(torch.randperm(len(x)), 32):
            optimizer.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
    return Subject(net.eval(), input_shape=(3, SIDE, SIDE), class_names=["ring", "cross"])


@pytest.fixture(scope="module")
def versions(store, tmp_path_factory):
    """Three versions of one model: honest, honest with another seed, and one that learned the mark; and their data."""
    import mlflow

    mlflow.set_tracking_uri(store)
    mlflow.set_registry_uri(store)
    subjects = [trained_on("none", 0), trained_on("none", 1), trained_on("only", 2)]
    images, labels = pictures(80, 99, "own")
    path = tmp_path_factory.mktemp("marked") / "marked.npz"
    np.savez(path, images=images, labels=labels)
    return [log_subject(s, "marked", experiment="tests") for s in subjects], path


@pytest.fixture(scope="module")
def audited_versions(versions):
    from tests.conftest import Cli

    uris, data = versions
    audits = [Cli().json("audit", uri, "--data", data, "--images", "20", *CHECKS) for uri in uris]
    return uris, data, audits


def test_the_model_that_reads_the_mark_is_found_and_the_honest_ones_are_not(audited_versions):
    _, _, audits = audited_versions
    found = [a["metrics"]["model/reliance/found"]["value"] for a in audits]
    assert found[:2] == [0, 0]
    assert found[2] >= 1
    assert all(a["metrics"]["model/accuracy"]["value"] > 0.9 for a in audits)  # accuracy says nothing of it
    assert audits[2]["verdict"]["headline"].startswith("Do not rely on this model yet: class")
    assert all(a["reliance"]["passes_per_image"] <= 60 for a in audits)


def test_the_drafted_policy_lets_the_retraining_pass_and_names_what_the_mark_breaks(cli, audited_versions, tmp_path):
    uris, _, _ = audited_versions
    policy = tmp_path / "policy.toml"
    policy.write_text(cli("policy", "init", uris[0]).stdout)
    assert '[limits."model/reliance/found"]' in policy.read_text()
    assert cli("gate", uris[1], "--policy", policy, "--junit", tmp_path / "honest.xml").exit_code == 0
    result = cli("gate", uris[2], "--policy", policy, "--junit", tmp_path / "mark.xml")
    assert result.exit_code == 1
    assert "model/reliance/found" in result.stdout
    failed = {
        f"{case.get('classname')}.{case.get('name')}".partition(" ")[0].replace(".", "/")
        for case in ElementTree.parse(tmp_path / "mark.xml").getroot().iter("testcase")
        if case.find("failure") is not None
    }
    assert {"model/reliance/found", "model/reliance/worst/score"} <= failed
    assert all(name.startswith("model/reliance/") for name in failed)  # and by nothing else


@pytest.mark.slow
def test_compare_shows_both_versions_regions_and_whose_reliance_rose(cli, audited_versions, tmp_path):
    uris, data, _ = audited_versions
    answer = cli.json(
        *("compare", uris[0], uris[2], "--data", data, "--refits", "5", "--rank", "4"), "--report", tmp_path / "d.html"
    )
    rises = {c["class"]: c["verdict"] for c in answer["changes"]["reliance"]}
    assert any(after == "found" for _, after in rises.values())
    assert not any(before == "found" for before, _ in rises.values())
    assert answer["changes"]["regions"]["overlap"] < 0.9
    page = (tmp_path / "d.html").read_text()
    assert page.count("<img") >= 8
    assert "of each of 2 classes" in answer["changes"]["regions"]["images"]
