"""The page of attribute fidelity: which images it shows, in which frames, and that names are text."""

import re

import numpy as np
import pytest
import torch
from torch import nn

from auditor import Subject, open_data
from auditor.explainers.tree.fidelity_page import SHOTS, fidelity_page, shown_images, write_fidelity_page
from auditor.explainers.tree.layer_fidelity import layer_fidelity


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Images whose first channel is bright for every third; a layer that averages each channel."""
    folder = tmp_path_factory.mktemp("fidelity")
    images = np.random.default_rng(0).uniform(0.1, 0.4, (30, 3, 7, 5)).astype(np.float32)
    is_bright = np.arange(30) % 3 == 0
    images[is_bright, 0] += 0.5
    np.savez(folder / "data.npz", images=images, labels=np.arange(30) % 2)
    data = open_data(folder / "data.npz")
    net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.ReLU(), nn.Flatten(), nn.Linear(3, 2)).eval()
    subject = Subject(net, input_shape=(3, 7, 5), mean=0.0, std=1.0)
    ids = next(data.batches(subject, 30)).ids
    rows = [f"{i},{100 * b},{100 * (k % 2)}" for k, (i, b) in enumerate(zip(ids, is_bright, strict=True))]
    (folder / "a.csv").write_text("\n".join(["image,<bright>,odd", *rows]) + "\n")
    return layer_fidelity(subject, data, "1", folder / "a.csv", bits=2), subject, data


def test_images_are_those_for_which_the_unit_says_yes(case):
    result = case[0]
    rows = shown_images(result, 0)
    assert len(rows) == SHOTS
    assert all(result.says(0)[k] for k in rows)
    assert rows == sorted(set(rows))
    np.testing.assert_array_equal(result.says(0), result.marks[:, 0])


def test_the_page_has_scores_attributes_and_framed_pictures(case, tmp_path):
    result, subject, data = case
    text = fidelity_page(result, subject, data, "models:/x/1")
    assert "&lt;bright&gt;: unit 0 is 3 (F1 1.00; yes for 10 images, 10 of them have it, as 33% of all)" in text
    assert "<bright>" not in text
    assert len(re.findall("<figure", text)) == sum(len(shown_images(result, i)) for i in range(2))
    assert text.count(": has it not") == 2 * sum(  # as alternative text and title, and once more as caption
        not result.marks[k, 1] for k in shown_images(result, 1)
    ) + sum(not result.marks[k, 1] for k in shown_images(result, 1))
    assert f"{result.by_distance.floor:.3f}" in text
    path = write_fidelity_page(result, subject, data, tmp_path / "new" / "units.html", "models:/x/1")
    assert path.read_text() == text


def test_an_attribute_whose_unit_never_says_yes_has_no_pictures(case):
    result = case[0]
    result.codes[:] = 0
    torch.manual_seed(0)
    f = result.by_f1
    f.best_code[:], f.is_equal[:] = 1, True
    assert shown_images(result, 0) == []
