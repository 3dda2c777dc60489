"""Columns in parts: a sweep gives the same however the examples are cut, for every penalty."""

import itertools

import pytest
import torch

from auditor.kernels.factorization import coupled_columns
from auditor.kernels.factorization.coupled import couple, objective, start, sweeps
from auditor.kernels.factorization.coupled_columns import Penalties, cut, tv_parts

GROUPS = torch.arange(61) % 7


def blocks(n=61, signed=False):
    g = torch.Generator().manual_seed(3)
    F = torch.rand(4, n, generator=g, dtype=torch.float64).sub(0.4).clamp_min(0)
    X = [torch.rand(s, 4, generator=g, dtype=torch.float64) @ F + 0.1 * torch.rand(s, n, generator=g) for s in (13, 5)]
    return [X[0], X[1] - 0.5] if signed else X


CASES = {
    "base": ({}, {}, False),
    "signed": ({}, {"solver": "mu"}, True),
    "mu": ({}, {"solver": "mu"}, False),
    "group": ({"latent": 0.0, "group": 0.05, "groups": GROUPS}, {"scale_rows": True}, False),
    "tv": ({"latent": 0.0, "tv": 0.1, "ortho": 0.02}, {"scale_rows": True}, False),
    "common": ({}, {"normalise": "common"}, False),
}


@pytest.mark.parametrize("case", CASES)
def test_the_cut_of_the_examples_changes_nothing(case, monkeypatch):
    penalties, rules, signed = CASES[case]
    X, free = blocks(signed=signed), (False, signed)
    P, F = start(X, 3, 0, "random", free)
    terms, reached = Penalties((1e-4,) * 2, **penalties), []
    for size in (1000, 20):
        monkeypatch.setattr(coupled_columns, "PART", size)
        state = next(itertools.islice(sweeps(X, P, F, terms, signed=free, **rules), 6, None))
        reached.append((state.P, state.F, state.objective))
    (P_1, F_1, value), (P_2, F_2, other) = reached
    torch.testing.assert_close(F_2, F_1, rtol=1e-9, atol=1e-12)  # float64 sums in another order
    for a, b in zip(P_1, P_2, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-12)
    assert other == pytest.approx(value, rel=1e-10)
    energies = [float(x.square().sum()) for x in X]
    assert value == pytest.approx(objective(X, P_1, F_1, terms, energies), rel=1e-10)
    assert float((F_1 - F).abs().max()) > 1e-3


def test_groups_are_never_cut():
    parts = cut(61, GROUPS, is_grouped=True)
    assert [len(part) for part in parts] == [61]
    coupled_columns.PART, before = 15, coupled_columns.PART
    try:
        parts = cut(61, GROUPS, is_grouped=True)
    finally:
        coupled_columns.PART = before
    assert torch.cat(parts).sort().values.tolist() == list(range(61))
    sides = [set(GROUPS[part].tolist()) for part in parts]
    assert len(parts) > 2
    assert sum(map(len, sides)) == 7


def test_total_variation_sees_the_columns_beside_a_part():
    F = torch.rand(3, 11, generator=torch.Generator().manual_seed(1))
    plus, minus = tv_parts(F)
    inner = tv_parts(F[:, 4:8], F[:, 3:4], F[:, 8:9])
    torch.testing.assert_close(inner[0], plus[:, 4:8])
    torch.testing.assert_close(inner[1], minus[:, 4:8])


def test_an_odd_member_of_the_crew_is_asked_in_order():
    with coupled_columns.here(lambda n: [n], [3, 4]) as crew:
        assert crew.ask("index", each=[(3,), (4,)]) == [0, 0]
        assert crew.ask("__len__") == [1, 1]


def test_the_best_state_can_be_read_at_the_end(monkeypatch):
    monkeypatch.setattr(coupled_columns, "PART", 20)
    fit = couple(blocks(), 3, max_iter=40, tol=0)
    assert fit.F.shape == (3, 61)
    assert max(fit.relative_errors) < 0.2
