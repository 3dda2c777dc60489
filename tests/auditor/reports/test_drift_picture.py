"""The picture of a drift, read back pixel by pixel: bars, bands and boxes stand for the numbers."""

import numpy as np
import pytest
import torch
from PIL import Image

from auditor.release.drift import Drift
from auditor.release.retraining_noise import Band
from auditor.release.version_changes import Regions
from auditor.reliance.regions import Boxes
from auditor.reports.drift_picture import BLUE, RED, drift_picture


def drift(similarities=(0.9, 0.7, 0.3), died=(), band=(), change=None):
    matched = [(i, i, s) for i, s in enumerate(similarities)]
    k = len(matched)
    return Drift(
        similarity=float(np.mean(similarities)),
        null_low=0.8,
        null_high=0.95,
        p_value=0.5,
        changed=False,
        band=Band(tuple(band)),
        matched=matched,
        born=[],
        died=list(died),
        basis=None,
        within=(0.9, 0.92),
        cka={"conv": 0.5, "fc": 1.0},
        classes=["cat", "dog"],
        change=np.zeros((k, 2)) if change is None else change,
        layers=("conv", "conv"),
        n_images=40,
    )


def shown(path):
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def share(path, colour):
    """The share of the picture that has this very colour."""
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return float((np.abs(shown(path) - wanted).max(-1) <= 2).mean())


def reddish(pixels):
    """Pixels of red lines, whose edges are mixed with what is below."""
    red, green, blue = pixels[..., 0], pixels[..., 1], pixels[..., 2]
    return (red - green > 60) & (red - blue > 60)


def test_concepts_without_a_match_are_red_and_the_others_blue(tmp_path):
    plain = drift_picture(drift(), tmp_path / "deep" / "er" / "a.png")
    assert plain == tmp_path / "deep" / "er" / "a.png"
    red = drift_picture(drift(died=[2]), tmp_path / "b.png")
    most_red = drift_picture(drift(died=[0]), tmp_path / "c.png")
    assert share(plain, RED) == 0
    assert 0 < share(red, RED) < share(most_red, RED)  # the third bar is short, the first one long
    assert share(most_red, BLUE) < share(plain, BLUE)
    assert share(red, RED) / share(most_red, RED) == pytest.approx(0.3 / 0.9, rel=0.2)  # lines cross the bars


def test_the_band_of_retraining_is_drawn_where_it_is_known(tmp_path):
    pictures = [
        reddish(shown(drift_picture(drift(band=band), tmp_path / "a.png")))
        for band in ([0.9], [0.9, 0.8, 0.85], [0.85, 0.85, 0.85])
    ]
    top = [np.nonzero(red[: len(red) // 2].any(1))[0] for red in pictures]  # rows of the upper half with red
    assert len(top[0]) == 0
    assert top[1].mean() > top[2].mean() + 50  # its low end, 0.45, lies far below 0.85


def test_the_change_by_class_is_coloured_by_its_sign(tmp_path):
    """What grew is red, what shrank is blue, and the largest of either sets the scale."""

    def warm(change):
        pixels = shown(drift_picture(drift(change=np.array(change)), tmp_path / "a.png"))
        left = pixels[pixels.shape[0] * 3 // 5 : pixels.shape[0] * 4 // 5, pixels.shape[1] // 4]
        return float((left[:, 0] - left[:, 2]).mean())

    assert warm([[2.0, 0.0]] * 3) > 50 > -50 > warm([[-2.0, 0.0]] * 3)
    assert warm([[2.0, -2.0]] * 3) == pytest.approx(warm([[20.0, -20.0]] * 3))
    assert abs(warm([[0.0, 0.0]] * 3)) < 20


@pytest.mark.parametrize("n", [1, 3])
def test_both_versions_boxes_lie_on_the_images(tmp_path, n):
    whole = torch.zeros(n), torch.zeros(n), torch.full((n,), 12.0), torch.full((n,), 15.0), torch.ones(n)
    small = torch.full((n,), 3.0), torch.full((n,), 4.0), torch.full((n,), 2.0), torch.full((n,), 2.0), torch.ones(n)
    names = [f"image {i}" for i in range(n)]
    regions = Regions(
        torch.full((n, 1, 13, 17), 0.5), names, ["cat"] * n, Boxes(*whole), Boxes(*small), torch.ones(n), 0.1,
        list(range(n)), "words",
    )  # fmt: skip
    both = drift_picture(drift(), tmp_path / "a.png", ("models:/m/1", "models:/m/2"), regions)
    with Image.open(both) as tall, Image.open(drift_picture(drift(), tmp_path / "b.png")) as flat:
        assert tall.size[0] == flat.size[0]
        assert tall.size[1] == round(flat.size[1] * 10.5 / 7.5)
    red = reddish(shown(both))
    upper, middle = len(red) * 7 // 10, len(red) * 87 // 100
    first, second = red[upper:middle].sum(), red[middle:].sum()
    assert first > 2 * second > 0  # the first version's boxes are as large as the images, above
