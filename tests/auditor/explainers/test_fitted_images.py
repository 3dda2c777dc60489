"""The record of a fit: roles by plain loops, rows that come back from disk, records that lie, and what kinds record."""

import logging

import numpy as np
import pytest
import torch
from torch import nn

from auditor import Explainer, Subject, fit, open_data
from auditor.errors import ArtifactError, DataError, ShapeError, TamperError
from auditor.explainers.fitted_images import FEW, PREFIX, FittedImages


def random_record(n, seed):
    role = torch.randint(0, 4, (n,), generator=torch.Generator().manual_seed(seed))
    return FittedImages(role == 0, role == 1, role == 2)


def same(a, b):
    return all(torch.equal(getattr(a, role), getattr(b, role)) for role in ("learn", "choose", "report"))


@pytest.mark.parametrize("choose", [False, True])
@pytest.mark.parametrize(("n", "every"), [(0, 2), (1, 2), (4, 5), (5, 5), (23, 2), (31, 5)])
def test_each_nth_is_held_out_and_every_second_of_these_chooses(n, every, choose):
    parts = FittedImages.each(n, every, choose=choose)
    n_held = 0
    for row in range(n):
        is_held = (row + 1) % every == 0
        chooses = choose and is_held and n_held % 2 == 1  # the first held-out image reports: metrics come first
        n_held += is_held
        assert bool(parts.learn[row]) == (not is_held)
        assert bool(parts.choose[row]) == chooses
        assert bool(parts.report[row]) == (is_held and not chooses)


@pytest.mark.parametrize("seed", range(3))
def test_rows_drawn_from_more_keep_their_roles(seed):
    drawn = torch.rand(41, generator=torch.Generator().manual_seed(seed)) < 0.4
    parts = random_record(int(drawn.sum()), seed)
    wide = parts.among(drawn)
    assert len(wide) == 41
    assert same(wide.rows(drawn), parts)
    assert wide.counts == parts.counts  # nothing outside of the drawn rows has a role
    assert same(wide.first(17), wide.rows(slice(0, 17)))


@pytest.mark.parametrize("seed", range(3))
def test_a_record_of_what_was_read_becomes_one_of_the_whole_source(seed):
    rows = np.sort(np.random.default_rng(seed).permutation(41)[:17])
    parts = random_record(13, seed)  # the last four of these rows were not read
    wide = parts.within(rows, 41)
    assert wide.counts == parts.counts
    for i, row in enumerate(rows[:13]):
        for role in ("learn", "choose", "report"):
            assert getattr(wide, role)[row] == getattr(parts, role)[i]


def test_held_out_is_all_that_was_neither_learned_from_nor_chosen_on():
    parts = FittedImages.of_rows(6, learn=torch.tensor([0, 1]), choose=torch.tensor([1, 2]), report=torch.tensor([3]))
    assert parts.held_out_in_order(8).tolist() == [False, False, False, True, True, True, True, True]
    assert parts.held_out(np.array([5, 1, 3])).tolist() == [True, False, True]
    assert parts.used.tolist() == [True, True, True, False, False, False]
    with pytest.raises(DataError, match="could read 6 images of this data and 5 can be read now"):
        parts.held_out_in_order(5)


def test_a_row_to_report_on_has_no_other_role():
    row = torch.tensor([True, False])
    for other in ("learn", "choose"):
        masks = {role: torch.zeros(2, dtype=torch.bool) for role in ("learn", "choose")} | {other: row}
        with pytest.raises(ShapeError, match="1 rows to report on were learned from or chosen on"):
            FittedImages(report=row, **masks)


@pytest.mark.parametrize("bad", [torch.zeros(3, dtype=torch.bool), torch.zeros(2), torch.zeros(2, 1, dtype=torch.bool)])
def test_masks_of_other_shapes_are_refused(bad):
    good = torch.zeros(2, dtype=torch.bool)
    with pytest.raises(ShapeError, match=r"three masks \(rows,\) of bool"):
        FittedImages(good, bad, good)


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 1000])
def test_packed_and_back(n):
    parts = random_record(n, n)
    again = FittedImages.restore(parts.tensors(), parts.to_json())
    assert same(parts, again)


def test_ten_million_rows_are_a_few_megabytes():
    parts = FittedImages.each(10_000_000, 5, choose=True)
    tensors = parts.tensors()
    assert sum(t.numel() * t.element_size() for t in tensors.values()) == 3 * 1_250_000
    assert parts.to_json() == {"rows": 10_000_000, "learn": 8_000_000, "choose": 1_000_000, "report": 1_000_000}
    assert same(parts, FittedImages.restore(tensors, parts.to_json()))


def test_records_that_lie_are_refused():
    parts = FittedImages.each(20, 5)
    tensors, about = parts.tensors(), parts.to_json()
    for wrong in ({"learn": 15}, {"rows": 19}, {"rows": 30}, {"rows": -1}, {"report": "4"}):
        with pytest.raises(TamperError, match="record of fitted images"):
            FittedImages.restore(tensors, about | wrong)
    with pytest.raises(TamperError, match="cannot be read"):
        FittedImages.restore({}, about)
    flipped = tensors | {PREFIX + "learn": torch.from_numpy(tensors[PREFIX + "learn"].numpy() ^ np.uint8(128))}
    with pytest.raises(TamperError, match="its bits say"):
        FittedImages.restore(flipped, about)


@pytest.mark.parametrize(("n", "level"), [(10 * FEW - 1, logging.WARNING), (10 * FEW, logging.INFO)])
def test_small_parts_are_said(caplog, n, level):
    caplog.set_level(logging.INFO, "auditor")
    FittedImages.each(n, 5, choose=True).warn_if_few("xnn", "the best epoch")
    (record,) = caplog.records
    assert record.levelno == level
    assert f"to choose the best epoch, {(n // 5 + 1) // 2} for the metrics" in record.message


