"""Which images are audited: never one that a fit used, a fixed choice, and what cannot be audited."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import auditor
from auditor import Subject, fit, open_data
from auditor.auditing.images import HeldOut, answers, choose, held_out, held_out_words, shared, spread
from auditor.errors import DataError, NumericsError


@pytest.fixture(scope="module")
def small():
    """A classifier of 5 x 4 images that is quick on thousands of them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 3, (3, 2)), nn.ReLU(), nn.Flatten(), nn.Linear(27, 2))
        with torch.no_grad():
            net[-1].bias -= net(torch.rand(500, 1, 5, 4)).mean(0)  # so that both classes are predicted
    return Subject(net.eval(), input_shape=(1, 5, 4), class_names=["a", "b"])


def many(tmp_path_factory, n):
    path = tmp_path_factory.mktemp("many") / f"{n}.npz"
    rng = np.random.default_rng(0)
    np.savez(path, images=rng.integers(0, 256, (n, 5, 4), dtype=np.uint8), labels=rng.integers(0, 2, n))
    return open_data(path)


OPTIONS = {
    "nmf": {"rank": "auto", "refits": 1, "max_positions": 2000},
    "coupled": {"rank": 2, "lambda_table": False, "max_iter": 5},
    "deepfacto": {"rank": 2, "cells": 1, "epochs": 0, "refits": 0, "max_positions": 2000},
    "xnn": {"n": 2, "max_epochs": 2, "max_images": 800},
    "tree": {"n_features": 4, "epochs": 2, "hidden": 4, "train_batch": 256, "max_images": 800},
    "rde": {"rates": (0.3,), "max_steps": 3, "calibration_images": 4, "draws": 2, "eval_draws": 8},
}
# kind, images, and the share of the guessed "held-out" images that an earlier release learned from
SIZES = [("coupled", 5000, 0.57), ("deepfacto", 12000, 0.67)]


def ids_learned(kind, subject, data, monkeypatch, **options):
    """Fit, and return the explainer with the names of the images that its fit learned from, by its own account."""
    if kind == "coupled":
        explainer = fit(kind, subject, data, **options)
        return explainer, set(explainer.ids_)
    from auditor.explainers.deepfacto import explainer as module

    gathered, gather = [], module.gather
    monkeypatch.setattr(module, "gather", lambda *args: gathered.append(gather(*args)) or gathered[-1])
    explainer = fit(kind, subject, data, **options)
    (examples,) = gathered
    return explainer, {name for name, held in zip(examples.batch.ids, examples.held.tolist(), strict=True) if not held}


@pytest.mark.parametrize(("kind", "n", "overlap"), SIZES)
def test_a_fit_on_a_random_subset_is_never_audited_on_it(kind, n, overlap, small, tmp_path_factory, monkeypatch):
    data = many(tmp_path_factory, n)
    explainer, learned = ids_learned(kind, small, data, monkeypatch, **OPTIONS[kind])
    assert explainer.fitted_images.counts["learn"] == len(learned)
    model = answers(small, data, batch_size=1000)
    held = held_out(explainer, data, model)
    assert held.known_from == "record"
    assert {str(i) for i in held.rows.nonzero()[:, 0].tolist()} == {str(i) for i in range(n)} - learned

    audited = choose(small, data, model, {"x": held}, 500)
    assert len(audited) == 500
    assert not learned & set(audited.ids)
    assert audited.ids == choose(small, data, model, {"x": held}, 500, batch_size=77).ids

    explainer.fitted_images = explainer.content_digest_ = None  # as an earlier release left it
    guess = held_out(explainer, data, model)
    assert guess.known_from == "guess"
    guessed = {str(i) for i in guess.rows.nonzero()[:, 0].tolist()}
    assert len(learned & guessed) / len(guessed) == pytest.approx(overlap, abs=0.03)  # the defect, for the record


@pytest.mark.parametrize("kind", OPTIONS)
def test_every_kind_records_parts_that_do_not_overlap(kind, small, tmp_path_factory, tmp_path):
    data = many(tmp_path_factory, 1001)
    explainer = fit(kind, small, data, **OPTIONS[kind])
    record = explainer.fitted_images
    read = min(1001, OPTIONS[kind].get("max_images", 1001))
    assert len(record) == 1001
    assert int((record.learn | record.choose | record.report).sum()) <= read
    assert record.counts["learn"] == read - read // 5
    assert not bool((record.report & (record.learn | record.choose)).any())
    chooses = kind != "coupled"  # the others choose: a rank, a pass, an epoch, when to stop, a limit
    assert bool(record.choose.any()) == chooses
    if kind in ("nmf", "xnn", "tree"):
        assert not bool((record.choose & record.learn).any())
        assert record.counts["choose"] == read // 5 // 2
        assert explainer.metrics["n_held_out"] == min(record.counts["report"], 400)
    explainer.save(tmp_path / kind)
    again = auditor.Explainer.load(tmp_path / kind, small)
    assert again.fitted_images.to_json() == record.to_json()
    assert torch.equal(held_out(again, data, answers(small, data)).rows, ~record.used)


