import copy
import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from auditor.data.source import open_data
from auditor.errors import OptionError, ShapeError
from auditor.release.drift import _null, check_comparable, compare
from auditor.reports.drift_picture import drift_picture
from auditor.subject.subject import Subject


def net(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 16, 3, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
        )  # fmt: skip


def subject_of(module, **options):
    return Subject(module, input_shape=(1, 8, 8), **options)


@pytest.fixture(scope="module")
def digits():
    return open_data("sklearn:digits", limit=150)


def test_same_version_is_no_drift_and_another_one_is(digits, tmp_path):
    a = subject_of(net(0))
    same = compare(a, subject_of(copy.deepcopy(a.module)), digits, layer="4", rank=4)
    assert same.drift is False
    assert same.metrics()["drift/alarm"] == 0
    assert same.similarity >= same.null_low
    assert same.born == same.died == []
    assert all(v == pytest.approx(1) for v in same.cka.values())
    changed = copy.deepcopy(a.module)
    changed[3] = net(1)[3]  # the layer below the one compared, re-initialised
    other = compare(a, subject_of(changed), digits, layer="4", rank=4)
    assert other.changed
    assert other.drift is None  # nobody knows what a retraining would have changed
    assert "CHANGED, which may be retraining" in other.words()
    assert "unknown" in other.words()
    assert math.isnan(other.metrics()["drift/alarm"])
    assert other.similarity < other.null_low
    assert other.cka["1"] == pytest.approx(1)
    assert other.cka["4"] < 0.99
    assert abs(other.change).max() > 0
    assert sorted(i for i, _, _ in other.matched) == [0, 1, 2, 3]
    assert len(other.basis) == 4
    answer = other.to_json()
    assert {"similarity", "null_low", "drift", "matched", "born", "died"} <= set(answer)
    assert drift_picture(other, tmp_path / "drift.png").stat().st_size > 10_000


def test_what_honest_versions_change_is_no_drift_and_more_is(digits):
    """Honest versions differ by weights below the compared layer; the other has lost half of its channels."""
    first = net(0)

    def another(scale, seed):
        changed = copy.deepcopy(first)
        generator = torch.Generator().manual_seed(seed)
        for p in changed[3].parameters():
            p.data += scale * p.data.std() * torch.randn(p.shape, generator=generator)
        return subject_of(changed)

    honest = {f"h{i}": another(0.25, i) for i in (1, 2)}
    options = {"layer": "4", "rank": 4, "refits": 5, "honest": honest}
    mild = compare(subject_of(first), another(0.2, 9), digits, **options)
    assert mild.band.is_known
    assert len(mild.band.similarities) == 3
    assert mild.drift is False
    assert mild.metrics()["drift/retraining_low"] == mild.band.low
    torn = compare(subject_of(first), another(5.0, 9), digits, **options)
    assert torn.similarity < mild.similarity
    assert torn.band.similarities == pytest.approx(mild.band.similarities)


def test_null_counts_every_split_once_and_finds_two_clusters():
    M = np.full((12, 12), 0.5)
    M[:6, :6] = M[6:, 6:] = 0.9
    similarity, null = _null(M, 6)
    assert len(null) == 462
    assert similarity == pytest.approx(0.5)
    assert (null <= similarity + 1e-12).sum() == 1
    brute = [
        M[np.ix_(left, [i for i in range(12) if i not in left])].mean() for left in itertools.combinations(range(12), 6)
    ]
    assert sorted(np.repeat(null, 2)) == pytest.approx(sorted(brute))


def test_versions_that_cannot_be_compared(digits):
    a = subject_of(net(0))
    with pytest.raises(ShapeError, match="different sizes, \\(1, 8, 8\\) and \\(1, 9, 9\\)"):
        check_comparable(a, Subject(net(0), input_shape=(1, 9, 9)))
    other = subject_of(net(0), class_names=[f"c{i}" for i in range(10)])
    with pytest.raises(OptionError, match="different class lists"):
        compare(a, other, digits)
    with pytest.raises(OptionError, match="rank must be at most 16"):
        compare(a, a, digits, layer="4", rank=17)
    with pytest.raises(OptionError, match="refits must be at least 5"):
        compare(a, a, digits, layer="4", refits=2)
