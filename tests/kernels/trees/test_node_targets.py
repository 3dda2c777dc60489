"""Descriptions of nodes against numpy: means, energies, fixed-point targets and coordinates of small nodes."""

import numpy as np
import pytest

from auditor.kernels.trees.histogram_simd import LANES
from auditor.kernels.trees.node_targets import LOCAL, MOST_COORDINATES, TAIL_SHARE, TOP, _coordinates, prepare
from auditor.kernels.trees.split_search import GROWN, SUBTRACTED
from auditor.kernels.trees.tiny_nodes import MOST_SUBSET_ROWS
from tests.kernels.trees.drawn_codes import nodes_of, room_for, targets_of


def prepared(y, groups, modes):
    nodes, targets = nodes_of(groups, modes), targets_of(y)
    out = room_for(nodes, targets)
    prepare(0, len(groups), nodes, targets, out)
    return nodes, targets, out


def local_rows(out, node, m):
    """The fixed-point rows of a LOCAL node, (rows, lanes), times its step but for the count."""
    lanes = out.lanes[node]
    return out.local[out.local_at[node] :][: m * lanes].reshape(m, lanes)


@pytest.mark.parametrize("k", [1, 3, 20])
def test_means_and_energies_equal_numpy(k):
    rng = np.random.default_rng(k)
    y = rng.normal(size=(90, k)) + 3
    order = rng.permutation(90)
    groups = [order[:30], order[30:35], order[35:36], order[36:]]
    _, _, out = prepared(y, groups, [GROWN, LOCAL, LOCAL, LOCAL])
    for node, rows in enumerate(groups):
        np.testing.assert_allclose(out.mean[node], y[rows].mean(0), rtol=1e-12)
        assert out.energy[node] == pytest.approx(((y[rows] - y[rows].mean(0)) ** 2).sum(), rel=1e-9, abs=1e-20)


@pytest.mark.parametrize("mode", [GROWN, SUBTRACTED])
def test_a_node_with_a_histogram_takes_the_common_fixed_point_targets(mode):
    y = np.random.default_rng(0).normal(size=(40, 17))
    rows = np.arange(3, 33)
    _, targets, out = prepared(y, [rows], [mode])
    assert out.lanes[0] == targets.fixed.shape[1] == 32
    assert out.step[0] == targets.step
    assert out.tail[0] == 0
    np.testing.assert_allclose(out.fixed_mean[0], targets.fixed[rows].mean(0), rtol=1e-12)
    assert out.fixed_mean[0, 0] == 1


def test_a_tiny_node_needs_no_histogram():
    y = np.random.default_rng(0).normal(size=(40, 3))
    _, _, out = prepared(y, [np.arange(MOST_SUBSET_ROWS), np.arange(MOST_SUBSET_ROWS + 1)], [LOCAL, LOCAL])
    assert out.lanes.tolist() == [0, LANES]
    assert out.tail.tolist() == [0, 0]
    assert (out.fixed_mean[0] == 0).all()


@pytest.mark.parametrize(("k", "lanes"), [(3, 16), (15, 16)])
def test_a_small_node_rounds_its_centred_targets_as_finely_as_sums_allow(k, lanes):
    y = np.random.default_rng(1).normal(size=(60, k)) * 5 + 100
    groups = [np.arange(20, 60), np.arange(20)]
    _, _, out = prepared(y, groups, [LOCAL, LOCAL])
    for node, rows in enumerate(groups):
        m, d = len(rows), y[rows] - y[rows].mean(0)
        assert out.lanes[node] == lanes
        assert out.step[node] == pytest.approx(m * np.abs(d).max() / TOP, rel=1e-9)
        fixed = local_rows(out, node, m)
        assert (fixed[:, 0] == 1).all()
        assert (fixed[:, k + 1 :] == 0).all()
        assert np.abs(fixed[:, 1 : k + 1] * out.step[node] - d).max() <= 0.5001 * out.step[node]
        np.testing.assert_allclose(out.fixed_mean[node], fixed.mean(0), rtol=1e-12)
        assert out.tail[node] == 0


