"""Purity of groupings against counting every grouping there is."""

import itertools

import numpy as np
import pytest

from auditor.metrics.grouping_purity import (
    balanced_counts,
    ceiling,
    chance,
    drawn_batches,
    masked,
    purity,
    shuffled_purity,
    small_pictures,
    ward_groups,
)


def slow_purity(groups, classes):
    right = 0
    for group in set(groups):
        inside = [c for g, c in zip(groups, classes, strict=True) if g == group]
        right += max(inside.count(c) for c in set(inside))
    return right / len(classes)


@pytest.mark.parametrize(("classes", "n"), [("aab", 2), ("aabbc", 3), ("abcd", 2), ("aaa", 4), ("aabbcc", 2)])
def test_chance_and_ceiling_are_the_mean_and_the_most_over_all_groupings(classes, n):
    every = [slow_purity(groups, classes) for groups in itertools.product(range(n), repeat=len(classes))]
    assert chance(classes, n) == pytest.approx(np.mean(every), abs=1e-12)
    assert ceiling(classes, n) == pytest.approx(max(every))


def test_ten_images_of_four_classes_in_four_groups_are_half_pure_by_chance():
    assert chance("aaabbbccdd", 4) == pytest.approx(0.5396, abs=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_purity_is_that_of_counting_and_names_do_not_matter(seed):
    rng = np.random.default_rng(seed)
    groups, classes = rng.integers(0, 3, 13).tolist(), rng.integers(0, 4, 13).tolist()
    assert purity(groups, classes) == pytest.approx(slow_purity(groups, classes))
    assert purity([f"g{2 - g}" for g in groups], classes) == purity(groups, classes)
    assert purity(classes, classes) == 1.0
    assert purity([0] * 13, classes) == max(classes.count(c) for c in classes) / 13


def test_a_grouping_of_another_length_or_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        purity([], [])
    with pytest.raises(ValueError, match="got 1, 2"):
        purity([1], [1, 2])


def test_ward_finds_clouds_and_numbers_groups_by_their_first_row():
    rows = np.array([[9.0, 9], [0, 0], [9.1, 9], [0, 0.1], [5, 0]])
    assert ward_groups(rows, 3) == [0, 1, 0, 1, 2]
    assert ward_groups(np.zeros((1, 3)), 4) == [0]
    assert len(set(ward_groups(np.zeros((5, 3)), 4))) == 1  # nothing tells them apart


def test_shuffled_purity_keeps_the_sizes_of_groups():
    rng = np.random.default_rng(0)
    assert shuffled_purity([0] * 6, "aaabbb", rng) == 0.5
    exact = np.mean([purity([0, 0, 1], p) for p in itertools.permutations("aab")])
    assert shuffled_purity([0, 0, 1], "aab", rng, n=2000) == pytest.approx(exact, abs=4 * 0.17 / 2000**0.5)


def test_counts_are_as_equal_as_can_be():
    assert balanced_counts(10, 4) == [3, 3, 2, 2]
    assert balanced_counts(4, 4) == [1, 1, 1, 1]


def test_small_pictures_are_means_of_cells_also_where_sides_do_not_divide():
    image = np.random.default_rng(0).random((2, 3, 13, 17))
    small = small_pictures(image, side=4).reshape(2, 3, 4, 4)
    rows, columns = [i * 4 // 13 for i in range(13)], [i * 4 // 17 for i in range(17)]
    for r, k in ((0, 0), (3, 1), (2, 3)):
        y, x = [i for i in range(13) if rows[i] == r], [i for i in range(17) if columns[i] == k]
        assert small[1, 2, r, k] == pytest.approx(image[1, 2][np.ix_(y, x)].mean())
    assert small_pictures(image[:, :, :3, :2]).shape == (2, 18)  # no cells where there are no pixels


def test_masking_leaves_what_the_heatmap_shows():
    image, heat = np.ones((2, 3, 2, 2)), np.array([[[0.0, 2.0], [1.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])
    assert masked(image, heat)[0, 1].tolist() == [[0.0, 1.0], [0.5, 0.0]]
    assert not masked(image, heat)[1].any()


def test_batches_hold_the_counts_that_people_are_shown():
    classes = [k for k in range(6) for _ in range(5)] + [9]
    batches, n = drawn_batches(classes, 4, 10, 20, seed=0)
    assert n == 4
    for rows in batches:
        of = [classes[i] for i in rows]
        assert sorted(of.count(c) for c in set(of)) == [2, 2, 3, 3]
        assert len(set(rows)) == 10
        assert 9 not in of
    assert len({tuple(sorted(rows)) for rows in batches}) > 10
    assert drawn_batches([0, 1], 4, 10, 5, 0) == ([], 0)
    assert drawn_batches([0] * 5 + [1] * 5, 4, 10, 1, 0)[1] == 2
