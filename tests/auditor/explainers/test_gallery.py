"""The images that show a concept best: which, where, and as they are stored."""

import json

import numpy as np
import pytest
import torch

from auditor.data.source import Batch
from auditor.explainers.gallery import CROP, Gallery

GRID = (5, 7)


def test_gallery_holds_the_images_with_the_highest_scores(concepts, digits, digits_data):
    x = torch.cat([b.images for b in digits_data.batches(digits)])
    with torch.no_grad():
        z = digits.activations(x, [concepts.layer_])[concepts.layer_]
    peaks = concepts.scores(digits.layout(concepts.layer_), z).amax(-1)
    for k, shots in enumerate(concepts.gallery_.shots):
        assert len(shots) == 8
        best = peaks[:, k].topk(8).values
        np.testing.assert_allclose([s.score for s in shots], best, rtol=1e-4)
        assert shots[0].crop.shape == (1, 48, 48)
    assert list(concepts.importance_) == sorted(concepts.importance_, reverse=True)


def batch_of(n, channels=1, size=(8, 8), start=0):
    images = torch.rand(n, channels, *size, generator=torch.Generator().manual_seed(start))
    return Batch(images, torch.arange(n), [f"image {start + i}" for i in range(n)])


def test_the_best_images_stay_whatever_the_batches_are():
    scores = torch.rand(30, 2, 6, generator=torch.Generator().manual_seed(1))
    whole = batch_of(30)
    galleries = []
    for size in (30, 7):
        gallery = Gallery(2, 4, (2, 3))
        for lo in range(0, 30, size):
            part = slice(lo, lo + size)
            gallery.offer(Batch(whole.images[part], whole.labels[part], whole.ids[part]), scores[part])
        galleries.append(gallery)
    for k in range(2):
        order = scores[:, k].amax(-1).argsort(descending=True)[:4].tolist()
        for gallery in galleries:
            assert [s.id for s in gallery.shots[k]] == [f"image {i}" for i in order]
            assert [s.score for s in gallery.shots[k]] == pytest.approx(scores[order, k].amax(-1).tolist())


def test_an_image_without_a_concept_is_not_shown_and_equals_keep_their_order():
    gallery = Gallery(1, 3, (1, 1))
    gallery.offer(batch_of(4), torch.tensor([0.0, 0.5, 0.5, 0.2]).reshape(4, 1, 1))
    assert [s.id for s in gallery.shots[0]] == ["image 1", "image 2", "image 3"]
    gallery.offer(batch_of(2, start=4), torch.tensor([0.5, 0.2]).reshape(2, 1, 1))
    assert [s.id for s in gallery.shots[0]] == ["image 1", "image 2", "image 4"]


@pytest.mark.parametrize(
    ("position", "box"),
    [(0, (0.0, 0.0, 0.5, 0.5)), (5, (0.5, 0.5, 1.0, 1.0)), (1, (0.0, 0.25, 0.5, 0.75))],
)
def test_a_large_image_is_cropped_to_half_around_the_peak(position, box):
    gallery, batch = Gallery(1, 1, (2, 3)), batch_of(1, 3, (80, 90))
    scores = torch.zeros(1, 1, 6)
    scores[0, 0, position] = 2.0
    gallery.offer(batch, scores)
    (shot,) = gallery.shots[0]
    assert shot.box == pytest.approx(box)
    top, left, bottom, right = (int(box[0] * 80), int(box[1] * 90), round(box[2] * 80), round(box[3] * 90))
    piece = torch.nn.functional.interpolate(
        batch.images[:, :, top:bottom, left:right], size=(CROP, CROP), mode="bilinear"
    )
    assert torch.equal(shot.crop, (piece[0] * 255).round().to(torch.uint8))
    assert int(shot.heat.max()) > 245  # the peak lies in the crop; between cells it is interpolated


def test_a_small_image_is_shown_whole():
    gallery = Gallery(1, 1, (2, 2))
    gallery.offer(batch_of(1, 1, (64, 64)), torch.tensor([0.1, 0.9, 0.2, 0.0]).reshape(1, 1, 4))
    assert gallery.shots[0][0].box == (0.0, 0.0, 1.0, 1.0)


def test_what_is_stored_comes_back():
    gallery = Gallery(3, 2, (2, 2))
    scores = torch.rand(5, 3, 4, generator=torch.Generator().manual_seed(2))
    scores[:, 1] = 0  # a concept that nothing shows
    gallery.offer(batch_of(5), scores)
    again = Gallery.restore(gallery.tensors(), json.loads(json.dumps(gallery.captions())))
    assert (again.n_top, again.grid) == (2, (2, 2))
    assert [len(shots) for shots in again.shots] == [2, 0, 2]
    for a, b in zip(gallery.shots[2], again.shots[2], strict=True):
        assert (a.id, a.label, a.score, a.box) == (b.id, b.label, b.score, b.box)
        assert torch.equal(a.crop, b.crop)
        assert torch.equal(a.heat, b.heat)
    assert [s.id for s in again.reordered([2, 0]).shots[0]] == [s.id for s in gallery.shots[2]]
    empty = Gallery(2, 1, (1, 1))
    assert Gallery.restore(empty.tensors(), empty.captions()).shots == [[], []]


