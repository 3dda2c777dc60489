"""A basis per class: chosen by itself, explained by the basis of the target, said where images are few or missing."""

import numpy as np
import pytest
import torch
from scipy.optimize import nnls

from auditor import fit, open_data
from auditor.errors import NumericsError, OptionError, WeakFitError
from auditor.explainers.activation_store import ActivationStore
from auditor.explainers.base import Explainer
from auditor.explainers.nmf.class_bases import ClassBases
from auditor.explainers.nmf.class_fit import ClassFit, sizes_of
from auditor.explainers.predicted_classes import PredictedClasses
from tests.auditor.explainers.nmf.photo_like import N_CLASSES, images, subject, write


@pytest.fixture(scope="module")
def model():
    return subject()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return open_data(write(tmp_path_factory.mktemp("photos") / "x.npz", 6))


@pytest.fixture(scope="module")
def fitted(model, data):
    return fit("nmf", model, data, refits=1)


@pytest.fixture(scope="module")
def some(model):
    pixels, labels = images(1, seed=7)
    return torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy())[:12], labels[:12]


def test_a_basis_per_class_is_chosen_where_one_cannot_stand_in(fitted):
    assert "a basis per predicted class was chosen: one shared basis of 10 concepts keeps" in fitted.remarks()[0]
    assert len(fitted.bases_) == 1 + N_CLASSES
    assert fitted.metrics["bases"] == N_CLASSES
    assert fitted.metrics["f_cls"] > 0.95
    assert fitted.metrics["unmet"] == 0
    assert fitted.metrics["f_cls_contested"] > 0.9  # textures of one class are not those of another
    assert fitted.shortcomings() == []
    assert fitted.W_.shape == (2 * N_CLASSES, fitted.n_concepts)
    torch.testing.assert_close(fitted.W_.norm(dim=0), torch.ones(fitted.n_concepts))


def test_an_image_is_explained_with_the_basis_of_its_target(fitted, model, some):
    x, labels = some
    for e, k in zip(fitted.explain(model, x), labels, strict=True):
        basis = fitted.bases_.for_class(int(k))
        assert [c.index for c in e.concepts] == list(basis.concepts)
        assert e.extra["basis"]["class"] == f"kind {k}"
        assert e.extra["basis"]["words"] == f"concepts of kind {k} ({basis.images} images)"
        assert fitted.lines(e) == [e.extra["basis"]["words"]]
        assert e.gap() < 1e-6
        assert abs(e.residual) < 0.3 * abs(e.target_value)
    (other,) = fitted.explain(model, x[:1], target="kind 9")
    assert other.extra["basis"]["class"] == "kind 9"
    assert other.gap() < 1e-6


def test_scores_are_the_weighted_non_negative_projection(fitted, model, some):
    """argmin_{s >= 0} |D (z - W s)| position by position, by scipy."""
    layout = model.layout("features")
    z = model.activations(some[0][:1], ["features"])["features"]
    basis = fitted.bases_.for_class(0)
    S = fitted.scores(layout, z, basis)[0]
    D = fitted.weights_[fitted.bases_.parts.index(basis)].double().numpy()
    W = fitted.directions(basis).double().numpy()
    for p in range(0, layout.n_positions, 7):
        want, _ = nnls(W * D[:, None], z.flatten(2)[0, :, p].double().numpy() * D)
        np.testing.assert_allclose(S[:, p], want, atol=1e-4)


def test_a_batch_equals_its_images_and_contributions_are_of_the_reconstruction(fitted, model, some):
    x, _ = some
    whole = fitted.explain(model, x)
    targets, layout = [e.target.index for e in whole], model.layout(fitted.layer_)
    with torch.no_grad():
        z = model.activations(x, [fitted.layer_])[fitted.layer_]
        hat = model.forward_from(fitted.layer_, fitted.reconstructed(layout, z, targets))
        together = fitted.stand_in(model, x)
    for i in range(len(x)):
        torch.testing.assert_close(fitted.stand_in(model, x[i : i + 1])[0], together[i], rtol=1e-4, atol=1e-4)
        (one,) = fitted.explain(model, x[i : i + 1])
        a, b = ([c.contribution for c in e.concepts] for e in (one, whole[i]))
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
        total = whole[i].bias + sum(c.contribution for c in whole[i].concepts)
        assert total == pytest.approx(float(hat[i, whole[i].target.index]), abs=1e-3)


def test_it_is_stored_and_comes_back_with_labels_per_concept(fitted, model, some, tmp_path):
    digest = fitted.save(tmp_path / "a")
    loaded = Explainer.load(tmp_path / "a", model)
    assert loaded.save(tmp_path / "b") == digest
    assert loaded.bases_.parts == fitted.bases_.parts
    assert loaded.remarks() == fitted.remarks()
    a, b = (e.explain(model, some[0][:2]) for e in (fitted, loaded))
    assert [x.to_json() for x in a] == [x.to_json() for x in b]
    first = loaded.bases_.for_class(3).first
    loaded.rename(first, "stripes")
    assert (loaded.label(first), loaded.label(first + 1)) == ("stripes", f"kind 3: concept {first + 1}")
    assert loaded.label(0) == "concept 0"
    with pytest.raises(OptionError, match="has concepts 0 to"):
        loaded.rename(loaded.n_concepts, "beyond")


def test_score_maps_of_some_concepts_are_those_of_all(fitted, model, some):
    z = model.activations(some[0][:2], ["features"])["features"]
    every = fitted.score_maps(model, z)
    picked = [fitted.bases_.for_class(5).first + 1, 2, fitted.n_concepts - 1]
    torch.testing.assert_close(fitted.score_maps(model, z, picked), every[:, picked])


