"""The weakly supervised experiment of [Khorram2020]: trained on identities alone, asked for attributes it never saw.

    python -m tests.benchmarks.bench_deepfacto_attributes --data-root DATA --keep FOLDER [--ranks 4,32,256]

The paper takes faces (LFWA): Inception-ResNet-V1, a factorization of its last layer, a fully connected layer on the
scores, a triplet loss of identities, then a linear SVM on the scores for each of 40 attributes. Here: SqueezeNet with
ImageNet weights, bird species in place of identities, the 312 attributes per class of CUB (above 50 of 100). Species 0
to 14 train the network and the SVMs; attributes are asked of photos of species 15 to 19, which nothing was trained on.
Beside it, with the same SVM on the same photos: majority, PCA and NMF of the same rank, and the layer as it is.

Results with the table per attribute are stored run by run in results/deepfacto_attributes.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from pathlib import Path

import torch
from torch import nn

from auditor.errors import NumericsError
from auditor.explainers.deepfacto.block_training import Scaled, in_rows
from auditor.kernels.factorization.deepfacto import projected
from auditor.kernels.factorization.nmf import factorize
from auditor.metrics.attribute_probe import (
    Attributes,
    majority_accuracy,
    pooled_features,
    principal_scores,
    probe_accuracy,
    read_attributes,
)
from auditor.network.network_blocks import split
from auditor.training.block_admm import BlockAdmm, BlockAdmmConfig
from auditor.training.factorization import Factorization
from tests.benchmarks import envelope
from tests.benchmarks.photo_networks import imagenet_squeezenet, photos_of

NAME = "deepfacto_attributes"
PUBLISHED = {4: 74.80, 32: 81.39, 256: 87.03}
SEEN = 15  # species
WIDTH, CELLS, EPOCHS = 64, 3, 4
START, LAYER = "features.10", "features.12"


class Embedding(nn.Module):
    """A fully connected layer over the scores, averaged on a grid of as many cells as the paper's layer has."""

    def __init__(self, rank):
        super().__init__()
        self.pool, self.linear = nn.AdaptiveAvgPool2d(CELLS), nn.Linear(rank * CELLS**2, WIDTH)

    def forward(self, S):
        return self.linear(self.pool(S).flatten(1))


def prepared(args):
    """Return the outputs of the lower layers and the labels, seen species first."""
    root, file = Path(args.data_root), Path(args.keep) / "attributes.prepared.pt"
    subject = imagenet_squeezenet(root)
    stem, below, _ = split(subject, [START, LAYER])
    if not file.exists():
        pairs = [
            (in_rows(stem, x).half(), y) for part in ("train", "test") for x, y in photos_of(root, part, range(20))
        ]
        torch.save({"x": torch.cat([x for x, _ in pairs]), "y": torch.cat([y for _, y in pairs])}, file)
    stored = torch.load(file, weights_only=True)
    order = stored["y"].argsort(stable=True)
    return below, stored["x"][order].float(), stored["y"][order]


