"""Rate-distortion maps of 224x224 photos on SqueezeNet: time, overhead of the solver, pixel-flip areas, PNG.

    python tests/benchmarks/bench_rde_photo.py --data-root DATA --out FOLDER --only overhead
    python tests/benchmarks/bench_rde_photo.py --data-root DATA --out FOLDER --only grid --photos 0 1 2 3
    python tests/benchmarks/bench_rde_photo.py --data-root DATA --out FOLDER --only full --photos 0

``overhead``: the solver's own time at n = 150,528 components against the time in the network. ``grid``: an MR-RDE map
on 28x28 cells within 60 s, against the maps of other schools by pixel flipping and by the share of the leading cells
inside the bird's bounding box. ``full``: the same map at full resolution, its time reported. The photos are every 23rd
of the test split whose class has a probability of at least 0.4; the noise comes from the training split.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from auditor import Subject, open_data
from auditor.attribution.baselines import METHODS
from auditor.explainers.rde.explainer import RdeExplainer
from auditor.explainers.rde.relevance_map import Budget, multi_rate
from auditor.perturbation.cells import components, grid
from auditor.perturbation.distortion import MonteCarlo, Problems
from auditor.perturbation.pixel_flipping import FlipCurve, compare, pixel_flip, plot_curves
from auditor.perturbation.replacement import Obfuscation, Statistics

RATES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
OTHERS = ("gradient", "integrated gradients", "SmoothGrad", "Grad-CAM", "occlusion", "random")
SIDE = 28  # cells per side of the coarse grid


class NetworkClock:
    """The network with a clock that runs during its forward and backward passes, and only then."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.seconds, self.images = subject, 0.0, 0

    def __call__(self, x: Tensor) -> Tensor:
        began = time.perf_counter()
        out = self.subject.logits(x.contiguous(memory_format=torch.channels_last))
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


def noise_of(root: Path, subject: Subject, kind: str) -> Obfuscation:
    """Return the obfuscation; ``white`` and ``smooth`` are Gaussian: one variance, or the data's leading covariance."""
    rank = 32 if kind == "smooth" else 0
    random = torch.Generator().manual_seed(0)
    total = None
    for batch in open_data(root / "cub20" / "train", limit=160).batches(subject, 32):
        shard = Statistics.of(batch.images, random, rank)
        total = shard if total is None else total.merge(shard)
    assert total is not None
    if kind in ("white", "smooth"):
        return Obfuscation.fitted("gaussian", total, spread="global" if kind == "white" else "pixel")
    return Obfuscation.fitted(kind, total, blur_sigma=10.0)  # type: ignore[arg-type]


