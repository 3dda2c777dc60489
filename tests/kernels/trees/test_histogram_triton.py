"""The histogram kernel in Triton's interpreter (in a process of its own: Triton reads the switch when imported)."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

PROGRAM = """
import torch
from auditor.kernels.trees.histogram_triton import node_histograms, node_histograms_reference

for n, n_features, n_codes, lanes in [(70, 3, 16, 16), (33, 2, 4, 5), (9, 1, 256, 21)]:
    g = torch.Generator().manual_seed(n)
    codes = torch.randint(0, n_codes, (n, n_features), generator=g).to(torch.uint8)
    targets = torch.randint(-(2**20), 2**20, (n, lanes), generator=g).to(torch.int32)
    rows = torch.randperm(n, generator=g).to(torch.int32)
    part, rest = rows[: n * 2 // 3], rows[n * 2 // 3 :]
    found = node_histograms(codes, part, targets, n_codes)
    plain = node_histograms_reference(codes, part, targets, n_codes)
    assert plain.any() and torch.equal(found, plain), (n, n_features, n_codes, lanes)
    sibling = node_histograms(codes, rows, targets, n_codes) - found  # integers: exact
    assert torch.equal(sibling, node_histograms_reference(codes, rest, targets, n_codes))
print("agreed")
"""


def test_histograms_agree_with_the_plain_sum_and_subtract_exactly():
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "agreed"
