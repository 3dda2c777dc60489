"""Read-outs of the shared latent by hand and by plain loops."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from auditor.explainers.coupled.latent_space import (
    ConceptSensitivity,
    class_scores_of,
    distinctness,
    mask_of,
    neighbours,
    one_dimensional_order,
    purity,
    top_examples,
    unit,
)
from auditor.subject.subject import Subject


def latent(seed=0, concepts=4, examples=9):
    return torch.rand(concepts, examples, generator=torch.Generator().manual_seed(seed))


def test_read_outs_by_hand():
    F = torch.tensor([[3.0, 2.0, 0.0, 1.0], [0.0, 1.0, 5.0, 0.0]])
    labels = torch.tensor([0, 0, 1, -1])
    assert top_examples(F, 2).tolist() == [[0, 1], [2, 1]]
    assert class_scores_of(F, labels, 2).tolist() == [[5.0, 0.0], [1.0, 5.0]]
    assert purity(F, labels, 2) == pytest.approx((1 + 0.5) / 2)
    near = neighbours(torch.tensor([1.0, 0.0]), torch.cat([F, torch.zeros(2, 1)], dim=1), n=2)
    assert near.index == [0, 3]
    assert near.concepts == [1.0, 0.0]
    assert mask_of(torch.tensor([1.0, 2.0, 3.0])).tolist() == [False, False, True]
    d = distinctness(torch.eye(4)[:, :3])
    assert d.top_mean == pytest.approx(1)
    assert d.off_diagonal == 0
    assert distinctness(torch.ones(4, 2)).top_mean == pytest.approx(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_unit_vectors_have_norm_one_and_zero_stays_zero(dtype):
    M = latent().to(dtype)
    M[:, 3] = 0
    M[:, 4] *= 1e-20
    columns = unit(M, 0)
    assert columns[:, 3].tolist() == [0, 0, 0, 0]
    norms = columns.norm(dim=0)
    torch.testing.assert_close(norms[norms > 0], torch.ones(8, dtype=dtype))
    rows = unit(M, 1)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(4, dtype=dtype))


def test_top_lists_and_class_scores_by_loops():
    F, labels = latent(1), torch.tensor([0, 2, -1, 1, 0, 2, 2, -1, 0])
    for k in range(4):
        plain = sorted(range(9), key=lambda i, k=k: -float(F[k, i]))
        assert top_examples(F, 5)[k].tolist() == plain[:5]
        for c in range(4):
            total = sum(float(F[k, i]) for i in range(9) if labels[i] == c)
            assert float(class_scores_of(F, labels, 4)[k, c]) == pytest.approx(total, rel=1e-5)
    assert top_examples(F).shape == (4, 9)


def test_purity_counts_known_labels_only():
    F = torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
    assert purity(F, torch.tensor([1, 1, -1, 0]), 3) == pytest.approx((2 / 2 + 1 / 2) / 2)
    assert math.isnan(purity(F, torch.full((4,), -1), 3))
    assert purity(F, torch.tensor([0, -1, -1, -1]), 1) == 1.0  # a list without a known label is left out


def test_distinctness_by_numpy():
    basis = latent(2, 7, 5).double()
    U = basis.numpy() / np.linalg.norm(basis.numpy(), axis=0)
    C = U.T @ U
    values = np.sort(np.linalg.eigvalsh(C))[::-1]
    measured = distinctness(basis)
    np.testing.assert_allclose(measured.cosines.numpy(), C, atol=1e-12)
    np.testing.assert_allclose(measured.eigenvalues.numpy(), values, atol=1e-10)
    assert measured.top_mean == pytest.approx(values[:3].mean())  # the larger half of five
    off = [C[i, j] ** 2 for i in range(5) for j in range(5) if i != j]
    assert measured.off_diagonal == pytest.approx(np.sqrt(np.mean(off)))
    assert distinctness(basis[:, :1]).off_diagonal == 0.0


@pytest.mark.parametrize("skip", [None, 2])
def test_neighbours_are_the_largest_cosines(skip):
    F = latent(3)
    f = F[:, 2]
    cosines = [float(F[:, i] @ f / (F[:, i].norm() * f.norm())) for i in range(9)]
    order = sorted((i for i in range(9) if i != skip), key=lambda i: -cosines[i])
    near = neighbours(f, F, n=4, skip=skip)
    assert near.index == order[:4]
    assert near.similarity == pytest.approx([cosines[i] for i in order[:4]], rel=1e-6)
    strongest = [int(F[:, i].argmax()) for i in order[:4]]
    assert near.concepts == [strongest.count(k) / 4 for k in range(4)]
    assert len(neighbours(f, F, n=30, skip=skip).index) == (9 if skip is None else 8)


def test_sensitivity_of_a_linear_head_is_the_sign_of_its_weights():
    head = nn.Sequential(nn.Identity(), nn.Flatten(), nn.Linear(12, 2))
    subject = Subject(head, input_shape=(1, 3, 4))
    directions = torch.eye(12)[:, :3]
    tcav = ConceptSensitivity(directions, 2)
    tcav.add(subject, "0", torch.rand(6, 1, 3, 4), torch.tensor([0, 1, 0, 1, -1, 0]))
    torch.testing.assert_close(tcav.scores(), (head[2].weight[:, :3].T > 0).float())


def test_the_order_of_activations_finds_a_shuffled_curve():
    n, d = 120, 40
    place = torch.linspace(0, 1, n)
    curve = torch.exp(-((torch.linspace(0, 1, d)[:, None] - place[None]) ** 2) / (2 * 0.15**2))  # a bump that slides
    shuffled = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    order = one_dimensional_order(curve[:, shuffled])
    rank = shuffled[order]
    rank = rank if rank[0] < rank[-1] else rank.flip(0)
    assert torch.equal(rank, torch.arange(n))
    # a dense matrix and its second eigenvector say the same
    rows = torch.rand(7, 30, generator=torch.Generator().manual_seed(1)).double()
    U = rows / rows.norm(dim=0)
    S = U.T @ U
    root = S.sum(0).rsqrt()
    second = torch.linalg.eigh(root[:, None] * S * root[None]).eigenvectors[:, -2] * root
    ours = one_dimensional_order(rows)
    assert torch.equal(ours, second.argsort()) or torch.equal(ours, (-second).argsort())


def test_an_example_without_activation_comes_last():
    rows = torch.rand(5, 9, generator=torch.Generator().manual_seed(2))
    rows[:, 3] = 0
    assert int(one_dimensional_order(rows)[-1]) == 3
    assert one_dimensional_order(torch.zeros(4, 3)).tolist() == [0, 1, 2]
