"""The Triton kernels, run by Triton's interpreter on the CPU in a process of their own, against the plain formulas."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

PROGRAM = """
import torch
from auditor.kernels.factorization.coordinate_descent import multiply_reference, sweep_reference
from auditor.kernels.factorization import projection
from auditor.kernels.factorization.coordinate_descent_triton import multiply_triton, sweep_triton

for channels, columns, rank in [(13, 17, 4), (5, 1, 1), (1, 9, 1), (20, 140, 5)]:
    g = torch.Generator().manual_seed(rank)
    for dtype, tol in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        W = torch.rand(channels, rank, generator=g, dtype=dtype)
        if rank == 4:
            W[:, 2] = 0
        X = torch.rand(channels, columns, generator=g, dtype=dtype) - 0.2
        F = torch.rand(rank, columns, generator=g, dtype=dtype)
        B, G = W.T @ X, W.T @ W
        floor = float(G.diagonal().max()) * 1e-12
        torch.testing.assert_close(sweep_triton(F, B, G, 3, floor), sweep_reference(F, B, G, 3), rtol=tol, atol=tol)
        B = B.clamp_min(0)
        got, want = multiply_triton(F, B, G, 1e-9), multiply_reference(F, B, G, 1e-9)
        torch.testing.assert_close(got, want, rtol=tol, atol=tol)
# the projection as a device without branches runs it: passes of the Triton kernel until nothing moves
g = torch.Generator().manual_seed(0)
W, X = torch.rand(13, 3, generator=g) - 0.5, torch.rand(13, 17, generator=g) - 0.2
basis = projection.prepare(W)
want = projection.project(X, basis)
assert 0 < (want > 0).double().mean() < 1
projection.sweep = lambda S, B, G, n_sweeps: sweep_triton(S, B, G, n_sweeps, 1e-12)
B = basis.left @ X.double()
got = projection.project_by_passes(B.clamp_min(0), B, basis.G) * torch.from_numpy(basis.scale)[:, None]
torch.testing.assert_close(got.float(), want, rtol=0, atol=1e-5)
print("agreed")
"""


def test_kernels_agree_with_the_formulas_in_the_interpreter():
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "agreed"
