"""RC-, MR-, Ord- and L-RDE on problems whose answer is known."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from auditor.errors import NumericsError, OptionError
from auditor.explainers.rde.relevance_map import (
    Budget,
    Method,
    OrderDistortion,
    RatePath,
    checked_rates,
    lagrangian,
    multi_rate,
    ordering,
    rate_constrained,
)
from auditor.kernels.frank_wolfe.solver import Status
from auditor.perturbation.cells import components
from auditor.perturbation.distortion import AssumedDensity, Problems
from auditor.perturbation.replacement import Obfuscation

W = torch.tensor([3.0, -1.0, 2.0, 0.5]).double()
X = torch.tensor([1.0, 0.5, -1.0, 2.0]).double()
VAR = torch.tensor([1.0, 4.0, 0.25, 9.0]).double()


def linear_distortion(x: Tensor = X, mean: Tensor | None = None) -> AssumedDensity:
    """Phi(x) = w . x, assumed-density filtering is exact here."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 1, bias=False)).double()
    net[1].weight.data = W[None].clone()
    problems = Problems.of(net, x.view(1, 1, 2, 2), torch.tensor([0]), components((1, 2, 2)))
    mean = torch.zeros(4).double() if mean is None else mean
    noise = Obfuscation(
        "gaussian", mean.view(1, 2, 2), VAR.view(1, 2, 2), torch.zeros(0, 1, 2, 2), torch.zeros(0, 1, 2, 2)
    )
    return AssumedDensity(problems, *noise.moments(problems.images)[:2])


def closed_form(s: Tensor) -> float:
    return float(0.5 * ((W * (1 - s) * X).sum() ** 2 + (W**2 * (1 - s) ** 2 * VAR).sum()))


@pytest.mark.parametrize(
    ("k", "best", "chosen"),
    [(0, 9.25, ()), (1, 4.75, (0,)), (2, 2.125, (0, 1)), (3, 1.625, (0, 1, 2)), (4, 0.0, (0, 1, 2, 3))],
)
def test_binary_optimum_by_brute_force(k: int, best: float, chosen: tuple[int, ...]) -> None:
    d = linear_distortion()
    sets = [s for n in range(k + 1) for s in itertools.combinations(range(4), n)]
    masks = torch.stack([torch.tensor([float(i in s) for i in range(4)]).double() for s in sets])
    values = d.value(masks, torch.zeros(len(sets), dtype=torch.long)).detach()
    torch.testing.assert_close(values, torch.tensor([closed_form(m) for m in masks]).double())
    assert float(values.min()) == pytest.approx(best)
    assert sets[int(values.argmin())] == chosen


@pytest.mark.parametrize("variant", ["away", "pairwise"])
@pytest.mark.parametrize(
    ("k", "s", "value"),
    [
        (1, (0.6337, 0.3663, 0.0, 0.0), 3.05569),
        (2, (0.7640, 0.7064, 0.2324, 0.2972), 1.31008),
        (3, (0.8820, 0.8532, 0.6162, 0.6486), 0.32752),
    ],
)
def test_continuous_optimum(k: int, s: tuple[float, ...], value: float, variant: str) -> None:
    answer = rate_constrained(
        linear_distortion(),
        torch.tensor([k]),
        torch.zeros(1, 4).double(),
        Budget(max_steps=3000, gap_share=1e-10),
        Method(variant, "backtracking"),  # type: ignore[arg-type]
    )
    torch.testing.assert_close(answer.s[0], torch.tensor(s).double(), rtol=0, atol=1e-4)
    assert float(answer.value) == pytest.approx(value, abs=1e-5)
    slsqp = minimize(
        lambda v: closed_form(torch.from_numpy(v)),
        [0.1] * 4,
        bounds=[(0, 1)] * 4,
        constraints={"type": "ineq", "fun": lambda v: k - v.sum()},
        tol=1e-12,
    )
    assert float(answer.value) == pytest.approx(slsqp.fun, abs=1e-6)
    assert float(answer.value) - slsqp.fun <= float(answer.gap) + 1e-8


def test_published_rule_reaches_the_same_value() -> None:
    d = linear_distortion()
    relevance = multi_rate(d, 1, 4, [1, 2, 3], Budget(1000, gap_share=1e-6), start=torch.zeros(1, 3, 4).double())
    torch.testing.assert_close(
        relevance.distortion[0], torch.tensor([3.05569, 1.31008, 0.32752]).double(), rtol=0, atol=2e-2
    )
    assert relevance.score[0].argsort(descending=True)[:2].tolist() == [0, 1]


