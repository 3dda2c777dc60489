"""DeepFacto on a CNN for MNIST, Fashion-MNIST or CUB: accuracy before and after, and the attribute probe beside others.

python tests/benchmarks/bench_deepfacto.py --data-root DATA [--set MNIST] [--ranks 8 16 32] [--seeds 3] [--keep FILE]

A network is trained on part of the training split, then factorized on ``--images`` images of it (every fifth of them
is held out by the fit; settings were chosen on training images that nothing else saw). All figures are of the test
split: the share of right answers of the network as it was and with the factorization inside, the error of the
reconstruction, and a linear SVM on pooled scores (mean and maximum over positions, C by cross-validation, for each
method alike) trained on the same images as the factorization. PCA and NMF factorize the layer of the network as it
was. On MNIST and Fashion-MNIST the classes stand in for attributes; CUB has 312 per class (above 50 of 100), its
network is SqueezeNet with ImageNet weights, of which the part below ``features.9`` is run once and stays as it is.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from auditor import Subject, fit, open_data
from auditor.data.source import Data
from auditor.explainers.deepfacto.factor_admm import activations_of
from auditor.kernels.factorization.deepfacto import projected
from auditor.kernels.factorization.nmf import factorize
from auditor.metrics.attribute_probe import (
    Attributes,
    pooled_features,
    principal_scores,
    probe_accuracy,
    read_attributes,
)
from auditor.network.below_layer import BelowLayer

SHOWN = ("before", "after", "drop", "error", "sparsity", "f_cls", "probe", "nmf", "pca", "cells", "kept", "cpu")


def network(kind="deep"):
    first = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    if kind == "shallow":
        return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(64 * 49, 128), nn.ReLU(), nn.Linear(128, 10)), "5"
    third = [nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, *third, nn.Flatten(), nn.Linear(128 * 9, 10)), "8"


def idx_images(root, name, split, n):
    data = open_data(f"torchvision:{name}?root={root}&split={split}", limit=n)
    batches = list(data.batches(Subject(network()[0], input_shape=(1, 28, 28)), 1000))
    return torch.cat([b.images for b in batches]), torch.cat([b.labels for b in batches])


def trained_network(kind, x, y, epochs, seed=0):
    torch.manual_seed(seed)
    net, layer = network(kind)
    optimiser = torch.optim.Adam(net.parameters(), 2e-3)
    steps = epochs * (len(x) // 100)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(100)[: len(x) // 100]:
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimiser.step()
            schedule.step()
    return Subject(net.eval(), input_shape=(1, 28, 28), class_names=[str(i) for i in range(10)]), layer


def known_network(args, x, y):
    """Train the network, or take it from beside the file of results."""
    if not args.keep:
        return trained_network(args.network, x, y, epochs=3)
    path = Path(f"{args.keep}.{args.set}.{args.network}.{len(x)}.pt")
    if not path.exists():
        torch.save(trained_network(args.network, x, y, epochs=3)[0].module.state_dict(), path)
    net, layer = network(args.network)
    net.load_state_dict(torch.load(path, weights_only=True))
    return Subject(net.eval(), input_shape=(1, 28, 28), class_names=[str(i) for i in range(10)]), layer


class Kept:
    """Results that are there already, in a file of JSON lines: a run that was cut goes on where it stopped."""

    def __init__(self, path):
        self.path = Path(path) if path else None
        self.rows = {}
        if self.path and self.path.exists():
            for line in self.path.read_text().splitlines():
                row = json.loads(line)
                self.rows[row["key"]] = row

    def add(self, key, row):
        self.rows[key] = {"key": key, **row}
        if self.path:
            with self.path.open("a") as file:
                file.write(json.dumps(self.rows[key]) + "\n")


def one_run(subject, data, layer, Z, held, images, labels, attributes, rank, seed, options):
    """Return the figures of one fit, measured on the test images (``held``)."""
    began = time.process_time()
    e = fit("deepfacto", subject, data, layer=layer, rank=rank, seed=seed, refits=0, **options)
    f = activations_of(BelowLayer(subject, layer, e.weights_), images)
    S = e.scores(f)
    with torch.no_grad():
        before = torch.cat([subject.logits(part).argmax(1) for part in images[held].split(500)])
    answers, truth = e.head(subject).logits(S[held]).argmax(1), labels[held]
    columns = Z[~held].permute(1, 0, 2).flatten(1)
    some = torch.randperm(columns.shape[1], generator=torch.Generator().manual_seed(seed))[:40_000]
    W = factorize(columns[:, some], rank, seed=seed, init="random").W
    scores = {"probe": S, "nmf": projected(Z, W), "pca": principal_scores(Z, held, rank)}
    accuracies = {k: probe_accuracy(pooled_features(v), held, attributes, seed) for k, v in scores.items()}
    right = float((answers == truth).float().mean())
    was = float((before == truth).float().mean())
    scaled = f[held] / e.scale_
    return accuracies | {
        "before": was,
        "after": right,
        "drop": was - right,
        "error": float((scaled - e.M_ @ S[held]).norm() / scaled.norm()),
        "sparsity": e.metrics["sparsity"],
        "f_cls": float((answers == before).float().mean()),
        "cells": e.metrics["cells"],
        "kept": e.metrics["epoch_kept"],
        "cpu": time.process_time() - began,
        "held-out": {k: v for k, v in e.metrics.items() if k.startswith(("accuracy", "probe", "relative"))},
    }


def table(name, subject, data, layer, factorized, unseen, attributes, options, args):
    """Print a line per seed as it comes, and the means per rank."""
    images, labels = torch.cat([factorized[0], unseen[0]]), torch.cat([factorized[1], unseen[1]])
    held = torch.arange(len(images)) >= len(factorized[0])
    Z = activations_of(BelowLayer(subject, layer), images)
    results = Kept(args.keep)
    print(
        f"{name}: layer {layer}, {Z.shape[1]} channels x {Z.shape[2]} positions; {len(factorized[0])} images, {options}"
    )
    print(f"{'rank':>5}{'seed':>5}" + "".join(f"{n:>9}" for n in SHOWN), flush=True)
    for rank in args.ranks:
        rows = []
        for seed in range(args.seeds):
            what = [name, args.network, len(images), args.test_from, rank, seed, options]
            key = json.dumps(what, sort_keys=True)
            if key not in results.rows:
                result = one_run(subject, data, layer, Z, held, images, labels, attributes, rank, seed, options)
                results.add(key, result)
            rows.append([results.rows[key][n] for n in SHOWN])
            print(f"{rank:5}{seed:5}" + "".join(f"{v:9.4f}" for v in rows[-1]), flush=True)
        mean = torch.tensor(rows).mean(0).tolist()
        print(f"{rank:5} mean" + "".join(f"{v:9.4f}" for v in mean), flush=True)


class Features(Data):
    """What the lower part of a network gives for the images of a folder, as images of many channels."""

    def __init__(self, x, y, ids, class_names):
        super().__init__("features of an image folder")
        self.x, self.y, self.ids, self.class_names = x.numpy(), y.numpy(), ids, tuple(class_names)

    def _count(self):
        return len(self.x)

    def _items(self, pre, batch_size):
        for i in range(0, len(self.x), batch_size):
            part = slice(i, i + batch_size)
            yield self.x[part], self.y[part], self.ids[part]

    def _content(self):
        yield self.x.tobytes()
        yield self.y.tobytes()


class Scaled(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.register_buffer("by", by)

    def forward(self, x):
        return x * self.by


def cub(args, options):
    """SqueezeNet on 20 classes of CUB: ImageNet weights, and a linear classifier on pooled features trained here."""
    from torchvision.models import squeezenet1_1

    root = Path(args.data_root) / "cub20"
    body = squeezenet1_1(weights=None)
    state = torch.load(Path(args.data_root) / "squeezenet1_1_imagenet.pth", weights_only=True)
    body.load_state_dict({k: v.float() for k, v in state.items()})
    below = body.features[:9].eval()
    folders = [open_data(str(root / part)) for part in ("train", "test")]
    names = list(folders[0].class_names)
    pixels = Subject(
        nn.Sequential(body.features, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval(),
        input_shape=(3, 224, 224),
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    )
    parts = []
    for data in folders:
        x, y, ids = [], [], []
        for b in data.batches(pixels, 16):
            with torch.no_grad():
                x.append(below(pixels.normalise(b.images)))
            y.append(b.labels)
            ids += b.ids
        parts.append((torch.cat(x), torch.cat(y), ids))
    top = parts[0][0].max()
    (x, y, ids), (test, truth, test_ids) = [((x / top).clamp_max(1), y, ids) for x, y, ids in parts]
    torch.manual_seed(0)
    net = nn.Sequential(
        Scaled(top), body.features[9:], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 20)
    ).eval()
    subject = Subject(net, input_shape=tuple(x.shape[1:]), class_names=names)
    Z = activations_of(BelowLayer(subject, "1"), x).mean(-1)
    head = net[4]
    adam = torch.optim.AdamW(head.parameters(), 2e-3, weight_decay=1e-2)
    for _ in range(80):
        for rows in torch.randperm(len(Z)).split(64):
            adam.zero_grad()
            nn.functional.cross_entropy(head(Z[rows]), y[rows]).backward()
            adam.step()
    net.requires_grad_(False)
    subject = Subject(net, input_shape=tuple(x.shape[1:]), class_names=names)
    table_path = root / "class_attributes.csv"
    marks = read_attributes(table_path, ids + test_ids, torch.cat([y, truth]), names, 50.0)
    options = {"lr": 3e-4} | options | {"attributes": str(table_path), "threshold": 50.0}
    data = Features(x, y, ids, names)
    table("CUB", subject, data, "1", (x, y), (test, truth), marks, options, args)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", default=os.environ.get("AUDITOR_DATA"))
    parser.add_argument("--set", choices=("MNIST", "FashionMNIST", "CUB"), default="MNIST")
    parser.add_argument("--network", choices=("deep", "shallow"), default="deep", help="three or two convolutions")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--images", type=int, default=3000, help="images that are factorized (every fifth is held out)")
    parser.add_argument("--train-images", type=int, default=15000, help="images the network is trained on")
    parser.add_argument("--test-images", type=int, default=5000)
    parser.add_argument("--test-from", type=int, default=0, help="number of the first test image")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="another option of the fit")
    parser.add_argument("--keep", help="file of results: those in it are not computed again")
    args = parser.parse_args()
    torch.set_num_threads(1)
    where = Path(args.data_root or "") / ("cub20" if args.set == "CUB" else args.set)
    if not args.data_root or not where.exists():
        raise SystemExit(f"skipped: no {where.name} under --data-root (or AUDITOR_DATA)")
    options = {"epochs": args.epochs} | {k: float(v) for k, v in (o.split("=") for o in args.option)}
    if args.set == "CUB":
        cub(args, options)
        return
    x, y = idx_images(args.data_root, args.set, "train", args.train_images)
    test = [
        part[args.test_from :]
        for part in idx_images(args.data_root, args.set, "test", args.test_from + args.test_images)
    ]
    subject, layer = known_network(args, x, y)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "images.npz"
        factorized = x[: args.images], y[: args.images]
        np.savez(path, images=factorized[0].permute(0, 2, 3, 1).numpy(), labels=factorized[1].numpy())
        labels = Attributes(("label",), torch.cat([factorized[1], test[1]]).numpy()[:, None])
        table(args.set, subject, open_data(path), layer, factorized, test, labels, options, args)


if __name__ == "__main__":
    main()