def named_batch(images, start=0):
    n = len(images)
    return Batch(images, torch.arange(start, start + n) % 3, [f"image {start + i}" for i in range(n)])


def offered(images, scores, n_top, size):
    gallery = Gallery(scores.shape[1], n_top, GRID)
    for start in range(0, len(images), size):
        gallery.offer(named_batch(images[start : start + size], start), scores[start : start + size])
    return gallery


def ramp(height, width):
    """Channel 0 is the share of the height, channel 1 that of the width."""
    y = (torch.arange(height) + 0.5).div(height)[:, None].expand(height, width)
    x = (torch.arange(width) + 0.5).div(width)[None].expand(height, width)
    return torch.stack([y, x, x * 0])[None]


def best_by_sorting(scores, n_top):
    """All images at once: those above zero by their peak, the earlier image first among equals."""
    peaks = scores.amax(-1)
    columns = [[(-float(p), i) for i, p in enumerate(peaks[:, k]) if p > 0] for k in range(peaks.shape[1])]
    return [[(f"image {i}", -p) for p, i in sorted(column)[:n_top]] for column in columns]


@pytest.mark.parametrize("size", [1, 4, 23])
def test_streaming_keeps_what_sorting_everything_keeps(size):
    g = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 6, (23, 4, 35), generator=g).float() * (torch.rand(23, 4, 1, generator=g) < 0.4)  # ties
    scores[:, 3] = 0
    scores[11, 3, 2] = 0.5
    gallery = offered(torch.rand(23, 1, 13, 17, generator=g), scores, 5, size)
    expected = best_by_sorting(scores, 5)
    assert [[(s.id, s.score) for s in shots] for shots in gallery.shots] == expected
    assert [len(shots) for shots in expected] == [5, 5, 5, 1]
    assert all(s.label == int(s.id.split()[1]) % 3 for shots in gallery.shots for s in shots)


def test_a_concept_that_no_image_shows_has_no_pictures():
    gallery = offered(
        torch.rand(3, 1, 13, 17), torch.tensor([0.0, -1.0]).repeat(3, 1)[..., None].expand(3, 2, 35), 2, 3
    )
    assert gallery.shots == [[], []]
    assert gallery.tensors()["crops"].shape == (0, 1, CROP, CROP)
    assert Gallery.restore(gallery.tensors(), gallery.captions()).shots == [[], []]


@pytest.mark.parametrize("position", range(35))
def test_the_window_is_half_the_image_around_the_peak(position):
    scores = torch.zeros(1, 1, 35)
    scores[0, 0, position] = 2.0
    (shot,) = offered(ramp(96, 130), scores, 1, 1).shots[0]
    top, left, bottom, right = shot.box
    assert (bottom - top, right - left) == pytest.approx((0.5, 0.5))
    assert min(top, left) >= 0
    assert max(bottom, right) <= 1
    y, x = (position // 7 + 0.5) / 5, (position % 7 + 0.5) / 7
    assert top <= y <= bottom
    assert left <= x <= right
    if 0.25 <= y <= 0.75:
        assert (top + bottom) / 2 == pytest.approx(y)
    # the ramp says where the pixels of the crop come from; two pixels of 96 and one step of 255 of rounding
    assert float(shot.crop[0].float().mean() / 255) == pytest.approx((top + bottom) / 2, abs=0.02)
    assert float(shot.crop[1].float().mean() / 255) == pytest.approx((left + right) / 2, abs=0.02)
    assert int(shot.crop[2].max()) == 0
    # and the heat is full where the cell lies in the crop, and falls away from it
    row, column = int((y - top) / 0.5 * CROP), int((x - left) / 0.5 * CROP)
    assert int(shot.heat[row, column]) > 230  # 255, but for a pixel of the 27 of a cell
    assert int(shot.heat[(row + CROP // 2) % CROP].max()) == int(shot.heat[:, (column + CROP // 2) % CROP].max()) == 0


def test_without_positions_the_whole_image_is_shown():
    gallery = Gallery(1, 2, (1, 1))
    gallery.offer(named_batch(ramp(96, 130)), torch.full((1, 1, 1), 0.25))
    assert gallery.shots[0][0].box == (0.0, 0.0, 1.0, 1.0)
    assert int(gallery.shots[0][0].heat.min()) == 255


def test_concepts_take_their_pictures_along_into_another_order():
    g = torch.Generator().manual_seed(2)
    gallery = offered(torch.rand(6, 1, 13, 17, generator=g), torch.rand(6, 3, 35, generator=g), 2, 6)
    moved = gallery.reordered([2, 0])
    assert moved.shots == [gallery.shots[2], gallery.shots[0]]
    assert (moved.n_top, moved.grid) == (2, GRID)


def test_labels_of_other_classes_are_shown_by_their_own_names():
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    batch = Batch(images, torch.tensor([-1, 1]), ["a", "b"], torch.tensor([1, 0]))
    scores = torch.tensor([0.7, 0.4]).reshape(2, 1, 1)
    for names, labels in ((None, ["", "dog"]), (("round", "straight"), ["straight", "round"])):
        gallery = Gallery(1, 2, (1, 1), names)
        gallery.offer(batch, scores)
        again = Gallery.restore(gallery.tensors(), gallery.captions()).reordered([0])
        assert [again.label_of(shot, ("cat", "dog")) for shot in again.shots[0]] == labels