def test_best_ordering_of_the_linear_example() -> None:
    d = linear_distortion()
    totals = {}
    for order in itertools.permutations(range(4)):
        P = torch.zeros(1, 4, 4).double()
        P[0, list(order), range(4)] = 1
        value, _ = OrderDistortion(d).gradient(P, torch.tensor([0]))
        totals[order] = float(value)
    assert min(totals, key=totals.__getitem__) == (0, 1, 2, 3)
    assert min(totals.values()) == pytest.approx(8.5)


def test_ordering_gradient_is_the_slope_and_samples_are_unbiased() -> None:
    d = linear_distortion()
    P = torch.rand(1, 4, 4, generator=torch.Generator().manual_seed(0)).double() / 8 + torch.eye(4).double() / 4
    value, G = OrderDistortion(d).gradient(P, torch.tensor([0]))
    step = torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(1)).double()
    h = 1e-6
    up, _ = OrderDistortion(d).gradient(P + h * step, torch.tensor([0]))
    down, _ = OrderDistortion(d).gradient(P - h * step, torch.tensor([0]))
    torch.testing.assert_close((G * step).sum(), ((up - down) / (2 * h))[0], rtol=1e-6, atol=1e-8)
    sampled = OrderDistortion(d, sampled=1, generator=torch.Generator().manual_seed(2))
    draws = [sampled.gradient(P, torch.tensor([0])) for _ in range(600)]
    mean = torch.stack([g for _, g in draws]).mean(0)
    error = 4 * torch.stack([g for _, g in draws]).std(0) / 600**0.5
    assert ((mean - G).abs() <= error + 1e-9).all()
    assert float(torch.stack([v for v, _ in draws]).mean()) == pytest.approx(float(value), rel=0.1)


@pytest.mark.parametrize("sampled", [None, 2])
def test_ordering_sorts_by_variance_where_the_image_is_the_mean(sampled: int | None) -> None:
    """x = mu: D separates, and the best ordering sorts w^2 sigma^2 descending: 9, 4, 1, 2.25."""
    answer = ordering(
        linear_distortion(X, X), 1, 4, Budget(300), sampled=sampled, generator=torch.Generator().manual_seed(0)
    )
    expected = (W**2 * VAR).argsort(descending=True).tolist()
    assert answer.score[0].argsort(descending=True).tolist() == expected
    assert float((answer.P.sum(1) - 1).abs().max()) < 1e-5
    assert answer.solution.gap.isfinite().all()


class BooleanString(nn.Module):
    """1 when five consecutive inputs are ones: 1 - relu(1 - sum over windows of relu(window sum - 4))."""

    def forward(self, x: Tensor) -> Tensor:
        window = nn.functional.conv2d(x, torch.ones(1, 1, 1, 5, dtype=x.dtype))
        hits = nn.functional.relu(window - 4).flatten(1)
        total = nn.functional.linear(hits, torch.ones(1, 12, dtype=x.dtype))
        return 1 - nn.functional.relu(1 - total)


def test_an_ordering_does_not_forget_its_start() -> None:
    """The published first step is a jump to some vertex; from a start it is 1/7 of the way."""
    start = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    d = _Double(linear_distortion())
    warm = ordering(d, 1, 4, Budget(1), start=start)
    jumped = ordering(d, 1, 4, Budget(1), Method("vanilla", "non-convex"), start=start)
    on_start = torch.eye(4).flip(1).bool()
    torch.testing.assert_close(warm.P[0][on_start].min(), torch.tensor(6 / 7))
    assert not jumped.P[0][on_start].all()
    assert jumped.P.unique().tolist() == [0, 1]


def test_boolean_string_block_is_recovered_exactly() -> None:
    x = torch.zeros(1, 1, 1, 16)
    x[..., 6:11] = 1
    shape = (1, 1, 16)
    problems = Problems.of(BooleanString(), x, torch.tensor([0]), components(shape))
    noise = Obfuscation(
        "gaussian", torch.full(shape, 0.5), torch.full(shape, 1 / 12), torch.zeros(0, *shape), torch.zeros(0, *shape)
    )
    d = AssumedDensity.of(problems, noise, low_rank=False)
    relevance = multi_rate(d, 1, 16, [5], Budget(500, gap_share=1e-6))
    blank = float(d.value(torch.zeros(1, 16), torch.tensor([0])).detach())
    assert blank == pytest.approx(0.4792, abs=2e-3)
    assert float(relevance.distortion) < 5e-4
    assert relevance.score[0].topk(5).indices.sort().values.tolist() == [6, 7, 8, 9, 10]
    assert float(relevance.score[0, 6:11].sum()) == pytest.approx(5.0, abs=1e-2)
    assert float(relevance.score[0, :6].sum() + relevance.score[0, 11:].sum()) < 1e-2


