"""Rate-distortion maps on MNIST against the maps of other schools, judged by pixel flipping.

    python tests/benchmarks/bench_rde_mnist.py --data-root DATA --cache FOLDER --out FOLDER

Prints a table of mean areas with standard errors and paired differences, checks the figures the project claims, and
writes the curves and some maps as PNG. The network is trained once (about 3 minutes on 2 idle cores).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
from mnist_network import mnist, trained
from torch import Tensor

from auditor.attribution import METHODS, attribution, has_excitation
from auditor.distortion import AssumedDensity, MonteCarlo, Problems
from auditor.obfuscation import Obfuscation, Statistics
from auditor.partition import pixels
from auditor.pixel_flip import FlipCurve, compare, pixel_flip, plot_curves
from auditor.relevance import Budget, lagrangian, multi_rate, ordering

RATES = [50, 100, 150, 200, 250, 300, 350, 400]
GRADIENT_TYPE = [
    "gradient",
    "gradient x input",
    "integrated gradients",
    "|integrated gradients|",
    "SmoothGrad",
    "Grad-CAM",
]


def noise_of(images: Tensor) -> Obfuscation:
    random = torch.Generator().manual_seed(0)
    shards = [Statistics.of(part, random) for part in images.split(5000)]
    total = shards[0]
    for shard in shards[1:]:
        total = total.merge(shard)
    return Obfuscation.fitted("gaussian", total)


def problems_of(args: argparse.Namespace, side: int) -> tuple[Problems, Obfuscation, float]:
    subject, accuracy = trained(args.data_root, args.cache, side)
    noise = noise_of(mnist(args.data_root, "train", side)[0])
    images = mnist(args.data_root, "test", side)[0][: args.images]
    with torch.no_grad():
        targets = subject.logits(images).argmax(1)
    problems = Problems.of(subject.logits, images, targets, pixels((1, side, side)))
    args.subject = subject
    return problems, noise, accuracy


def flips(p: Problems, maps: dict[str, Tensor], group: int, draws: int) -> dict[str, FlipCurve]:
    return {
        name: pixel_flip(p.network, p.images, p.targets, score, p.partition, group=group, draws=draws)
        for name, score in maps.items()
    }


def table(curves: dict[str, FlipCurve]) -> None:
    print(f"\n{'map':28s} {'area':>8s} {'s.e.':>7s}   share of draws right")
    for name, curve in sorted(curves.items(), key=lambda item: float(item[1].area().mean())):
        area = curve.area()
        print(
            f"{name:28s} {float(area.mean()):8.4f} {float(area.std() / len(area) ** 0.5):7.4f}   "
            f"{float(curve.accuracy.mean()):.3f}"
        )


def against(curves: dict[str, FlipCurve], better: str, others: list[str]) -> list[dict[str, object]]:
    print(f"\n{better} is smaller than … by (paired over images)")
    found = []
    for name in others:
        c = compare(curves[better], curves[name])
        verdict = "beyond two standard errors" if c.is_beyond_two_errors else "NOT beyond two standard errors"
        print(f"  {name:28s} {c.difference:8.4f} +- {c.standard_error:.4f}  {verdict}")
        found.append(
            {"than": name, "difference": c.difference, "error": c.standard_error, "clear": c.is_beyond_two_errors}
        )
    return found


def full_size(args: argparse.Namespace) -> dict[str, object]:
    p, noise, accuracy = problems_of(args, 28)
    print(f"network: average pooling, test accuracy {accuracy:.4f} (wanted 0.985)")
    assert accuracy >= 0.985
    n, m = len(p.images), p.partition.size
    surrogate = AssumedDensity.of(p, noise, low_rank=False, chunk=64)
    climbs = torch.zeros(())
    last: dict[str, Tensor] = {}

    def watch(_k: int, step: object) -> None:
        nonlocal climbs
        value = step.value  # type: ignore[attr-defined]
        if "value" in last:
            climbs = torch.maximum(climbs, (value - last["value"]).max())
        last["value"] = value

    began = time.monotonic()
    mr = multi_rate(surrogate, n, m, RATES, Budget(args.steps, gap_share=1e-5), path="cold", on_step=watch)
    seconds = time.monotonic() - began
    fresh = MonteCarlo.drawn(p, noise, 256, torch.Generator().manual_seed(7), 512)
    blank = surrogate.value(torch.zeros(n, m), torch.arange(n)).detach()
    print(f"MR-RDE: {len(RATES)} rates x {n} images, {mr.steps} steps, {seconds:.0f} s, {seconds / n:.1f} s per image")
    print(f"largest climb of D between steps: {float(climbs):.3g} (monotone rule: wanted <= 0)")
    print(f"{'k':>5s} {'D (adf)':>9s} {'D (MC)':>9s} {'gap':>8s}    blank {float(blank.mean()):.1f}")
    sampled = torch.stack([fresh.value(mr.masks[:, j], torch.arange(n)) for j in range(len(RATES))], 1)
    for j, k in enumerate(mr.rates):
        print(
            f"{k:5d} {float(mr.distortion[:, j].mean()):9.4f} {float(sampled[:, j].mean()):9.4f} "
            f"{float(mr.gap[:, j].mean()):8.4f}"
        )
    grows = (mr.distortion.diff(dim=1) > 0.02 * blank[:, None]).sum()
    print(f"rates at which D grows with k by more than 2% of D(nothing kept): {int(grows)} (wanted 0)")
    maps = {"MR-RDE": mr.score}
    for j, k in enumerate(mr.rates):
        if k in (100, 200):
            maps[f"RC-RDE (k={k})"] = mr.masks[:, j]
    maps["L-RDE"], _ = lagrangian(surrogate, n, m, 0.5, Budget(max_steps=args.steps))
    names = [*METHODS, *(["excitation"] if has_excitation() else [])]
    if args.captum:
        names += ["captum:DeepLift", "captum:GuidedBackprop"]
    for name in names:
        maps[name] = attribution(name)(args.subject, p.images, p.targets).flatten(1)
    curves = flips(p, maps, group=args.group, draws=args.draws)
    table(curves)
    others = [name for name in maps if not name.startswith(("MR", "RC"))]
    report = {
        "MR-RDE": against(curves, "MR-RDE", ["RC-RDE (k=100)", "RC-RDE (k=200)", *others]),
        "RC-RDE (k=100)": against(curves, "RC-RDE (k=100)", others),
    }
    plot_curves(curves, args.out / "mnist-pixel-flip.png", f"MNIST, {n} test images, {args.draws} draws per step")
    plot_maps(p.images, maps, args.out / "mnist-maps.png")
    area = {name: float(curve.area().mean()) for name, curve in curves.items()}
    worst_gradient = min(area[name] for name in GRADIENT_TYPE if name in area)
    holds = area["MR-RDE"] < area["RC-RDE (k=100)"] < worst_gradient and worst_gradient < area["random"]
    print(f"\nMR-RDE < RC-RDE (k=100) < every gradient-type map < random: {'holds' if holds else 'DOES NOT HOLD'}")
    return {"accuracy": accuracy, "area": area, "paired": report, "order_holds": holds, "climb": float(climbs)}


def half_size(args: argparse.Namespace) -> dict[str, object]:
    """Ord-RDE against MR-RDE on 14x14, n = 196."""
    p, noise, accuracy = problems_of(args, 14)
    print(f"\n14x14 network: test accuracy {accuracy:.4f}")
    n, m = len(p.images), p.partition.size
    surrogate = AssumedDensity.of(p, noise, low_rank=False, chunk=256)
    rates = [round(k * 196 / 784) for k in RATES]
    began = time.monotonic()
    mr = multi_rate(surrogate, n, m, rates, Budget(args.steps, gap_share=1e-5), path="cold")
    mr_seconds = time.monotonic() - began
    maps = {"MR-RDE": mr.score, "RC-RDE (k=25)": mr.masks[:, rates.index(25)] if 25 in rates else mr.masks[:, 1]}
    began = time.monotonic()
    random = torch.Generator().manual_seed(0)
    answer = ordering(surrogate, n, m, Budget(args.ord_steps), sampled=m // 10 + 1, generator=random)
    seconds = time.monotonic() - began
    print(
        f"Ord-RDE: stochastic with momentum, {m // 10 + 1} of {m - 1} rates per step, {answer.solution.steps} steps, "
        f"{seconds / n:.1f} s per image (MR-RDE {mr_seconds / n:.1f} s)"
    )
    maps["Ord-RDE"] = answer.score
    warm = ordering(surrogate, n, m, Budget(args.ord_steps), sampled=m // 10 + 1, start=mr.score, generator=random)
    maps["Ord-RDE from MR-RDE"] = warm.score
    for name in ("gradient", "SmoothGrad", "occlusion", "random"):
        maps[name] = METHODS[name](args.subject, p.images, p.targets).flatten(1)
    curves = flips(p, maps, group=4, draws=args.draws)
    table(curves)
    own = expected_distortion(p, noise, maps)
    print("\nthe objective of Ord-RDE, mean Monte-Carlo distortion over all rates of the ordering, fresh draws:")
    for name, value in sorted(own.items(), key=lambda item: item[1]):
        print(f"  {name:28s} {value:8.3f}")
    paired = against(curves, "Ord-RDE", ["MR-RDE", "RC-RDE (k=25)", "gradient", "SmoothGrad", "occlusion", "random"])
    plot_curves(curves, args.out / "mnist14-pixel-flip.png", f"MNIST 14x14, {n} test images")
    area = {name: float(curve.area().mean()) for name, curve in curves.items()}
    return {"accuracy": accuracy, "area": area, "paired": paired, "own": own, "seconds": seconds / n}


def expected_distortion(p: Problems, noise: Obfuscation, maps: dict[str, Tensor]) -> dict[str, float]:
    """Return the mean of D over nested sets of growing size, under fresh draws: what an ordering is for."""
    fresh = MonteCarlo.drawn(p, noise, 32, torch.Generator().manual_seed(7), 512)
    n, m = len(p.images), p.partition.size
    sizes = torch.arange(4, m, 8)
    found = {}
    for name, score in maps.items():
        place = score.argsort(1, descending=True).argsort(1)
        masks = (place[:, None] < sizes[:, None]).float().flatten(0, 1)
        found[name] = float(fresh.value(masks, torch.arange(n).repeat_interleave(len(sizes))).mean())
    return found


def plot_maps(images: Tensor, maps: dict[str, Tensor], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = list(maps)[:14]
    figure = Figure(figsize=(1.25 * (len(shown) + 1), 1.35 * 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(6, len(shown) + 1)
    for i in range(6):
        axes[i, 0].imshow(images[i, 0], cmap="gray")
        for j, name in enumerate(shown, 1):
            axes[i, j].imshow(maps[name][i].view(images.shape[2:]), cmap="inferno")
    for j, name in enumerate(["image", *shown]):
        axes[0, j].set_title(name, fontsize=6)
    for a in axes.flat:
        a.axis("off")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=os.environ.get("AUDITOR_DATA"))
    parser.add_argument("--cache", type=Path, default=Path("bench-cache"), help="where the trained networks are kept")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="where the PNGs go")
    parser.add_argument("--images", type=int, default=50)
    parser.add_argument("--steps", type=int, default=60, help="Frank-Wolfe steps per rate")
    parser.add_argument("--ord-steps", type=int, default=200)
    parser.add_argument("--draws", type=int, default=32, help="noise draws per flip step")
    parser.add_argument("--group", type=int, default=16, help="pixels flipped per step, of 784")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--captum", action="store_true", help="also DeepLift and guided backprop from Captum")
    parser.add_argument("--only", choices=["full", "half"], help="28x28 or 14x14 alone")
    args = parser.parse_args()
    if not args.data_root or not (Path(args.data_root) / "MNIST").is_dir():
        print("skipped: no MNIST under --data-root or AUDITOR_DATA")
        sys.exit(0)
    args.data_root = Path(args.data_root)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    report = {}
    if args.only != "half":
        report["28x28"] = full_size(args)
    if args.only != "full":
        report["14x14"] = half_size(args)
    (args.out / "mnist.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
