"""Projection of new positions on a fixed basis: ours against scikit-learn's NMF.transform and looped SciPy nnls.

    python tests/benchmarks/bench_projection.py --data-root DIR

scikit-learn keeps its fitted basis between calls, so does ours (``prepare``, timed beside). A thousand images come as
one (channels, positions) matrix, and once more as (images, channels, positions), the way a network hands them out.
"""

from __future__ import annotations

import argparse
import time
import warnings

import numpy as np
import torch
from real_activations import add_data_root, need, squeezenet_activations
from scipy.optimize import nnls
from sklearn.decomposition import NMF

from auditor.kernels.factorization.nmf import factorize
from auditor.kernels.factorization.projection import prepare, project, project_images


def best_us(run, positions: int, repeats: int) -> tuple[float, float]:
    """Return the best wall and CPU microseconds per position over ``repeats`` runs."""
    wall, cpu = [], []
    for _ in range(repeats):
        w, c = time.perf_counter(), time.process_time()
        run()
        wall.append(time.perf_counter() - w)
        cpu.append(time.process_time() - c)
    return min(wall) / positions * 1e6, min(cpu) / positions * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_root(parser)
    parser.add_argument("--ranks", type=int, nargs="+", default=[10, 32])
    args = parser.parse_args()
    root = need(args.data_root, "cub20", "squeezenet1_1_imagenet.pth")
    warnings.filterwarnings("ignore")
    fitted = squeezenet_activations(root, 512, 8000)
    new = squeezenet_activations(root, 512, 49_000, split="test")
    for rank in args.ranks:
        W = factorize(fitted, rank, max_iter=30).W
        for n_images in (1, 1000):
            X = new[:, : 49 * n_images].contiguous()
            samples, columns_of_W = np.ascontiguousarray(X.T.numpy()), W.double().numpy()
            peer = NMF(rank, init="nndsvda", random_state=0, max_iter=1).fit(samples[:49])
            peer.components_ = np.ascontiguousarray(W.T.numpy())
            peer.set_params(max_iter=200)
            looped = samples[: min(len(samples), 2000)].astype(np.float64)
            want = np.stack([nnls(columns_of_W, x)[0] for x in looped], axis=1)
            basis = prepare(W)
            gap = np.abs(project(X, basis).numpy()[:, : len(looped)] - want).max() / want.max()
            repeats = 200 if n_images == 1 else 5
            ours = best_us(lambda X=X, basis=basis: project(X, basis), X.shape[1], repeats)
            sk = best_us(
                lambda peer=peer, samples=samples: peer.transform(samples), X.shape[1], 20 if n_images == 1 else 3
            )
            sp = best_us(
                lambda looped=looped, columns_of_W=columns_of_W: [nnls(columns_of_W, x) for x in looped], len(looped), 1
            )
            ratios = [f"{peer[0] / ours[0]:.1f}x wall, {peer[1] / ours[1]:.1f}x cpu" for peer in (sk, sp)]
            print(
                f"rank {rank:3d}, {n_images:4d} image(s) of 49: ours {ours[0]:.2f} us/position, "
                f"scikit-learn {sk[0]:.2f} ({ratios[0]}), SciPy {sp[0]:.2f} ({ratios[1]}); "
                f"largest difference to SciPy {gap:.1e}",
                flush=True,
            )
            if n_images > 1:
                Z = X.reshape(512, n_images, 49).permute(1, 0, 2).contiguous()
                same = torch.allclose(
                    project_images(Z, basis).permute(1, 0, 2).flatten(1), project(X, basis), atol=1e-4
                )
                batch = best_us(lambda Z=Z, basis=basis: project_images(Z, basis), X.shape[1], repeats)
                ready = best_us(lambda W=W: prepare(W), 1, 20)
                print(
                    f"    as (images, channels, positions): {batch[0]:.2f} us/position, {sk[0] / batch[0]:.1f}x wall, "
                    f"{sk[1] / batch[1]:.1f}x cpu, {'the same scores' if same else 'OTHER SCORES'}; "
                    f"making the basis ready, once: {ready[0]:.0f} us",
                    flush=True,
                )


if __name__ == "__main__":
    main()
