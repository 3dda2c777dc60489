"""MR-RDE on photos against occlusion and Grad-CAM, under several yardsticks: what replaces a flipped cell decides much.

    python -m tests.benchmarks.bench_rde_yardsticks --data-root DATA --half tune --photos 8 [--variants NAME,NAME]
    python -m tests.benchmarks.bench_rde_yardsticks --data-root DATA --half report --photos 30 --variants NAME

SqueezeNet with ImageNet weights explains its own prediction on test photos of CUB-20 of which it is sure (at least
0.4), every 7th; of these the even ones are for choosing a variant, the odd ones for reporting it. Each map is judged by
the area under the pixel-flip curve on 28 x 28 cells (least relevant first, 16 steps), the flipped cells being uniform
noise (as published), the photo blurred, the photo's mean colour, or another photo. Less is better.

Runs are stored photo by photo in results/rde_yardsticks.json, so a command that was cut goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from auditor import Subject
from auditor.attribution.baselines import METHODS
from auditor.explainers.rde.relevance_map import Budget
from auditor.explainers.rde.search import RdeConfig, Search
from auditor.perturbation.cells import Partition, grid
from auditor.perturbation.pixel_flipping import MaskedImages, flip_curve
from auditor.perturbation.replacement import Kind, Obfuscation
from tests.benchmarks import envelope
from tests.benchmarks.photo_networks import imagenet_squeezenet

NAME = "rde_yardsticks"
SIDE, STEPS, DRAWS, SURE, EVERY = 28, 16, 8, 0.4, 7
OTHERS = ("Grad-CAM", "occlusion", "random")
YARDSTICKS = ("uniform noise", "blur", "mean colour", "another photo")
FRESH = {"variant": "stochastic", "rule": "non-convex", "draws": 4}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "warm start": {"warm_start": "both"},
    "fresh draws": FRESH,
    "fresh draws + soft regions": {**FRESH, "smooth": 1.0},
    "fresh draws + warm start + soft regions": {**FRESH, "warm_start": "both", "smooth": 1.0},
    "fresh draws + Grad-CAM first + soft regions": {**FRESH, "warm_start": "grad-cam", "smooth": 1.5},
    "fresh draws + warm start + soft regions + blur": {
        **FRESH, "warm_start": "both", "smooth": 1.0, "obfuscation": "blur",
    },
    "fresh draws + warm start + soft regions + uniform noise": {
        **FRESH, "warm_start": "both", "smooth": 1.0, "obfuscation": "uniform",
    },
}  # fmt: skip


class Yardstick(MaskedImages):
    """Masked images whose flipped cells are replaced by something else than uniform noise."""

    def __init__(self, kind: str, others: Tensor, network: Any, partition: Partition) -> None:
        super().__init__(network, partition, draws=DRAWS, chunk=16)
        self.kind, self.others = kind, others

    def _noise(self, index: int, x: Tensor) -> Tensor:
        if self.kind == "uniform noise":
            return super()._noise(index, x)
        if self.kind == "mean colour":
            return x.mean((1, 2), keepdim=True).expand(self.draws, *x.shape)
        if self.kind == "another photo":
            return self.others[: self.draws]
        return obfuscation_of("blur").draw(x[None], self.draws, torch.Generator().manual_seed(index))[0]


def obfuscation_of(kind: Kind) -> Obfuscation:
    """Return an obfuscation whose numbers are those of photos in general: mean .45, variance .06, range 0 to 1."""
    shape, none = (3, 224, 224), torch.zeros(0, 3, 224, 224)
    centre, spread = (0.0, 1.0) if kind == "uniform" else (0.45, 0.06)
    return Obfuscation(kind, torch.full(shape, centre), torch.full(shape, spread), none, none, 8.0)


def photos(root: Path, subject: Subject, half: str, n: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, pixels (1, 3, 224, 224) and prediction of the photos of one half."""
    found = 0
    for path in sorted((root / "cub20" / "test").rglob("*.jpg"))[::EVERY][half == "report" :: 2]:
        with Image.open(path) as photo:
            x = subject.pixels(photo.convert("RGB"))
        with torch.no_grad():
            p = subject.logits(x).softmax(1)
        if float(p.max()) >= SURE:
            yield path.name, x, p.argmax(1)
            found += 1
        if found == n:
            return


def mapped(subject: Subject, x: Tensor, target: Tensor, options: dict[str, Any], seconds: float) -> Tensor:
    """Return the relevance of 28 x 28 cells by MR-RDE within a budget."""
    config = RdeConfig(**{"cells": "grid", "distortion": "monte-carlo", "eval_draws": 2, "timeout_s": None, **options})
    search = Search(config, obfuscation_of(config.obfuscation), subject)
    return search.run(x, target, Budget(10_000, seconds), 2).score


