"""Relevance maps side by side on CUB-20 photos: pixel flipping, the pointing game in the bird's box, and time.

    python tests/benchmarks/bench_maps.py --data-root DATA                       # the table, stored
    python tests/benchmarks/bench_maps.py --data-root DATA --photos 2 --dry

SqueezeNet with its ImageNet weights explains its own prediction on photos of the test split of which it is sure (at
least 0.4), every 19th. A map is judged by the pixel-flip area (8 x 8 cells, uniform noise, the least relevant first; a
random order under the same noise beside it), by whether its highest pixel is inside the bird's box, by the share of its
positive mass there, and by the seconds it takes on this machine. ``nmf`` is our concept basis, fitted to 160 photos of
the training split. It stops after --minutes with the photos it has.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from auditor import Subject, fit, open_data
from auditor.auditing.map_comparison import DEFAULT_METHODS, compare_maps
from tests.benchmarks.envelope import table, write
from tests.benchmarks.photo_networks import imagenet_squeezenet

EVERY, SURE = 19, 0.4
METHODS = (*DEFAULT_METHODS, "gradient", "excitation")


def photos(root: Path, subject: Subject, n: int) -> list[tuple[str, Tensor, Tensor]]:
    """Return name, pixels (3, 224, 224) and the bird's box as a mask (224, 224) of the first ``n`` photos."""
    boxes = {row["image"]: row for row in csv.DictReader((root / "cub20" / "boxes.csv").open())}
    results = []
    for path in sorted((root / "cub20" / "test").rglob("*.jpg"))[::EVERY]:
        if len(results) == n:
            break
        with Image.open(path) as photo:
            x, size = subject.pixels(photo.convert("RGB")), photo.size
        with torch.no_grad():
            if float(subject.logits(x).softmax(1).max()) < SURE:
                continue
        name = str(path.relative_to(root / "cub20"))
        left, top, width, height = (float(boxes[name][key]) for key in ("x", "y", "width", "height"))
        box = Image.new("RGB", size)
        box.paste((255, 255, 255), (round(left), round(top), round(left + width), round(top + height)))
        results.append((name, x[0], subject.pixels(box)[0, 0] > 0.5))
    return results


def mean_and_error(values: list[float]) -> str:
    """Return a mean with its standard error, as a cell."""
    v = torch.tensor(values, dtype=torch.float64)
    return (
        f"{float(v.mean()):.3f} ± {float(v.std()) / math.sqrt(len(v)):.3f}" if len(v) > 1 else f"{float(v.mean()):.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=os.environ.get("AUDITOR_DATA"))
    parser.add_argument("--photos", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--dry", action="store_true", help="print, store nothing")
    args = parser.parse_args()
    root = Path(args.data_root or "")
    if not (root / "squeezenet1_1_imagenet.pth").is_file():
        print("skipped: no SqueezeNet weights under --data-root or AUDITOR_DATA")
        sys.exit(0)
    began = time.monotonic()
    subject = imagenet_squeezenet(root)
    train = open_data(str(root / "cub20" / "train"), limit=160, labels="none")
    concepts = fit("nmf", subject, train, rank=12, seed=0, refits=1)
    figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    problems: dict[str, str] = {}
    n_done, random_areas, box_share = 0, [], []
    for name, x, box in photos(root, subject, args.photos):
        if time.monotonic() - began > 60 * args.minutes:
            break
        compared = compare_maps(subject, x, {"nmf (ours)": concepts}, methods=METHODS)
        random_areas.append(compared.random_area)
        box_share.append(float(box.float().mean()))
        n_done += 1
        for m in compared.maps:
            if m.heat is None:
                problems[m.name] = m.problem
                continue
            positive = m.heat.clamp(min=0)
            top = int(m.heat.argmax())
            row = figures[m.name]
            row["area"].append(m.flip_area)
            row["gain"].append(m.flip_gain)
            row["pointing"].append(float(box.flatten()[top]))
            row["inside"].append(float((positive * box).sum() / positive.sum().clamp_min(1e-30)))
            row["seconds"].append(m.seconds)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    order = sorted(figures, key=lambda k: sum(figures[k]["area"]) / len(figures[k]["area"]))
    rows = [
        {
            "map": name,
            "photos": len(figures[name]["area"]),
            "pixel-flip area": mean_and_error(figures[name]["area"]),
            "gain over random": mean_and_error(figures[name]["gain"]),
            "highest pixel in box": mean_and_error(figures[name]["pointing"]),
            "positive mass in box": mean_and_error(figures[name]["inside"]),
            "median seconds": round(float(torch.tensor(figures[name]["seconds"]).median()), 3),
        }
        for name in order
    ]
    random = {
        "map": "random order",
        "photos": n_done,
        "pixel-flip area": mean_and_error(random_areas),
        "highest pixel in box": mean_and_error(box_share),
        "positive mass in box": mean_and_error(box_share),
    }
    for row in [*rows, random]:
        print(row)
    print(problems or "every method gave a map")
    if not args.dry:
        path = write(
            "maps",
            experiment="Relevance maps of SqueezeNet's predictions on CUB-20 photos, by known methods and by nmf",
            command=f"python tests/benchmarks/bench_maps.py --data-root DATA --photos {args.photos}",
            settings={"cells": "8 x 8", "noise": "uniform, 4 draws", "photos": n_done, "problems": problems},
            seeds=0,
            tables=[table("mean over photos ± standard error", [*rows, random])],
            details={
                name: {k: [round(v, 5) for v in values] for k, values in of.items()} for name, of in figures.items()
            },
        )
        print(path)


if __name__ == "__main__":
    main()