def test_what_is_known_of_an_explainers_images(concepts, digits, digits_data):
    n = 1797
    model = answers(digits, digits_data)
    recorded = held_out(concepts, digits_data, model)
    assert recorded.to_json() == {"images": 359, "of": n, "known_from": "record"}
    old = type(concepts)(concepts.config)
    old.data_digest_ = digits_data.digest
    guess = held_out(old, digits_data, model)
    assert guess.known_from == "guess"
    assert torch.equal(guess.rows, recorded.rows)  # for nmf the guess is right
    assert "359 of the 1797 is a guess" in held_out_words(guess.to_json())
    old.fitted_images = concepts.fitted_images.first(n)  # a release that recorded rows as they were read
    assert torch.equal(held_out(old, digits_data, model).rows, recorded.rows)


def test_a_split_of_the_fitted_images_is_not_new_and_other_images_are(concepts, digits):
    test = open_data("sklearn:digits?split=test")  # every fifth of the images that the concepts were fitted on
    model = answers(digits, test)
    of_the_fit = held_out(concepts, test, model)
    assert of_the_fit.known_from == "other data"
    assert 340 < of_the_fit.to_json()["images"] <= 359  # the fit held out the same ones; a few 8 x 8 digits look alike
    train = open_data("sklearn:digits?split=train")
    learned = held_out(concepts, train, answers(digits, train))
    assert learned.to_json() == {"images": 0, "of": 1438, "known_from": "other data"}
    assert "0 of the 1438 images are new to it, the others look like" in held_out_words(learned.to_json())
    new = {"images": 359, "of": 359, "known_from": "other data"}
    assert held_out_words(new) == "fitted on other data, so all 359 images are new to it"


PARTS = [((300, 0), (None, 0)), ((None, 0), (90, 1)), ((300, 1), (200, 2))]  # limit and seed of fit and audit


@pytest.mark.parametrize(("kind", "fitted", "audited"), [(k, *PARTS[i % 3]) for i, k in enumerate(OPTIONS)])
def test_a_part_of_the_fitted_source_is_known(kind, fitted, audited, small, tmp_path_factory):
    """``--limit`` takes a part of the source, at the fit or at the audit: what was learned stays learned."""
    path = many(tmp_path_factory, 600).spec
    limit, seed = fitted
    fit_on = open_data(path, limit=limit, seed=seed)
    explainer = fit(kind, small, fit_on, **OPTIONS[kind] | ({"max_images": 200} if kind in ("xnn", "tree") else {}))
    used = {str(i) for i in explainer.fitted_images.used.nonzero()[:, 0].tolist()}
    assert used <= {name for batch in fit_on.batches(small) for name in batch.ids}
    limit, seed = audited
    data = open_data(path, limit=limit, seed=seed)
    model = answers(small, data)
    held = held_out(explainer, data, model)
    assert held.known_from == "record"
    assert 0 < int(held.rows.sum()) < len(model.ids)
    assert [not h for h in held.rows.tolist()] == [name in used for name in model.ids]


@pytest.mark.parametrize("kind", OPTIONS)
def test_broken_images_move_no_record(kind, small, tmp_path):
    from PIL import Image

    rng = np.random.default_rng(0)
    for i in range(120):
        file = tmp_path / "photos" / "ab"[i % 2] / f"{i:03d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (5, 4), dtype=np.uint8)).save(file)
    for i in (1, 40, 41, 119):
        (tmp_path / "photos" / "ab"[i % 2] / f"{i:03d}.png").write_bytes(b"no image")
    data = open_data(tmp_path / "photos")
    explainer = fit(kind, small, data, **OPTIONS[kind] | ({"max_images": 60} if kind in ("xnn", "tree") else {}))
    record = explainer.fitted_images
    assert len(record) == 120
    again = open_data(tmp_path / "photos")
    model = answers(small, again)
    held = held_out(explainer, again, model)
    assert held.to_json() == {"images": 116 - int(record.used.sum()), "of": 116, "known_from": "record"}
    rows = [again.rows_of([name])[0] for name in model.ids]
    assert held.rows.tolist() == [not bool(record.used[row]) for row in rows]
    broken = again.rows_of(list(again.skipped))
    assert len(broken) == 4
    assert not bool((record.used | record.report)[torch.from_numpy(broken)].any())


