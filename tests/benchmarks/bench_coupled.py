"""The coupled factorization on MNIST test digits: robustness to lambda, purity of the top lists, and the oracle.

    python tests/benchmarks/bench_coupled.py --data-root DIR

Pixels and one fully connected layer of a small net trained on MNIST share ten concepts (1,000 test digits). Prints the
CKA between lambda_F = 1 and .1, .01, .001 from a common start (want .95), the CKA between starts, the mean label purity
of the top-20 lists (want .65), and the largest difference to scikit-learn's NMF of the stacked blocks (want 1e-10).
"""

from __future__ import annotations

import argparse
import gzip
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from real_activations import add_data_root, need
from sklearn.decomposition import NMF
from torch import nn

from auditor.explainers.coupled.blocks import scale_of
from auditor.explainers.coupled.latent_space import purity
from auditor.kernels.factorization.coupled import couple, start, sweeps
from auditor.kernels.factorization.coupled_columns import Penalties
from auditor.kernels.networks.linear_cka import linear_cka

LAMBDAS = (1.0, 0.1, 0.01, 0.001)


def mnist(root: Path, split: str, n: int):
    with gzip.open(root / f"MNIST/raw/{split}-images-idx3-ubyte.gz") as f:
        images = np.frombuffer(f.read(), np.uint8, offset=16).reshape(-1, 784)[:n]
    with gzip.open(root / f"MNIST/raw/{split}-labels-idx1-ubyte.gz") as f:
        labels = np.frombuffer(f.read(), np.uint8, offset=8)[:n]
    return torch.from_numpy(images.copy()).float() / 255, torch.from_numpy(labels.copy()).long()


def hidden_layer(root: Path) -> nn.Module:
    """Return pixels -> 64 ReLU units of a net trained for three passes over 20,000 digits."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    images, labels = mnist(root, "train", 20_000)
    optimiser = torch.optim.Adam(net.parameters(), lr=2e-3)
    for _ in range(3):
        for rows in torch.randperm(len(images)).split(128):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(images[rows]), labels[rows]).backward()
            optimiser.step()
    return net[:2]


def oracle_gap(X: list[torch.Tensor]) -> float:
    X = [x.double() for x in X]
    P, F = start(X, 10, 1, "random", (False, False))
    states = sweeps(X, P, F, Penalties((1e-4, 1e-4), 1.0), signed=(False, False), solver="mu")
    for _ in range(30):
        next(states)
    got = next(states)
    rows, n = sum(x.shape[0] for x in X), X[0].shape[1]
    peer = NMF(10, solver="mu", init="custom", l1_ratio=0, alpha_W=1e-4 / n, alpha_H=1.0 / rows, tol=0, max_iter=30)
    W = peer.fit_transform(torch.cat(X).numpy(), W=torch.cat(P).numpy().copy(), H=F.numpy().copy())
    return max(float(np.abs(torch.cat(got.P).numpy() - W).max()), float(np.abs(got.F.numpy() - peer.components_).max()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_root(parser)
    parser.add_argument("--starts", type=int, default=3)
    args = parser.parse_args()
    root = need(args.data_root, "MNIST/raw")
    warnings.filterwarnings("ignore")
    images, labels = mnist(root, "t10k", 1000)
    layer = hidden_layer(root)
    with torch.no_grad():
        X = [images.T.contiguous(), layer(images).T.contiguous()]
    X = [x / scale_of(x, "norm") for x in X]
    ckas, purities, firsts = [], [], []
    for solver in ("hals", "mu"):
        for seed in range(args.starts):
            clock = time.perf_counter()
            runs = [
                couple(X, 10, penalties=Penalties((1e-4, 1e-4), lam), solver=solver, seed=seed, max_iter=300)
                for lam in LAMBDAS
            ]
            table = [linear_cka(runs[0].F, run.F) for run in runs[1:]]
            pure = purity(runs[0].F, labels)
            print(
                f"{solver} start {seed}: CKA of lambda 1 to .1/.01/.001 {' '.join(f'{c:.3f}' for c in table)}; "
                f"purity {pure:.3f}; relative errors {' '.join(f'{e:.3f}' for e in runs[0].relative_errors)}; "
                f"{runs[0].n_iter} sweeps; {time.perf_counter() - clock:.1f} s for four fits",
                flush=True,
            )
            ckas += table
            purities.append(pure)
            firsts.append(runs[0].F)
    between = [linear_cka(firsts[0], F) for F in firsts[1:]]
    gap = oracle_gap(X)
    print(
        f"smallest CKA over lambda {min(ckas):.3f} (want .95); between starts {min(between):.3f} to {max(between):.3f}"
    )
    print(f"mean purity {np.mean(purities):.3f} (want .65); largest difference to the stacked oracle {gap:.1e} (1e-10)")
    sys.exit(0 if min(ckas) >= 0.95 and np.mean(purities) >= 0.65 and gap <= 1e-10 else 1)


if __name__ == "__main__":
    main()
