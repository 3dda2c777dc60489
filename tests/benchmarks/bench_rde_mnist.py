"""Rate-distortion maps on MNIST against the maps of other schools, judged by pixel flipping.

    python tests/benchmarks/bench_rde_mnist.py --data-root DATA --cache FOLDER --out FOLDER

Prints a table of mean areas with standard errors and paired differences, checks the figures the project claims, and
writes the curves and some maps as PNG. The network is trained once (about 2 minutes on one idle core). Images are done
in pieces that are kept in the output folder, so a run that was cut goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from mnist_network import mnist, trained
from safetensors.torch import load_file, save_file
from torch import Tensor

from auditor.attribution.baselines import METHODS, attribution
from auditor.explainers.rde.relevance_map import Budget, lagrangian, multi_rate, ordering
from auditor.kernels.frank_wolfe.solver import Step
from auditor.perturbation.cells import pixels
from auditor.perturbation.distortion import AssumedDensity, MonteCarlo, Problems
from auditor.perturbation.pixel_flipping import FlipCurve, compare, pixel_flip, plot_curves
from auditor.perturbation.replacement import Obfuscation, Statistics

PIECE = 10  # images between two results that are kept
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


def pieces(
    args: argparse.Namespace, side: int, piece: Callable[[Problems, Obfuscation], dict[str, Tensor]]
) -> tuple[dict[str, Tensor], float]:
    """Return the results of all images, one row each, and the network's accuracy; what is kept is not done again."""
    subject, accuracy = trained(args.data_root, args.cache, side)
    args.subject = subject
    print(f"{side}x{side} network: average pooling, test accuracy {accuracy:.4f} (wanted 0.985)", flush=True)
    noise = noise_of(mnist(args.data_root, "train", side)[0])
    images = mnist(args.data_root, "test", side)[0]
    results = []
    for first in range(args.first, args.first + args.images, PIECE):
        last = min(first + PIECE, args.first + args.images)
        file = args.out / f"mnist{side}-{first}-{last}.safetensors"
        if not file.is_file():
            x = images[first:last]
            with torch.no_grad():
                targets = subject.logits(x).argmax(1)
            args.seed = first
            began = time.monotonic()
            answer = piece(Problems.of(subject.logits, x, targets, pixels((1, side, side))), noise)
            save_file({name: t.contiguous() for name, t in answer.items()}, file)
            print(f"images {first} to {last - 1}: {time.monotonic() - began:.0f} s", flush=True)
        results.append(load_file(file))
    names = [name for name in results[0] if all(name in part for part in results)]
    return {name: torch.cat([part[name] for part in results]) for name in names}, accuracy


def flips(p: Problems, maps: dict[str, Tensor], group: int, draws: int, seed: int) -> dict[str, Tensor]:
    """Return curves and maps under names to keep them by."""
    out = {f"map {name}": score for name, score in maps.items()}
    for name, score in maps.items():
        curve = pixel_flip(p.network, p.images, p.targets, score, p.partition, group=group, draws=draws, seed=seed)
        out |= {f"curve {name}": curve.distortion, f"right {name}": curve.accuracy}
        out["kept"] = curve.share_kept.expand(len(p.images), -1)
    return out


def curves_of(scores: dict[str, Tensor]) -> dict[str, FlipCurve]:
    names = [name.removeprefix("curve ") for name in scores if name.startswith("curve ")]
    return {name: FlipCurve(scores["kept"][0], scores[f"curve {name}"], scores[f"right {name}"]) for name in names}


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
    results = []
    for name in others:
        c = compare(curves[better], curves[name])
        verdict = "beyond two standard errors" if c.is_beyond_two_errors else "NOT beyond two standard errors"
        print(f"  {name:28s} {c.difference:8.4f} +- {c.standard_error:.4f}  {verdict}")
        results.append(
            {"than": name, "difference": c.difference, "error": c.standard_error, "clear": c.is_beyond_two_errors}
        )
    return results


