import json

import numpy as np
import pytest
import torch
from torch import nn

import auditor
from auditor import Subject, open_data
from auditor.demo import DigitsNet
from auditor.errors import DataError, NumericsError, OptionError, TamperError
from auditor.explainers.base import Explainer, explainer_class
from tests.auditor.explainers.tree.conftest import OPTIONS


def test_network_and_tree_are_accurate_and_agree(fitted):
    _, explainer, _, _ = fitted
    m = explainer.metrics
    assert m["accuracy_network"] >= 0.93
    assert m["accuracy_tree"] >= 0.85
    assert m["agreement"] >= 0.85
    assert m["depth"] <= 8
    assert m["leaves"] == explainer.tree_.n_leaves > 10
    assert 0.1 < m["zero_codes"] < 1
    assert 4 < m["features_used"] <= 48
    assert m["classes_without_leaf"] == 0


def test_contributions_along_the_path_add_up_exactly(fitted):
    subject, explainer, images, explanations = fitted
    for e in explanations:
        assert e.gap() < 1e-9
        assert sum(step["contribution"] for step in e.extra["path"]) + e.bias == pytest.approx(
            e.target_value, abs=1e-12
        )
        assert e.target_value == pytest.approx(explainer.tree_.value[e.extra["leaf"], e.target.index], abs=1e-15)
        assert e.target.label == e.extra["tree_class"]
    assert len({e.extra["leaf"] for e in explanations}) > 3
    other = explainer.explain(subject, images[:3], target="7")
    for e in other:
        assert e.target.label == "7"
        assert e.gap() < 1e-9


def test_every_rule_holds_for_the_image(fitted):
    _, _, _, explanations = fitted
    for e in explanations:
        for step in e.extra["path"]:
            holds = step["code"] <= step["threshold"]
            assert step["direction"] == ("<=" if holds else ">")
            assert str(step["threshold"]) in step["rule"]
        assert {c.index for c in e.concepts} == {step["feature"] for step in e.extra["path"]}


def test_alternatives_reach_their_leaf_when_the_codes_are_changed(fitted):
    subject, explainer, images, explanations = fitted
    backbone = explainer._backbone(subject)
    with torch.no_grad():
        codes = explainer.net_.codes(backbone.inputs(images)).to(torch.uint8).numpy()
    for row, e in zip(codes, explanations, strict=True):
        assert len(e.extra["alternatives"]) == 3
        costs = [a["steps"] for a in e.extra["alternatives"]]
        assert costs == sorted(costs)
        for other in e.extra["alternatives"]:
            moved = row.copy()
            for change in other["changes"]:
                assert moved[change["feature"]] == change["code"]
                moved[change["feature"]] = change["wanted"]
            assert explainer.tree_.path(moved)[-1] == other["leaf"]
            assert other["class"] != e.extra["tree_class"]


def test_heatmaps_lie_on_the_layers_grid_and_prototypes_in_their_leaf(fitted):
    subject, explainer, _, explanations = fitted
    grid = subject.layout(explainer.layer_).grid
    maps = [c.heatmap for e in explanations for c in e.concepts]
    assert all(tuple(h.shape) == grid and torch.isfinite(h).all() and h.min() >= 0 for h in maps)
    assert sum(float(h.max()) > 0 for h in maps) > len(maps) / 2
    shots = explainer.gallery_.shots
    assert len(shots) == explainer.tree_.n_leaves
    assert all(1 <= len(prototypes) <= 3 for prototypes in shots)
    assert explanations[0].extra["prototypes"]


def test_batch_equals_one_by_one(fitted):
    subject, explainer, images, explanations = fitted
    for i in (0, 5, 11):
        alone = explainer.explain(subject, images[i : i + 1])[0]
        assert alone.extra["path"] == explanations[i].extra["path"]


def test_save_and_load_is_identity(fitted, tmp_path):
    subject, explainer, images, explanations = fitted
    digest = explainer.save(tmp_path / "a")
    assert explainer.save(tmp_path / "b") == digest
    back = Explainer.load(tmp_path / "a", subject)
    again = back.explain(subject, images)
    assert [e.to_json() for e in again] == [e.to_json() for e in explanations]
    assert back.metrics == explainer.metrics
    document = json.loads((tmp_path / "a" / "tree.json").read_text())
    assert document["class_names"] == list(subject.class_names)
    text = (tmp_path / "a" / "tree.json").read_text()
    (tmp_path / "a" / "tree.json").write_text(text.replace('"bits": 4', '"bits": 3'))
    with pytest.raises(TamperError, match=r"tree\.json"):
        Explainer.load(tmp_path / "a", subject)


def test_another_model_is_refused(fitted):
    _, explainer, images, _ = fitted
    other = Subject(DigitsNet(), input_shape=(1, 8, 8), mean=0.0, std=1.0)
    with pytest.raises(TamperError, match="fit it to this model"):
        explainer.explain(other, images)


def test_a_leafs_pictures_are_called_by_the_leaf(fitted):
    _, explainer, _, explanations = fitted
    for explanation in explanations:
        e = explanation.extra
        label = explainer.gallery_label(e["gallery"])
        assert label == f"leaf {e['leaf']}: {e['tree_class']} {e['tree_probability']:.0%}"
        assert [p["id"] for p in e["prototypes"]] == [s.id for s in explainer.gallery_.shots[e["gallery"]]]


def npz(tmp_path, images, labels):
    np.savez(tmp_path / "d.npz", images=images, labels=labels)
    return open_data(tmp_path / "d.npz")


@pytest.fixture
def tiny():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 3))
    return Subject(module, input_shape=(1, 8, 8), mean=0.0, std=1.0)


