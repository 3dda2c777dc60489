import pytest
import torch

from auditor.kernels.factorization.nmf import Status, factorize
from auditor.kernels.factorization.streaming import basis_step, draw_sample, factorize_stream, statistics


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
