"""Operator norms of convolutions against the largest singular value of their explicit matrix.

    python tests/benchmarks/bench_operator_norm.py

For each awkward shape: the explicit matrix's norm (numpy), what Lanczos finds without the matrix and its upper bound
that fails with probability 1e-9, what the certified bound uses on maps of this size, and the torus bound that it uses
on large maps. The first three must agree to 1e-4; every upper bound must hold.
"""

from __future__ import annotations

import argparse
import math
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auditor.kernels.networks.operator_norm import convolution_norm, lanczos_norm
from auditor.network.aten_graph import AtenGraph
from auditor.stability.certified_bound import bounds_at

CASES = [  # out, in, kernel, size, stride, padding, dilation, groups
    (4, 3, (3, 3), (13, 17), (1, 1), (1, 1), (1, 1), 1),
    (7, 3, (7, 7), (23, 19), (2, 2), (3, 3), (1, 1), 1),
    (6, 4, (3, 3), (9, 11), (2, 1), (2, 2), (2, 2), 2),
    (12, 12, (3, 3), (9, 8), (1, 1), (1, 1), (1, 1), 12),
    (12, 12, (5, 5), (10, 13), (2, 2), (2, 2), (1, 1), 12),
    (5, 6, (1, 1), (9, 7), (2, 2), (0, 0), (1, 1), 1),
    (8, 6, (2, 2), (12, 10), (2, 2), (0, 0), (1, 1), 1),
    (4, 3, (2, 5), (13, 17), (1, 3), (0, 4), (1, 1), 1),
    (3, 2, (3, 3), (14, 14), (1, 1), (4, 4), (4, 4), 1),
    (16, 1, (3, 3), (28, 28), (1, 1), (1, 1), (1, 1), 1),
    (1, 16, (3, 3), (17, 13), (3, 3), (1, 1), (1, 1), 1),
    (3, 3, (3, 3), (1, 9), (1, 2), (1, 1), (1, 1), 3),
]


def explicit(w: Tensor, size: tuple[int, int], stride, padding, dilation, groups) -> np.ndarray:
    n = w.shape[1] * groups
    eye = torch.eye(n * math.prod(size), dtype=torch.float64).view(-1, n, *size)
    return F.conv2d(eye, w, None, stride, padding, dilation, groups).flatten(1).numpy()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="Lanczos steps at most")
    args = parser.parse_args()
    torch.manual_seed(0)
    worst, held, started = 0.0, True, time.process_time()
    print(f"{'case':58s} {'explicit':>10s} {'lanczos':>10s} {'1e-9 upper':>10s} {'certified':>10s} {'torus':>10s}")
    for out, inner, kernel, size, stride, padding, dilation, groups in CASES:
        conv = nn.Conv2d(inner, out, kernel, stride, padding, dilation, groups).double()
        w = conv.weight.detach()
        truth = float(np.linalg.norm(explicit(w, size, stride, padding, dilation, groups), 2))
        like = torch.zeros(1, inner, *size, dtype=torch.float64)
        after = F.conv2d(like, w, None, stride, padding, dilation, groups)

        def forward(v: Tensor, w=w, options=(stride, padding, dilation, groups)) -> Tensor:
            return F.conv2d(v, w, None, *options)

        def back(u: Tensor, like=like, shape=after.shape, forward=forward) -> Tensor:
            _, pull = torch.func.vjp(forward, like)
            return pull(u.view(shape))[0]

        estimate = lanczos_norm(forward, back, like, n_steps=args.steps)
        graph = AtenGraph.trace(conv, torch.zeros(2, inner, *size, dtype=torch.float64))
        proof = bounds_at(graph, graph.output, (1.0,) * inner)[0].value
        pads = [(p, p) for p in padding]
        torus = convolution_norm(w, size, stride=stride, pad=pads, dilation=dilation, groups=groups)
        off = max(abs(estimate.lower / truth - 1), abs(proof / truth - 1))
        held &= min(estimate.upper, proof, torus) >= truth * (1 - 1e-12)
        worst = max(worst, off)
        name = f"{inner}->{out} k{kernel} on {size} s{stride} p{padding} d{dilation} g{groups}"
        print(f"{name:58s} {truth:10.6f} {estimate.lower:10.6f} {estimate.upper:10.6f} {proof:10.6f} {torus:10.6f}")
    print(f"largest relative difference {worst:.1e}; every upper bound holds: {held}; "
          f"{time.process_time() - started:.1f} s of processor time")  # fmt: skip
    return int(worst > 1e-4 or not held)


if __name__ == "__main__":
    raise SystemExit(main())
