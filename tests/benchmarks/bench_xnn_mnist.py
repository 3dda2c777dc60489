"""Explanation heads on MNIST: SRAE against NN, SAE and CAE on all ten classes of a CNN, several seeds.

python tests/benchmarks/bench_xnn_mnist.py --data-root DATA [--seeds 5] [--images 10000]
"""

import argparse
import gzip
import os
import time
from pathlib import Path

import torch
from torch import nn

from auditor.head_training import fit_heads
from auditor.layers import layout_of
from auditor.xnn import Examples, XnnConfig, make_heads, measure, srae_config


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
    fall = torch.optim.lr_scheduler.OneCycleLR(adam, 4e-3, steps + epochs)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(128):
            adam.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            adam.step()
            fall.step()
    return net.eval()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", default=os.environ.get("AUDITOR_DATA"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--variants", nargs="+", default=["srae", "nn", "sae"])
    args = parser.parse_args()
    if not args.data_root or not (Path(args.data_root) / "MNIST" / "raw").exists():
        raise SystemExit("skipped: no MNIST/raw under --data-root (or AUDITOR_DATA)")
    x, y = mnist(args.data_root, "train")
    xt, yt = mnist(args.data_root, "t10k")
    net = cnn(x, y)
    with torch.no_grad():
        print(f"CNN test accuracy {(net(xt).argmax(1) == yt).float().mean():.4f}")
        n = args.images
        rows = torch.cat([x[:n], xt])
        Z, logits = (torch.cat(part) for part in zip(*((net[:9](b), net(b)) for b in rows.split(1000)), strict=True))
    held = torch.arange(len(rows)) >= n
    examples = Examples(Z, logits, torch.cat([y[:n], yt]), held)
    columns = ["f_reg", "f_reg_relative", "f_cls", "f_cls_boundary", "pull_away", "pull_away_live", "alive", "epochs"]
    print(f"{'variant':8}{'seed':>5}{'seconds':>9}" + "".join(f"{c:>16}" for c in columns))
    for variant in args.variants:
        total = []
        for seed in range(args.seeds):
            began = time.perf_counter()
            cfg = XnnConfig(variant=variant, seed=seed)
            heads = make_heads(examples, 10, layout_of((64,), (28, 28)), cfg)
            trained = fit_heads(
                heads, examples, range(10), srae_config(cfg), max_epochs=args.epochs, patience=cfg.patience
            )
            m = measure(trained, examples, list(range(10)))
            total.append([m[c] for c in columns])
            spent = time.perf_counter() - began
            print(f"{variant:8}{seed:5}{spent:9.1f}" + "".join(f"{v:16.4f}" for v in total[-1]), flush=True)
        mean = torch.tensor(total).mean(0).tolist()
        print(f"{variant:8} mean{'':9}" + "".join(f"{v:16.4f}" for v in mean), flush=True)


if __name__ == "__main__":
    main()
