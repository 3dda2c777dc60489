"""Annotated parts of the objects in an image folder: points and boxes from two CSV files, as soft masks.

``parts.csv`` has the columns ``image, part, x, y`` and ``boxes.csv`` the columns ``image, x, y, width, height``, in
pixels of the files; ``image`` is a path whose end names the file in the folder (CUB-200-2011 brings both kinds).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image, ImageOps
from torch import Tensor

from auditor.data.source import Data, FolderData
from auditor.errors import DataError, OptionError
from auditor.metrics.locality import Box, voronoi_parts
from auditor.subject.preprocessing import Preprocessing

Points = dict[str, tuple[float, float]]


def part_masks(
    data: Data, pre: Preprocessing, parts: str | Path, boxes: str | Path | None = None
) -> Callable[[str, tuple[int, int]], Tensor]:
    """Return a function from image id and size to masks (parts + 1, height, width), the last being the context.

    Without ``boxes`` the whole image counts as the object.
    """
    if not isinstance(data, FolderData):
        raise OptionError(f"parts are annotated for image files; {data.spec} is no image folder.")
    if pre.resize != "stretch":
        raise OptionError("parts can be placed in images that are stretched to size; this model crops the centre.")
    root = data.root
    points: dict[str, Points] = {}
    for image, part, (x, y) in _rows(Path(parts), ("image", "part", "x", "y")):
        points.setdefault(image, {})[part] = (x, y)
    frames: dict[str, Box] = {}
    if boxes is not None:
        for image, _, (x, y, w, h) in _rows(Path(boxes), ("image", "x", "y", "width", "height")):
            frames[image] = (x, y, w, h)
    names = sorted({part for own in points.values() for part in own})

    def masks(image_id: str, size: tuple[int, int]) -> Tensor:
        name = Path(image_id).name
        own, frame = points.get(name), frames.get(name)
        if own is None or (boxes is not None and frame is None):
            raise DataError(
                f"{image_id} has no {'parts' if own is None else 'box'} in the annotation; name all images."
            )
        with Image.open(root / image_id) as image:
            width, height = ImageOps.exif_transpose(image).size
        sx, sy = size[1] / width, size[0] / height
        at = torch.tensor([own.get(n, (math.nan, math.nan)) for n in names], dtype=torch.float64)
        scaled = None if frame is None else (frame[0] * sx, frame[1] * sy, frame[2] * sx, frame[3] * sy)
        return voronoi_parts(at * torch.tensor([sx, sy], dtype=torch.float64), size, scaled)

    return masks


def _rows(path: Path, columns: tuple[str, ...]) -> list[tuple[str, str, list[float]]]:
    """Return file name, part (or nothing) and the numbers of every row."""
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            missing = [c for c in columns if c not in (reader.fieldnames or ())]
            if missing:
                raise DataError(f"{path.name}: there is no column {missing[0]!r}; wanted {', '.join(columns)}.")
            numbers = [c for c in columns if c not in ("image", "part")]
            return [(Path(r["image"]).name, r.get("part", ""), [float(r[c]) for c in numbers]) for r in reader]
    except DataError:
        raise
    except (OSError, TypeError, ValueError) as err:
        raise DataError(f"{path.name}: cannot be read as a table of {', '.join(columns)} ({err}).") from err
