import itertools
import math

import pytest
import torch

from auditor.kernels.factorization import streaming
from auditor.kernels.factorization.nmf import Status, factorize
from auditor.kernels.factorization.streaming import (
    _hashed_exponential,
    alternating,
    basis_kkt,
    basis_step,
    draw_sample,
    factorize_stream,
    statistics,
)


def activations(channels=24, positions=900, rank=6, dtype=torch.float64):
    g = torch.Generator().manual_seed(7)
    W = torch.rand(channels, rank, generator=g, dtype=dtype).sub(0.5).clamp_min(0)
    S = torch.rand(rank, positions, generator=g, dtype=dtype).sub(0.5).clamp_min(0)
    return W @ S + 0.05 * torch.rand(channels, positions, generator=g, dtype=dtype)


def cut(X, *edges):
    return lambda: [X[:, a:b] for a, b in zip((0, *edges), (*edges, X.shape[1]), strict=True)]


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_sharding_changes_nothing_but_rounding(dtype, tol):
    X = activations(dtype=dtype)
    whole, parts = factorize_stream(cut(X), 5), factorize_stream(cut(X, 1, 130, 500), 5)
    assert parts.positions == 900
    assert parts.relative_error == pytest.approx(whole.relative_error, abs=tol)
    torch.testing.assert_close(parts.W, whole.W, rtol=0, atol=max(tol, 1e-6))  # W is returned in float32


def test_reaches_the_in_memory_error_and_basis():
    X = activations()
    memory = factorize(X, 6, tol=1e-8, max_iter=2000)
    stream = factorize_stream(cut(X, 300, 600), 6, tol=1e-8, max_iter=500, W0=memory.W)
    cosine = (stream.W.double() * memory.W).sum(0)
    assert cosine.min() > 0.999
    assert stream.relative_error <= memory.relative_error * (1 + 1e-4)
    cold = factorize_stream(cut(X, 300, 600), 6, tol=1e-6, max_iter=300)
    assert cold.relative_error <= memory.relative_error * 1.02


def test_objective_never_rises_and_kkt_falls():
    X = activations()
    fit = factorize_stream(cut(X, 450), 4, tol=0, max_iter=40)
    assert all(b <= a for a, b in zip(fit.objective, fit.objective[1:], strict=False))
    assert fit.kkt < factorize_stream(cut(X, 450), 4, tol=0, max_iter=1).kkt
    assert fit.status is Status.STEP_LIMIT or fit.n_iter < 40