def full_piece(args: argparse.Namespace, p: Problems, noise: Obfuscation) -> dict[str, Tensor]:
    n, m = len(p.images), p.partition.size
    surrogate = AssumedDensity.of(p, noise, low_rank=False, chunk=64)
    climb = torch.full((n * len(RATES),), -torch.inf)
    last: list[Tensor] = []

    def watch(_k: int, step: Step) -> None:
        if last:
            climb.copy_(torch.maximum(climb, step.value - last.pop()))
        last.append(step.value)

    began = time.monotonic()
    mr = multi_rate(surrogate, n, m, RATES, Budget(args.steps, gap_share=1e-5), path="cold", on_step=watch)
    seconds = (time.monotonic() - began) / n
    fresh = MonteCarlo.drawn(p, noise, 256, torch.Generator().manual_seed(7), 512)
    sampled = torch.stack([fresh.value(mr.masks[:, j], torch.arange(n)) for j in range(len(RATES))], 1)
    maps = {"MR-RDE": mr.score}
    for j, k in enumerate(mr.rates):
        if k in (100, 200):
            maps[f"RC-RDE (k={k})"] = mr.masks[:, j]
    maps["L-RDE"], _ = lagrangian(surrogate, n, m, 0.5, Budget(max_steps=args.steps))
    names = list(METHODS)
    if args.captum:
        names += ["captum:DeepLift", "captum:GuidedBackprop"]
    for name in names:
        maps[name] = attribution(name)(args.subject, p.images, p.targets).flatten(1)
    return {
        "images": p.images,
        "distortion": mr.distortion,
        "gap": mr.gap,
        "sampled": sampled,
        "blank": surrogate.value(torch.zeros(n, m), torch.arange(n)).detach(),
        "climb": climb.view(n, -1).amax(1),
        "seconds": torch.full((n,), seconds),
        **flips(p, maps, args.group, args.draws, args.seed),
    }


def full_size(args: argparse.Namespace) -> dict[str, object]:
    scores, accuracy = pieces(args, 28, lambda p, noise: full_piece(args, p, noise))
    assert accuracy >= 0.985
    n, climb = len(scores["images"]), float(scores["climb"].max())
    print(f"MR-RDE: {len(RATES)} rates x {n} images, {float(scores['seconds'].mean()):.1f} s per image")
    print(f"largest climb of D between steps: {climb:.3g} (monotone rule: wanted <= 0)")
    print(f"{'k':>5s} {'D (adf)':>9s} {'D (MC)':>9s} {'gap':>8s}    blank {float(scores['blank'].mean()):.1f}")
    means = (scores[name].mean(0).tolist() for name in ("distortion", "sampled", "gap"))
    for k, adf, mc, gap in zip(RATES, *means, strict=True):
        print(f"{k:5d} {adf:9.4f} {mc:9.4f} {gap:8.4f}")
    grows = (scores["distortion"].diff(dim=1) > 0.02 * scores["blank"][:, None]).sum()
    print(f"rates at which D grows with k by more than 2% of D(nothing kept): {int(grows)} (wanted 0)")
    curves = curves_of(scores)
    table(curves)
    others = [name for name in curves if not name.startswith(("MR", "RC"))]
    report = {
        "MR-RDE": against(curves, "MR-RDE", ["RC-RDE (k=100)", "RC-RDE (k=200)", *others]),
        "RC-RDE (k=100)": against(curves, "RC-RDE (k=100)", others),
        **{name: against(curves, name, ["random"]) for name in GRADIENT_TYPE},
    }
    plot_curves(curves, args.out / "mnist-pixel-flip.png", f"MNIST, {n} test images, {args.draws} draws per step")
    plot_maps(scores["images"], {name: scores[f"map {name}"] for name in curves}, args.out / "mnist-maps.png")
    area = {name: float(curve.area().mean()) for name, curve in curves.items()}
    best_gradient = min(area[name] for name in GRADIENT_TYPE if name in area)
    worst_gradient = max(area[name] for name in GRADIENT_TYPE if name in area)
    holds = area["MR-RDE"] < area["RC-RDE (k=100)"] < best_gradient and worst_gradient < area["random"]
    print(f"\nMR-RDE < RC-RDE (k=100) < every gradient-type map < random: {'holds' if holds else 'DOES NOT HOLD'}")
    return {"accuracy": accuracy, "area": area, "paired": report, "order_holds": holds, "climb": climb}


