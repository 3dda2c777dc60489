"""The cost of keeping only the most relevant cells: by plain loops, and the smallest set by trying every size."""

import time

import pytest
import torch
from torch import nn

from auditor.explainers.rde.rate_curve import RateCurve, descending, joined, kept_up_to, measure, smallest_set
from auditor.perturbation.cells import components
from auditor.perturbation.distortion import MonteCarlo, Problems

M = 20  # cells


def distortion(draws=6, seed=0, n=2):
    """A linear network with two classes on images of twenty pixels, under fixed draws of noise."""
    g = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(M, 2)).double()
    with torch.no_grad():
        net[1].weight.copy_(torch.randn(2, M, generator=g, dtype=torch.float64))
        net[1].bias.zero_()
    images = torch.rand(n, 1, 4, 5, generator=g, dtype=torch.float64)
    targets = net(images).argmax(1)
    noise = torch.rand(n, draws, 1, 4, 5, generator=g, dtype=torch.float64)
    return MonteCarlo(Problems.of(net, images, targets, components((1, 4, 5))), noise)


def order_of(seed=0):
    return torch.randperm(M, generator=torch.Generator().manual_seed(seed))


def slow_entry(d, row, order, size):
    """One entry of the curve, draw by draw."""
    p = d.problems
    mask = torch.zeros(M, dtype=torch.float64)
    mask[order[:size]] = 1
    mask = mask.view(1, 4, 5)
    target, full = int(p.targets[row]), float(p.target_values[row])
    squares, logits, hits = [], [], []
    for noise in d.noise[row]:
        out = p.network((mask * p.images[row] + (1 - mask) * noise)[None])[0].detach()
        logits.append(float(out[target]))
        squares.append(0.5 * (logits[-1] - full) ** 2)
        hits.append(int(out.argmax()) == target)
    n = len(squares)
    mean = sum(squares) / n
    spread = (sum((s - mean) ** 2 for s in squares) / (n - 1)) ** 0.5
    return {
        "cells": size,
        "distortion": mean,
        "standard_error": spread / n**0.5,
        "kept": sum(hits) / n,
        "logit": sum(logits) / n,
    }


@pytest.mark.parametrize("row", [0, 1])
def test_the_curve_is_the_loop_over_draws(row):
    d, order = distortion(), order_of(row)
    curve = measure(d, row, order, [7, 0, 3, 7, 13])
    assert curve.sizes == (0, 3, 7, 13)
    for entry in curve.to_json():
        assert entry == pytest.approx(slow_entry(d, row, order, entry["cells"]), rel=1e-6)
    assert curve.at(7) == 2


def test_the_whole_image_costs_nothing():
    d = distortion()
    (entry,) = measure(d, 1, order_of(), [M]).to_json()
    whole = float(d.problems.target_values[1])
    assert entry == {"cells": M, "distortion": 0, "standard_error": 0, "kept": 1, "logit": pytest.approx(whole)}


def test_one_draw_has_no_standard_error():
    curve = measure(distortion(draws=1), 0, order_of(), [0, 3])
    assert curve.standard_error.isnan().all()


def curve_of(sizes, distortions, probabilities):
    values = torch.tensor(distortions)
    return RateCurve(tuple(sizes), values, values / 10, torch.tensor(probabilities), values * 2)


def test_joined_curves_are_sorted_and_the_first_wins():
    a = curve_of([0, 4], [9.0, 5.0], [0.1, 0.5])
    b = curve_of([2, 4, 6], [7.0, 99.0, 3.0], [0.3, 0.0, 0.7])
    both = joined(a, b)
    assert both.sizes == (0, 2, 4, 6)
    rows = both.to_json()
    assert [row["distortion"] for row in rows] == [9, 7, 5, 3]
    assert [row["kept"] for row in rows] == pytest.approx([0.1, 0.3, 0.5, 0.7])
    assert [row["logit"] for row in rows] == [18, 14, 10, 6]
    assert [row["standard_error"] for row in rows] == pytest.approx([0.9, 0.7, 0.5, 0.3])


def test_the_limit_is_the_largest_distortion_before_the_first_lost_decision():
    assert kept_up_to(curve_of([0, 1, 2, 3], [9.0, 5.0, 2.0, 0.0], [0.2, 0.9, 0.95, 1.0]), 0.9) == 5
    # from the smallest distortion upwards: what comes back after a loss does not count
    assert kept_up_to(curve_of([0, 1, 2, 3], [9.0, 5.0, 2.0, 0.0], [1.0, 0.5, 0.95, 1.0]), 0.9) == 2
    assert kept_up_to(curve_of([0, 1], [9.0, 5.0], [0.2, 0.1]), 0.9) == 0


def test_cells_go_down_by_score_and_ties_are_shuffled():
    score = torch.tensor([0.1, 0.9, 0.5, 0.9, 0.1, 0.1, 0.7])
    orders = [descending(score, torch.Generator().manual_seed(seed)).tolist() for seed in range(20)]
    for order in orders:
        assert sorted(order) == list(range(7))
        assert [float(score[i]) for i in order] == sorted(score.tolist(), reverse=True)
    assert {order[0] for order in orders} == {1, 3}
    assert {order[-1] for order in orders} == {0, 4, 5}
    assert orders[0] == descending(score, torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("width", [1, 2, 8])
@pytest.mark.parametrize("seed", range(3))
def test_the_smallest_set_is_the_first_size_that_passes(width, seed):
    d = distortion(seed=seed)
    p = d.problems
    weight = p.network[1].weight[int(p.targets[0])]
    # most decisive cells first, so that passing is nearly monotone in the size
    order = ((weight * (p.images[0].flatten() - d.noise[0].flatten(1).mean(0))).abs()).argsort(descending=True)
    every = measure(d, 0, order, list(range(M + 1)))
    limit, keep = float(every.distortion.median()), 0.8
    passes = [e["distortion"] <= limit and e["kept"] >= keep for e in every.to_json()]
    first = passes.index(True)
    assert all(passes[first:])  # the search promises the smallest set where passing is monotone
    smallest, curve = smallest_set(d, 0, order, measure(d, 0, order, [0, M]), limit, keep, width=width)
    assert smallest.size == first
    assert smallest.distortion == pytest.approx(every.to_json()[first]["distortion"])
    assert set(curve.sizes) >= {0, first, M}
    assert set(curve.sizes) >= ({first - 1} if first else set())  # the size below was tried and does not pass


def test_nothing_may_pass_and_everything_may():
    d, order = distortion(), order_of()
    start = measure(d, 0, order, [0, M])
    assert smallest_set(d, 0, order, start, -1.0, 0.5)[0] is None
    everything, _ = smallest_set(d, 0, order, start, 1e9, 0.0)
    assert everything.size == 0


def test_a_set_must_keep_the_distortion_and_the_decision():
    d, order = distortion(), order_of()
    every = measure(d, 0, order, list(range(M + 1)))
    by_distortion, _ = smallest_set(d, 0, order, every, 1e9, 1.0)
    assert by_distortion.size == next(e["cells"] for e in every.to_json() if e["kept"] >= 1.0)
    by_limit, _ = smallest_set(d, 0, order, every, 0.01, 0.0)
    assert by_limit.size == next(e["cells"] for e in every.to_json() if e["distortion"] <= 0.01)


def test_after_the_deadline_the_first_size_that_passes_is_the_answer():
    d, order = distortion(), order_of()
    start = measure(d, 0, order, [0, M])
    smallest, curve = smallest_set(d, 0, order, start, 1e-9, 1.0, deadline=time.monotonic() - 1)
    assert smallest.size == M
    assert curve is start
