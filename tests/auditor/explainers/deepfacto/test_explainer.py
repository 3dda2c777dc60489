"""Kind deepfacto: the updates against closed forms and scipy, the fit on digits, the identity, the artifact."""

import numpy as np
import pytest
import torch
from scipy.optimize import nnls

from auditor import fit, open_data
from auditor.errors import DataError, LayerError, OptionError
from auditor.explainers.base import Explainer
from auditor.explainers.deepfacto.factor_admm import Task
from auditor.explainers.deepfacto.forms import chosen_side
from auditor.metrics.attribute_probe import (
    labels_as_attributes,
    pooled_features,
    principal_scores,
    probe_accuracy,
    read_attributes,
)
from auditor.network.below_layer import BelowLayer
from auditor.subject.layers import layout_of

FORMS = {
    "linear": {"head": "linear", "epochs": 4},
    "blocks": {"epochs": 3, "copies": 1, "warm_passes": 6, "patience": 9},
}


@pytest.fixture(scope="session", params=FORMS)
def factors(request, trained, digits_data):
    """A small deepfacto explainer of each form, fitted to the digits subject."""
    return fit("deepfacto", trained[0], digits_data, rank=8, refits=0, seed=0, **FORMS[request.param])


def test_scores_of_an_image_are_nnls_column_by_column(factors, digits, images):
    cut = BelowLayer(digits, factors.layer_, factors.weights_)
    with torch.no_grad():
        f = cut(images[:2])
    S = factors.scores(f)
    M = factors.M_.double().numpy()
    for i in range(2):
        for p in range(f.shape[2]):
            want = nnls(M, f[i, :, p].double().numpy() / factors.scale_)[0]
            np.testing.assert_allclose(S[i, :, p], want, atol=1e-5 * max(1.0, want.max()))
    # the explanation's heatmaps are these scores
    maps = torch.stack([c.heatmap for c in factors.explain(digits, images[:1])[0].concepts]).flatten(1)
    torch.testing.assert_close(maps, S[0])


def test_fine_tuning_keeps_the_accuracy_and_lowers_the_error(factors):
    m = factors.metrics
    assert m["accuracy"] > 0.93  # rank 8 and four passes only
    assert m["accuracy"] > m["accuracy_warm"] - 0.015  # the pass was chosen on other images than these 359
    assert m["accuracy"] > m["accuracy_before"] - 0.03
    assert m["relative_error"] < m["relative_error_warm"] < 0.5
    assert m["probe_deepfacto"] > m["probe_majority"] + 0.5
    assert m["export_error"] < 1e-3
    assert m["probe_deepfacto"] > m["probe_nmf"]
    assert set(m) >= {"accuracy_before", "f_cls", "f_reg", "sparsity", "probe_nmf", "probe_pca", "reseeded"}


@pytest.mark.parametrize("target", [None, "7"])
def test_contributions_add_up_to_the_models_own_logit(factors, digits, images, target):
    with torch.no_grad():
        logits, factorized = digits.logits(images), factors.logits(digits, images)
    for i, e in enumerate(factors.explain(digits, images, target)):
        assert e.gap() < 1e-4
        assert e.extra["integration_error"] < 0.02 * abs(float(logits[i].abs().max()))
        assert e.target_value == pytest.approx(float(logits[i, e.target.index]), rel=1e-5)
        # the residual is the difference between the two networks, measured on its own
        assert e.residual == pytest.approx(float(logits[i, e.target.index] - factorized[i, e.target.index]), abs=1e-3)


def test_the_model_is_as_it_was(factors, digits, images):
    before = digits.logits(images)
    factors.explain(digits, images)
    with factors.network(digits) as other:
        assert not torch.equal(other.logits(images), before)
    torch.testing.assert_close(digits.logits(images), before, rtol=0, atol=0)
    assert not any(m._forward_hooks for m in digits.module.modules())


def test_save_and_load_is_identity(factors, digits, images, tmp_path):
    digest = factors.save(tmp_path / "a")
    loaded = Explainer.load(tmp_path / "a", digits)
    assert loaded.save(tmp_path / "b") == digest
    a, b = factors.explain(digits, images)[0], loaded.explain(digits, images)[0]
    assert {**a.to_json(), "name": ""} == {**b.to_json(), "name": ""}


def test_bad_input_is_one_sentence(digits, digits_data, tiny, tiny_npz, tmp_path):
    with pytest.raises(LayerError, match=r"layer 'conv' gives negative values.*such as 'relu'"):
        fit("deepfacto", tiny, open_data(tiny_npz), layer="conv")
    with pytest.raises(OptionError, match="at most the 5 channels of layer 'relu', got 6"):
        fit("deepfacto", tiny, open_data(tiny_npz), layer="relu", rank=6)
    for head in ("blocks", "linear"):
        with pytest.raises(OptionError, match=r"need \d+\.\d MiB and 1\.0 MiB are free"):
            fit("deepfacto", digits, digits_data, memory_limit=1e-3, head=head)
    with pytest.raises(LayerError, match="runs before"):
        fit("deepfacto", digits, digits_data, layer="features.1", trained_from="features.4")
    np.savez(tmp_path / "one.npz", images=np.zeros((12, 13, 17), np.uint8), labels=np.ones(12, int))
    with pytest.raises(DataError, match="every image is labelled 'b'"):
        fit("deepfacto", tiny, open_data(tmp_path / "one.npz"), layer="relu")


