"""A choice of images: spread over the classes, the same for the same seed, and said in words."""

import numpy as np
import pytest
import torch
from PIL import Image

from auditor import open_data
from auditor.data.sampling import one_of_each_run, shares, stratified
from auditor.subject.preprocessing import Preprocessing

GREY = Preprocessing.of((1, 8, 8), None, None, "stretch")


def one_by_one(sizes, n):
    """Deal one after the other to every group that has some left: plainly even."""
    counts = [0] * len(sizes)
    while sum(counts) < min(n, sum(sizes)):
        for i, size in enumerate(sizes):
            if counts[i] < size and sum(counts) < n:
                counts[i] += 1
    return counts


@pytest.mark.parametrize("sizes", [[3, 50, 50], [1], [4, 0, 9, 2], [7, 7, 7]])
@pytest.mark.parametrize("n", [0, 1, 2, 5, 11, 43, 1000])
def test_shares_are_dealt_evenly(sizes, n):
    counts = shares(sizes, n)
    assert sum(counts) == min(n, sum(sizes))
    dealt = one_by_one(sizes, n)
    assert sorted(counts) == sorted(dealt)
    assert all(t <= size for t, size in zip(counts, sizes, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_a_sample_is_spread_over_classes_whatever_their_order(seed):
    labels = np.repeat([0, 1, 2, 3, 4], [60, 5, 60, 60, 60])
    sample = stratified(labels, 45, seed)
    assert sample.rows.tolist() == sorted(set(sample.rows.tolist()))
    assert np.bincount(labels[sample.rows]).tolist() == [10, 5, 10, 10, 10]
    assert sample.words == f"45 of 245 images, 5 to 10 of each of 5 classes, seed {seed}"
    assert np.array_equal(stratified(labels, 45, seed).rows, sample.rows)
    assert not np.array_equal(stratified(labels, 45, seed + 1).rows, sample.rows)


def test_every_row_of_a_class_has_the_same_chance():
    labels, draws = np.repeat([0, 1], [4, 20]), 400
    counts = sum(np.bincount(stratified(labels, 6, s).rows, minlength=24) for s in range(draws))
    expected = np.repeat([3 / 4, 3 / 20], [4, 20])
    error = 4 * np.sqrt(expected * (1 - expected) / draws)
    assert (np.abs(counts / draws - expected) < error).all()


def test_more_than_there_are_is_all_and_no_labels_is_said():
    assert stratified([1, 0, 1], 9).words == "3 of 3 images, 1 to 2 of each of 2 classes"
    assert stratified([-1] * 5, 2, seed=7).words.endswith("since they have no labels, seed 7")
    assert stratified([-1, -1, 0, 0], 2).words == "2 of 4 images, all of one class, 1 without a label, seed 0"
    assert stratified([], 3).words == "0 of 0 images"


def test_a_folder_in_class_order_gives_every_class(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("ant", "bee", "cat"):
        (tmp_path / name).mkdir()
        for i in range(12):
            Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).save(tmp_path / name / f"{i:02}.png")
    data = open_data(tmp_path, limit=7, seed=2)
    ids = [i for batch in data.batches(GREY, 2) for i in batch.ids]
    assert len(ids) == len(data) == 7
    assert sorted({i.partition("/")[0] for i in ids}) == ["ant", "bee", "cat"]
    assert data.sample.words == "7 of 36 images, 2 to 3 of each of 3 classes, seed 2"
    digests = {open_data(tmp_path, limit=n, seed=s).digest for n, s in ((7, 2), (7, 3), (8, 2), (None, 0))}
    assert len(digests) == 4
    assert open_data(tmp_path, limit=7, seed=2).digest == data.digest
    assert open_data(tmp_path, limit=36).digest == open_data(tmp_path).digest  # nothing is left out


@pytest.mark.parametrize("batch_size", [1, 5, 64, 5000])
def test_a_limit_on_a_stream_gives_full_batches_of_the_same_images(batch_size):
    whole = open_data("sklearn:digits")
    images = torch.cat([b.images for b in whole.batches(GREY, 500)])
    data = open_data("sklearn:digits", limit=130, seed=1)
    batches = list(data.batches(GREY, batch_size))
    assert all(len(b) == batch_size for b in batches[:-1])
    assert torch.equal(torch.cat([b.images for b in batches]), images[data.sample.rows])
    assert [i for b in batches for i in b.ids] == [str(i) for i in data.sample.rows]
    assert torch.cat([b.labels for b in batches]).bincount().tolist() == [13] * 10


@pytest.mark.parametrize(("total", "n"), [(17, 5), (100, 99), (7, 7), (3, 9), (40, 1)])
def test_one_row_of_each_run(total, n):
    rows = one_of_each_run(total, n, seed=3)
    assert len(rows) == min(total, n)
    runs = [[i for i in range(total) if i * n // total == k] for k in range(n)] if n < total else [[i] for i in rows]
    sizes = [len(run) for run in runs]
    assert max(sizes) - min(sizes) <= 1
    assert (np.diff(rows) > 0).all()
    hits = {int(r) for s in range(200) for r in one_of_each_run(total, n, s)}
    assert hits == set(range(total))


def test_what_a_fit_draws_does_not_ask_for_labels(tmp_path):
    images, labels = np.zeros((90, 8, 8), dtype=np.uint8), np.repeat([0, 1, 2], 30)
    masks = []
    for name, y in (("a", labels), ("b", labels[::-1].copy())):
        np.savez(tmp_path / f"{name}.npz", images=images, labels=y)
        masks.append(open_data(tmp_path / f"{name}.npz").spaced(12, seed=5))
    assert torch.equal(*masks)
    assert np.bincount(labels[masks[0].numpy()]).tolist() == [4, 4, 4]
    allowed = torch.arange(90) % 3 == 2
    some = open_data(tmp_path / "a.npz").spaced(9, seed=5, among=allowed)
    assert int(some.sum()) == 9
    assert not bool((some & ~allowed).any())


def test_a_part_of_a_source_reads_only_that():
    data = open_data("sklearn:digits", limit=100)
    allowed = torch.zeros(100, dtype=torch.bool)
    allowed[::3] = True
    drawn = data.draw(20, seed=1, among=allowed)
    assert int(drawn.sum()) == 20
    assert not bool((drawn & ~allowed).any())
    part = data.only(drawn)
    batch = next(iter(part.batches(GREY, 64)))
    every = next(iter(data.batches(GREY, 100)))
    assert len(part) == len(batch) == 20
    assert torch.equal(batch.images, every.images[drawn])
    assert part.digest != data.digest
    assert data.only(torch.ones(100, dtype=torch.bool)).digest == data.digest
    assert len(data) == 100
