"""``auditor train``: small networks and registered ones, constraints, what is registered, bad input."""

import json

import pytest
import torch

pytestmark = pytest.mark.usefixtures("registry")
SMALL = ("--data", "sklearn:digits", "--limit", "200")


def test_a_small_network_is_trained_and_registered_with_its_curves(cli, tmp_path):
    from mlflow import MlflowClient

    from auditor.plugins import load_subject
    from auditor.plugins.registry.location import resolve

    out = tmp_path / "t.png"
    result = cli.json("train", "mlp:24", *SMALL, "--epochs", "9", "--seeds", "2", "--optimizer", "adam",
                      "--set", "loss=cross_entropy", "--register", "--name", "trained_mlp", "--out", out)  # fmt: skip
    assert result["registered"] == "models:/trained_mlp/1"
    assert len(result["curves"]) == 2
    assert all(len(curve["accuracy"]) == 9 for curve in result["curves"])
    assert result["accuracy"][0] > 0.5
    assert out.read_bytes()[:4] == b"\x89PNG"
    lineage = json.loads(resolve(result["registered"]).tags["auditor.lineage"])
    assert "mlp:24 trained by adam on sklearn:digits, 200 images, 9 epochs, seeds 0 to 1" in lineage["change"]
    run = lineage["change"].rpartition(" ")[2]
    client = MlflowClient()
    logged = [m.value for m in client.get_metric_history(run, "accuracy/seed_1")]
    assert logged == pytest.approx(result["curves"][1]["accuracy"])
    assert [a.path for a in client.list_artifacts(run)] == ["t.png"]
    made = load_subject(result["registered"])
    assert made.input_shape == (1, 8, 8)
    assert made.class_names == tuple(str(i) for i in range(10))


def test_orthonormal_rows_hold_in_what_is_registered(cli, tmp_path):
    from auditor.plugins import load_subject

    result = cli.json("train", "mlp:16,12", *SMALL, "--epochs", "3", "--optimizer", "dladmm", "--register",
                      "--constraint", "orthonormal-rows", "--name", "trained_rows",
                      "--out", tmp_path / "t.png")  # fmt: skip
    made = load_subject(result["registered"])
    matrices = [p.detach() for p in made.module.parameters() if p.ndim == 2]
    assert [tuple(W.shape) for W in matrices] == [(16, 64), (12, 16), (10, 12)]
    for W in matrices[:-1]:
        torch.testing.assert_close(W @ W.T, torch.eye(len(W)), rtol=0, atol=1e-5)
    assert float((matrices[-1] @ matrices[-1].T - torch.eye(10)).abs().max()) > 1e-2  # not asked for there


def test_a_registered_model_is_trained_in_blocks_and_gets_a_new_version(cli, trained, tmp_path):
    from auditor.plugins import load_subject, log_subject
    from auditor.plugins.registry.location import resolve

    uri = log_subject(trained[0], "to_train", experiment="tests")
    source = load_subject(uri)
    result = cli.json("train", uri, *SMALL, "--epochs", "1", "--optimizer", "block-admm", "--cuts", "features",
                      "--register", "--out", tmp_path / "t.png")  # fmt: skip
    assert result["registered"] == "models:/to_train/2"
    made = load_subject(result["registered"])
    assert made.digest != source.digest
    assert made.class_names == source.class_names
    assert result["accuracy"][0] > 0.8
    lineage = json.loads(resolve(result["registered"]).tags["auditor.lineage"])
    assert (lineage["source"], lineage["source_digest"]) == (uri, source.digest)
    assert lineage["change"].startswith("cut at features, trained by block-admm on")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("mlp:0", *SMALL), "mlp wants the widths"),
        (("nosuch", *SMALL), "want a registered model (models:/name/1) or an architecture"),
        (("mlp:8", *SMALL, "--optimizer", "nosuch"), "optimizer 'nosuch' is not known"),
        (("mlp:8", *SMALL, "--constraint", "unit-rows"), "is held by optimizer dladmm, got block-admm"),
        (("mlp:8", *SMALL, "--optimizer", "dladmm", "--constraint", "round"), "optimizer dladmm: constraint"),
        (("mlp:96", *SMALL, "--optimizer", "dladmm", "--constraint", "orthonormal-rows"), "96 rows of 64 weights"),
        (("mlp:8", *SMALL, "--cuts", "a"), "--cuts are of a registered model"),
        (("mlp:8", *SMALL, "--set", "lr=-1"), "optimizer block-admm: lr"),
        (("cnn", *SMALL, "--optimizer", "dladmm"), "block 1 must be a Linear"),
        (("mlp:8", "--data", "/no/such"), "no such file or folder"),
    ],
)
def test_bad_input_is_one_line(cli, options, sentence):
    assert sentence in cli.fails("train", *options)


def test_cuts_of_a_registered_model_are_refused_before_reading_images(cli, scratch):
    line = cli.fails("train", scratch, "--data", "/no/such", "--cuts", "features,features")
    assert "give the same output" in line
