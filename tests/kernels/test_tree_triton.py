import importlib

import pytest
import torch


@pytest.fixture(scope="module")
def histograms():
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setenv("TRITON_INTERPRET", "1")  # read when the kernel is decorated
        yield importlib.import_module("auditor.kernels.tree_triton")


@pytest.mark.parametrize(("n", "n_features", "n_codes", "lanes"), [(70, 3, 16, 16), (33, 2, 4, 5), (9, 1, 256, 21)])
def test_equals_the_plain_sum(histograms, n, n_features, n_codes, lanes):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    g = torch.Generator().manual_seed(n)
    codes = torch.randint(0, n_codes, (n, n_features), generator=g).to(torch.uint8)
    targets = torch.randint(-(2**20), 2**20, (n, lanes), generator=g).to(torch.int32)
    rows = torch.randperm(n, generator=g)[: n * 2 // 3].to(torch.int32)
    found = histograms.node_histograms(codes.to(device), rows.to(device), targets.to(device), n_codes).cpu()
    plain = histograms.node_histograms_reference(codes, rows, targets, n_codes)
    assert torch.equal(found, plain)
    assert plain.any()


def test_sibling_subtraction_is_exact(histograms):
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (60, 2), generator=g).to(torch.uint8)
    targets = torch.randint(-(2**24), 2**24, (60, 16), generator=g).to(torch.int32)
    rows = torch.arange(60, dtype=torch.int32)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = [
        histograms.node_histograms(codes.to(device), r.to(device), targets.to(device), 16) for r in (rows, rows[:23])
    ]
    rest = histograms.node_histograms_reference(codes, rows[23:], targets, 16)
    assert torch.equal((parts[0] - parts[1]).cpu(), rest)