def test_a_kind_that_records_nothing_is_not_trusted(small, tmp_path_factory):
    data = many(tmp_path_factory, 60)
    explainer = fit("rde", small, data, **OPTIONS["rde"])
    explainer.fitted_images = None
    model = answers(small, data)
    held = held_out(explainer, data, model)
    assert held.to_json() == {"images": 0, "of": 60, "known_from": "nothing"}
    assert "without a record" in held_out_words(held.to_json())
    with pytest.raises(DataError, match="mine was fitted on it and does not say which images"):
        choose(small, data, model, {"mine": held}, 30)


def test_audited_are_images_that_all_explainers_held_out(small, tmp_path_factory):
    data = many(tmp_path_factory, 200)
    row = torch.arange(200)
    held = {"a": HeldOut(row % 2 == 0, "record"), "b": HeldOut(row >= 100, "record")}
    assert shared(held, 200).nonzero()[:, 0].tolist() == list(range(100, 200, 2))
    picked = choose(small, data, answers(small, data), held, 1000)
    assert [int(i) for i in picked.ids] == list(range(100, 200, 2))
    held["c"] = HeldOut(row >= 162, "record")
    with pytest.raises(DataError, match="only 19 of 200 images were held out of the explainers' fits"):
        choose(small, data, answers(small, data), held, 1000)
    held["c"] = HeldOut(row >= 160, "record")
    assert len(choose(small, data, answers(small, data), held, 1000)) == 20


def test_images_are_a_fixed_choice_of_held_out_ones(digits, digits_data, concepts):
    model = answers(digits, digits_data)
    held = {"concepts": held_out(concepts, digits_data, model)}
    picked = choose(digits, digits_data, model, held, 30)
    assert all(int(i) % 5 == 4 for i in picked.ids)  # the concepts were fitted on this data and held these out
    assert picked.ids == choose(digits, digits_data, model, held, 30).ids
    assert sorted(picked.labels.bincount().tolist()) == [3] * 10
    with torch.no_grad():
        torch.testing.assert_close(digits.logits(picked.images), picked.logits, rtol=1e-4, atol=1e-4)
    test = open_data("sklearn:digits?split=test")
    model = answers(digits, test)
    other = choose(digits, test, model, {"concepts": held_out(concepts, test, model)}, 30)
    assert other.ids != picked.ids


def test_an_audit_says_how_many_images_were_held_out(audited):
    about = audited.to_json()
    assert about["explainers"]["concepts"]["held_out"] == {"images": 359, "of": 1797, "known_from": "record"}
    assert about["data"]["n_held_out"] == 359
    assert about["data"]["n_explained"] == 30


def test_spread_keeps_the_order_and_never_repeats():
    for n in range(1, 40):
        for k in range(1, n + 1):
            rows = spread(n, k)
            assert rows == sorted(set(rows))
            assert len(rows) == k
            assert 0 <= rows[0] <= rows[-1] < n


def test_data_that_is_too_small_or_of_other_classes_is_refused(digits, tmp_path):
    with pytest.raises(DataError, match=r"12 images are too few for an interval; give at least 20"):
        auditor.audit(digits, open_data("sklearn:digits", limit=12))
    path = tmp_path / "other.npz"
    np.savez(path, images=np.zeros((30, 8, 8), np.uint8), labels=np.full(30, 11))
    with pytest.raises(DataError, match="labels must be 0 to 9 like the model's classes, got 11"):
        answers(digits, open_data(path))
    from PIL import Image

    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / "pets" / name / "1.png")
    with pytest.raises(DataError, match="2 of its 2 labels are no class of the model: 'cat', 'dog'; the model's 10 cl"):
        answers(digits, open_data(tmp_path / "pets"))


def test_a_model_that_says_nan_is_refused(tiny, tiny_npz):
    with torch.no_grad():
        tiny.module.fc.weight[0, 0] = math.nan
    with pytest.raises(NumericsError, match="NaN or infinite logits"):
        answers(tiny, open_data(tiny_npz))


def test_label_sets_need_a_model_whose_labels_stand_alone(tiny, tmp_path):

    images = np.zeros((24, *tiny.input_shape), dtype=np.uint8)
    np.savez(tmp_path / "sets.npz", images=images, labels=np.eye(3, dtype=np.int64)[np.arange(24) % 3])
    np.savez(tmp_path / "wide.npz", images=images, labels=np.ones((24, 4), dtype=np.int64))
    with pytest.raises(DataError, match="--output multilabel"):
        answers(tiny, open_data(tmp_path / "sets.npz"))
    labels = Subject(tiny.module, input_shape=tiny.input_shape, output="multilabel")
    model_answers = answers(labels, open_data(tmp_path / "sets.npz"))
    assert model_answers.label_sets is not None
    assert model_answers.label_sets.sum().item() == 24
    with pytest.raises(DataError, match="labels have 4 columns, the model 3 classes"):
        answers(labels, open_data(tmp_path / "wide.npz"))
