"""The updates of DeepFacto against closed forms, scipy and plain loops."""

import numpy as np
import pytest
import torch
from scipy.optimize import nnls

from auditor.kernels.factorization.coordinate_descent import sweep_reference
from auditor.kernels.factorization.deepfacto import (
    LOGIT_STEPS,
    LinearHead,
    basis_step,
    decoupled,
    logit_steps,
    projected,
    score_step,
)
from auditor.kernels.factorization.nmf import factorize


def test_z_lies_between_its_terms():
    """Known answer: beta = 1, gamma = 3, f - U = 2, M S - V = 6."""
    assert float(decoupled((1.0, torch.tensor(2.0)), (3.0, torch.tensor(6.0)))) == 5.0


def test_separable_nmf_is_exact_and_test_time_scores_find_it_again():
    """Z = M0 S0 with an identity inside M0: the factorization is unique up to order and scale."""
    g = torch.Generator().manual_seed(0)
    M0 = torch.cat([torch.eye(4), torch.rand(9, 4, generator=g)]).double()
    S0 = torch.rand(4, 300, generator=g, dtype=torch.float64) * (torch.rand(4, 300, generator=g) < 0.4)
    S0[:, :4] = torch.eye(4, dtype=torch.float64)  # every factor is seen alone once
    exact = factorize(M0 @ S0, 4, max_iter=4000, tol=1e-13)
    assert exact.relative_error < 1e-6
    M = exact.W
    S = projected((M0 @ S0)[None], M)[0]
    match = (M.T @ (M0 / M0.norm(dim=0))).argmax(0)
    assert sorted(match.tolist()) == [0, 1, 2, 3]
    torch.testing.assert_close(S[match], S0 * M0.norm(dim=0)[:, None], rtol=0, atol=1e-3)


def test_a_score_step_reaches_the_minimiser_with_its_linear_term():
    g = torch.Generator().manual_seed(1)
    M, X = torch.rand(13, 3, generator=g), torch.rand(2, 13, 5, generator=g)
    linear = 0.3 * torch.randn(2, 3, 5, generator=g)
    S = score_step(projected(X, M), X, M, linear, n_sweeps=400)
    slope = M.T @ (M @ S - X) - linear
    assert float(S.min()) >= 0
    assert float(torch.minimum(S, slope).abs().max()) < 1e-4  # the optimality of a non-negative least squares
    near = score_step(projected(X, M), X, M, 1e-6 * linear, n_sweeps=400)
    torch.testing.assert_close(near, projected(X, M), rtol=0, atol=1e-4)


def test_a_small_request_is_the_derivative_through_the_projection():
    """Known answer by differences: J at the head on argmin_{S >= 0} |f - M S|, in some direction of f."""
    g = torch.Generator().manual_seed(7)
    M, f = torch.rand(13, 3, generator=g).double(), torch.rand(4, 13, 6, generator=g).double()
    pool = torch.rand(6, 2, generator=g).double()
    head = LinearHead(torch.randn(5, 3, 2, generator=g).double(), torch.zeros(5).double(), pool)
    y, d = torch.tensor([0, 3, 1, 4]), torch.randn(4, 13, 6, generator=g).double()

    def J(f):
        return float(torch.nn.functional.cross_entropy(head.logits(projected(f, M)), y, reduction="sum"))

    S = projected(f, M)
    assert 0.1 < float((S == 0).double().mean()) < 0.9  # some scores are at their bound, where the slope is none
    e = torch.nn.functional.one_hot(y, 5) - head.logits(S).softmax(1)
    linear = 1e-5 * head.pulled_back(e)
    moved = M @ (score_step(S, f, M, linear, n_sweeps=2000) - S) / 1e-5
    slope = (J(f + 1e-5 * d) - J(f - 1e-5 * d)) / 2e-5
    assert float((moved * d).sum()) == pytest.approx(-slope, rel=1e-2)


def test_a_basis_step_lowers_the_error_and_keeps_columns_short():
    g = torch.Generator().manual_seed(2)
    X, S = torch.rand(13, 40, generator=g), torch.rand(3, 40, generator=g)
    M = torch.rand(13, 3, generator=g) / 13
    new = basis_step(M, X @ S.T, S @ S.T, 3)
    assert float((X - new @ S).norm()) < float((X - M @ S).norm())
    assert float(new.norm(dim=0).max()) <= 1 + 1e-6
    assert float(new.min()) >= 0


def test_the_head_is_linear_and_its_parts_are_exact():
    g = torch.Generator().manual_seed(3)
    pool = torch.rand(6, 2, generator=g).double()
    head = LinearHead(torch.randn(4, 3, 2, generator=g).double(), torch.randn(4, generator=g).double(), pool)
    S = torch.rand(5, 3, 6, generator=g).double()
    targets = torch.tensor([0, 1, 2, 3, 0])
    whole = head.bias[targets] + head.parts(S, targets).sum(1)
    torch.testing.assert_close(whole, head.logits(S).gather(1, targets[:, None])[:, 0])
    without = S.clone()
    without[:, 1] = 0  # taking a factor away takes its part away, nothing else
    torch.testing.assert_close((head.logits(S) - head.logits(without))[range(5), targets], head.parts(S, targets)[:, 1])
    e = torch.randn(5, 4, generator=g).double()
    torch.testing.assert_close((head.pulled_back(e) * S).sum(), (e * (head.logits(S) - head.bias)).sum())


