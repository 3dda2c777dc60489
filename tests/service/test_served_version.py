"""One version as it is served: what it says of itself, and what is checked before a request is queued."""

import pytest
import torch

from auditor.errors import OptionError, UnknownExplainerError
from auditor.plugins.registry.location import ModelVersion
from auditor.service.served_version import fingerprint, load_version, move_subject
from auditor.service.settings import Settings
from auditor.service.types import ExplainerAnswer, GalleryAnswer, Options


@pytest.fixture(scope="module")
def version(store, served):
    import mlflow

    mlflow.set_tracking_uri(store)
    mlflow.set_registry_uri(store)
    return load_version(Settings(model=served, engine="torch", sample_images="sklearn:digits"))


def test_it_describes_its_explainers_by_the_contract(version):
    concepts, heads = (ExplainerAnswer.model_validate(item) for item in version.describe())
    assert (concepts.name, concepts.n_concepts, concepts.gallery, concepts.gallery_of_concepts) == (
        "concepts",
        6,
        True,
        True,
    )
    assert sorted(k for group in concepts.groups for k in group) == list(range(6))
    assert concepts.groups == version.explainers["concepts"].groups
    assert concepts.labels == {k: f"concept {k}" for k in range(6)}
    assert (concepts.classes, concepts.searches, concepts.target_value_of) == (None, False, "logit")
    assert (heads.name, heads.gallery, heads.gallery_of_concepts) == ("heads", False, False)
    assert heads.classes == version.explainers["heads"].explainable_classes()
    assert concepts.default
    assert heads.default


def test_pictures_that_are_not_of_concepts_say_so(version, monkeypatch):
    monkeypatch.setattr(type(version.explainers["concepts"]), "gallery_label", lambda self, k: f"leaf {k}")
    assert version.describe()[0]["gallery_of_concepts"] is False
    gallery = GalleryAnswer.model_validate(version.gallery("concepts"))
    assert [c.label for c in gallery.concepts] == [f"leaf {k}" for k in range(6)]


def test_a_gallery_has_pictures_with_the_names_of_their_classes(version):
    gallery = GalleryAnswer.model_validate(version.gallery("concepts"))
    shots = version.explainers["concepts"].gallery.shots
    for k, concept in enumerate(gallery.concepts):
        assert [p.label for p in concept.pictures] == [version.subject.class_names[s.label] for s in shots[k]]
        assert all(p.image.startswith("data:image/png;base64,") for p in concept.pictures)
    assert version.gallery("heads")["concepts"] == []
    assert len({s["label"] for s in version.samples}) == 10


def test_time_to_search_is_the_requests_the_servers_or_the_fits(version, images):
    for requested, setting, used in ((None, None, None), (None, 2.0, 2.0), (3.0, 2.0, 3.0), (3.0, None, 3.0)):
        question = version.question(images[0], Options(timeout_s=requested), Settings(search_timeout_s=setting))
        assert question.options.timeout_s == used
        assert question.names == ["concepts", "heads"]
    assert version.explained.search_limit_s == 10.0
    with pytest.raises(UnknownExplainerError):
        version.question(images[0], Options(explainers=["x"]), Settings())


def test_the_fingerprint_changes_with_what_is_attached_and_not_with_a_verdict():
    def mark(**tags):
        return fingerprint(ModelVersion("models:/m@a", "m", "1", "root", None, "0", tags))

    plain = mark()
    assert mark(**{"auditor.gate": "{}"}) == plain
    assert mark(**{"auditor.explainer.x": "{}"}) != plain
    assert mark(somebody="else") == plain
    assert fingerprint(ModelVersion("models:/m@b", "m", "1", "root", None, "0", {})) == plain


def test_a_device_that_is_not_there_is_one_sentence(tiny, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match="device cuda: torch finds no GPU here"):
        move_subject(tiny, Settings(device="cuda"))
    move_subject(tiny, Settings(precision="bfloat16"))
    assert tiny.dtype == torch.bfloat16