@pytest.mark.slow
@pytest.mark.parametrize("head", ["blocks", "linear"])
def test_an_exported_model_is_factorized_and_its_network_registered(cli, trained, images, head):
    """From pt2 only the graph is known; the new version answers as the explainer does and names its source."""
    import json

    from auditor.plugins import load, load_subject, log_subject
    from auditor.plugins.registry.location import resolve

    uri = log_subject(trained[0], f"to_factorize_{head}", experiment="tests")
    options = [f"--set={text}" for text in ("rank=3", "epochs=1", "refits=0")]
    line = cli.fails("fit", "nmf", uri, "--data", "sklearn:digits", "--register")
    assert "kind nmf makes no network of its own" in line
    answer = cli.json(
        "fit",
        "deepfacto",
        uri,
        "--data",
        "sklearn:digits",
        "--limit",
        "200",
        "--register",
        "--name",
        "f",
        "--attach-anyway",
        f"--set=head={head}",
        *options,
    )
    assert answer["registered"] == f"models:/to_factorize_{head}/2"
    source = load_subject(uri)
    explainer = load(uri, "f", subject=source)
    made = load_subject(answer["registered"])
    with torch.no_grad():
        exact, unrolled = explainer.logits(source, images), made.logits(images)
    torch.testing.assert_close(unrolled, exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max()))
    assert made.class_names == source.class_names
    lineage = json.loads(resolve(answer["registered"]).tags["auditor.lineage"])
    assert lineage["source"] == uri
    assert lineage["source_digest"] == source.digest
    assert lineage["explainer_digest"] == answer["digest"]
    assert source.digest != made.digest


def test_layers_are_found_with_gradients_off(trained):
    from auditor import Subject

    with torch.no_grad():
        fresh = Subject(trained[0].module, input_shape=(1, 8, 8))
        assert fresh.layout("features").channels == 64


def test_the_head_reads_positions_only_where_positions_matter():
    g = torch.Generator().manual_seed(6)
    layout, n = layout_of((2, 4, 4), (8, 8)), 200
    y = torch.arange(n) % 2
    noise = 0.1 * torch.rand(n, 2, 16, generator=g)
    task = Task(torch.zeros(n, 1), y, torch.zeros(n, 2))
    amount, position = noise.clone(), noise.clone()
    amount[y == 1, 0] += 1
    position[y == 0, 0, :8] += 1
    position[y == 1, 0, 8:] += 1
    assert chosen_side(amount, task, layout) == 1
    assert chosen_side(position, task, layout) == 2


def test_attributes_per_class_and_per_image(tmp_path):
    ids, labels = ["a/1.png", "b/2.png", "a/3.png"], torch.tensor([0, 1, 0])
    (tmp_path / "c.csv").write_text("class,wing,beak\nred,80,10\nblue,20,60\n")
    attributes = read_attributes(tmp_path / "c.csv", ids, labels, ["red", "blue"], 50.0)
    assert attributes.names == ("wing", "beak")
    assert attributes.values.tolist() == [[1, 0], [0, 1], [1, 0]]
    (tmp_path / "i.csv").write_text("image,loop\n1.png,1\n2.png,0\n3.png,0\n")
    assert read_attributes(tmp_path / "i.csv", ids, labels, ["red", "blue"], 0.5).values.tolist() == [[1], [0], [0]]
    (tmp_path / "x.csv").write_text("image,loop\nelse.png,1\n")
    with pytest.raises(DataError, match="names neither the images"):
        read_attributes(tmp_path / "x.csv", ids, labels, ["red", "blue"], 0.5)
    with pytest.raises(DataError, match="want a CSV file"):
        read_attributes(tmp_path / "none.csv", ids, labels, ["red", "blue"], 0.5)


def test_the_probe_reads_what_is_linear_and_nothing_else():
    g = torch.Generator().manual_seed(5)
    y = torch.arange(60) % 3
    scores = torch.nn.functional.one_hot(y, 3).float()[:, :, None].repeat(1, 1, 4)
    held = torch.arange(60) % 5 == 4
    labels = labels_as_attributes(y)
    assert probe_accuracy(pooled_features(scores), held, labels) == 1.0
    noise = torch.rand(60, 3, 4, generator=g)
    assert probe_accuracy(pooled_features(noise), held, labels) < 0.8
    turned = principal_scores(scores, held, 2)
    assert probe_accuracy(pooled_features(turned), held, labels) == 1.0
