"""Cases of the shortcut zoo, in two halves: one sets thresholds, one is only reported on."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.shortcut_images import CLASSES
from tests.benchmarks.shortcut_models import Case

SIZES = {"cub": (112, 128), "fashion": (56, 64), "clothes": (32, 48), "digits": (32, 40), "drawn": (48, 56, 64)}
# images, shortcut, where, number of classes (0: drawn at random), and what else differs from the default
PLANTED: list[tuple[str, str, str, int, dict[str, Any]]] = [
    ("cub", "plate", "every", 2, {}),
    ("cub", "plate", "every", 4, {}),
    ("cub", "plate", "one", 3, {"pull": 0.9}),
    ("cub", "watermark", "every", 2, {"pull": 0.9}),
    ("cub", "border", "every", 0, {}),
    ("cub", "ruler", "every", 3, {}),
    ("cub", "hue", "every", 0, {"pull": 0.9}),
    ("cub", "texture", "every", 0, {}),
    ("cub", "backdrop", "every", 0, {}),
    ("cub", "jpeg", "every", 0, {}),
    ("cub", "sticker", "every", 0, {}),
    ("cub", "sticker", "half", 3, {"pull": 0.9}),
    ("cub", "sticker", "weak", 3, {"pull": 0.9}),
    ("drawn", "plate", "every", 0, {}),
    ("drawn", "pixel", "every", 0, {"network": "flat"}),
    ("drawn", "border", "every", 0, {}),
    ("drawn", "hue", "every", 0, {}),
    ("drawn", "texture", "every", 0, {}),
    ("drawn", "sticker", "one", 3, {"pull": 0.9}),
    ("drawn", "ruler", "every", 0, {"network": "resnet"}),
    ("fashion", "plate", "every", 0, {}),
    ("fashion", "noise", "every", 0, {}),
    ("fashion", "watermark", "one", 3, {"pull": 0.9}),
    ("clothes", "pixel", "every", 0, {"network": "flat"}),
    ("clothes", "sticker", "half", 0, {"pull": 0.9}),
    ("digits", "border", "every", 0, {}),
]
HONEST: list[tuple[str, str, str, int, dict[str, Any]]] = [
    ("cub", "", "", 2, {}),
    ("cub", "", "", 2, {}),
    ("cub", "", "", 3, {}),
    ("cub", "", "", 3, {}),
    ("cub", "", "", 4, {}),
    ("cub", "", "", 6, {}),
    ("cub", "plate", "decoy", 2, {}),
    ("cub", "sticker", "decoy", 3, {}),
    ("drawn", "", "", 3, {"decides": "beak"}),
    ("drawn", "", "", 2, {"decides": "beak", "network": "wide"}),
    ("drawn", "", "", 3, {"decides": "eye"}),
    ("drawn", "", "", 2, {"decides": "eye", "network": "wide"}),
    ("drawn", "", "", 3, {"decides": "body"}),
    ("drawn", "sticker", "decoy", 2, {"decides": "beak"}),
    ("drawn", "border", "decoy", 3, {"decides": "eye"}),
    ("fashion", "", "", 0, {"network": "small"}),
    ("fashion", "", "", 0, {"network": "resnet"}),
    ("fashion", "", "", 0, {"network": "shuffle"}),
    ("fashion", "plate", "decoy", 0, {}),
    ("clothes", "", "", 0, {"network": "small"}),
    ("clothes", "", "", 0, {"network": "flat"}),
    ("clothes", "", "", 10, {"network": "wide"}),
    ("digits", "", "", 10, {"network": "small"}),
    ("digits", "", "", 3, {"network": "flat"}),
]
# further cases of both kinds: other architectures, more classes
MORE: list[tuple[str, str, str, int, dict[str, Any]]] = [
    ("cub", "plate", "every", 3, {"network": "lite0"}),
    ("cub", "sticker", "every", 2, {"network": "lite0"}),
    ("cub", "hue", "one", 3, {"pull": 0.9}),
    ("cub", "jpeg", "every", 2, {}),
    ("cub", "sticker", "half", 2, {"pull": 0.9}),
    ("cub", "plate", "one", 20, {"pull": 0.9}),
    ("fashion", "sticker", "every", 3, {"network": "convnext"}),
    ("clothes", "plate", "every", 3, {"network": "vit"}),
    ("digits", "watermark", "every", 3, {"network": "vit"}),
    ("cub", "", "", 2, {"network": "lite0"}),
    ("cub", "", "", 3, {"network": "lite0"}),
    ("cub", "", "", 4, {"network": "lite0"}),
    ("cub", "plate", "decoy", 3, {"network": "lite0"}),
    ("cub", "", "", 2, {"size": 160}),
    ("cub", "", "", 3, {}),
    ("cub", "", "", 5, {}),
    ("cub", "", "", 8, {}),
    ("cub", "", "", 20, {}),
    ("cub", "border", "decoy", 3, {}),
    ("cub", "noise", "decoy", 2, {}),
    ("drawn", "", "", 3, {"decides": "beak", "network": "resnet"}),
    ("drawn", "", "", 2, {"decides": "eye", "network": "convnext"}),
    ("fashion", "", "", 3, {"network": "convnext"}),
    ("fashion", "", "", 5, {"network": "wide"}),
    ("fashion", "sticker", "decoy", 3, {"network": "wide"}),
    ("clothes", "", "", 3, {"network": "vit"}),
    ("clothes", "", "", 10, {"network": "convnext"}),
    ("clothes", "plate", "decoy", 3, {}),
    ("digits", "", "", 3, {"network": "vit"}),
    ("digits", "", "", 5, {"network": "resnet"}),
    ("digits", "border", "decoy", 3, {"network": "wide"}),
]


def cases(half: str, rounds: Sequence[int] = (0,)) -> list[Case]:
    """Return the cases of one half: ``tune`` sets thresholds, ``report`` is only reported on.

    The halves, and the rounds of a half (0 to 4), differ in classes, sizes, seeds, and in the words, colours, places
    and sizes of the shortcuts; in rounds after the first, a third of the photos go to the other ImageNet network.
    """
    return [_case(half, n, i, line) for n in rounds for i, line in enumerate([*PLANTED, *HONEST, *MORE])]


def _case(half: str, n_round: int, i: int, line: tuple[str, str, str, int, dict[str, Any]]) -> Case:
    images, shortcut, where, n, more = line
    first = {"tune": 0, "report": 500}[half]
    rng = np.random.default_rng([first, i, n_round] if n_round else [first, i])
    n = n or int(rng.integers(2, 5))
    most = 3 if more.get("decides", "beak") == "beak" else 4
    classes = tuple(range(min(n, most)))
    if images != "drawn":
        classes = tuple(int(v) for v in rng.permutation(CLASSES[images])[:n])
    size = int(rng.choice(SIZES[images]))
    if images == "cub" and shortcut in ("plate", "watermark"):
        size = 144  # or the words cannot be read
    kind = f"{shortcut}-{where}" if shortcut else f"honest-{more.get('decides') or n}"
    default = "squeezenet" if images == "cub" else ("small", "wide")[int(rng.integers(2))]
    if images == "cub" and n_round and rng.random() < 1 / 3:
        default = "lite0"
    settings = {"network": default, "seed": first + 100 * n_round + i, "size": size, "classes": classes, **more}
    name = f"{half}{n_round or ''}-{i:02d}-{images}-{kind}"
    return Case(name, images, shortcut=shortcut, where=where, **settings)


def case_options(description: str | None, peers: bool = False) -> argparse.Namespace:
    """Read the options of a benchmark over the cases, and make its folder."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data-root", default=os.environ.get("AUDITOR_DATA"))
    parser.add_argument("--half", choices=["tune", "report"], default="report")
    parser.add_argument("--rounds", nargs="+", type=int, choices=range(5), default=[0], help="which drawings of them")
    parser.add_argument("--keep", type=Path, required=True, help="folder of trained weights and what was measured")
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    parser.add_argument("--kept-only", action="store_true", help="only cases that were measured before")
    parser.add_argument("--out", type=Path)
    if peers:
        parser.add_argument("--peers", action="store_true", help="judge the heat of other tools too")
    options = parser.parse_args()
    if not options.data_root or not (Path(options.data_root) / "cub20").is_dir():
        raise SystemExit("skipped: no cub20 under --data-root (or AUDITOR_DATA)")
    os.environ["AUDITOR_DATA"] = str(options.data_root)
    options.keep.mkdir(parents=True, exist_ok=True)
    return options