def one_photo(args: argparse.Namespace, subject: Subject, others: Tensor, photo: Any, known: dict[str, Any]) -> Any:
    """Return the areas of all maps of a photo that are not known yet."""
    name, x, target = photo
    cells, zero = grid((3, 224, 224), SIDE, SIDE), torch.tensor([0])

    def network(images: Tensor) -> Tensor:
        return subject.logits(images.contiguous(memory_format=torch.channels_last))

    judges = {kind: Yardstick(kind, others, network, cells) for kind in YARDSTICKS}
    runs = dict(known)
    for method in (*OTHERS, *args.variants.split(",")):
        if method in runs:
            continue
        began = time.process_time()
        if method in OTHERS:
            scores = cells.gather(METHODS[method](subject, x, target), zero)
        else:
            scores = mapped(subject, x, target, VARIANTS[method], args.seconds)
        seconds, group = time.process_time() - began, cells.size // STEPS
        areas = {k: float(flip_curve(j, x, target, scores, [0], group=group).area()) for k, j in judges.items()}
        runs[method] = {"cpu_s": round(seconds, 1), "areas": areas}
        print(name, method, {k: round(v, 3) for k, v in areas.items()}, f"{seconds:.0f} s", flush=True)
    return runs


def stored() -> dict[str, Any]:
    """Return the runs so far, by half and photo."""
    path = envelope.RESULTS / f"{NAME}.json"
    runs: dict[str, Any] = json.loads(path.read_text())["details"]["runs"] if path.exists() else {}
    return runs


def store(args: argparse.Namespace, key: str, run: Any) -> None:
    """Store a photo's runs and write the tables anew."""
    runs = {**stored(), key: run}
    tables = []
    for half in ("report", "tune"):
        of_half = [run for name, run in runs.items() if name.startswith(half)]
        methods = list(dict.fromkeys(m for run in of_half for m in run))
        rows = [line(method, [run for run in of_half if method in run]) for method in methods]
        if rows:
            title = f"Pixel-flip area, photos for {'reporting' if half == 'report' else 'choosing a variant'}"
            rows.sort(key=lambda row: row[YARDSTICKS[0]])
            tables.append(envelope.table(title, rows, "Less is better. *Ahead of* is the mean difference on the same "
                                         "photos under uniform noise, with its standard error."))  # fmt: skip
    envelope.write(
        NAME,
        experiment="MR-RDE on photos of birds beside occlusion and Grad-CAM, judged by four yardsticks",
        command="python -m tests.benchmarks.bench_rde_yardsticks --data-root DATA --half tune|report",
        settings={"seconds of search per photo": args.seconds, "threads": args.threads, "variants": VARIANTS},
        seeds=[0],
        tables=tables,
        details={"runs": runs},
    )


def line(method: str, runs: list[Any]) -> dict[str, Any]:
    """Return a row: mean areas, and how far ahead of occlusion and Grad-CAM."""
    row: dict[str, Any] = {"map": method}
    row |= {kind: round(statistics.mean(run[method]["areas"][kind] for run in runs), 4) for kind in YARDSTICKS}
    for other in ("occlusion", "Grad-CAM"):
        gaps = [run[other]["areas"][YARDSTICKS[0]] - run[method]["areas"][YARDSTICKS[0]] for run in runs]
        error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
        row[f"ahead of {other}"] = "" if method == other else f"{statistics.mean(gaps):+.4f} ± {error:.4f}"
    return row | {"cpu s": round(statistics.mean(run[method]["cpu_s"] for run in runs), 1), "photos": len(runs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", default=os.environ.get("AUDITOR_DATA"))
    parser.add_argument("--half", choices=("tune", "report"), default="tune")
    parser.add_argument("--photos", type=int, default=8)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="commas between")
    parser.add_argument("--seconds", type=float, default=25.0, help="of search per photo")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no photo after this time")
    args = parser.parse_args()
    if not args.data_root or not Path(args.data_root).exists():
        raise SystemExit("skipped: no folder --data-root (or AUDITOR_DATA)")
    until, root = time.monotonic() + 60 * args.minutes, Path(args.data_root)
    torch.set_num_threads(args.threads)
    subject = imagenet_squeezenet(root)
    other_half = "tune" if args.half == "report" else "report"
    others = torch.cat([x for _, x, _ in photos(root, subject, other_half, DRAWS)])
    for photo in photos(root, subject, args.half, args.photos):
        key = f"{args.half}|{photo[0]}"
        if time.monotonic() > until:
            break
        known = stored().get(key, {})
        run = one_photo(args, subject, others, photo, known)
        if run.keys() != known.keys():
            store(args, key, run)


if __name__ == "__main__":
    main()
