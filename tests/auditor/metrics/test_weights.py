"""Sparsity and cosines of weights against hand-computed values and against their null model."""

import math

import pytest
import torch

from auditor.metrics.weights import ALPHA, Cosines, weight_metrics


def test_cosines_of_all_pairs():
    w = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [-2.0, 0.0]])
    values = Cosines.of(w).values.sort().values
    torch.testing.assert_close(values, torch.tensor([0.5, 0.5, 1.0]).double().sqrt())
    metrics = weight_metrics(w)
    assert metrics["zero_rows"].value == 1
    assert metrics["cosine_max"].value == pytest.approx(1)
    assert metrics["cosine_max"].n == 3
    assert metrics["cosine_share_below"].value == 0
    assert sum(metrics["cosine_histogram"].per_image) == pytest.approx(1)
    assert len(metrics["cosine_histogram"].per_image) == 50


def test_cosines_of_random_rows_are_those_of_the_null_model():
    w = torch.randn(400, 784, generator=torch.Generator().manual_seed(1))
    metrics = weight_metrics(w)
    assert metrics["cosine_max"].value == pytest.approx(metrics["cosine_max"].null, abs=0.03)
    assert metrics["cosine_histogram"].value == pytest.approx(math.sqrt(2 / math.pi / 784), rel=0.02)
    assert metrics["cosine_share_below"].value == 1
    assert ALPHA == 0.2


def test_sparsity_known_answers():
    w = torch.tensor([[3.0, -4.0], [0.0, 0.001]])
    metrics = weight_metrics(w)
    assert metrics["norm_1_1"].value == pytest.approx(7.001)
    assert metrics["norm_2_1"].value == pytest.approx(5.001)
    assert metrics["norm_2_2"].value == pytest.approx(math.sqrt(25 + 1e-6))
    assert metrics["norm_2_inf"].value == 5
    assert metrics["mean_abs_weight"].value == pytest.approx(7.001 / 4)
    assert metrics["near_zero_share"].value == 0.5
    gaussian = 0.1 * torch.randn(500, 784, generator=torch.Generator().manual_seed(0))
    assert weight_metrics(gaussian)["mean_abs_weight"].value == pytest.approx(0.07979, abs=4 * 0.0603 / 626)


def test_a_single_neuron_has_no_pairs_and_zero_weights_are_sparse():
    metrics = weight_metrics(torch.zeros(1, 5))
    assert metrics["cosine_max"].status == "skipped"
    assert metrics["near_zero_share"].value == 1


def test_a_sample_of_rows_says_so(monkeypatch):
    monkeypatch.setattr("auditor.metrics.weights.MOST_ROWS", 20)
    w = torch.randn(50, 9, generator=torch.Generator().manual_seed(0))
    metrics = weight_metrics(w, seed=3)
    assert metrics["cosine_max"].n == 190
    assert metrics["cosine_max"].reason == "20 of 50 neurons, drawn at random"
    assert metrics["norm_2_1"].null == pytest.approx(50 / math.sqrt(3), rel=0.1)  # scaled to all 50 rows
    assert weight_metrics(w, seed=3) == metrics


def test_figures_are_order_statistics_of_the_explicit_cosines():
    w = torch.randn(9, 4, generator=torch.Generator().manual_seed(2))
    unit = w.double() / w.double().norm(dim=1, keepdim=True)
    pairs = sorted(abs(float(unit[i] @ unit[j])) for i in range(9) for j in range(i))
    result = weight_metrics(w)
    last = len(pairs) - 1
    for name, at in (("cosine_max", 1), ("cosine_q999", 0.999), ("cosine_q99", 0.99), ("cosine_median", 0.5)):
        assert result[name].value == pytest.approx(pairs[round(at * last)], rel=1e-12)
        assert (result[name].direction, result[name].n, result[name].reason) == ("down", 36, "")
    assert result["cosine_share_below"].value == pytest.approx(sum(c <= ALPHA for c in pairs) / 36)
    assert result["cosine_share_below"].direction == "up"
    histogram = [sum(k / 50 <= c < (k + 1) / 50 for c in pairs) / 36 for k in range(50)]
    assert result["cosine_histogram"].per_image == pytest.approx(histogram)
    assert result["cosine_histogram"].value == pytest.approx(sum(pairs) / 36)