def one_run(args, rank, seed):
    """Train on identities; return accuracies on the unseen species, and per attribute."""
    began = time.process_time()
    below, x, y = prepared(args)
    held = y >= SEEN
    Z = in_rows(below, x)
    scale = float(Z[~held].square().mean().sqrt())
    Z = Z.flatten(2) / scale
    columns = Z[~held].permute(1, 0, 2).flatten(1)
    some = torch.randperm(columns.shape[1], generator=torch.Generator().manual_seed(seed))[:20_000]
    M = factorize(columns[:, some], rank, seed=seed, init="random" if seed else "auto").W
    torch.manual_seed(seed)
    blocks = [Scaled(below, scale), Factorization(M), Embedding(rank)]
    config = BlockAdmmConfig(
        loss="triplet", batch=48, lr=3e-4, lr_factors=(1.0, 1.0, 3.0), z_steps=3, reconstruction=0.003, seed=seed,
        decay_epochs=EPOCHS,
    )  # fmt: skip
    losses, stopped = [], ""
    try:
        for cycle in itertools.islice(BlockAdmm(blocks, x[~held], y[~held], config), EPOCHS):
            losses.append(round(cycle.loss, 4))
    except NumericsError as error:
        stopped = str(error)
    scores = in_rows(lambda v: blocks[1](blocks[0](v)), x).flatten(2)
    names = sorted(p.name for p in (Path(args.data_root) / "cub20" / "train").iterdir() if p.is_dir())
    table = Path(args.data_root) / "cub20" / "class_attributes.csv"
    attributes = read_attributes(table, [f"{names[k]}/{i}" for i, k in enumerate(y.tolist())], y, names, 50.0)
    methods = {"deepfacto": scores, "nmf": projected(Z, M), "pca": principal_scores(Z, held, rank), "layer": Z}
    features = {name: pooled_features(S) for name, S in methods.items()}
    figures = {name: probe_accuracy(v, held, attributes, seed) for name, v in features.items()}
    varied = [c for c in range(len(attributes.names)) if len(set(attributes.values[~held.numpy(), c].tolist())) > 1]
    each = {}
    for c in varied:
        one = Attributes((attributes.names[c],), attributes.values[:, c : c + 1])
        each[attributes.names[c]] = [round(probe_accuracy(features["deepfacto"], held, one, seed), 4),
                                     round(majority_accuracy(held, one), 4)]  # fmt: skip
    return {
        "figures": {**figures, "majority": majority_accuracy(held, attributes)}, "attributes": each, "losses": losses,
        "stopped": stopped, "seed": seed, "photos": int(held.sum()), "cpu_s": round(time.process_time() - began),
    }  # fmt: skip


def stored():
    path = envelope.RESULTS / f"{NAME}.json"
    return json.loads(path.read_text())["details"]["runs"] if path.exists() else {}


def add(key, run):
    """Store a run and write the tables anew."""
    runs = {**stored(), key: run}
    rows = []
    for name, one in sorted(runs.items(), key=lambda item: int(item[0].split("|")[0])):
        rank, reached = int(name.split("|")[0]), {k: round(100 * v, 2) for k, v in one["figures"].items()}
        rows.append({
            "rank": rank, "published": PUBLISHED.get(rank), "reached": reached.pop("deepfacto"), **reached,
            "attributes": len(one["attributes"]), "photos": one["photos"], "seed": one["seed"],
            "differs": "birds and their species, not faces and identities; SqueezeNet; attributes per class",
        })  # fmt: skip
    last = list(runs.values())[-1]["attributes"]
    by_gain = sorted(last.items(), key=lambda item: item[1][1] - item[1][0])
    shown = [{"attribute": n, "deepfacto": 100 * v, "majority": 100 * m} for n, (v, m) in (*by_gain[:8], *by_gain[-8:])]
    envelope.write(
        NAME,
        experiment="Attributes of unseen species from scores that were trained on species alone, by a triplet loss",
        command="python -m tests.benchmarks.bench_deepfacto_attributes --data-root DATA --keep FOLDER",
        settings={"epochs": EPOCHS, "embedding": WIDTH, "layer": LAYER, "species": f"{SEEN} train, {20 - SEEN} test"},
        seeds=sorted({one["seed"] for one in runs.values()}),
        tables=[envelope.table("Mean accuracy over attributes that vary among the training species, per cent", rows),
                envelope.table("Of the last run, the attributes of most and of least gain over the majority", shown)],
        details={"runs": runs},
    )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", default=os.environ.get("AUDITOR_DATA"))
    parser.add_argument("--keep", required=True, help="folder for what the lower layers give")
    parser.add_argument("--ranks", default="4,32,256")
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    if not args.data_root or not Path(args.data_root).exists():
        raise SystemExit("skipped: no folder --data-root (or AUDITOR_DATA)")
    for rank, seed in itertools.product(map(int, args.ranks.split(",")), range(args.seeds)):
        key = f"{rank}|{seed}"
        if key not in stored():
            add(key, run := one_run(args, rank, seed))
            print(key, run["figures"], run["losses"], run["stopped"], f"{run['cpu_s']} s", flush=True)


if __name__ == "__main__":
    main()
