"""The table of the XNN paper on 20 classes of CUB: SqueezeNet fine-tuned from ImageNet weights, annotated parts.

python tests/benchmarks/bench_xnn_cub.py --data-root DATA [--seeds 0,1,2] [--methods srae,nn,…] [--keep DIR] [--shown 4]

All layers of SqueezeNet are trained on the photos of cub20/train, with a new classifier (mean over positions, 128 ReLU
units, 20 logits), since SqueezeNet has no fully connected layer a head could attach to. The heads are trained on the
same photos, every fifth of which only tells them when to stop; all figures are of the photos of cub20/test. With --keep
the network and every row stay in DIR, and a run that was cut goes on where it stopped.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import squeezenet1_1

from auditor import Subject, open_data
from auditor.explainers.xnn.explainer import XnnConfig
from auditor.explainers.xnn.paper_table import METHODS, TableOptions, xnn_table
from auditor.metrics.locality import part_masks

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
UNSEEDED = ("lasso", "1-heatmap")  # nothing random in them: one seed tells all
COLUMNS = ("f_reg", "f_cls", "o1", "o2", "locality", "alive", "pull_away")


def network(weights=None, n_classes=20):
    """Return SqueezeNet's body (with the given ImageNet weights) and a new classifier."""
    torch.manual_seed(0)
    body = squeezenet1_1(weights=None)
    if weights is not None:
        body.load_state_dict({k: v.float() for k, v in torch.load(weights, weights_only=True).items()})
    return nn.Sequential(
        body.features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, n_classes)
    )


def subject_of(net, names):
    return Subject(net.eval(), input_shape=(3, 224, 224), mean=MEAN, std=STD, class_names=names)


def fine_tune(net, data, epochs):
    """Train all layers, with mirrored and shifted photos."""
    subject = subject_of(net, data.class_names)
    pairs = [(b.images, b.labels) for b in data.batches(subject, 64)]
    x, y = subject.normalise(torch.cat([i for i, _ in pairs])), torch.cat([t for _, t in pairs])
    body, head = list(net[0].parameters()), [p for m in net[1:] for p in m.parameters()]
    adam = torch.optim.AdamW([{"params": body, "lr": 2e-4}, {"params": head, "lr": 2e-3}], weight_decay=1e-2)
    n_batches = -(-len(x) // 32)
    fall = torch.optim.lr_scheduler.OneCycleLR(adam, [2e-4, 2e-3], epochs * n_batches, pct_start=0.2)
    net.train().to(memory_format=torch.channels_last)
    for epoch in range(epochs):
        total = 0.0
        for rows in torch.randperm(len(x)).split(32):
            images = x[rows] if torch.rand(()) < 0.5 else x[rows].flip(3)
            dy, dx = torch.randint(-24, 25, (2,)).tolist()
            images = F.pad(images, (24, 24, 24, 24), mode="reflect")[:, :, 24 + dy : 248 + dy, 24 + dx : 248 + dx]
            adam.zero_grad()
            loss = F.cross_entropy(net(images.contiguous(memory_format=torch.channels_last)), y[rows])
            loss.backward()
            adam.step()
            fall.step()
            total += loss.item() * len(rows)
        print(f"epoch {epoch + 1} of {epochs}: loss {total / len(x):.3f}", flush=True)
    return net.eval().to(memory_format=torch.contiguous_format)


def kept_network(folder, weights, data, epochs):
    """Return the fine-tuned network of an earlier piece, or make and keep it."""
    path = folder / f"squeezenet-{epochs}.pth" if folder else None
    if path is not None and path.exists():
        net = network()
        net.load_state_dict(torch.load(path, weights_only=True))
        return net.eval()
    net = fine_tune(network(weights), data, epochs)
    if path is not None:
        torch.save(net.state_dict(), path)
    return net


def accuracy(subject, data):
    with torch.no_grad():
        hits = [subject.logits(b.images).argmax(1) == b.labels for b in data.batches(subject, 32)]
    return torch.cat(hits).float().mean().item()


def print_table(done, methods):
    print(f"{'method':10}{'seeds':>6}" + "".join(f"{c:>11}" for c in COLUMNS))
    for method in methods:
        mine = [row for key, row in done.items() if key.split()[0] == method]
        if mine:
            means = [statistics.fmean(row[c] for row in mine) for c in COLUMNS]
            print(f"{method:10}{len(mine):6}" + "".join(f"{v:11.3f}" if v == v else f"{'-':>11}" for v in means))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", default=os.environ.get("AUDITOR_DATA"))
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated")
    parser.add_argument("--shown", type=int, default=4, help="unseen positives per class whose heatmaps are judged")
    parser.add_argument("--classes", type=int, default=20, help="how many of the classes get a head")
    parser.add_argument("--epochs", type=int, default=150, help="of the heads, at most")
    parser.add_argument("--tune-epochs", type=int, default=12, help="of SqueezeNet")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="option of kind xnn, a number")
    parser.add_argument("--keep", type=Path, help="folder for the network and the results")
    args = parser.parse_args()
    root = Path(args.data_root or "") / "cub20"
    weights = Path(args.data_root or "") / "squeezenet1_1_imagenet.pth"
    if not args.data_root or not root.exists() or not weights.exists():
        raise SystemExit("skipped: no cub20 and squeezenet1_1_imagenet.pth under --data-root (or AUDITOR_DATA)")
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
    train, test = open_data(str(root / "train")), open_data(str(root / "test"))
    net = kept_network(args.keep, weights, train, args.tune_epochs)
    subject = subject_of(net, train.class_names)
    print(f"classifier: seen {accuracy(subject, train):.3f}, unseen {accuracy(subject, test):.3f}", flush=True)
    settings = {k: float(v) for k, v in (s.split("=") for s in args.set)}
    what = "-".join(map(str, (args.tune_epochs, args.epochs, args.classes, args.shown, *args.set)))
    results = args.keep / f"results-{what}.json" if args.keep else None
    done = json.loads(results.read_text()) if results and results.exists() else {}
    seeds, methods = args.seeds.split(","), args.methods.split(",")
    for seed in seeds:
        missing = [m for m in methods if f"{m} {seed}" not in done and (m not in UNSEEDED or seed == seeds[0])]
        began = time.perf_counter()
        cfg = XnnConfig(seed=int(seed), max_epochs=args.epochs, targets=list(range(args.classes)), **settings)
        if missing:
            parts = part_masks(test, subject.preprocessing, root / "parts.csv", root / "boxes.csv")
            rows = xnn_table(
                subject,
                train,
                cfg,
                methods=missing,
                options=TableOptions(images_per_class=args.shown),
                parts=parts,
                judged_on=test,
            )
            done |= {f"{row.method} {seed}": row.to_json() for row in rows}
            if results:
                results.write_text(json.dumps(done))
        print(f"seed {seed}: {time.perf_counter() - began:.0f} s", flush=True)
        print_table(done, methods)


if __name__ == "__main__":
    main()
