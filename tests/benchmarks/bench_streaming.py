"""Peak memory of the streaming fit: 5,000 against 50,000 images, each in a process of its own.

    python tests/benchmarks/bench_streaming.py [--images 5000 50000]

Shards of 100 images (64 channels x 49 positions) are made on the fly from their number, so the data itself takes no
memory; 50,000 images are 0.6 GB of activations.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys

import torch

CHANNELS, POSITIONS, SHARD = 64, 49, 100


def shard(index: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(index)
    W = torch.rand(CHANNELS, 8, generator=torch.Generator().manual_seed(0)).sub(0.5).clamp_min(0)
    S = torch.rand(8, SHARD * POSITIONS, generator=g).sub(0.5).clamp_min(0)
    return W @ S + 0.05 * torch.rand(CHANNELS, SHARD * POSITIONS, generator=g)


def child(n_images: int) -> None:
    from auditor.kernels.factorization.streaming import factorize_stream

    fit = factorize_stream(lambda: (shard(i) for i in range(n_images // SHARD)), 8, max_iter=3)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{n_images} {fit.positions} {fit.relative_error:.4f} {peak:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, nargs="+", default=[5000, 50_000])
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child)
        return
    peaks = []
    for n in args.images:
        done = subprocess.run([sys.executable, __file__, "--child", str(n)], check=True, capture_output=True, text=True)
        images, positions, error, peak = done.stdout.split()
        peaks.append(float(peak))
        print(f"{images} images, {positions} positions: relative error {error}, peak memory {peak} MB", flush=True)
    print(f"largest growth {max(peaks) - min(peaks):.0f} MB (want under 5% of the smallest)")
    sys.exit(0 if max(peaks) <= 1.05 * min(peaks) else 1)


if __name__ == "__main__":
    main()
