"""Groups: a concept that was doubled or split is one group, independent ones stay apart."""

import pytest
import torch

from auditor.metrics.concept_groups import dominance, groups, likeness


def independent(n_images, n_concepts, n_positions, seed=0):
    g = torch.Generator().manual_seed(seed)
    strength = torch.rand(n_images, n_concepts, 1, generator=g) ** 3
    return strength * torch.rand(n_images, n_concepts, n_positions, generator=g) ** 4


@pytest.mark.parametrize("seed", range(3))
def test_a_split_concept_is_one_group_and_independent_ones_stay_apart(seed):
    S = independent(80, 5, 25, seed)
    assert groups(S, seed=seed) == [[k] for k in range(5)]
    g = torch.Generator().manual_seed(seed)
    halves = [S[:, [2]] * (0.5 + 0.1 * torch.rand(80, 1, 25, generator=g)) for _ in range(2)]
    assert groups(torch.cat([S, *halves], 1), seed=seed) == [[0], [1], [2, 5, 6], [3], [4]]


def test_the_same_images_in_other_places_are_not_one_thing():
    strength = torch.rand(80, 1, 1, generator=torch.Generator().manual_seed(0)) ** 3
    left, right = torch.zeros(80, 1, 10), torch.zeros(80, 1, 10)
    left[..., :3], right[..., 6:] = 1.0, 1.0
    S = torch.cat([left * strength, right * strength, left * strength], 1)
    assert likeness(S)[0, 1] == 0
    assert groups(S) == [[0, 2], [1]]


def test_likeness_is_the_definition():
    S = independent(30, 3, 7)
    a, b = S[:, 0].flatten().double(), S[:, 2].flatten().double()
    top = [set(S[:, k].amax(-1).topk(3).indices.tolist()) for k in (0, 2)]
    expected = (float(a @ b / a.norm() / b.norm()) * len(top[0] & top[1]) / 3) ** 0.5
    assert float(likeness(S)[0, 2]) == pytest.approx(expected)
    assert groups(S[:, :1]) == [[0]]
    assert groups(torch.zeros(4, 2, 3)) in ([[0], [1]], [[0, 1]])  # dead concepts do not stop it


def test_dominance_is_the_share_of_the_largest_group():
    by_class = torch.tensor([[2.0, 0.0], [1.0, -1.0], [1.0, 0.0]])
    shares = dominance(by_class, [[0, 2], [1]])
    assert float(shares[0]) == 0.75
    assert bool(shares[1].isnan())


def test_likeness_does_not_depend_on_the_scale_of_a_concept():
    S = torch.rand(30, 3, 6, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(likeness(S * torch.tensor([0.01, 1.0, 50.0])[None, :, None]), likeness(S))