def half_piece(args: argparse.Namespace, p: Problems, noise: Obfuscation) -> dict[str, Tensor]:
    n, m = len(p.images), p.partition.size
    surrogate = AssumedDensity.of(p, noise, low_rank=False, chunk=256)
    rates = [round(k * 196 / 784) for k in RATES]
    began = time.monotonic()
    mr = multi_rate(surrogate, n, m, rates, Budget(args.steps, gap_share=1e-5), path="cold")
    took = {"MR-RDE": time.monotonic() - began}
    maps = {"MR-RDE": mr.score, "RC-RDE (k=25)": mr.masks[:, 1]}
    for name, start in (("Ord-RDE", None), ("Ord-RDE from MR-RDE", mr.score)):
        began = time.monotonic()
        random = torch.Generator().manual_seed(0)
        budget = Budget(args.ord_steps)
        maps[name] = ordering(surrogate, n, m, budget, sampled=m // 10 + 1, start=start, generator=random).score
        took[name] = time.monotonic() - began
    for name in ("gradient", "SmoothGrad", "occlusion", "random"):
        maps[name] = METHODS[name](args.subject, p.images, p.targets).flatten(1)
    out = flips(p, maps, 4, args.draws, args.seed)
    fresh = MonteCarlo.drawn(p, noise, 32, torch.Generator().manual_seed(7), 512)
    for name, score in maps.items():
        out[f"sampled {name}"], out[f"adf {name}"] = own_objective(fresh, score), own_objective(surrogate, score)
    return out | {f"seconds {name}": torch.full((n,), seconds / n) for name, seconds in took.items()}


def half_size(args: argparse.Namespace) -> dict[str, object]:
    """Ord-RDE against MR-RDE on 14x14, n = 196."""
    print()
    scores, accuracy = pieces(args, 14, lambda p, noise: half_piece(args, p, noise))
    curves = curves_of(scores)
    table(curves)
    print("\nseconds per image:", {k[8:]: round(float(v.mean()), 1) for k, v in scores.items() if k[:8] == "seconds "})
    print("the objective of Ord-RDE, the mean of D over the sizes of an ordering: sampled, adf")
    for name in sorted(curves, key=lambda name: float(scores[f"adf {name}"].mean())):
        print(f"  {name:28s} {float(scores[f'sampled {name}'].mean()):8.3f} {float(scores[f'adf {name}'].mean()):8.3f}")
    sampled = {name: float(scores[f"sampled {name}"].mean()) for name in curves}
    for name in ("Ord-RDE", "Ord-RDE from MR-RDE"):
        gain = scores["adf MR-RDE"] - scores[f"adf {name}"]
        error = float(gain.std() / len(gain) ** 0.5)
        print(f"{name} has a lower objective (adf) than MR-RDE by {float(gain.mean()):.3f} +- {error:.3f}")
    rivals = ["MR-RDE", "RC-RDE (k=25)", "gradient", "SmoothGrad", "occlusion", "random"]
    paired = {name: against(curves, name, rivals) for name in ("Ord-RDE", "Ord-RDE from MR-RDE")}
    n = len(scores["kept"])
    plot_curves(curves, args.out / "mnist14-pixel-flip.png", f"MNIST 14x14, {n} test images")
    area = {name: float(curve.area().mean()) for name, curve in curves.items()}
    return {"accuracy": accuracy, "area": area, "paired": paired, "own": sampled}


def own_objective(distortion: MonteCarlo | AssumedDensity, score: Tensor) -> Tensor:
    """Return (batch,) the mean of D over nested sets of growing size: what an ordering is for."""
    n, m = score.shape
    sizes = torch.arange(4, m, 8)
    ranks = score.argsort(1, descending=True).argsort(1)
    masks = (ranks[:, None] < sizes[:, None]).float().flatten(0, 1)
    with torch.no_grad():
        return distortion.value(masks, torch.arange(n).repeat_interleave(len(sizes))).view(n, -1).mean(1)


def plot_maps(images: Tensor, maps: dict[str, Tensor], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = list(maps)[:14]
    rows = min(6, len(images))
    figure = Figure(figsize=(1.25 * (len(shown) + 1), 1.35 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, len(shown) + 1, squeeze=False)
    for i in range(rows):
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
    parser.add_argument("--first", type=int, default=0, help="number of the first test image")
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
