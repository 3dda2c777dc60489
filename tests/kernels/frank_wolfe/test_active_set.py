"""The combination of vertices against dense arithmetic."""

from __future__ import annotations

import pytest
import torch

from auditor.kernels.frank_wolfe.active_set import DROP_BELOW, ActiveSet


def corner(*at: int, n: int = 4) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.float64).index_fill_(0, torch.tensor(at, dtype=torch.long), 1.0)


def test_it_is_the_point_it_claims() -> None:
    active = ActiveSet(torch.tensor([1.0, 0.0, 0.0]).double())
    active.towards(torch.tensor([0.0, 1.0, 0.0]).double(), 0.25)
    torch.testing.assert_close(active.point(), torch.tensor([0.75, 0.25, 0.0]).double())
    active.swap(0, torch.tensor([0.0, 0.0, 1.0]).double(), 0.5)
    torch.testing.assert_close(active.point(), torch.tensor([0.25, 0.25, 0.5]).double())
    active.away(1, 0.25 / 0.75)
    torch.testing.assert_close(active.point(), torch.tensor([1 / 3, 0.0, 2 / 3]).double())
    assert len(active) == 2
    torch.testing.assert_close(active.scores(torch.tensor([3.0, 5.0, 7.0]).double()), torch.tensor([3.0, 7.0]).double())


def test_random_steps_follow_the_dense_point() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.rand(5, dtype=torch.float64, generator=generator)  # the start needs not be a vertex
    active, s = ActiveSet(start), start
    for _ in range(60):
        kind = int(torch.randint(3, (1,), generator=generator))
        v = (torch.rand(5, generator=generator) < 0.4).double()
        a = int(torch.randint(len(active), (1,), generator=generator))
        away, w = active.vertex(a), active.weights[a]
        share = float(torch.rand(1, generator=generator))
        if kind == 0:
            active.towards(v, 0.3 * share)
            s = s + 0.3 * share * (v - s)
        elif kind == 1 and w < 0.9:
            gamma = share * w / (1 - w)
            active.away(a, gamma)
            s = s + gamma * (s - away)
        else:
            active.swap(a, v, share * w)
            s = s + share * w * (v - away)
        assert sum(active.weights) == pytest.approx(1, abs=1e-12)
        assert min(active.weights) > DROP_BELOW
        torch.testing.assert_close(active.point(), s, rtol=0, atol=1e-9)
        g = torch.randn(5, dtype=torch.float64, generator=generator)
        dense = torch.stack([g @ active.vertex(i) for i in range(len(active))])
        torch.testing.assert_close(active.scores(g), dense)
    assert len(active) > 3


def test_the_same_vertex_is_stored_once_and_a_rescaled_one_is_another() -> None:
    active = ActiveSet(corner(0))
    active.towards(corner(1, 2), 0.5)
    active.towards(corner(1, 2), 0.5)
    assert active.weights == [0.25, 0.75]
    active.towards(0.5 * corner(1, 2), 0.5)
    assert len(active) == 3


def test_a_full_step_forgets_what_was_there() -> None:
    active = ActiveSet(corner(0))
    active.towards(corner(3), 1.0)
    assert active.weights == [1.0]
    torch.testing.assert_close(active.vertex(0), corner(3))
    active.swap(0, corner(1), 1.0)
    torch.testing.assert_close(active.point(), corner(1))


@pytest.mark.parametrize(("gamma", "n_vertices"), [(1e-13, 1), (1e-11, 2)])
def test_rounding_is_no_support(gamma: float, n_vertices: int) -> None:
    active = ActiveSet(corner(0))
    active.towards(corner(1), gamma)
    assert len(active) == n_vertices


def test_remembered_vertices_weigh_nothing() -> None:
    active = ActiveSet(corner(0))
    active.remember(corner(1))
    active.remember(corner(1))
    active.remember(corner(2))
    assert active.weights == [1.0, 0.0, 0.0]
    torch.testing.assert_close(active.point(), corner(0))
    torch.testing.assert_close(
        active.scores(torch.tensor([1.0, 2.0, 3.0, 4.0])), torch.tensor([1.0, 2.0, 3.0]).double()
    )


def test_shape_and_type_are_the_starts() -> None:
    active = ActiveSet(torch.eye(3))
    active.towards(torch.eye(3).flip(0), 0.25)
    assert active.point().dtype == active.vertex(1).dtype == torch.float32
    torch.testing.assert_close(active.point(), 0.75 * torch.eye(3) + 0.25 * torch.eye(3).flip(0))
    torch.testing.assert_close(active.vertex(1), torch.eye(3).flip(0))
    active = ActiveSet(torch.zeros(3))  # no entry at all
    assert active.scores(torch.ones(3)).tolist() == [0.0]
