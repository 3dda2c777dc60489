"""Artifacts attached before modules moved to rooms load, and explain what they explained then.

``fixtures/before_the_move`` was written by the release before the move: a model of 1,300 weights, four images, one
artifact of each kind, and the numbers that release gave for them. Nothing here may be written again by newer code.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from auditor import Explainer, Subject
from auditor.explainers.kinds import BUILT_IN

FOLDER = Path(__file__).parent / "fixtures" / "before_the_move"
NUMBERS = json.loads((FOLDER / "numbers.json").read_text())


@pytest.fixture(scope="module")
def subject():
    net = nn.Sequential(
        nn.Conv2d(1, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 6, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(6 * 4 * 5, 8), nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip
    net.load_state_dict(load_file(FOLDER / "model.safetensors"))
    return Subject(net, input_shape=(1, 9, 11), class_names=["top", "middle", "bottom"], mean=0.3, std=0.2)


@pytest.fixture(scope="module")
def images():
    return load_file(FOLDER / "images.safetensors")["images"]


def test_there_is_one_of_each_kind():
    assert set(NUMBERS) == set(BUILT_IN)
    assert {p.name for p in FOLDER.iterdir() if p.is_dir()} == set(BUILT_IN)


@pytest.mark.parametrize("kind", BUILT_IN)
@pytest.mark.parametrize(("key", "target"), [("default", None), ("target_2", "bottom")])
def test_a_stored_artifact_explains_what_it_explained(kind, key, target, subject, images):
    explainer = Explainer.load(FOLDER / kind, subject)
    assert explainer.kind == kind
    explanations = explainer.explain(subject, images, target)
    for now, then in zip(explanations, NUMBERS[kind][key], strict=True):
        assert now.gap() < 1e-6
        assert (now.target.index, now.prediction.index) == (then["target"], then["prediction"])
        for name in ("target_value", "bias", "residual"):
            assert getattr(now, name) == pytest.approx(then[name], rel=1e-4, abs=1e-4)
        assert [(c.index, c.label) for c in now.concepts] == [(i, label) for i, label, _, _ in then["concepts"]]
        for concept, (_, _, activation, contribution) in zip(now.concepts, then["concepts"], strict=True):
            assert concept.activation == pytest.approx(activation, rel=1e-3, abs=1e-4)
            assert concept.contribution == pytest.approx(contribution, rel=1e-3, abs=1e-4)
        sums = [None if c.heatmap is None else float(c.heatmap.sum()) for c in now.concepts]
        assert sums == [None if s is None else pytest.approx(s, rel=1e-3, abs=1e-4) for s in then["heatmap_sums"]]
    contributions = {tuple(c.contribution for c in e.concepts) for e in explanations}
    assert len(contributions) > 1, "four images of three classes are not all alike"


@pytest.mark.parametrize("kind", BUILT_IN)
def test_what_the_contract_asks_is_answered_by_a_stored_artifact(kind, subject, images, tmp_path):
    explainer = Explainer.load(FOLDER / kind, subject)
    assert explainer.metrics == pytest.approx(NUMBERS[kind]["metrics"])
    assert explainer.fitted_images is None  # was not stored then
    assert all(name in explainer.metrics for name in explainer.headline[:1])
    explanation = explainer.explain(subject, images[:1])[0]
    assert all(isinstance(line, str) for line in explainer.lines(explanation))
    if explainer.n_concepts:
        assert explainer.label(1) == "named before the move"
        assert max(c.index for c in explanation.concepts) < explainer.n_concepts
    if explainer.gallery is not None:
        page = explainer.write_page(subject, tmp_path / "page.html", explanation, images[0])
        assert explanation.concepts[0].label in page.read_text(encoding="utf-8")
    # a new revision of it is stored and loads like any other
    explainer.labels[0] = "named after the move"
    explainer.save(tmp_path / "again")
    again = Explainer.load(tmp_path / "again", subject)
    assert again.labels == explainer.labels
    with torch.no_grad():
        logits, layer_outputs = subject.run(images, again.reads().layers)
    assert len(again.explain_from(subject, images, logits, layer_outputs, [None] * 4)) == 4
