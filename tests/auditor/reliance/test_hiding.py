"""Hiding: a block that is read is necessary and sufficient; the same mask elsewhere is neither."""

import pytest
import torch

from auditor.reliance.hiding import hide, keep_only
from tests.auditor.reliance.planted import BLOCK, SIZE, ReadsBlock, images, subject

SHARE = 54 / 768


@pytest.fixture(scope="module")
def marked():
    model = subject(ReadsBlock())
    x, y = images()
    maps = torch.full((len(x), *SIZE), 1e-6)
    maps[:, BLOCK[0], BLOCK[1]] = 1.0

    def predict(batch):
        with torch.no_grad():
            return model.logits(batch)

    return predict, x[y == 1], y[y == 1], maps[y == 1]


def test_hiding_the_block_ends_the_class_and_hiding_as_much_elsewhere_does_not(marked):
    survivals = hide(*marked, (0.01, 0.10), ("mean", "blur", "inpaint"), seed=0)
    assert [(s.share, s.fill) for s in survivals] == [(0.01, "mean")] + [(0.10, f) for f in ("mean", "blur", "inpaint")]
    assert survivals[0].still_scattered is None
    whole = survivals[1:]
    assert [float(s.still.mean()) for s in whole] == [0, 0, 0]
    assert float(whole[0].still_moved.mean()) == 1
    assert float(whole[0].still_scattered.mean()) > 0.8
    assert float(whole[0].margin.max()) < 0 < float(whole[0].margin_moved.min())
    assert float(survivals[0].margin.mean()) > float(whole[0].margin.mean())


def test_the_block_alone_is_enough_and_another_place_is_not(marked):
    (survival,) = keep_only(*marked, (SHARE,), seed=0)
    assert float(survival.still.mean()) == 1
    assert float(survival.still_moved.mean()) == 0
    assert survival.fill == "blur"


def test_the_same_seed_moves_masks_to_the_same_places(marked):
    first, again = (hide(*marked, (0.03,), ("mean",), seed=4)[0] for _ in range(2))
    assert torch.equal(first.margin_moved, again.margin_moved)
    other = hide(*marked, (0.03,), ("mean",), seed=5)[0]
    assert not torch.equal(first.margin_moved, other.margin_moved)
