"""Cost of five contrastive heatmaps in forward passes of the same image, to the pixels and to a middle layer.

python tests/benchmarks/bench_excitation.py [--threads 2] [--repeats 5] [--batch 16] [--models vgg16 resnet18]
"""

import argparse
import time

import torch
from torchvision import models

from auditor.attribution.excitation import ExcitationBackprop


def best(repeats, **tasks):
    """Return the shortest time of every task; they take turns, so that a busy moment hits all of them."""
    times = {name: [] for name in tasks}
    for _ in range(repeats):
        for name, task in tasks.items():
            began = time.perf_counter()
            task()
            times[name].append(time.perf_counter() - began)
    return {name: min(spent) for name, spent in times.items()}


MIDDLE = {"vgg16": "features.16", "resnet18": "layer2"}
LIMIT = {"vgg16": 8, "resnet18": 10}
FIVE = [0, 1, 2, 3, 4]


def measure(name, repeats, n_batch):
    torch.manual_seed(0)
    net = getattr(models, name)(weights=None).eval()
    engine = ExcitationBackprop(net, torch.rand(2, 3, 224, 224), floor=-2.5)
    x = torch.randn(n_batch, 3, 224, 224).clamp(-2, 2)
    one = x[:1]

    def forward():
        with torch.no_grad():
            net(one)

    tasks = {
        "forward": forward,
        "pixels": lambda: engine.maps(one, FIVE),
        "middle": lambda: engine.maps(one, FIVE, stop=MIDDLE[name]),
    }
    many = {
        "batch": lambda: engine.maps(x, FIVE),
        "singly": lambda: [engine.maps(image[None], FIVE) for image in x],
    }
    best(1, **tasks)  # warm
    spent = best(repeats, **tasks) | best(2, **many)
    passes = {task: seconds / spent["forward"] for task, seconds in spent.items()}
    batch, singly = passes["batch"] / n_batch, passes["singly"] / n_batch
    print(
        f"{name}: forward {spent['forward'] * 1e3:.0f} ms; 5 contrastive maps of one image: to the pixels "
        f"{passes['pixels']:.2f}, to {MIDDLE[name]} {passes['middle']:.2f} forward passes (limit {LIMIT[name]}); "
        f"per image of {n_batch}, in a batch {batch:.2f}, one by one {singly:.2f}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--models", nargs="+", default=list(MIDDLE), choices=list(MIDDLE))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for name in args.models:
        measure(name, args.repeats, args.batch)


if __name__ == "__main__":
    main()
