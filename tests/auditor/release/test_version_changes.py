"""Two versions on the same images: one reads the mark, the other the opposite corner."""

import math

import numpy as np
import pytest
import torch

from auditor import Subject, open_data
from auditor.release.version_changes import ClassChange, deciding_regions, version_changes
from tests.auditor.auditing.test_model_reliance import SIDE, Patch, marked_images


def reads(corner):
    net = Patch()
    kernel = torch.zeros(1, 1, SIDE, SIDE)
    kernel[..., corner : corner + 5, corner : corner + 5] = 1 / 25
    net.layer.weight.data = kernel
    return Subject(net.eval(), input_shape=(1, SIDE, SIDE), class_names=["bare", "marked"])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("two") / "marked.npz"
    images, labels = marked_images(48, np.random.default_rng(0))
    images[labels == 1, -6:-1, -6:-1] = 240
    np.savez(path, images=images, labels=labels)
    return open_data(path)


def test_the_same_version_looks_at_the_same_places(data):
    a = reads(1)
    regions = deciding_regions(a, a, data, 12, 0)
    assert torch.equal(regions.overlap, torch.ones(12).to(regions.overlap))
    assert regions.words == "12 of 48 images, 6 of each of 2 classes, seed 0"
    assert len(regions.shown) == 8
    assert sorted({regions.targets[i] for i in regions.shown}) == ["bare", "marked"]


def test_versions_that_read_opposite_corners_have_no_region_in_common(data):
    changes = version_changes(reads(1), reads(SIDE - 6), data, n_images=12)
    regions = changes.regions
    marked = [i for i, k in enumerate(regions.targets) if k == "marked"]
    assert float(regions.overlap[marked].mean()) < 0.2
    assert (regions.a.top[marked] < SIDE // 2).all()
    assert (regions.b.top[marked] >= SIDE // 2 - 4).all()
    assert {c.name for c in changes.reliance} == {"bare", "marked"}
    entry = changes.to_json()
    assert len(entry["regions"]["each"]) == 12
    assert entry["reliance"][0]["verdict"][1] in ("found", "look", "nothing")


def test_without_reliance_the_reason_is_said(data):
    changes = version_changes(reads(1), reads(1), data, n_images=4, reliance=False)
    assert "--no-reliance" in changes.not_measured


def test_what_was_not_measured_is_null_in_json():
    assert ClassChange("b", (0.3, math.nan), ("look", "skipped")).to_json()["score"] == [0.3, None]
