"""Rate-distortion maps of a 224x224 photo on SqueezeNet: time, overhead of the solver, and the maps as PNG.

    python tests/benchmarks/bench_rde_photo.py --data-root DATA --out FOLDER

Three parts: the solver's own overhead at n = 150,528 components against the time in the network, an MR-RDE map on a
coarse grid within 60 s, and the same at full resolution with its time reported.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from auditor import Subject, open_data
from auditor.attribution import gradient
from auditor.distortion import MonteCarlo, Problems
from auditor.obfuscation import Obfuscation, Statistics
from auditor.partition import components, grid
from auditor.pixel_flip import pixel_flip
from auditor.rde import RdeExplainer
from auditor.relevance import Budget, multi_rate

RATES = (0.05, 0.1, 0.2, 0.3, 0.4)


class NetworkClock:
    """The network with a clock that runs during its forward and backward passes, and only then."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.seconds, self.images = subject, 0.0, 0

    def __call__(self, x: Tensor) -> Tensor:
        began = time.perf_counter()
        out = self.subject.logits(x)
        self.seconds += time.perf_counter() - began
        self.images += len(x)
        if out.requires_grad:
            marks: list[float] = []

            def start(_grad: Tensor) -> None:
                marks.append(time.perf_counter())

            def stop(_grad: Tensor) -> None:
                self.seconds += time.perf_counter() - marks[0]

            out.register_hook(start)
            x.register_hook(stop)
        return out


def squeezenet(root: Path) -> Subject:
    from torchvision.models import squeezenet1_1

    net = squeezenet1_1()
    state = torch.load(root / "squeezenet1_1_imagenet.pth", weights_only=True)
    net.load_state_dict({key: value.float() for key, value in state.items()})
    return Subject(
        net.eval(), input_shape=(3, 224, 224), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), resize="crop"
    )


def photos(root: Path, subject: Subject) -> tuple[Tensor, Obfuscation]:
    data = open_data(root / "cub20" / "test", limit=96)
    random = torch.Generator().manual_seed(0)
    total, kept = None, []
    for batch in data.batches(subject, 32):
        shard = Statistics.of(batch.images, random)
        total = shard if total is None else total.merge(shard)
        kept.append(batch.images[:6])
    assert total is not None
    return torch.cat(kept), Obfuscation.fitted("gaussian", total, spread="global")


def overhead(subject: Subject, x: Tensor, noise: Obfuscation, draws: int, steps: int) -> dict[str, float]:
    """Full resolution, every component its own cell: all time outside the network is counted as overhead."""
    with torch.no_grad():
        target = subject.logits(x).argmax(1)
    clock = NetworkClock(subject)
    problems = Problems.of(clock, x, target, components((3, 224, 224)))
    distortion = MonteCarlo.drawn(problems, noise, draws, torch.Generator().manual_seed(1), 8)
    mixing = Mixing(distortion)
    clock.seconds, clock.images = 0.0, 0
    began = time.perf_counter()
    found = multi_rate(mixing, 1, 150_528, [10_000], Budget(steps, gap_share=1e-9))
    total = time.perf_counter() - began
    solver, all_else = total - mixing.seconds, total - clock.seconds
    print(
        f"overhead at n = 150,528, {draws} draws, {found.steps} steps, {clock.images} images through the network: "
        f"total {total:.1f} s, network {clock.seconds:.1f} s\n  solver {solver:.2f} s = "
        f"{100 * solver / clock.seconds:.1f}% of it (wanted <= 10%); with mixing images and noise {all_else:.2f} s = "
        f"{100 * all_else / clock.seconds:.1f}%"
    )
    return {"total": total, "network": clock.seconds, "solver": solver, "all_else": all_else}


