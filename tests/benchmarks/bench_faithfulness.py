"""Faithfulness of 1000-unit layers on 10,000 images against one forward pass per neuron.

    python tests/benchmarks/bench_faithfulness.py [--data-root DATA]

Trains 784-1000-1000-10 on MNIST for a moment when a data root is given (noise images and random weights otherwise),
then ablates every neuron of both hidden layers. The plain loop zeroes one row at a time and runs the whole network;
it is timed on a few neurons and scaled up. Both wall and processor time are printed: on a loaded machine the ratio of
processor times is the one to read.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from auditor import Subject
from auditor.metrics.ablation import ablate
from auditor.network.aten_graph import graph_of
from auditor.network.weight_layers import weight_layers


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 10)
    )


def digits(root: Path | None, n: int) -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    net = network()
    if root is None:
        return net, torch.rand(n, 1, 28, 28), torch.randint(0, 10, (n,))
    from mnist_network import mnist  # beside this file

    x, y = mnist(root, "train")
    optimiser = torch.optim.Adam(net.parameters(), 1e-3)
    for batch in torch.randperm(len(x)).split(200):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
        optimiser.step()
    images, labels = mnist(root, "test")
    return net, images[:n], labels[:n]


def plain_loss(net: nn.Module, weight: nn.Parameter, i: int, x: Tensor, y: Tensor) -> float:
    before = weight[i].clone()
    weight[i] = 0
    loss = nn.functional.cross_entropy(net(x).double(), y, reduction="mean")
    weight[i] = before
    return float(loss)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=os.environ.get("AUDITOR_DATA"))
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--plain", type=int, default=10, help="neurons of the plain loop")
    args = parser.parse_args()
    net, x, y = digits(args.data_root and Path(args.data_root), args.images)
    subject = Subject(net, input_shape=(1, 28, 28))
    graph = graph_of(subject)
    layers = weight_layers(graph)
    ablate(graph, layers[0], x[:50], y[:50])  # compiles
    ablate(graph, layers[1], x[:50], y[:50])
    failed = False
    print(f"{len(x)} images, {torch.get_num_threads()} threads")
    with torch.no_grad():
        for layer, linear in zip(layers[:2], (net[1], net[3]), strict=True):
            wall, cpu = time.perf_counter(), time.process_time()
            ablation = ablate(graph, layer, x, y)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            some = torch.linspace(0, 999, args.plain).long().tolist()
            base = float(nn.functional.cross_entropy(net(x).double(), y))
            slow, slow_cpu = time.perf_counter(), time.process_time()
            plain = [plain_loss(net, linear.weight, i, x, y) - base for i in some]
            slow, slow_cpu = time.perf_counter() - slow, time.process_time() - slow_cpu
            slow, slow_cpu = slow * 1000 / args.plain, slow_cpu * 1000 / args.plain
            gap = float((ablation.increase[some] - torch.tensor(plain, dtype=torch.float64)).abs().max())
            print(
                f"layer {layer.name}: {wall:.1f} s wall, {cpu:.1f} s cpu; plain loop {slow:.0f} s wall, "
                f"{slow_cpu:.0f} s cpu; {slow / wall:.0f}x wall, {slow_cpu / cpu:.0f}x cpu; "
                f"largest difference {gap:.1e} (increases up to {float(ablation.increase.max()):.2e}); "
                f"faithfulness {ablation.faithfulness().value:.4f}"
            )
            failed |= gap > 1e-6 or slow_cpu / cpu < 20
    print("FAILED" if failed else "at least 20x on both layers, equal to 1e-6")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