def test_targets_of_low_rank_become_a_few_coordinates_with_the_same_products():
    rng = np.random.default_rng(2)
    y = rng.normal(size=(50, 5)) @ rng.normal(size=(5, 40))
    _, targets, out = prepared(y, [np.arange(50)], [LOCAL])
    assert targets.fixed.shape[1] == 48
    assert out.lanes[0] == 16
    coords = local_rows(out, 0, 50)[:, 1:] * out.step[0]
    d = y - y.mean(0)
    assert (coords[:, 5:] == 0).all()
    longest = (d**2).sum(1).argmax()  # the first axis
    np.testing.assert_allclose(coords[longest, :5], [np.linalg.norm(d[longest]), 0, 0, 0, 0], atol=1e-5)
    np.testing.assert_allclose(coords @ coords.T, d @ d.T, atol=1e-4)  # fifty rows times the step times a length
    assert 0 <= out.tail[0] <= 2e-10 * out.energy[0]
    assert (out.fixed_mean[0, 16:] == 0).all()


def test_coordinates_stop_at_a_full_group_of_lanes_and_own_up_to_what_they_leave_out():
    rng = np.random.default_rng(3)
    y = rng.normal(size=(80, 60)) * 0.75 ** np.arange(60)
    _, _, out = prepared(y, [np.arange(80)], [LOCAL])
    assert out.lanes[0] == 16  # fifteen coordinates and the count
    coords = local_rows(out, 0, 80)[:, 1:] * out.step[0]
    left = out.energy[0] - (coords**2).sum()
    assert coords[:, 14].any()
    assert 0 < left < TAIL_SHARE * out.energy[0]
    assert out.tail[0] == pytest.approx(left + 1e-10 * out.energy[0], rel=1e-3)


@pytest.mark.parametrize("k", [64, 70])
def test_targets_of_full_rank_stay_as_they_are(k):
    y = np.random.default_rng(4).normal(size=(200, k))
    _, _, out = prepared(y, [np.arange(200)], [LOCAL])
    assert out.lanes[0] == 80
    assert out.tail[0] == 0
    fixed = local_rows(out, 0, 200)
    assert np.abs(fixed[:, 1 : k + 1] * out.step[0] - (y - y.mean(0))).max() <= 0.5001 * out.step[0]


def test_all_coordinates_are_used_where_they_leave_little_out():
    y = np.random.default_rng(5).normal(size=(150, 70)) * np.where(np.arange(70) < 60, 1, 0.02)
    _, _, out = prepared(y, [np.arange(150)], [LOCAL])
    assert out.lanes[0] == 64
    assert 0 < out.tail[0] < TAIL_SHARE * out.energy[0]
    sixteen = np.random.default_rng(6).normal(size=(60, 16))
    assert prepared(sixteen, [np.arange(60)], [LOCAL])[2].lanes[0] == 32  # with the count they are seventeen


def test_equal_targets_and_a_part_of_the_nodes():
    y = np.full((40, 20), 2.0)
    y[0] = 5  # outside the node: the step of all targets is not zero
    nodes, targets = nodes_of([np.arange(1, 20), np.arange(20, 40)], [LOCAL, LOCAL]), targets_of(y)
    out = room_for(nodes, targets)
    prepare(1, 2, nodes, targets, out)
    assert out.energy.tolist() == [7, 0]
    assert out.lanes.tolist() == [7, 32]
    assert out.step[1] == 1e-300
    fixed = local_rows(out, 1, 20)
    assert (fixed[:, 0] == 1).all()
    assert (fixed[:, 1:] == 0).all()


def test_gram_schmidt_takes_the_longest_rest_first():
    part = np.array([[1.0, 0, 0], [0, 5, 0], [3, 4, 0], [0, 0, 2]])
    original, norms = part.copy(), (part**2).sum(1)
    coords = np.zeros((4, MOST_COORDINATES))
    rank, left = _coordinates(part, coords, norms, norms.sum())
    assert rank == 3
    assert left == pytest.approx(0, abs=1e-12)
    np.testing.assert_allclose(coords[:, 0], original @ [0, 1, 0])  # rows 1 and 2 are as long: the first one
    np.testing.assert_allclose(np.abs(coords[:, 1]), [1, 0, 3, 0])
    np.testing.assert_allclose(np.abs(coords[:, 2]), [0, 0, 0, 2])
    np.testing.assert_allclose(part, 0, atol=1e-12)
    np.testing.assert_allclose(coords @ coords.T, original @ original.T, atol=1e-12)


def test_gram_schmidt_ends_at_rounding_and_at_nothing():
    part = np.zeros((3, 4))
    assert _coordinates(part, np.zeros((3, MOST_COORDINATES)), np.zeros(3), 1.0) == (0, 1.0)  # no length is left
    part = np.diag([1.0, 1e-8, 0])
    rank, left = _coordinates(part, np.zeros((3, MOST_COORDINATES)), (part**2).sum(1), 1.0)
    assert (rank, left) == (1, pytest.approx(1e-16))
