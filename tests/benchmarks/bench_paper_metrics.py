"""Tables 2 and 3 and figures 2 and 3 of the interpretability framework paper, recomputed, beside their null models.

    python tests/benchmarks/bench_paper_metrics.py --data-root DATA [--train 20000] [--images 1000]

Architectures A = 2x1000, B = 3x500, C = 4x300 (the paper's text numbers them the other way round from its tables), with
the paper's initialisation N(0, 0.1^2), trained by Adam on MNIST and Fashion-MNIST without (a) and with (b) the l1 term
of 1e-5. Then says which published numbers cannot be distinguished from those of a network that was never trained.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from auditor import Subject, open_data
from auditor.metrics.ablation import ablate
from auditor.metrics.weights import Cosines
from auditor.network.aten_graph import graph_of
from auditor.network.weight_layers import weight_layers
from auditor.stability.certified_bound import bounds_at
from auditor.stability.model import input_node, last_hidden, measured

WIDTHS = {"A": [1000, 1000], "B": [500, 500, 500], "C": [300, 300, 300, 300]}
NULL_MEAN = 0.1 * math.sqrt(2 / math.pi)
PUBLISHED_MEAN = {
    ("MNIST", "a"): {"A": [0.0798, 0.0798], "B": [0.0798, 0.0798, 0.0799], "C": [0.0798, 0.0796, 0.0796, 0.0796]},
    ("MNIST", "b"): {"A": [0.0602, 0.0344], "B": [0.0609, 0.0263, 0.0385], "C": [0.0770, 0.0754, 0.0758, 0.0764]},
    ("FashionMNIST", "a"): {
        "A": [0.0798, 0.0798], "B": [0.0797, 0.0798, 0.0798], "C": [0.0798, 0.0796, 0.0796, 0.0796],
    },
    ("FashionMNIST", "b"): {
        "A": [0.0240, 0.0384], "B": [0.0242, 0.0362, 0.0402], "C": [0.0739, 0.0764, 0.0768, 0.0770],
    },
}  # fmt: skip
PUBLISHED_FAITHFULNESS = {
    ("MNIST", "a"): {"A": [0.0707, 0.0026], "B": [0.0383, 0.0165, 0.0119], "C": [0.0274, -0.0246, -0.0322, 0.0486]},
    ("MNIST", "b"): {"A": [0.0951, 0.3808], "B": [0.0108, 0.3976, 0.2033], "C": [0.0380, 0.0074, -0.0032, 0.0743]},
    ("FashionMNIST", "a"): {
        "A": [0.0011, 0.0092], "B": [0.0526, 0.0190, 0.0090], "C": [0.0284, -0.0016, -0.0372, 0.0175],
    },
    ("FashionMNIST", "b"): {
        "A": [0.01, 0.1383], "B": [0.3148, 0.1743, 0.2355], "C": [0.0579, 0.0100, -0.0300, 0.0256],
    },
}  # fmt: skip


def network(widths: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    before = 784
    for width in widths:
        layers += [nn.Linear(before, width), nn.ReLU()]
        before = width
    net = nn.Sequential(*layers, nn.Linear(before, 10))
    for p in net.parameters():
        nn.init.normal_(p, 0, 0.1)
    return net


def images_of(root: Path, name: str, split: str) -> tuple[Tensor, Tensor]:
    probe = Subject(network([4]), input_shape=(1, 28, 28))
    batches = list(open_data(f"torchvision:{name}?root={root}&split={split}").batches(probe, 5000))
    return torch.cat([b.images for b in batches]), torch.cat([b.labels for b in batches])


def trained(widths: list[int], x: Tensor, y: Tensor, l1: float, epochs: int) -> nn.Sequential:
    torch.manual_seed(0)
    net = network(widths)
    weights = [m.weight for m in net if isinstance(m, nn.Linear)]
    optimiser = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(200):
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(net(x[batch]), y[batch])
            (loss + l1 * sum(w.abs().sum() for w in weights)).backward()
            optimiser.step()
    return net


def report(name: str, kind: str, arch: str, net: nn.Module, x: Tensor, y: Tensor) -> None:
    subject = Subject(net, input_shape=(1, 28, 28))
    graph = graph_of(subject)
    layers = weight_layers(graph)
    with torch.no_grad():
        accuracy = float((subject.logits(x).argmax(1) == y).float().mean())
    stable = measured(subject, last_hidden(subject, layers), x[:16])
    bound = bounds_at(graph, input_node(layers[-1]), (1.0,))[0].value
    print(f"{name} {arch} ({kind}): accuracy {accuracy:.3f}; C1 sampled {float(stable.c1_sampled.max()):.2f}, "
          f"local {float(stable.c1_local.max()):.2f}, certified {bound:.1f}")  # fmt: skip
    for layer in layers[:-1]:
        mean = float(layer.rows.abs().mean())
        faithful = ablate(graph, layer, x, y).faithfulness()
        cosines = Cosines.of(layer.rows).figures()
        null = Cosines.of(torch.randn(layer.rows.shape, generator=torch.Generator().manual_seed(0))).figures()
        note = "" if abs(faithful.value) > (faithful.null or 0) else "  (within chance)"
        print(
            f"    layer {layer.name}: mean |w| {mean:.4f} (start {NULL_MEAN:.4f}); faithfulness {faithful.value:+.4f} "
            f"[{faithful.low:+.2f}, {faithful.high:+.2f}] (chance {faithful.null:.3f}){note}; |cos| max "
            f"{cosines['cosine_max']:.3f}, 99.9% {cosines['cosine_q999']:.3f} (random {null['cosine_max']:.3f}, "
            f"{null['cosine_q999']:.3f})"
        )


def verdicts() -> None:
    """Which published numbers are those of the null model."""
    print("\nPublished numbers that cannot be distinguished from their null model:")
    for what, tables in (("mean |w|", PUBLISHED_MEAN), ("faithfulness", PUBLISHED_FAITHFULNESS)):
        same, all_of_them = [], 0
        for (name, kind), archs in tables.items():
            for arch, values in archs.items():
                for k, value in enumerate(values):
                    width = WIDTHS[arch][k]
                    fan_in = 784 if k == 0 else width
                    if what == "mean |w|":  # two standard errors and the rounding of four digits
                        error = 0.1 * math.sqrt((1 - 2 / math.pi) / (width * fan_in))
                        null = abs(value - NULL_MEAN) <= 2 * error + 0.00005
                    else:
                        null = abs(value) <= 1.96 / math.sqrt(width)
                    all_of_them += 1
                    if null:
                        same.append(f"{name} ({kind}) {arch}{k + 1}")
        print(f"  {what}: {len(same)} of {all_of_them}: {', '.join(same)}")
    print("  figure 3: the largest cosine of about 0.15 is that of 1000 random rows of 784 numbers (printed above)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=os.environ.get("AUDITOR_DATA"))
    parser.add_argument("--train", type=int, default=20_000, help="training images")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--images", type=int, default=1000, help="test images for the metrics")
    parser.add_argument("--only", choices=["MNIST", "FashionMNIST"])
    args = parser.parse_args()
    if args.data_root is None:
        parser.error("give --data-root, or set AUDITOR_DATA")
    for name in [args.only] if args.only else ["MNIST", "FashionMNIST"]:
        x, y = images_of(args.data_root, name, "train")
        images, labels = images_of(args.data_root, name, "test")
        for arch, widths in WIDTHS.items():
            for kind, l1 in (("a", 0.0), ("b", 1e-5)):
                started = time.process_time()
                net = trained(widths, x[: args.train], y[: args.train], l1, args.epochs)
                report(name, kind, arch, net, images[: args.images], labels[: args.images])
                print(f"    {time.process_time() - started:.0f} s of processor time", flush=True)
    verdicts()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