class Mixing:
    """The distortion with a clock: what is outside it is the solver."""

    def __init__(self, inner: MonteCarlo) -> None:
        self.inner, self.seconds = inner, 0.0

    def gradient(self, s: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        began = time.perf_counter()
        found = self.inner.gradient(s, rows)
        self.seconds += time.perf_counter() - began
        return found


def maps(subject: Subject, x: Tensor, noise: Obfuscation, args: argparse.Namespace) -> dict[str, Any]:
    report: dict[str, Any] = {}
    shown: dict[str, Tensor] = {}
    for name, options, limit in (
        ("grid 28x28", {"cells": "grid", "grid": 28}, 60.0),
        ("superpixels", {"cells": "superpixel", "grid": 20}, 60.0),
        ("full resolution", {"cells": "component"}, args.full_seconds),
    ):
        explainer = RdeExplainer(
            rates=RATES,
            draws=args.draws,
            max_steps=args.steps,
            timeout_s=limit,
            batch_size=8,
            spread="global",
            **options,
        )
        explainer.obfuscation_, explainer.limit_ = noise, args.limit
        explainer.subject_digest_ = subject.digest
        began = time.perf_counter()
        (e,) = explainer.explain(subject, x)
        seconds = time.perf_counter() - began
        rates = e.extra["solver"]["rates"]
        blank = e.extra["curve"][0]["distortion"]
        print(f"\n{name}: {e.extra['cells']} cells, {seconds:.1f} s (budget {limit:.0f} s), class {e.prediction.label}")
        for r in rates:
            print(
                f"  k = {r['cells']:6d}  D {r['distortion']:8.3f}  fresh draws {r['monte_carlo']:8.3f}  "
                f"gap {r['gap']:8.3f}  {r['status']}"
            )
        print(f"  D(nothing kept) {blank:.2f}; smallest set {e.extra['smallest_set']}; {e.extra['notes']}")
        report[name] = {"seconds": seconds, "rates": rates, "smallest": e.extra["smallest_set"], "blank": blank}
        shown[name] = torch.tensor(e.extra["relevance"])
    cells = grid((3, 224, 224), 28, 28)
    target = subject.logits(x).argmax(1).detach()
    heat = cells.gather(gradient(subject, x, target), torch.tensor([0]))
    noise_map = torch.rand(1, 784, generator=torch.Generator().manual_seed(0))
    areas = {}
    for name, score in (("MR-RDE, grid", shown["grid 28x28"].view(1, -1)), ("gradient", heat), ("random", noise_map)):
        curve = pixel_flip(subject.logits, x, target, score, cells, group=49, draws=8, chunk=16)
        areas[name] = float(curve.area())
    print("\npixel-flip area on the 28x28 cells:", {k: round(v, 4) for k, v in areas.items()})
    report["areas"] = areas
    draw(x[0], {**shown, "gradient": heat.view(28, 28)}, args.out / "photo-maps.png")
    return report


def draw(x: Tensor, shown: dict[str, Tensor], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.6 * (len(shown) + 1), 2.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(shown) + 1)
    axes[0].imshow(x.permute(1, 2, 0))
    axes[0].set_title("photo", fontsize=8)
    for a, (name, heat) in zip(axes[1:], shown.items(), strict=True):
        a.imshow(x.mean(0), cmap="gray", extent=(0, 224, 224, 0))
        a.imshow(heat, cmap="inferno", alpha=0.65, extent=(0, 224, 224, 0), interpolation="nearest")
        a.set_title(name, fontsize=8)
    for a in axes:
        a.axis("off")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=os.environ.get("AUDITOR_DATA"))
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    parser.add_argument("--photo", type=int, default=0, help="which of the kept photos")
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--limit", type=float, default=10.0, help="distortion limit for the smallest set")
    parser.add_argument("--full-seconds", type=float, default=300.0, help="budget of the full-resolution map")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=["overhead", "maps"])
    args = parser.parse_args()
    weights = Path(args.data_root or "") / "squeezenet1_1_imagenet.pth"
    if not args.data_root or not weights.is_file():
        print("skipped: no SqueezeNet weights under --data-root or AUDITOR_DATA")
        sys.exit(0)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    subject = squeezenet(Path(args.data_root))
    images, noise = photos(Path(args.data_root), subject)
    x = images[args.photo : args.photo + 1]
    report: dict[str, Any] = {}
    if args.only != "maps":
        report["overhead"] = overhead(subject, x, noise, args.draws, 10)
    if args.only != "overhead":
        report["maps"] = maps(subject, x, noise, args)
    (args.out / "photo.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
