"""Tables 2 and 3 and figures 2, 3, 4 of the interpretability framework paper, recomputed, beside their null models.

    python -m tests.benchmarks.bench_paper_metrics --data-root DATA [--train 2000] [--minutes 10] [--kinds a,b,…]

Architectures A = 2x1000, B = 3x500, C = 4x300 (the paper's text numbers them the other way round from its tables),
trained by dlADMM as the paper does: weights from N(0, 0.1^2), nu = rho = 1e-6, 100 iterations over all images at once,
without (a) and with (b) the l1 term of 1e-5; then under hard constraints on every matrix but the last. The paper takes
all 60,000 images; figures here are of the first ``--train``, which every row says. Runs are stored one by one in
results/paper_metrics.json, so a command that was cut goes on where it stopped. What cannot be distinguished from a
network that was never trained is said for published and reached numbers alike.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from auditor import Subject, open_data
from auditor.errors import NumericsError
from auditor.metrics.ablation import ablate
from auditor.metrics.weights import Cosines
from auditor.network.aten_graph import graph_of
from auditor.network.weight_layers import weight_layers
from auditor.stability.certified_bound import bounds_at
from auditor.stability.model import input_node, last_hidden, measured
from auditor.training.cycle import accuracy
from auditor.training.dladmm import DlAdmm, DlAdmmConfig
from auditor.training.learning_curves import stack
from tests.benchmarks import envelope

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


KINDS = {
    "a": {}, "b": {"penalty": "l1", "strength": 1e-5}, "orthonormal": {"constraint": "orthonormal"},
    "unit rows": {"constraint": "unit_rows"}, "fixed support": {"constraint": "support"},
    "nonnegative": {"constraint": "nonnegative"},
}  # fmt: skip
ITERATIONS, SHOWN = 100, (1, 5, 10, 25, 50, 100)
NAME = "paper_metrics"


def images_of(root: Path, name: str, split: str) -> tuple[Tensor, Tensor]:
    probe = Subject(nn.Sequential(nn.Flatten(), *stack([784, 10], 0)), input_shape=(1, 28, 28))
    batches = list(open_data(f"torchvision:{name}?root={root}&split={split}").batches(probe, 5000))
    return torch.cat([b.images for b in batches]), torch.cat([b.labels for b in batches])


def trained(kind: str, widths: list[int], x: Tensor, y: Tensor, held: tuple[Tensor, Tensor], seed: int) -> Any:
    """Train by dlADMM; return the network, its accuracy after each iteration, and the last cycle."""
    blocks = stack([784, *widths, 10], seed)
    generator, masks = torch.Generator().manual_seed(seed), None
    if kind == "fixed support":  # half of the weights, drawn at the start
        linears = [m for block in blocks for m in block.modules() if isinstance(m, nn.Linear)]
        masks = [(torch.rand(m.weight.shape, generator=generator) < 0.5).float() for m in linears]
    config = DlAdmmConfig(nu=1e-6, rho=1e-6, init=0.1, seed=seed, **KINDS[kind])
    curve, last, stopped = {}, None, ""
    try:
        for last in DlAdmm(blocks, x.flatten(1), y, config, masks):
            if last.epoch in SHOWN:
                curve[last.epoch] = round(accuracy(blocks, held[0].flatten(1), held[1]), 4)
            if last.epoch == ITERATIONS:
                break
    except NumericsError as error:
        stopped = str(error)
    return nn.Sequential(nn.Flatten(), *blocks).eval(), curve, last, stopped


def quartiles(values: Tensor) -> list[float]:
    """Return what a box plot shows: least, quartiles and largest."""
    flat = values.flatten()[:: max(1, values.numel() // 1_000_000)].double()
    return [round(v, 5) for v in torch.quantile(flat, torch.tensor([0, 0.25, 0.5, 0.75, 1.0]).double()).tolist()]


def one_run(args: argparse.Namespace, name: str, kind: str, arch: str, seed: int) -> dict[str, Any]:
    """Train one network and measure all that the tables and figures show."""
    began = time.process_time()
    x, y = (t[: args.train] for t in images_of(args.data_root, name, "train"))
    images, labels = images_of(args.data_root, name, "test")
    net, curve, cycle, stopped = trained(kind, WIDTHS[arch], x, y, (images, labels), seed)
    subject = Subject(net, input_shape=(1, 28, 28))
    graph = graph_of(subject)
    layers = weight_layers(graph)
    stable = measured(subject, last_hidden(subject, layers), images[:16])
    bound = bounds_at(graph, input_node(layers[-1]), (1.0,))[0].value
    rows = []
    for layer in layers[:-1]:
        W, generator = layer.rows, torch.Generator().manual_seed(0)
        faithful = ablate(graph, layer, images[: args.images], labels[: args.images]).faithfulness()
        cosines = Cosines.of(W).figures()
        null = Cosines.of(torch.randn(W.shape, generator=generator)).figures()
        unit = W / W.norm(dim=1, keepdim=True).clamp_min(1e-30)
        rows.append({
            "mean": float(W.abs().mean()), "faithfulness": finite(faithful.value), "chance": faithful.null,
            "cosine max": cosines["cosine_max"], "random cosine max": null["cosine_max"],
            "zeros": float((W == 0).double().mean()), "box |w|": quartiles(W.abs()),
            "box cosine": quartiles((unit @ unit.T)[~torch.eye(len(W), dtype=torch.bool)]),
        })  # fmt: skip
    return {
        "layers": rows, "curve": curve, "stopped": stopped, "seed": seed, "images": args.train,
        "violation": None if cycle is None else cycle.extra["violation"], "c1 sampled": float(stable.c1_sampled.max()),
        "c1 local": float(stable.c1_local.max()), "c1 bound": float(bound),
        "cpu_s": round(time.process_time() - began),
    }  # fmt: skip


def finite(value: float) -> float | None:
    """Return the number; none where a correlation is not defined, as with rows of one norm."""
    return round(value, 4) if math.isfinite(value) else None


def stored() -> dict[str, Any]:
    """Return the runs so far."""
    path = envelope.RESULTS / f"{NAME}.json"
    runs: dict[str, Any] = json.loads(path.read_text())["details"]["runs"] if path.exists() else {}
    return runs


def add(key: str, run: dict[str, Any]) -> None:
    """Store a run and write the tables anew."""
    runs = {**stored(), key: run}
    weights, faithful, stable = [], [], []
    for name, one in sorted(runs.items()):
        data, kind, arch, _, _ = name.split("|")
        layers = one["layers"]
        head = {"data": data, "formulation": kind, "network": arch}
        last = {"images": f"{one['images']} of 60000"}
        means = {"reached": [round(r["mean"], 4) for r in layers], "never trained": round(NULL_MEAN, 4)}
        weights.append(head | {"published": PUBLISHED_MEAN.get((data, kind), {}).get(arch)} | means | last)
        beta = {"reached": ["not defined" if r["faithfulness"] is None else r["faithfulness"] for r in layers]}
        chance = {"chance": [round(r["chance"] or 0, 3) for r in layers]}
        faithful.append(
            head | {"published": PUBLISHED_FAITHFULNESS.get((data, kind), {}).get(arch)} | beta | chance | last
        )
        at = {f"accuracy at {k}": round(100 * value, 2) for k, value in one["curve"].items()}
        figures = {"C1 sampled": round(one["c1 sampled"], 2), "C1 local": round(one["c1 local"], 2),
                   "C1 certified": round(one["c1 bound"], 1), "violation": one["violation"],
                   "largest cosine": [round(r["cosine max"], 3) for r in layers],
                   "of random rows": [round(r["random cosine max"], 3) for r in layers]}  # fmt: skip
        stable.append(head | figures | at | {"broke down": bool(one["stopped"])})
    envelope.write(
        NAME,
        experiment="Interpretability framework: dlADMM with nu = rho = 1e-6, 100 iterations on all images at once",
        command="python -m tests.benchmarks.bench_paper_metrics --data-root DATA",
        settings={"start": "N(0, 0.1^2)", "iterations": ITERATIONS, "l1 of (b)": 1e-5},
        seeds=sorted({run["seed"] for run in runs.values()}),
        tables=[
            envelope.table("Table 2: mean |w| per hidden layer", weights,
                           "A network that was never trained has .1 sqrt(2/pi) = .0798 in every layer."),
            envelope.table("Table 3: faithfulness per hidden layer", faithful,
                           "Chance is two standard errors of a correlation of as many neurons."),
            envelope.table("Figures 2 to 4: stability, cosines, accuracy over iterations", stable,
                           "Boxes of |w| and of cosines are in the file."),
        ],
        details={"runs": runs},
    )  # fmt: skip


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
    parser.add_argument("--train", type=int, default=2000, help="training images")
    parser.add_argument("--images", type=int, default=1000, help="test images for the metrics")
    parser.add_argument("--sets", default="MNIST,FashionMNIST")
    parser.add_argument("--kinds", default="a,b", help=f"commas between: {', '.join(KINDS)}")
    parser.add_argument("--networks", default="C,B,A")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no run after this time")
    args = parser.parse_args()
    if args.data_root is None:
        parser.error("give --data-root, or set AUDITOR_DATA")
    until = time.monotonic() + 60 * args.minutes
    for arch, name, kind in itertools.product(args.networks.split(","), args.sets.split(","), args.kinds.split(",")):
        key = f"{name}|{kind}|{arch}|{args.train}|{args.seed}"
        if key not in stored() and time.monotonic() < until:
            run = one_run(args, name, kind, arch, args.seed)
            add(key, run)
            shown = [(round(r["mean"], 4), r["faithfulness"]) for r in run["layers"]]
            print(
                f"{key}: accuracy {list(run['curve'].values())[-1:]}, mean |w| and faithfulness {shown}, "
                f"{run['cpu_s']} s",
                flush=True,
            )
    verdicts()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
