"""Time to the same relative error: our NMF against scikit-learn's coordinate descent and torchnmf, in one run.

    python tests/benchmarks/bench_nmf.py --data-root DIR [--sizes 512x50000:10 512x50000:32 1792x9000:256]

Each peer runs with its own defaults to its own stop; ours then runs until it reaches that error. Wall and CPU seconds
are printed, because on a shared machine only the second one is steady. torchnmf runs where it is installed.
"""

from __future__ import annotations

import argparse
import time
import warnings

import numpy as np
import torch
from real_activations import add_data_root, need, squeezenet_activations
from sklearn.decomposition import NMF
from torch import Tensor

from auditor.kernels.factorization.nmf import factorize


def timed(run):
    """Return (result, wall seconds, CPU seconds)."""
    wall, cpu = time.perf_counter(), time.process_time()
    out = run()
    return out, time.perf_counter() - wall, time.process_time() - cpu


def relative_error(X: np.ndarray, A: np.ndarray, B: np.ndarray) -> float:
    return float(np.sqrt(np.square(X - A @ B, dtype=np.float64).sum() / np.square(X, dtype=np.float64).sum()))


def sklearn_run(X: Tensor, rank: int, max_iter: int, tol: float):
    samples = np.ascontiguousarray(X.T.numpy())
    model = NMF(rank, solver="cd", init="nndsvda", random_state=0, max_iter=max_iter, tol=tol)
    A, wall, cpu = timed(lambda: model.fit_transform(samples))
    return relative_error(samples, A, model.components_), wall, cpu, model.n_iter_


def torchnmf_run(X: Tensor, rank: int, max_iter: int):
    from torchnmf.nmf import NMF as TorchNMF

    torch.manual_seed(0)
    model = TorchNMF(X.shape, rank=rank)
    n_iter, wall, cpu = timed(lambda: model.fit(X, beta=2, max_iter=max_iter))
    error = relative_error(X.numpy(), model.H.detach().numpy(), model.W.detach().numpy().T)
    return error, wall, cpu, n_iter


def ours_run(X: Tensor, rank: int, error: float):
    fit, wall, cpu = timed(lambda: factorize(X, rank, max_iter=500, tol=0, target_error=error))
    return fit.relative_error, wall, cpu, fit.n_iter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_root(parser)
    parser.add_argument("--sizes", nargs="+", default=["512x50000:10", "512x50000:32", "1792x9000:256"])
    parser.add_argument("--max-iter", type=int, default=200, help="of the peers")
    parser.add_argument("--tol", type=float, default=1e-4, help="of scikit-learn")
    parser.add_argument("--no-torchnmf", action="store_true")
    args = parser.parse_args()
    root = need(args.data_root, "cub20", "squeezenet1_1_imagenet.pth")
    warnings.filterwarnings("ignore")
    ours_run(torch.rand(40, 300), 4, 0.5)  # compile before the clock starts
    print("error, wall seconds and CPU seconds of the peer | iterations, error, wall and CPU seconds of ours")
    for size in args.sizes:
        shape, rank = size.split(":")
        channels, positions = (int(v) for v in shape.split("x"))
        X = squeezenet_activations(root, channels, positions)
        peers = {"scikit-learn": lambda X=X, r=int(rank): sklearn_run(X, r, args.max_iter, args.tol)}
        if not args.no_torchnmf:
            peers["torchnmf"] = lambda X=X, r=int(rank): torchnmf_run(X, r, args.max_iter)
        for name, peer in peers.items():
            try:
                error, wall, cpu, _ = peer()
            except ImportError as err:
                print(f"{size:>16} {name:>12} skipped: {err}")
                continue
            e, w, c, n = ours_run(X, int(rank), error)
            print(
                f"{size:>16} {name:>12} {error:8.5f} {wall:8.2f} {cpu:8.2f} | {n:4d} {e:8.5f} {w:7.2f} {c:7.2f}   "
                f"faster: wall {wall / w:.1f}x, cpu {cpu / c:.1f}x{'' if e <= error else '   ERROR NOT REACHED'}",
                flush=True,
            )


if __name__ == "__main__":
    main()
