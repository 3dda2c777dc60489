"""Drift alarms: re-fits of one model must stay silent, changed versions must not.

    python tests/benchmarks/bench_drift.py [--pairs 40] [--limit 400]

On scikit-learn's digits: (1) the same version compared with itself from other starts, ``--pairs`` times; (2) versions
whose compared layer was re-initialised and retrained; (3) versions trained with a class removed. Ends with 1 when a
figure is missed.
"""

from __future__ import annotations

import argparse
import copy
import sys

import torch
from torch import nn

from auditor.data.source import open_data
from auditor.demo import DigitsNet
from auditor.release.drift import compare
from auditor.subject.preprocessing import Preprocessing
from auditor.subject.subject import Subject

LAYER = "features.6"


def train(net: nn.Module, images, labels, *, epochs: int, seed: int, only=None) -> nn.Module:
    """Train in place, all weights or only those whose name starts with ``only``."""
    generator = torch.Generator().manual_seed(seed)
    weights = [p for name, p in net.named_parameters() if only is None or name.startswith(only)]
    optimiser = torch.optim.Adam(weights, lr=2e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(images), generator=generator).split(64):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(images[rows]), labels[rows]).backward()
            optimiser.step()
    return net.eval()


def fresh(seed: int) -> DigitsNet:
    torch.manual_seed(seed)
    return DigitsNet()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--limit", type=int, default=400)
    parser.add_argument("--versions", type=int, default=3, help="changed versions of each sort")
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args()
    pre = Preprocessing.of((1, 8, 8), None, None, "stretch")
    batch = next(open_data("sklearn:digits?split=train").batches(pre, 4096))
    data = open_data("sklearn:digits?split=test", limit=args.limit)
    base = train(fresh(0), batch.images, batch.labels, epochs=args.epochs, seed=0)
    a = Subject(base, input_shape=(1, 8, 8))
    missed = False
    alarms = 0
    for i in range(args.pairs):
        drift = compare(a, Subject(copy.deepcopy(base), input_shape=(1, 8, 8)), data, layer=LAYER, seed=100 * (i + 1))
        alarms += drift.drift
    print(f"same version, other starts: {alarms} false alarms in {args.pairs} pairs (want below 5%)", flush=True)
    missed |= alarms >= 0.05 * args.pairs
    for sort in ("layer re-initialised and retrained", "class removed, trained anew", "class removed, trained on"):
        caught = []
        for v in range(args.versions):
            net = copy.deepcopy(base)
            rows = batch.labels != 3 + v
            if sort.startswith("layer"):
                net.features[5] = fresh(10 + v).features[5]
                train(net, batch.images, batch.labels, epochs=args.epochs // 2, seed=10 + v, only="features.5")
            elif sort.endswith("anew"):
                net = train(fresh(0), batch.images[rows], batch.labels[rows], epochs=args.epochs, seed=0)
            else:
                train(net, batch.images[rows], batch.labels[rows], epochs=args.epochs, seed=20 + v)
            drift = compare(a, Subject(net, input_shape=(1, 8, 8)), data, layer=LAYER, seed=v)
            caught.append(drift.drift)
            print(
                f"  {sort}: similarity {drift.similarity:.3f}, null from {drift.null_low:.3f}, within "
                f"{drift.within[0]:.3f}/{drift.within[1]:.3f}, p {drift.p_value:.4f}, alarm {drift.drift}",
                flush=True,
            )
        print(f"{sort}: {sum(caught)} alarms in {len(caught)} versions (want all)", flush=True)
        missed |= not all(caught)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