def test_one_class_is_refused(tiny, tmp_path):
    images = np.random.default_rng(0).random((40, 8, 8, 1), dtype=np.float32)
    with pytest.raises(DataError, match="all 40 images are of one class"):
        auditor.fit("tree", tiny, npz(tmp_path, images, np.zeros(40, int)), **OPTIONS)


def test_constant_features_are_refused(tiny, tmp_path):
    images = np.full((40, 8, 8, 1), 0.5, np.float32)
    with pytest.raises(NumericsError, match="all 32 images have the same codes"):
        auditor.fit("tree", tiny, npz(tmp_path, images, np.arange(40) % 3), **OPTIONS)


def test_nan_features_are_refused(tmp_path):
    class Broken(nn.Module):
        def forward(self, x):
            return torch.where(x.mean((1, 2, 3), keepdim=True) > 0.9, torch.nan, x)

    torch.manual_seed(0)
    module = nn.Sequential(Broken(), nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 3))
    images = np.random.default_rng(0).random((40, 8, 8, 1), dtype=np.float32)
    images[7] = 1.0
    subject = Subject(module, input_shape=(1, 8, 8), mean=0.0, std=1.0)
    with pytest.raises(NumericsError, match="1 of 40 images give NaN or infinite features"):
        auditor.fit("tree", subject, npz(tmp_path, images, np.arange(40) % 3), layer="2", **OPTIONS)


def test_too_few_images_are_refused(tiny, tmp_path):
    images = np.random.default_rng(0).random((3, 8, 8, 1), dtype=np.float32)
    with pytest.raises(DataError, match="3 images are too few"):
        auditor.fit("tree", tiny, npz(tmp_path, images, np.arange(3)), **OPTIONS)


def test_a_depth_that_cannot_separate_is_said(fitted, caplog):
    subject, *_ = fitted
    data = open_data("sklearn:digits", limit=300)
    with caplog.at_level("WARNING"):
        flat = auditor.fit("tree", subject, data, **{**OPTIONS, "depth": 2, "epochs": 3})
    assert flat.metrics["classes_without_leaf"] >= 6
    assert "raise depth" in caplog.text
    assert "cannot separate 10 classes" in caplog.text


@pytest.mark.parametrize(
    "option", [{"bits": 9}, {"bits": 1}, {"p": 1.5}, {"depth": 0}, {"variant": "forest"}, {"nosuch": 1}]
)
def test_bad_options_are_one_sentence(option):
    with pytest.raises(OptionError, match=next(iter(option))):
        explainer_class("tree")(**option)


def test_unlabelled_data_learn_the_models_predictions(fitted, tmp_path):
    subject, *_ = fitted
    batch = next(open_data("sklearn:digits").batches(subject, 300))
    images = batch.images.permute(0, 2, 3, 1).numpy()
    longer = {**OPTIONS, "epochs": 40, "stop_after_drops": 0}  # 240 images are few: after 8 epochs chance decides
    explainer = auditor.fit("tree", subject, npz(tmp_path, images, np.full(300, -1)), **longer)
    assert not any(name.startswith("accuracy") for name in explainer.metrics)
    assert explainer.metrics["agreement_model"] > 0.6


@pytest.mark.parametrize(
    "extra", [{"fine_tune": True}, {"pooling": "mean"}, {"per_feature": True}, {"variant": "soft_tree"}]
)
def test_other_forms_save_and_explain(fitted, extra, tmp_path):
    subject, _, images, _ = fitted
    data = open_data("sklearn:digits", limit=400)
    explainer = auditor.fit("tree", subject, data, **{**OPTIONS, "epochs": 3, **extra})
    explainer.save(tmp_path / "a")
    back = Explainer.load(tmp_path / "a", subject)
    a, b = explainer.explain(subject, images[:4]), back.explain(subject, images[:4])
    assert [e.to_json() for e in a] == [e.to_json() for e in b]
    assert max(e.gap() for e in a) < 1e-9


def test_a_layer_without_positions_gets_heatmaps_by_gradients(fitted):
    subject, _, images, _ = fitted
    data = open_data("sklearn:digits", limit=400)
    explainer = auditor.fit("tree", subject, data, layer="head.2", **{**OPTIONS, "epochs": 3})
    heat = [c.heatmap for e in explainer.explain(subject, images[:3]) for c in e.concepts]
    assert all(tuple(h.shape) == (8, 8) for h in heat)
    assert any(float(h.max()) > 0 for h in heat)


def test_attributes_give_the_fidelity_of_the_fit_and_of_the_audit(trained, tmp_path):
    from auditor.auditing.fit_metrics import fit_measures

    subject = trained[0]
    rows = [f"{k},{90 * (k in (0, 6, 8, 9))},{90 * (k in (1, 4, 7))}" for k in range(10)]
    (tmp_path / "a.csv").write_text("\n".join(["class,loop,straight", *rows]) + "\n")
    options = {"n_features": 16, "epochs": 1, "attributes": str(tmp_path / "a.csv")}
    e = auditor.fit("tree", subject, open_data("sklearn:digits", limit=300), **options)
    assert 0 < e.metrics["fidelity_floor"] <= e.metrics["fidelity"] <= 1
    measures = fit_measures({"tree": e})
    assert measures["explainer/tree/fidelity"].null == e.metrics["fidelity_floor"]
    assert measures["explainer/tree/fidelity"].value == measures["explainer/tree/fit/fidelity"].value
    (tmp_path / "a.csv").write_text("class,loop\nzero,90\n")
    with pytest.raises(DataError, match="names neither the images"):
        auditor.fit("tree", subject, open_data("sklearn:digits", limit=300), **options)
