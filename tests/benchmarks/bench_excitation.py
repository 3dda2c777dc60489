"""Cost of five contrastive heatmaps in forward passes of the same image, to the pixels and to a middle layer.

Beside it, in the same run, five maps by zennit (its excitation backprop) and by Captum (gradient times input), where
they are installed (pip install zennit captum). Times are CPU time of the process, which a busy machine changes least.

python tests/benchmarks/bench_excitation.py [--threads 2] [--repeats 5] [--batch 16] [--models vgg16 resnet18 vit_b_16]
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torchvision import models

from auditor.attribution.excitation import ExcitationBackprop


def best(repeats, **tasks):
    """Return the shortest time of every task; they take turns, so that a busy moment hits all of them."""
    times = {name: [] for name in tasks}
    for _ in range(repeats):
        for name, task in tasks.items():
            began = time.process_time()
            task()
            times[name].append(time.process_time() - began)
    return {name: min(spent) for name, spent in times.items()}


MIDDLE = {"vgg16": "features.16", "resnet18": "layer2", "vit_b_16": "encoder.layers.encoder_layer_5"}
LIMIT = {"vgg16": 8, "resnet18": 10, "vit_b_16": 10}
FIVE = [0, 1, 2, 3, 4]


def with_zennit(net, x):
    """Return a task: five maps of one image by zennit's excitation backprop, in one batch."""
    try:
        from zennit.attribution import Gradient
        from zennit.composites import ExcitationBackprop as Composite
    except ImportError:
        return None
    rows = x.expand(len(FIVE), -1, -1, -1).contiguous()

    def task():
        with Gradient(model=net, composite=Composite()) as attributor:
            attributor(rows.clone().requires_grad_(), torch.eye(1000)[FIVE])

    return task


def with_captum(net, x):
    """Return a task: five maps of one image by Captum's gradient times input, in one batch."""
    try:
        from captum.attr import InputXGradient
    except ImportError:
        return None
    rows = x.expand(len(FIVE), -1, -1, -1).contiguous()
    method = InputXGradient(net)
    return lambda: method.attribute(rows.clone().requires_grad_(), target=torch.tensor(FIVE))


def measure(name, repeats, n_batch):
    torch.manual_seed(0)
    net = getattr(models, name)(weights=None).eval()
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    if name.startswith("vit"):
        torch.nn.init.normal_(net.heads.head.weight, std=0.02)  # torchvision starts it at zero
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
    peers = {"zennit": with_zennit(net, one), "captum": with_captum(net, one)}
    tasks |= {peer: task for peer, task in peers.items() if task is not None}
    best(1, **tasks)  # warm
    spent = best(repeats, **tasks) | (best(2, **many) if n_batch > 1 else {"batch": 0.0, "singly": 0.0})
    passes = {task: seconds / spent["forward"] for task, seconds in spent.items()}
    batch, singly = passes["batch"] / n_batch, passes["singly"] / n_batch
    print(
        f"{name}: forward {spent['forward'] * 1e3:.0f} ms; 5 contrastive maps of one image: to the pixels "
        f"{passes['pixels']:.2f}, to {MIDDLE[name]} {passes['middle']:.2f} forward passes (limit {LIMIT[name]}); "
        f"per image of {n_batch}, in a batch {batch:.2f}, one by one {singly:.2f}; "
        + ", ".join(f"{peer} {passes[peer]:.2f}" for peer in peers if peer in passes),
        flush=True,
    )
    return {"model": name, "forward_s": spent["forward"], "limit": LIMIT[name], **passes}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--models", nargs="+", default=list(MIDDLE), choices=list(MIDDLE))
    parser.add_argument("--out", type=Path, help="Store the figures as JSON.")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    figures = [measure(name, args.repeats, args.batch) for name in args.models]
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