def test_the_gallery_shows_images_of_the_class(fitted):
    for basis in fitted.bases_.parts[1:4]:
        shots = fitted.gallery.shots[basis.first]
        assert shots
        assert {int(s.id) % N_CLASSES for s in shots} == {basis.index}
    assert fitted.contributions_by_class.shape == (fitted.n_concepts, N_CLASSES)
    own = fitted.contributions_by_class[fitted.bases_.for_class(2).first]
    assert float(own[2]) > 0
    assert int((own != 0).sum()) == 1


def test_the_same_seed_gives_the_same_bytes(model, data, fitted, tmp_path):
    again = fit("nmf", model, data, refits=1)
    assert again.save(tmp_path / "a") == fitted.save(tmp_path / "b")


def test_one_photo_per_class_is_one_sentence_and_is_not_attached(model, tmp_path):
    e = fit("nmf", model, open_data(write(tmp_path / "x.npz", 1)), refits=1)
    assert e.metrics["unmet"] == 1
    with pytest.raises(WeakFitError) as caught:
        e.check_stands_in()
    sentence = str(caught.value)
    assert (
        "100% of the held-out images are of classes that the fit has no image of (41 images, 41 predicted" in sentence
    )
    assert "at least four images of every class" in sentence
    assert sentence.count("does not stand in") == 1
    assert "0%" not in sentence.replace("100%", "")  # f_cls is not quoted beside it


def test_a_class_without_images_takes_the_shared_concepts_and_says_so(model, tmp_path):
    pixels, labels = images(6)
    np.savez(tmp_path / "x.npz", images=pixels[labels != 4])
    e = fit("nmf", model, open_data(tmp_path / "x.npz"), refits=1)
    x = torch.from_numpy(pixels[labels == 4][:1].transpose(0, 3, 1, 2).copy())
    (item,) = e.explain(model, x)
    assert item.target.label == "kind 4"
    assert item.extra["basis"]["words"].startswith("no image of kind 4 was in the fit: concepts shared by all classes")
    assert [c.index for c in item.concepts] == list(e.bases_.shared.concepts)
    assert item.gap() < 1e-6


@pytest.mark.parametrize(
    ("options", "n"), [({"bases": "shared"}, 1), ({"rank": 6}, 1), ({"rank": 3, "bases": "class"}, 42)]
)
def test_what_is_asked_for_is_done(model, data, options, n):
    e = fit("nmf", model, data, refits=1, **options)
    assert len(e.bases_) == n
    assert all(len(b.concepts) <= options.get("rank", 10) for b in e.bases_.parts)


def test_photos_of_another_domain_are_said(model, tmp_path):
    e = fit("nmf", model, open_data(write(tmp_path / "x.npz", 3, contrast=0.12)), refits=1, rank=2)
    assert any("unsure of 100% of these images" in remark for remark in e.remarks())


def test_a_constant_layer_is_one_sentence(model, tmp_path):
    np.savez(tmp_path / "x.npz", images=np.full((8, 20, 20, 1), 0.5, np.float32))
    with pytest.raises(NumericsError, match="layer 'features': its activations are constant"):
        fit("nmf", model, open_data(tmp_path / "x.npz"), refits=1)


@pytest.mark.parametrize("bend", [False, True])
def test_the_head_decides_which_channels_count(bend):
    """The gradient of a class reads two of the channels; the others keep the least weight."""
    model = subject(bend)
    z = model.activations(torch.rand(3, 1, 20, 20, generator=torch.Generator().manual_seed(0)), ["features"])[
        "features"
    ]
    with ActivationStore(9, 0) as store:
        work = ClassFit(model, "features", model.layout("features"), store, {}, 0, lambda _: ())
        weights = work.sensitivity(z, 5)
        assert set(weights.topk(2).indices.tolist()) == {5, N_CLASSES + 5}
        assert float(weights.min()) == pytest.approx(0.1)
        plain = ClassFit(model, "features", model.layout("features"), store, {}, 0, lambda _: (), weighted=False)
        assert plain.sensitivity(z, 5).tolist() == [1.0] * (2 * N_CLASSES)


def test_a_class_with_few_images_borrows_from_the_nearest_and_says_so(model, data):
    """Where four images are asked for, two of class 5 get two more of the class that they resemble."""
    x = torch.cat([b.images for b in data.batches(model)])
    with torch.no_grad():
        logits, taken = model.run(x, ["features"])
    classes = logits.argmax(1)
    learned = torch.ones(len(x), dtype=torch.bool)
    learned[(classes == 5).nonzero()[2:, 0]] = False
    predicted = PredictedClasses(model)
    predicted.add(logits[:100], learned[:100])
    predicted.add(logits[100:], learned[100:])
    mean = logits[learned & (classes == 5)].mean(0)
    mean[5] = -torch.inf
    nearest = mean.argsort(descending=True).tolist()
    assert predicted.nearest(5)[:3] == nearest[:3]
    with ActivationStore(100, 0) as store:
        rows = learned.nonzero()[:, 0].tolist()
        store.put(rows, classes[rows].tolist(), taken["features"][rows])
        work = ClassFit(model, "features", model.layout("features"), store, {}, 0, predicted.nearest, 4)
        assert work.rows_of(3) == (store.rows_of(3), ())
        assert work.rows_of(5) == (store.rows_of(5) + store.rows_of(nearest[0])[:2], (nearest[0],))
        basis = work.bases(2, lambda *_: None)[5]
    bases = ClassBases.of(1, 9, sizes_of({5: basis}, model, predicted.learned))
    assert bases.for_class(5).words == f"concepts of kind 5 (only 2 images, and some of kind {nearest[0]})"
    assert ClassBases.restore(bases.to_json(), 3).for_class(5) == bases.for_class(5)