def test_statistics_add_up():
    X = activations()
    W = factorize(X, 4, max_iter=5).W
    whole, parts = statistics(X, W), statistics(X[:, :100], W) + statistics(X[:, 100:], W)
    torch.testing.assert_close(parts.XSt, whole.XSt, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(parts.SS, whole.SS, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(basis_step(W, parts), basis_step(W, whole), rtol=1e-8, atol=1e-10)


def test_sample_does_not_depend_on_the_shards():
    X = activations()
    one, two = draw_sample(cut(X), 50, seed=3), draw_sample(cut(X, 11, 470), 50, seed=3)
    assert torch.equal(one.columns, two.columns)
    assert not torch.equal(one.columns, draw_sample(cut(X), 50, seed=4).columns)


@pytest.mark.parametrize(
    ("shards", "rank", "sentence"),
    [
        ([], 2, "no shard came"),
        ([torch.ones(4, 5), -torch.ones(4, 5)], 2, "non-negative, got a smallest value of -1"),
        ([torch.full((4, 5), torch.inf)], 2, "must be finite"),
        ([torch.ones(4, 5)], 5, "got rank 5 for 4 channels x 5 positions"),
    ],
)
def test_bad_input_gets_one_sentence(shards, rank, sentence):
    with pytest.raises(ValueError, match=sentence):
        factorize_stream(lambda: shards, rank)


def test_signed_stream_reaches_the_in_memory_semi_nmf():
    X = activations() - 0.3
    memory = factorize(X, 4, signed=True, tol=1e-8, max_iter=2000)
    fit = factorize_stream(cut(X, 200, 650), 4, signed=True, tol=1e-7, max_iter=200)
    assert fit.W.min() < 0
    assert all(b <= a for a, b in zip(fit.objective, fit.objective[1:], strict=False))
    assert fit.relative_error <= memory.relative_error * 1.01
    whole = factorize_stream(cut(X), 4, signed=True, tol=1e-7, max_iter=200)
    torch.testing.assert_close(fit.W, whole.W, rtol=0, atol=1e-6)
    assert fit.kkt < factorize_stream(cut(X), 4, signed=True, max_iter=1, tol=0).kkt


def test_a_free_component_nobody_uses_stays():
    X = activations()
    X[0] = 0
    W = torch.cat([factorize(X, 3, max_iter=5).W, torch.zeros(24, 1).double()], dim=1)
    W[0, 3] = 1  # a channel that is silent everywhere
    step = basis_step(W, statistics(X, W), signed=True)
    assert torch.isfinite(step).all()
    assert not torch.equal(step[:, 0], W[:, 0])
    assert torch.equal(step[:, 3], W[:, 3])


@pytest.mark.parametrize("tol", [1e-2, 1e-3])
def test_it_stops_at_the_first_epoch_that_gains_less_than_a_tenth_of_the_tolerance(tol):
    fit = factorize_stream(cut(activations(), 400), 4, tol=tol, max_iter=200)
    gains = [(a - b) / b for a, b in itertools.pairwise(fit.objective)]
    assert fit.status is Status.CONVERGED
    assert all(gain > tol / 10 for gain in gains[:-1])
    assert gains[-1] <= tol / 10
    assert fit.n_iter == len(fit.objective) - 1 == len(gains)
    torch.testing.assert_close(fit.W.norm(dim=0), torch.ones(4))
    longer = factorize_stream(cut(activations(), 400), 4, tol=0, max_iter=3)
    assert (longer.n_iter, longer.status) == (3, Status.STEP_LIMIT)


def test_the_gain_of_an_epoch_is_weighed_against_a_tenth_of_the_tolerance():
    shards = cut(activations(), 400)
    free = factorize_stream(shards, 4, tol=0, max_iter=6)
    gains = [(a - b) / b for a, b in itertools.pairwise(free.objective)]
    least = min(range(6), key=gains.__getitem__)
    for share, status in ((1.02, Status.CONVERGED), (0.98, Status.STEP_LIMIT)):
        fit = factorize_stream(shards, 4, tol=share * 10 * gains[least], max_iter=least + 1)
        assert (fit.n_iter, fit.status) == (least + 1, status)


def test_statistics_and_the_step_of_an_epoch_are_plain_products():
    X = activations(positions=60)
    W = factorize(X, 3, max_iter=3).W
    state, after = itertools.islice(alternating(cut(X, 20), W), 2)
    sums = state.statistics
    fitted = X - W @ streaming.project(X, W)
    assert sums.energy == pytest.approx(float(X.square().sum()), rel=1e-12)
    assert sums.misfit == pytest.approx(float(fitted.square().sum()), rel=1e-9)
    assert sums.positions == 60
    assert (state.t, after.t) == (0, 1)
    torch.testing.assert_close(after.W, basis_step(W, sums))
    assert float(after.W.min()) >= 0


def test_the_residual_is_the_gradient_in_the_scale_of_unit_rows():
    g = torch.Generator().manual_seed(0)
    W, S, X = (torch.rand(*s, generator=g).double() for s in ((5, 3), (3, 9), (5, 9)))
    sums = streaming.Statistics(X @ S.T, S @ S.T, 0.0, 0.0, 9)
    rows = S.norm(dim=1)
    unit, scaled = S / rows[:, None], W * rows
    gradient = (scaled @ unit - X) @ unit.T
    for signed, side in ((True, gradient.abs()), (False, torch.minimum(scaled, gradient).abs())):
        want = float(side.max() / scaled.max())
        assert basis_kkt(W, sums, signed=signed) == pytest.approx(want, rel=1e-10)
    assert basis_kkt(W, sums) == basis_kkt(W, sums, signed=False)


def test_keys_are_exponential_and_belong_to_the_running_number():
    keys = _hashed_exponential(0, 20_000, seed=5)
    assert float(keys.mean()) == pytest.approx(1, abs=4 / 20_000**0.5)
    for edge in (0.1, 1.0, 3.0):
        share = math.exp(-edge)
        spread = 4 * math.sqrt(share * (1 - share) / 20_000)
        assert float((keys > edge).double().mean()) == pytest.approx(share, abs=spread)
    assert torch.equal(_hashed_exponential(700, 50, seed=5), keys[700:750])
    assert not torch.equal(_hashed_exponential(0, 50, seed=6), keys[:50])
    assert abs(float(torch.corrcoef(torch.stack([keys[:-1], keys[1:]]))[0, 1])) < 0.03


def test_columns_are_drawn_by_their_energy():
    X = torch.ones(2, 10)
    X[:, 7] *= 9  # energy 81 of 90
    hits = sum(bool((draw_sample(cut(X, 4), 1, seed=s).columns == 9).all()) for s in range(300))
    assert abs(hits / 300 - 0.9) < 4 * math.sqrt(0.09 / 300)
    whole = draw_sample(cut(X, 4), 50, seed=0)
    assert torch.equal(whole.columns, X)
    assert whole.total == pytest.approx(2 * 9 + 162)
    assert whole.n_drawn_from == 10


def test_the_start_factorizes_a_sample_in_which_weak_columns_weigh_more(monkeypatch):
    X, passed = activations(), []
    monkeypatch.setattr(
        streaming, "factorize", lambda X, *args, **kwargs: (passed.append(X), factorize(X, *args, **kwargs))[1]
    )
    factorize_stream(cut(X, 100), 5, seed=3, max_iter=1)
    drawn = draw_sample(cut(X, 100), 128 * 5, seed=3)
    assert drawn.columns.shape[1] == 640
    chance = (640 * drawn.columns.square().sum(0) / X.square().sum()).clamp_max(1)
    assert 0 < float((chance < 1).double().mean()) < 1
    torch.testing.assert_close(passed[0], drawn.columns / chance.sqrt())
    few = X[:, :300]
    factorize_stream(cut(few), 5, seed=3, max_iter=1)
    torch.testing.assert_close(passed[1], few)  # all of it: nothing stands for anything else


def test_keys_are_those_of_splitmix64_in_plain_integers():
    def mixed(number):
        z = (number * 0x9E3779B97F4A7C15 + 7 * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) % 2**64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    plain = [-math.log1p(-((mixed(i) >> 11) / 2.0**53)) for i in range(5, 18)]
    assert _hashed_exponential(5, 13, 7).tolist() == pytest.approx(plain, rel=1e-12)
