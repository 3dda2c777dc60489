"""Tree kernel against scikit-learn's DecisionTreeRegressor on the same codes, in the same run.

    python tests/benchmarks/bench_tree.py --rows 6000 26000 --outputs 10 200 --depth 8 12
    python tests/benchmarks/bench_tree.py --append --rows 6000 --outputs 10 --batch 64

Prints, per case: seconds of both (best of --repeats; scikit-learn once), the ratio of wall times, the ratio of CPU
times (scikit-learn uses one core, this kernel all: on a busy machine the wall ratio falls towards the CPU ratio, on
idle cores it rises above it), and whether the trees agree (leaves, training error).
``--append`` compares an epoch of appended mini-batches with refits from scratch per batch;
scikit-learn's epoch is timed at every --every-th batch and summed by trapezoids, because all of it takes minutes.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
from sklearn.tree import DecisionTreeRegressor

from auditor.kernels.trees.grower import TreeGrower
from auditor.kernels.trees.tree import TreeLimits, fit_tree

WANTED = {(10, 8): 15.0, (10, 12): 5.0, (200, 8): 6.0, (200, 12): 3.0}


def drawn(n, n_features, k, bits, seed, kind):
    """Draw codes and softmax targets: 'relu' like features of k classes, 'uniform' with 20 features that matter."""
    rng = np.random.default_rng(seed)
    top = 2**bits - 1
    if kind == "relu":
        classes = rng.integers(0, k, n)
        x = rng.normal(size=(k, n_features))[classes] + rng.normal(size=(n, n_features)) - 0.3
        codes = np.minimum(np.round(np.maximum(x, 0) / 4 * top), top).astype(np.uint8)
        logits = 4 * np.eye(k)[classes] + rng.normal(size=(n, k))
    else:
        codes = rng.integers(0, top + 1, (n, n_features)).astype(np.uint8)
        logits = (codes[:, :20] / top - 0.5) @ rng.normal(size=(20, k)) * 3 + rng.normal(0, 0.5, (n, k))
    p = np.exp(logits - logits.max(1, keepdims=True))
    return codes, p / p.sum(1, keepdims=True)


def timed(job):
    """Return wall seconds, CPU seconds of all threads, and the result."""
    start, cpu = time.perf_counter(), time.process_time()
    result = job()
    return time.perf_counter() - start, time.process_time() - cpu, result


def best_of(job, repeats):
    runs = [timed(job) for _ in range(repeats)]
    return min(run[0] for run in runs), min(run[1] for run in runs), runs[0][2]


def fresh(n, k, depth, args, kind):
    codes, y = drawn(n, args.features, k, args.bits, args.seed, kind)
    ours, cpu, tree = best_of(
        lambda: fit_tree(codes, y, TreeLimits(depth), bits=args.bits, threads=args.threads), args.repeats
    )
    x = codes.astype(np.float32)
    theirs, their_cpu, peer = timed(lambda: DecisionTreeRegressor(max_depth=depth, random_state=0).fit(x, y))
    error, peer_error = ((tree.predict(codes) - y) ** 2).mean(), ((peer.predict(x) - y) ** 2).mean()
    return {
        "case": f"{kind} rows={n} outputs={k} depth={depth}",
        "ours_s": round(ours, 4),
        "sklearn_s": round(theirs, 3),
        "ratio": round(theirs / ours, 1),
        "cpu_ratio": round(their_cpu / cpu, 1),
        "wanted": WANTED.get((k, depth)),
        "leaves": [tree.n_leaves, int(peer.get_n_leaves())],
        "error_gap": abs(float(error - peer_error)),
    }


def appended(n, k, depth, args, kind):
    codes, y = drawn(n, args.features, k, args.bits, args.seed, kind)
    ends = list(range(args.batch, n + 1, args.batch))

    def epoch():
        grower = TreeGrower(
            args.features, k, TreeLimits(depth), bits=args.bits, expected_rows=n, span=(0, 1), threads=args.threads
        )
        return [grower.append(codes[end - args.batch : end], y[end - args.batch : end]) for end in ends][-1]

    ours, cpu, tree = best_of(epoch, args.repeats)
    x = codes.astype(np.float32)
    sampled = sorted({*ends[:: args.every], ends[-1]})
    spent = np.array(
        [
            timed(lambda e=end: DecisionTreeRegressor(max_depth=depth, random_state=0).fit(x[:e], y[:e]))[:2]
            for end in sampled
        ]
    )
    theirs, their_cpu = (float(np.interp(ends, sampled, column).sum()) for column in spent.T)
    whole = fit_tree(codes[: ends[-1]], y[: ends[-1]], TreeLimits(depth), bits=args.bits)
    return {
        "case": f"append {kind} rows={n} batch={args.batch} outputs={k} depth={depth}",
        "ours_s": round(ours, 3),
        "sklearn_s": round(theirs, 1),
        "ratio": round(theirs / ours, 1),
        "cpu_ratio": round(their_cpu / cpu, 1),
        "wanted": 20.0,
        "same_as_fresh": bool(
            np.array_equal(tree.feature, whole.feature) and np.array_equal(tree.threshold, whole.threshold)
        ),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[6000, 26000])
    parser.add_argument("--outputs", type=int, nargs="+", default=[10, 200])
    parser.add_argument("--depth", type=int, nargs="+", default=[8, 12])
    parser.add_argument("--kind", nargs="+", default=["relu", "uniform"], choices=["relu", "uniform"])
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--append", action="store_true")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--every", type=int, default=12)
    args = parser.parse_args()
    fit_tree(*drawn(200, 40, 3, args.bits, 0, "relu"), bits=args.bits)  # compile before the clock runs
    for kind in args.kind:
        for n in args.rows:
            for k in args.outputs:
                for depth in args.depth:
                    print(json.dumps((appended if args.append else fresh)(n, k, depth, args, kind)), flush=True)


if __name__ == "__main__":
    main()
