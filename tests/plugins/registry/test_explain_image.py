"""One image file explained by what is attached to a version."""

import json

import mlflow
import pytest
import torch

from auditor.errors import DataError, ModelError, UnknownExplainerError
from auditor.explainers.answer_options import AnswerOptions
from auditor.plugins import attach, load_subject, log_subject
from auditor.plugins.registry.attachments import attached_layer
from auditor.plugins.registry.explain_image import answer_image, draw_answer, explain_image
from auditor.plugins.registry.location import resolve
from auditor.subject.preprocessing import read_image

QUICK = {"heatmaps": "none", "noise_samples": 2}


@pytest.fixture(scope="module")
def uri(store, trained, concepts, heads):
    mlflow.set_tracking_uri(store)
    mlflow.set_registry_uri(store)
    uri = log_subject(trained[0], "pictured", experiment="tests")
    subject = load_subject(uri)
    attach(concepts, uri, "concepts", subject=subject)
    attach(heads, uri, "heads", subject=subject, attach_anyway=True)
    concepts.name = heads.name = ""
    return uri


@pytest.fixture
def picture(tmp_path, images):
    from PIL import Image

    Image.fromarray((images[0, 0].numpy() * 255).round().astype("uint8")).save(tmp_path / "image.png")
    return tmp_path / "image.png"


def test_the_answer_is_what_explainers_say(registry, uri, picture, digits, heads):
    answer = explain_image(uri, picture, explainers=["heads"], target=4, **QUICK)
    x = torch.from_numpy(read_image(picture, digits.preprocessing))[None]
    alone = heads.explain(digits, x, 4)[0]
    (explanation,) = answer["explanations"]
    assert [c["contribution"] for c in explanation["concepts"]] == pytest.approx(
        [c.contribution for c in alone.concepts], rel=1e-5
    )
    assert answer["model"]["version"] == uri.rpartition("/")[2]


def test_the_stability_is_of_the_same_layer_for_any_explainer(registry, uri, picture, concepts):
    everybody, one = (explain_image(uri, picture, explainers=names, **QUICK) for names in (["*"], ["heads"]))
    assert everybody["stability"]["layer"] == concepts.layer_
    for key in ("c1", "c2", "score", "bound"):
        assert one["stability"][key] == pytest.approx(everybody["stability"][key], rel=1e-6)
    assert attached_layer(resolve(uri), "concepts") == concepts.layer_


def test_a_neighbour_that_does_not_verify_is_not_asked(registry, uri, picture):
    client, number = mlflow.MlflowClient(), uri.rpartition("/")[2]
    tag = "auditor.explainer.concepts"
    before = client.get_model_version("pictured", number).tags[tag]
    client.set_model_version_tag("pictured", number, tag, json.dumps({**json.loads(before), "digest": "0" * 64}))
    try:
        assert explain_image(uri, picture, explainers=["heads"], **QUICK)["explanations"][0]["concepts"]
        with pytest.raises(Exception, match=r"not what was attached|does not match"):
            explain_image(uri, picture, **QUICK)
    finally:
        client.set_model_version_tag("pictured", number, tag, before)


def test_pictures_of_an_answer(registry, uri, picture, tmp_path):
    answer = answer_image(uri, picture, AnswerOptions(explainers=["concepts"], stability="off"))
    draw_answer(answer, tmp_path / "deep" / "out")
    drawn = {path.name for path in (tmp_path / "deep" / "out").iterdir()}
    assert drawn == {"concepts.png", *(f"concepts-{c.index:02d}.png" for c in answer.explanations["concepts"].concepts)}


def test_what_is_not_there(registry, uri, trained, picture, tmp_path):
    with pytest.raises(DataError, match="no such file"):
        explain_image(uri, tmp_path / "nosuch.png")
    with pytest.raises(UnknownExplainerError, match="there is no explainer 'x'; attached are: concepts, heads"):
        explain_image(uri, picture, explainers=["x"])
    bare = log_subject(trained[0], "bare", experiment="tests")  # other tests attach to models:/digits/1
    with pytest.raises(ModelError, match=f"nothing is attached to {bare}; fit something first"):
        explain_image(bare, picture)