def test_directions_and_null_model():
    w = torch.randn(6, 16, generator=torch.Generator().manual_seed(3))
    result = weight_metrics(w)
    assert {k: m.direction for k, m in result.items() if "cosine" not in k} == {
        "mean_abs_weight": "down", "near_zero_share": "up", "norm_1_1": "none", "norm_2_1": "none",
        "norm_2_2": "none", "norm_2_inf": "none", "zero_rows": "none"}  # fmt: skip
    blank = (torch.rand(6, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1) / 4  # 1 / sqrt(16)
    assert result["mean_abs_weight"].null == pytest.approx(float(blank.abs().mean()), rel=1e-6)
    assert result["norm_2_inf"].null == pytest.approx(float(blank.norm(dim=1).max()), rel=1e-6)
    assert result["norm_1_1"].null == pytest.approx(float(blank.abs().sum()), rel=1e-6)
    assert result["zero_rows"].null == 0
    assert result == weight_metrics(w, seed=0) != weight_metrics(w, seed=1)


def test_near_zero_is_below_a_thousandth_of_the_largest():
    w = torch.tensor([[1000.0, 0.5, 0.0], [2.0, -0.9, 7.0]])
    assert weight_metrics(w)["near_zero_share"].value == pytest.approx(0.5)  # 0.5, 0 and -0.9
    most = torch.tensor([[1000.0, 0.5, 0.0], [0.25, -0.9, 7.0]])
    assert weight_metrics(most)["near_zero_share"].value == pytest.approx(4 / 6)
    bound = torch.tensor([[1024.0, 1.024, -1.0, 0.0]], dtype=torch.float64)
    assert weight_metrics(bound)["near_zero_share"].value == pytest.approx(2 / 4)  # the thousandth itself is not below
    assert weight_metrics(w)["zero_rows"].value == 0


def test_no_neurons_and_no_pairs():
    empty = weight_metrics(torch.zeros(2, 3))
    assert empty["cosine_share_below"].status == empty["cosine_max"].status == "skipped"
    assert (empty["cosine_share_below"].direction, empty["cosine_max"].direction) == ("up", "down")
    assert (empty["norm_2_inf"].value, empty["zero_rows"].value, empty["mean_abs_weight"].value) == (0, 2, 0)


def test_all_rows_are_taken_up_to_the_limit(monkeypatch):
    monkeypatch.setattr("auditor.metrics.weights.MOST_ROWS", 20)
    w = torch.randn(20, 9, generator=torch.Generator().manual_seed(0))
    assert weight_metrics(w)["cosine_max"].n == 190
    assert weight_metrics(w)["cosine_max"].reason == ""


def test_up_to_four_million_numbers_are_taken_in_double_precision():
    """Two rows that differ by a millionth: float32 sums over two million entries cannot tell."""
    n = 1 << 21
    g = torch.Generator().manual_seed(0)
    a = torch.randn(n, generator=g, dtype=torch.float64)
    b = a + 1e-4 * torch.randn(n, generator=g, dtype=torch.float64)
    exact = float(a @ b / (a.norm() * b.norm()))
    assert float(Cosines.of(torch.stack([a, b])).values) == pytest.approx(exact, abs=1e-14)


def test_the_rows_of_a_sample_are_the_first_of_a_seeded_permutation(monkeypatch):
    monkeypatch.setattr("auditor.metrics.weights.MOST_ROWS", 7)
    w = torch.randn(30, 9, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(4)
    rows = torch.randperm(30, generator=generator)[:7]
    unit = w[rows].double() / w[rows].double().norm(dim=1, keepdim=True)
    cosines = (unit @ unit.T).abs()
    result = weight_metrics(w, seed=4)
    assert result["cosine_max"].value == pytest.approx(float(cosines.fill_diagonal_(0).max()), rel=1e-12)
    blank = (torch.rand(7, 9, generator=generator) * 2 - 1) / 3
    assert result["norm_1_1"].null == pytest.approx(float(blank.abs().sum()) * 30 / 7, rel=1e-6)
    assert result["norm_2_1"].null == pytest.approx(float(blank.norm(dim=1).sum()) * 30 / 7, rel=1e-6)
    assert result["norm_2_2"].null == pytest.approx(float(blank.norm()) * (30 / 7) ** 0.5, rel=1e-6)
    assert result["norm_2_inf"].null == pytest.approx(float(blank.norm(dim=1).max()), rel=1e-6)
    assert result["mean_abs_weight"].null == pytest.approx(float(blank.abs().mean()), rel=1e-6)
    assert result["mean_abs_weight"].n == 270
    assert result["norm_1_1"].value == pytest.approx(float(w.abs().sum()), rel=1e-6)  # of all rows
