"""Explanation heads on MNIST: SRAE against NN, SAE and CAE on all ten classes of a CNN, several seeds.

python tests/benchmarks/bench_xnn_mnist.py --data-root DATA [--seeds 0,1,2,3,4] [--methods srae,nn,sae] [--keep DIR]

With --keep the CNN and every result stay in DIR: a run that was cut goes on where it stopped, and pieces run one after
the other (--seeds 0,1, then --seeds 2,3,4) are summed up together at the end.
"""

import argparse
import gzip
import json
import os
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from auditor.explainers.fitted_images import FittedImages
from auditor.explainers.xnn.explainer import Examples, XnnConfig, make_heads, measure, srae_config
from auditor.explainers.xnn.head_training import fit_heads
from auditor.subject.layers import layout_of


def idx(path, skip):
    with gzip.open(path) as file:
        return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)[skip:]


def mnist(root, split):
    raw = Path(root) / "MNIST" / "raw"
    x = idx(raw / f"{split}-images-idx3-ubyte.gz", 16).view(-1, 1, 28, 28).float() / 255
    return x, idx(raw / f"{split}-labels-idx1-ubyte.gz", 8).long()


def cnn(x, y, seed=0, epochs=3):
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(800, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    adam = torch.optim.Adam(net.parameters(), 2e-3)
    steps = epochs * len(x) // 128
    fall = torch.optim.lr_scheduler.OneCycleLR(adam, 4e-3, max(1, steps + epochs))
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(128):
            adam.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            adam.step()
            fall.step()
    return net.eval()


def kept_cnn(folder, x, y):
    """Return the CNN of an earlier piece, or train it and keep it."""
    path = folder / "cnn.pth" if folder else None
    if path is not None and path.exists():
        net = cnn(x[:0], y[:0], epochs=0)
        net.load_state_dict(torch.load(path, weights_only=True))
        return net
    net = cnn(x, y)
    if path is not None:
        torch.save(net.state_dict(), path)
    return net


N_STOP = 3000  # images that tell the heads when to stop; all figures are of the 10,000 test images
COLUMNS = ["f_reg", "f_reg_relative", "f_cls", "f_cls_boundary", "pull_away", "pull_away_live", "alive", "epochs"]


def one(examples, unseen, variant, seed, epochs):
    """Fit the heads of all ten classes and return the means over classes of every figure on ``unseen``."""
    cfg = XnnConfig(variant=variant, seed=seed)
    heads = make_heads(examples, 10, layout_of((64,), (28, 28)), cfg)
    began = time.perf_counter()
    trained = fit_heads(heads, examples, range(10), srae_config(cfg), max_epochs=epochs, patience=cfg.patience)
    m = measure(trained, unseen, list(range(10)))
    return {"seconds": time.perf_counter() - began, **{c: m[c] for c in COLUMNS}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", default=os.environ.get("AUDITOR_DATA"))
    parser.add_argument("--seeds", default="0,1,2,3,4", help="comma-separated")
    parser.add_argument("--methods", default="srae,nn,sae", help="comma-separated, of srae, nn, sae, cae")
    parser.add_argument("--images", type=int, default=10_000, help="training images of the heads")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--keep", type=Path, help="folder for the CNN and the results")
    args = parser.parse_args()
    if not args.data_root or not (Path(args.data_root) / "MNIST" / "raw").exists():
        raise SystemExit("skipped: no MNIST/raw under --data-root (or AUDITOR_DATA)")
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
    results = args.keep / f"results-{args.images}-{args.epochs}.json" if args.keep else None
    done = json.loads(results.read_text()) if results and results.exists() else {}
    x, y = mnist(args.data_root, "train")
    xt, yt = mnist(args.data_root, "t10k")
    net, n = kept_cnn(args.keep, x, y), args.images
    row = torch.arange(n + N_STOP)
    stopped_by = FittedImages.of_rows(n + N_STOP, learn=row[:n], choose=row[n:])  # the last ones tell when to stop
    with torch.no_grad():
        print(f"CNN test accuracy {(net(xt).argmax(1) == yt).float().mean():.4f}")
        examples, unseen = (
            Examples(
                torch.cat([net[:9](b) for b in r.split(1000)]), torch.cat([net(b) for b in r.split(1000)]), t, parts
            )
            for r, t, parts in (
                (x[: n + N_STOP], y[: n + N_STOP], stopped_by),
                (xt, yt, FittedImages.of_rows(len(xt), report=torch.arange(len(xt)))),  # these are only measured on
            )
        )
    print(f"{'method':8}{'seed':>5}{'seconds':>9}" + "".join(f"{c:>16}" for c in COLUMNS))
    for seed in args.seeds.split(","):
        for variant in args.methods.split(","):
            key = f"{variant} {seed}"
            if key not in done:
                done[key] = one(examples, unseen, variant, int(seed), args.epochs)
                if results:
                    results.write_text(json.dumps(done))
            row = done[key]
            print(
                f"{variant:8}{seed:>5}{row['seconds']:9.1f}" + "".join(f"{row[c]:16.4f}" for c in COLUMNS), flush=True
            )
    for variant in dict.fromkeys(key.split()[0] for key in done):
        mine = [row for key, row in done.items() if key.split()[0] == variant]
        mean = "".join(f"{statistics.fmean(row[c] for row in mine):16.4f}" for c in COLUMNS)
        print(f"{variant:8} mean of {len(mine)}   {mean}", flush=True)


if __name__ == "__main__":
    main()