def test_a_saved_explainer_brings_its_record_back(tiny, tiny_npz, tmp_path):
    explainer = fit("nmf", tiny, open_data(tiny_npz), rank=2, refits=1)
    explainer.fitted_images = random_record(37, 0)
    explainer.save(tmp_path / "with")
    again = Explainer.load(tmp_path / "with", tiny)
    assert again.fitted_images is not None
    assert same(again.fitted_images, explainer.fitted_images)
    assert again.save(tmp_path / "again") == explainer.digest_

    explainer.fitted_images = None  # as artifacts of earlier releases are
    explainer.save(tmp_path / "without")
    assert Explainer.load(tmp_path / "without", tiny).fitted_images is None


def test_no_kind_may_use_the_names_of_the_record(tiny, tiny_npz, tmp_path, monkeypatch):
    explainer = fit("nmf", tiny, open_data(tiny_npz), rank=2, refits=1)
    monkeypatch.setattr(explainer, "tensors", lambda: {PREFIX + "learn": torch.zeros(1)})
    with pytest.raises(ArtifactError, match="are kept for the base class"):
        explainer.save(tmp_path / "clash")


# what the six kinds record is what they do


@pytest.fixture(scope="module")
def small():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 7, (3, 2)), nn.ReLU(), nn.Flatten(), nn.Linear(63, 2))
        with torch.no_grad():
            net[-1].bias -= net(torch.rand(500, 1, 5, 4)).mean(0)  # so that both classes are predicted
    return Subject(net.eval(), input_shape=(1, 5, 4), class_names=["a", "b"])


KINDS = {
    "nmf": {"rank": "auto", "refits": 1},
    "coupled": {"rank": 2, "lambda_table": False, "max_iter": 5, "max_images": 100, "pixels": False},
    "deepfacto": {"rank": 2, "cells": 1, "epochs": 1, "refits": 0, "max_images": 150},
    "xnn": {"n": 2, "max_epochs": 3, "max_images": 180},
    "tree": {"n_features": 4, "epochs": 3, "min_epochs": 0, "hidden": 4, "max_images": 180},
    "rde": {"rates": (0.3,), "max_steps": 3, "calibration_images": 4, "draws": 2, "eval_draws": 8},
}


def learned_state(explainer):
    """What the explainer computes explanations from; concepts in an order that no measure decides."""
    tensors = explainer.tensors()
    if explainer.kind in ("nmf", "deepfacto"):  # their concepts are ordered by importance on held-out images
        basis, weights = tensors["basis"], {k: v for k, v in tensors.items() if k.startswith("weights.")}
        scale = torch.tensor(explainer.state().get("scale", 1.0))
        return {"basis": basis[:, basis.sum(0).argsort()], "scale": scale, **weights}
    if explainer.kind == "coupled":
        return {k: v for k, v in tensors.items() if k.startswith("basis.") or k == "latent"}
    if explainer.kind == "tree":
        value = torch.from_numpy(explainer.tree_.value)
        return {k: v for k, v in tensors.items() if k.startswith("net.")} | {"tree": value}
    return tensors | {"limit": torch.tensor(explainer.state().get("max_distortion", 0.0))}  # xnn, rde


def differs(a, b):
    return a.keys() != b.keys() or any(a[k].shape != b[k].shape or not torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_images_that_are_recorded_as_used_move_an_explainer(kind, small, tmp_path):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (200, 5, 4), dtype=np.uint8), rng.integers(0, 2, 200)

    def fitted(name, changed):
        np.savez(
            tmp_path / name, images=np.where(changed[:, None, None], 255 - images, images), labels=labels ^ changed
        )
        return fit(kind, small, open_data(tmp_path / f"{name}.npz"), **KINDS[kind])

    first = fitted("first", np.zeros(200, bool))
    record = first.fitted_images
    free = record.held_out(np.arange(200)).numpy()
    assert 0 < free.sum() < 200
    assert not differs(learned_state(first), learned_state(fitted("free", free)))
    used = np.zeros(200, bool)
    used[: len(record)] = record.learn.numpy()
    assert differs(learned_state(first), learned_state(fitted("used", used)))


ONE_EPOCH = {
    "nmf": {},
    "xnn": {"max_epochs": 1, "lr": 1e-30},
    "tree": {"epochs": 1},
}  # so that there is nothing to choose


@pytest.mark.parametrize("kind", ["nmf", "xnn", "tree"])
def test_metrics_come_from_the_third_part(kind, small, tmp_path):
    rng = np.random.default_rng(1)
    images, labels = rng.integers(0, 256, (200, 5, 4), dtype=np.uint8), rng.integers(0, 2, 200)

    def metrics(name, changed):
        np.savez(tmp_path / name, images=np.where(changed[:, None, None], 255 - images, images), labels=labels)
        explainer = fit(kind, small, open_data(tmp_path / f"{name}.npz"), **KINDS[kind] | ONE_EPOCH[kind])
        return explainer.fitted_images, explainer.metrics

    record, first = metrics("first", np.zeros(200, bool))
    chosen, reported = np.zeros(200, bool), np.zeros(200, bool)
    chosen[: len(record)], reported[: len(record)] = record.choose.numpy(), record.report.numpy()
    name = {"nmf": "relative_error", "xnn": "f_reg", "tree": "zero_codes"}[kind]
    assert metrics("reported", reported)[1][name] != first[name]
    if kind != "nmf":  # another rank may be chosen there
        assert metrics("chosen", chosen)[1] == first
