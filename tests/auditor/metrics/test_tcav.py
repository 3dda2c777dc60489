"""TCAV of a model that is known: red counts for one class and against the other, grey for none."""

import numpy as np
import pytest
import torch
from torch import nn

from auditor import Subject, open_data
from auditor.errors import DataError, OptionError
from auditor.metrics.tcav import tcav

SHAPE = (3, 9, 13)


class Redness(nn.Module):
    """Class ``red`` by the mean of the first channel, ``other`` by its negative."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)
        self.fc = nn.Linear(4, 2, bias=False)
        with torch.no_grad():
            self.layer.weight.zero_()
            self.layer.weight[0, 0, 1, 1] = self.layer.weight[1, 1, 1, 1] = 1.0
            self.layer.weight[2, 2, 1, 1] = 1.0
            self.fc.weight.copy_(torch.tensor([[4.0, 0.05, -0.05, 0.0], [-4.0, 0.05, -0.05, 0.0]]))

    def forward(self, x):
        return self.fc(self.layer(x).relu().mean((2, 3)))


@pytest.fixture(scope="module")
def subject():
    return Subject(Redness(), input_shape=SHAPE, class_names=["red", "other"])


def source(tmp_path, name, n, red=0.0, labels=None, seed=0):
    rng = np.random.default_rng(seed)
    images = rng.uniform(0.2, 0.6, (n, *SHAPE)).astype(np.float32)
    images[:, 0] += red
    file = tmp_path / f"{name}.npz"
    extra = {} if labels is None else {"labels": labels}
    np.savez(file, images=images, **extra)
    return open_data(file)


@pytest.fixture
def sources(tmp_path):
    data = source(tmp_path, "data", 40, 0.1, np.arange(40) % 2, seed=1)
    return data, source(tmp_path, "pool", 160, seed=2)


def test_a_concept_counts_for_one_class_and_against_the_other(subject, sources, tmp_path):
    data, pool = sources
    concepts = {
        "redness": source(tmp_path, "red", 20, 0.3, seed=3),
        "nothing": source(tmp_path, "none", 20, seed=4),
    }
    result = tcav(subject, "layer", concepts, pool, data, runs=8)
    rows = {(r.concept, r.label): r for r in result.rows}
    assert set(rows) == {(c, k) for c in concepts for k in ("red", "other")}
    assert rows["redness", "red"].score == 1.0
    assert rows["redness", "other"].score == 0.0
    assert rows["redness", "red"].accuracy > 0.95
    assert rows["redness", "red"].is_significant
    assert rows["redness", "other"].is_significant
    assert not rows["nothing", "red"].is_significant
    assert not rows["nothing", "other"].is_significant
    assert any("nothing: layer layer does not separate it from random images" in r for r in result.remarks)
    assert (result.set_size, result.pool, result.runs) == (20, 160, 8)
    assert not any("share images" in r for r in result.remarks)
    again = tcav(subject, "layer", concepts, pool, data, runs=8)
    assert again == result  # the seed decides


def test_targets_few_images_and_small_pools_are_said(subject, sources, tmp_path):
    data, pool = sources
    concept = {"redness": source(tmp_path, "red", 12, 0.3, seed=3)}
    result = tcav(subject, "layer", concept, open_data(tmp_path / "pool.npz", limit=30), data, targets=["red"], runs=4)
    assert [(r.label, r.n_images) for r in result.rows] == [("red", 20)]
    assert any("4 random sets of 12 share images, since the pool has 30" in r for r in result.remarks)
    few = source(tmp_path, "few", 24, 0.1, np.array([0] * 20 + [1] * 4), seed=5)
    enough = source(tmp_path, "enough", 30, 0.1, np.array([0] * 20 + [1] * 10), seed=5)
    assert tcav(subject, "layer", concept, pool, enough, runs=3).skipped == {}
    assert tcav(subject, "layer", concept, pool, few, runs=3).skipped == {"other": "4 images, needs at least 10"}
    assert tcav(subject, "layer", concept, pool, data, runs=3, images=11).rows[0].n_images == 11
    assert result.to_json()["scores"][0]["significant"] is False  # four runs are too few to tell


def test_bad_input(subject, sources, tmp_path):
    data, pool = sources
    concept = {"redness": source(tmp_path, "red", 12, 0.3, seed=3)}
    with pytest.raises(OptionError, match="give at least one concept"):
        tcav(subject, "layer", {}, pool, data)
    with pytest.raises(OptionError, match="needs at least 3 random sets, got 2"):
        tcav(subject, "layer", concept, pool, data, runs=2)
    with pytest.raises(DataError, match="concept 'tiny' has 9 images"):
        tcav(subject, "layer", {"tiny": source(tmp_path, "tiny", 9)}, pool, data)
    with pytest.raises(DataError, match="a pool of at least 24"):
        tcav(subject, "layer", concept, open_data(tmp_path / "pool.npz", limit=20), data)
    with pytest.raises(OptionError, match="no class is called 'blue'"):
        tcav(subject, "layer", concept, pool, data, targets=["blue"], runs=3)
    with pytest.raises(DataError, match="no class has 10 images"):
        tcav(subject, "layer", concept, pool, source(tmp_path, "four", 8, labels=np.arange(8) % 2), runs=3)