def test_every_path_agrees_on_a_convex_example_and_distortion_falls_with_the_rate() -> None:
    warm = multi_rate(linear_distortion(), 1, 4, [1, 2, 3, 4], Budget(500))
    cold = multi_rate(linear_distortion(), 1, 4, [1, 2, 3, 4], Budget(500), path="cold")
    torch.testing.assert_close(warm.distortion.float(), cold.distortion.float(), rtol=0, atol=0.05)
    assert (warm.distortion.diff() <= 1e-9).all(), "each rate starts where the last one ended and only descends"
    assert (cold.distortion.diff() <= 0.02 * cold.distortion[:, :1]).all()
    assert cold.masks.shape == (1, 4, 4)
    down = multi_rate(linear_distortion(), 1, 4, [1, 2, 3, 4], Budget(500), path="down")
    torch.testing.assert_close(down.distortion.float(), cold.distortion.float(), rtol=0, atol=0.05)
    assert down.rates == (1, 2, 3, 4)
    assert (down.masks.sum(2) <= torch.tensor([1, 2, 3, 4]) * (1 + 1e-5)).all()


class _Blind:
    """1/2 (1 - relu(mean of s over cells 2 to 4 - 0.2) / 0.8)^2: flat where next to nothing is shown."""

    def gradient(self, s: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = s.detach().requires_grad_()
            value = 0.5 * (1 - torch.relu(leaf[:, 2:5].mean(1) - 0.2) / 0.8).square()
            (g,) = torch.autograd.grad(value.sum(), leaf)
        return value.detach(), g


def test_going_down_finds_what_a_start_at_zero_cannot_see() -> None:
    up = multi_rate(_Blind(), 2, 9, [3, 6], path="up")
    down = multi_rate(_Blind(), 2, 9, [3, 6], path="down")
    assert (up.distortion == 0.5).all(), "no gradient, no step: stationary and useless"
    assert (down.distortion < 1e-3).all()
    assert (down.masks[:, 0, 2:5] > 0.95).all()
    assert float(down.masks[:, 0].sum(1).max()) <= 3 * (1 + 1e-5)


def test_lagrangian_trades_rate_for_distortion() -> None:
    d = linear_distortion()
    results = {}
    for penalty in (0.1, 1.0, 4.0):
        s, step = lagrangian(_Double(d), 1, 4, penalty)
        exact = minimize(
            lambda v, c=penalty: closed_form(torch.from_numpy(v)) + c * v.sum(),
            [0.25] * 4,
            bounds=[(0, 1)] * 4,
            tol=1e-12,
        )
        assert float(step.value) == pytest.approx(exact.fun, abs=1e-3)
        results[penalty] = float(s.sum())
    assert results[0.1] > results[1.0] > results[4.0]


class _Double:
    """Feeds float32 masks to a float64 network."""

    def __init__(self, d: AssumedDensity) -> None:
        self.d = d

    def gradient(self, s: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        value, g = self.d.gradient(s.double(), rows)
        return value.float(), g.float()


class _Clock:
    """A clock that moves only when told to, in place of ``time``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        for module in ("auditor.explainers.rde.relevance_map", "auditor.kernels.frank_wolfe.solver"):
            monkeypatch.setattr(f"{module}.time", self)

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize("path", ["up", "down"])
def test_time_budget_is_kept_and_reported(path: RatePath, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)

    class Slow(_Double):
        def gradient(self, s: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            clock.now += 0.02
            return super().gradient(s, rows)

    budget = Budget(10**6, timeout_s=0.5, gap_share=1e-12)
    relevance = multi_rate(Slow(linear_distortion()), 1, 4, [1, 2, 3], budget, path=path)
    assert 0.4 < relevance.seconds < 0.6
    assert relevance.status == [[Status.TIME_LIMIT] * 3]
    assert relevance.gap.isfinite().all()


@pytest.mark.parametrize(("path", "solved"), [("up", (1,)), ("down", (3,))])
def test_rates_without_time_are_left_out(path: RatePath, solved: tuple[int], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)

    class Slower(_Double):
        def gradient(self, s: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            clock.now += 1.0
            return super().gradient(s, rows)

    answer = multi_rate(Slower(linear_distortion()), 1, 4, [1, 2, 3], Budget(9, timeout_s=0.5), path=path)
    assert answer.rates == solved
    assert answer.steps == 1, "the first rate makes a step however late it is"


@pytest.mark.parametrize("rates", [[0], [5], [-1], [0.0], [1.5], [2, 0, 9]])
def test_rates_out_of_range(rates: list[float]) -> None:
    with pytest.raises(OptionError, match="rates are out of range"):
        checked_rates(rates, 4)


def test_nan_gradients_are_counted() -> None:
    class Holey(_Double):
        def gradient(self, s: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            value, g = super().gradient(s, rows)
            return value, g * torch.nan

    with pytest.raises(NumericsError, match="3 of 3 solves met NaN or infinite gradients, on 1 of 1 images"):
        multi_rate(Holey(linear_distortion()), 1, 4, [1, 2, 3])