def test_z_of_three_terms_zeroes_the_gradient():
    g = torch.Generator().manual_seed(0)
    terms = [(w, torch.randn(2, 3, generator=g).double()) for w in (0.5, 2.0, 3.5)]
    Z = decoupled(*terms)
    torch.testing.assert_close(sum(w * (Z - t) for w, t in terms), torch.zeros(2, 3).double(), rtol=0, atol=1e-14)


def test_scores_are_nnls_column_by_column():
    g = torch.Generator().manual_seed(4)
    X, M = torch.randn(3, 13, 5, generator=g).double(), torch.rand(13, 4, generator=g).double()
    S = projected(X, M)
    assert S.shape == (3, 4, 5)
    for i in range(3):
        for p in range(5):
            np.testing.assert_allclose(S[i, :, p], nnls(M.numpy(), X[i, :, p].numpy())[0], atol=1e-8)


def test_a_score_step_is_coordinate_passes_image_by_image():
    g = torch.Generator().manual_seed(5)
    X, M = torch.rand(2, 13, 5, generator=g).double(), torch.rand(13, 3, generator=g).double()
    S, requested = torch.rand(2, 3, 5, generator=g).double(), torch.randn(2, 3, 5, generator=g).double()
    for n_sweeps in (1, 3):
        got = score_step(S, X, M, requested, n_sweeps)
        for i in range(2):
            want = sweep_reference(S[i], M.T @ X[i] + requested[i], M.T @ M, n_sweeps)
            torch.testing.assert_close(got[i], want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(score_step(S, X, M, requested), score_step(S, X, M, requested, 8))


def test_a_basis_step_is_coordinate_passes_and_shortens_only_long_columns():
    g = torch.Generator().manual_seed(6)
    X, S, M = (torch.rand(*shape, generator=g).double() for shape in ((13, 40), (3, 40), (13, 3)))
    X = X * torch.linspace(0.01, 3, 13).double()[:, None]
    for n_sweeps in (1, 4):
        free = sweep_reference(M.T, (X @ S.T).T, S @ S.T, n_sweeps).T
        norms = free.norm(dim=0)
        torch.testing.assert_close(
            basis_step(M, X @ S.T, S @ S.T, n_sweeps), free / norms.clamp_min(1), rtol=1e-10, atol=1e-10
        )
    assert norms.max() > 1
    short = basis_step(0.01 * M, 0.01 * X @ S.T, S @ S.T)
    torch.testing.assert_close(short, sweep_reference(0.01 * M.T, 0.01 * (X @ S.T).T, S @ S.T).T, rtol=1e-9, atol=1e-12)
    assert short.norm(dim=0).max() < 1


@pytest.mark.parametrize("kappa", [0.5, 1.0, 20.0])
def test_logits_move_by_gradient_steps_towards_the_label(kappa):
    g = torch.Generator().manual_seed(7)
    h, labels = 3 * torch.randn(5, 4, generator=g).double(), torch.tensor([0, 3, -1, 2, 2])
    L = h.clone()
    for _ in range(LOGIT_STEPS):
        for i, label in enumerate(labels.tolist()):
            slope = L[i].softmax(0) - torch.eye(4).double()[label] if label >= 0 else torch.zeros(4).double()
            L[i] = L[i] - (slope + kappa * (L[i] - h[i])) / (kappa + 0.5)
    got = logit_steps(h, labels, kappa)
    torch.testing.assert_close(got, L, rtol=1e-12, atol=1e-12)
    assert torch.equal(got[2], h[2])  # no label asks for nothing
    slope = got.softmax(1) - torch.nn.functional.one_hot(labels.clamp_min(0), 4) + kappa * (got - h)
    assert slope[labels >= 0].abs().max() < 1e-3 * (1 if kappa >= 1 else 60)  # close to the minimiser
    torch.testing.assert_close(logit_steps(h, labels), logit_steps(h, labels, 1.0))


def test_the_head_equals_plain_sums():
    g = torch.Generator().manual_seed(8)
    head = LinearHead(torch.randn(2, 3, 2, generator=g), torch.randn(2, generator=g), torch.rand(4, 2, generator=g))
    S = torch.rand(5, 3, 4, generator=g)
    for n in range(5):
        for c in range(2):
            want = float(head.bias[c])
            for k in range(3):
                for q in range(2):
                    want += float(head.weight[c, k, q]) * sum(float(S[n, k, p] * head.pool[p, q]) for p in range(4))
            assert float(head.logits(S)[n, c]) == pytest.approx(want, rel=1e-5)
    torch.testing.assert_close(head.of_pooled(head.pooled(S)), head.logits(S))