def photos(root: Path, subject: Subject, wanted: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Return pixels (1, 3, 224, 224) and the share of each cell that is inside the bird's box, for photos by number."""
    from PIL import Image

    boxes = {row["image"]: row for row in csv.DictReader((root / "cub20" / "boxes.csv").open())}
    cells = grid((3, 224, 224), SIDE, SIDE)
    results: list[tuple[Tensor, Tensor]] = []
    for path in sorted((root / "cub20" / "test").rglob("*.jpg"))[::23]:
        if len(results) > max(wanted):
            break
        with Image.open(path) as photo:
            x, size = subject.pixels(photo.convert("RGB")), photo.size
        with torch.no_grad():
            if float(subject.logits(x).softmax(1).max()) < 0.4:
                continue
        row = boxes[str(path.relative_to(root / "cub20"))]
        left, top, width, height = (float(row[key]) for key in ("x", "y", "width", "height"))
        box = Image.new("RGB", size)
        box.paste((255, 255, 255), (round(left), round(top), round(left + width), round(top + height)))
        inside = (subject.pixels(box) > 0.5).float()
        results.append((x, cells.gather(inside, torch.tensor([0]))[0] * cells.size / inside[0].numel()))
    return [results[i] for i in wanted]


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
    result = multi_rate(mixing, 1, 150_528, [10_000], Budget(steps, gap_share=1e-9))
    total = time.perf_counter() - began
    solver, all_else = total - mixing.seconds, total - clock.seconds
    print(
        f"overhead at n = 150,528, {draws} draws, {result.steps} steps, {clock.images} images through the network: "
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
        gradient = self.inner.gradient(s, rows)
        self.seconds += time.perf_counter() - began
        return gradient


def explained(
    subject: Subject, x: Tensor, noise: Obfuscation, args: argparse.Namespace, limit: float, **options: Any
) -> tuple[Tensor, float]:
    """Return the relevance map (H, W) and the seconds it took; prints what was reached at each rate."""
    explainer = RdeExplainer(
        rates=RATES,
        draws=args.draws,
        eval_draws=16,
        max_steps=args.steps,
        timeout_s=limit,
        obfuscation=noise.kind,
        **options,
    )
    explainer.obfuscation_, explainer.limit_ = noise, args.limit
    explainer.subject_digest_ = subject.digest
    began = time.perf_counter()
    (e,) = explainer.explain(subject, x)
    seconds = time.perf_counter() - began
    blank = e.extra["curve"][0]["distortion"]
    print(f"  {e.extra['cells']} cells, {seconds:.1f} s (budget {limit:.0f} s), class {e.prediction.label}")
    for r in e.extra["solver"]["rates"]:
        print(
            f"    k = {r['cells']:6d}  D {r['distortion']:8.3f}  fresh draws {r['monte_carlo']:8.3f}  "
            f"gap {r['gap']:8.3f}  {r['status']}"
        )
    print(f"    D(nothing kept) {blank:.2f}; smallest set {e.extra['smallest_set']}; {e.extra['notes']}", flush=True)
    return torch.tensor(e.extra["relevance"]), seconds


def on_grid(subject: Subject, noise: Obfuscation, args: argparse.Namespace) -> dict[str, Any]:
    """Print for every photo, and for their mean, how the map does against the others."""
    cells, zero = grid((3, 224, 224), SIDE, SIDE), torch.tensor([0])
    options = {"cells": "superpixel", "grid": 20} if args.cells == "superpixel" else {"cells": "grid", "grid": SIDE}
    curves: dict[str, list[FlipCurve]] = {}
    shares: dict[str, list[float]] = {}
    seconds: list[float] = []
    for number, (x, inside) in zip(args.photos, photos(Path(args.data_root), subject, args.photos), strict=True):
        print(f"photo {number}", flush=True)
        heat, took = explained(subject, x, noise, args, args.seconds, **options)
        seconds.append(took)
        target = subject.logits(x).argmax(1).detach()
        scores = {"MR-RDE": heat.view(1, -1)}
        if heat.numel() != cells.size:
            heat = torch.nn.functional.interpolate(heat[None, None], (224, 224), mode="nearest")
            scores["MR-RDE"] = cells.gather(heat.expand(1, 3, -1, -1), zero)
        scores |= {name: cells.gather(METHODS[name](subject, x, target), zero) for name in OTHERS}
        for name, score in scores.items():
            fast = fast_logits(subject)
            curve = pixel_flip(fast, x, target, score, cells, group=cells.size // 16, draws=args.flip_draws, chunk=16)
            leading = score[0].argsort(descending=True)[: cells.size // 5]
            curves.setdefault(name, []).append(curve)
            shares.setdefault(name, []).append(float(inside[leading].mean()))
            print(f"    {name:22s} area {float(curve.area()):.4f}  in box {shares[name][-1]:.2f}", flush=True)
        shares.setdefault("(share of the photo)", []).append(float(inside.mean()))
        draw(x[0], {k: v.view(SIDE, SIDE) for k, v in scores.items()}, args.out / f"photo-{number}-{args.noise}.png")
    whole = {name: _joined(parts) for name, parts in curves.items()}
    print(f"\n{len(seconds)} photos, {args.noise} noise, {max(seconds):.1f} s at most per map (wanted <= 60)")
    report: dict[str, Any] = {"seconds": seconds, "area": {}, "in_box": shares}
    for name, curve in sorted(whole.items(), key=lambda item: float(item[1].area().mean())):
        gain = compare(whole["MR-RDE"], curve)
        print(
            f"  {name:22s} area {float(curve.area().mean()):.4f}  MR-RDE is smaller by {gain.difference:7.4f} +- "
            f"{gain.standard_error:.4f}  top fifth in box {sum(shares[name]) / len(seconds):.2f}"
        )
        report["area"][name] = curve.area().tolist()
    print(f"  the boxes are {sum(shares['(share of the photo)']) / len(seconds):.2f} of the photos")
    plot_curves(whole, args.out / f"photo-flip-{args.noise}.png", f"{len(seconds)} photos, SqueezeNet, 28x28 cells")
    return report


def _joined(parts: list[FlipCurve]) -> FlipCurve:
    distortion, accuracy = (torch.cat([getattr(p, name) for p in parts]) for name in ("distortion", "accuracy"))
    return FlipCurve(parts[0].share_kept, distortion, accuracy)


def fast_logits(subject: Subject) -> Any:
    return lambda images: subject.logits(images.contiguous(memory_format=torch.channels_last))


def full(subject: Subject, noise: Obfuscation, args: argparse.Namespace) -> dict[str, Any]:
    """Print the time of maps at full resolution, and what they reached on their own and on fresh draws."""
    report: dict[str, Any] = {}
    for number, (x, _) in zip(args.photos, photos(Path(args.data_root), subject, args.photos), strict=True):
        for name, n in (("pixel", 224 * 224), ("component", 3 * 224 * 224)):
            print(f"photo {number}, one cell per {name}: n = {n:,}", flush=True)
            heat, seconds = explained(subject, x, noise, args, args.full_seconds, cells=name)
            report[f"{number} {name}"] = seconds
            draw(x[0], {f"MR-RDE per {name}": heat}, args.out / f"photo-{number}-{name}.png")
    return report


def draw(x: Tensor, shown: dict[str, Tensor], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(4, len(shown) + 1)
    rows = math.ceil((len(shown) + 1) / columns)
    figure = Figure(figsize=(2.6 * columns, 2.8 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    axes[0].imshow(x.permute(1, 2, 0))
    axes[0].set_title("photo", fontsize=8)
    for a, (name, heat) in zip(axes[1:], shown.items(), strict=False):
        rank = heat.flatten().argsort().argsort().view(heat.shape) / heat.numel()
        a.imshow(x.mean(0), cmap="gray", extent=(0, 224, 224, 0))
        a.imshow(rank, cmap="inferno", alpha=0.65, extent=(0, 224, 224, 0), interpolation="nearest")
        a.set_title(f"{name} (rank)", fontsize=8)
    for a in axes:
        a.axis("off")
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=os.environ.get("AUDITOR_DATA"))
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    parser.add_argument("--photos", type=int, nargs="+", default=[0, 1, 2, 3, 4, 5], help="which, by number")
    parser.add_argument("--noise", choices=["white", "smooth", "blur", "uniform", "reference"], default="white")
    parser.add_argument("--cells", choices=["grid", "superpixel"], default="grid")
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--flip-draws", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="per rate, on each of the grids 7x7, 14x14 and 28x28")
    parser.add_argument("--limit", type=float, default=10.0, help="distortion limit for the smallest set")
    parser.add_argument("--seconds", type=float, default=50.0, help="budget of a map on the grid")
    parser.add_argument("--full-seconds", type=float, default=300.0, help="budget of a full-resolution map")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=["overhead", "grid", "full"])
    args = parser.parse_args()
    weights = Path(args.data_root or "") / "squeezenet1_1_imagenet.pth"
    if not args.data_root or not weights.is_file():
        print("skipped: no SqueezeNet weights under --data-root or AUDITOR_DATA")
        sys.exit(0)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    subject = squeezenet(Path(args.data_root))
    noise = noise_of(Path(args.data_root), subject, args.noise)
    report: dict[str, Any] = {}
    if args.only in (None, "overhead"):
        ((x, _),) = photos(Path(args.data_root), subject, args.photos[:1])
        report["overhead"] = overhead(subject, x, noise, args.draws, 10)
    if args.only in (None, "grid"):
        report["grid"] = on_grid(subject, noise, args)
    if args.only in (None, "full"):
        report["full"] = full(subject, noise, args)
    (args.out / f"photo-{args.only or 'all'}-{args.noise}.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
