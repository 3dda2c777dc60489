"""How few parts of the object a heatmap lies on: entropy of its mass over parts, low is local.

Parts are soft masks  P(part | pixel)  in [0, 1]: Voronoi cells of annotated points with inverse distance, object masks,
or a plain grid where nothing is annotated (say so). The mass per part is averaged over images before the entropy.

Annotations come as two CSV files: ``parts.csv`` has the columns ``image, part, x, y`` and ``boxes.csv`` the columns
``image, x, y, width, height``, in pixels of the files; ``image`` is a path whose end names the file in the folder
(CUB-200-2011 brings both kinds).
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from auditor.data.source import Data
from auditor.errors import DataError, OptionError
from auditor.subject.preprocessing import Preprocessing

Points = dict[str, tuple[float, float]]  # (x, y) by the name of the part
Box = tuple[float, float, float, float]  # left, top, width, height in pixels


@dataclass(frozen=True, slots=True)
class Locality:
    """Entropy (natural log) of the mass over parts; ``skipped`` maps had no mass."""

    entropy: float
    masses: tuple[float, ...]
    skipped: int


def voronoi_parts(points: Tensor, size: tuple[int, int], box: Box | None = None) -> Tensor:
    """Return soft masks (parts + 1, height, width) of part points (parts, 2) as (x, y); NaN points are not visible.

    Inside the box a pixel belongs to the nearest point, with  1 - d / (largest d of the cell).  The last mask is the
    context: everything outside the box.
    """
    height, width = size
    ys, xs = torch.meshgrid(torch.arange(height).double(), torch.arange(width).double(), indexing="ij")
    inside = torch.ones(size, dtype=torch.bool) if box is None else box_mask(box, size)
    masks = torch.zeros(len(points) + 1, height, width, dtype=torch.float64)
    masks[-1] = (~inside).double()
    visible = torch.isfinite(points).all(1)
    if not bool(visible.any()):
        return masks
    d = ((xs - points[:, 0].view(-1, 1, 1)) ** 2 + (ys - points[:, 1].view(-1, 1, 1)) ** 2).sqrt()
    d[~visible] = torch.inf
    nearest = d.argmin(0)
    for p in visible.nonzero().flatten().tolist():
        cell = (nearest == p) & inside
        if bool(cell.any()):
            farthest = float(d[p][cell].max())
            masks[p][cell] = 1 - d[p][cell] / farthest if farthest > 0 else 1.0
    return masks


def box_mask(box: Box, size: tuple[int, int]) -> Tensor:
    """Return which pixels (height, width) lie inside a box."""
    left, top, w, h = box
    ys = torch.arange(size[0]).double().view(-1, 1) + 0.5
    xs = torch.arange(size[1]).double().view(1, -1) + 0.5
    return (xs >= left) & (xs <= left + w) & (ys >= top) & (ys <= top + h)


def grid_parts(size: tuple[int, int], rows: int = 4, columns: int = 4) -> Tensor:
    """Return a grid of hard masks (rows * columns, height, width) for data without annotation."""
    r = (torch.arange(size[0]) * rows // size[0]).view(-1, 1)
    c = (torch.arange(size[1]) * columns // size[1]).view(1, -1)
    cell = r * columns + c
    return torch.stack([(cell == p) for p in range(rows * columns)]).double()


def part_masses(heatmap: Tensor, parts: Tensor) -> Tensor:
    """Return the mass  S_p = sum P(p | pixel) S(pixel)  of one heatmap (height, width) on every part."""
    return (parts * heatmap.double()).sum((-1, -2))


def entropy(masses: Tensor) -> float:
    """Return the entropy of masses after scaling them to sum 1, with 0 log 0 = 0.

    >>> round(entropy(torch.ones(16)), 6), entropy(torch.eye(16)[3])
    (2.772589, 0.0)
    """
    p = masses.double() / masses.double().sum()
    return float(-(torch.where(p > 0, p * p.clamp(min=1e-300).log(), 0.0)).sum()) + 0.0


def locality(heatmaps: Sequence[Tensor | None], parts: Sequence[Tensor] | Tensor) -> Locality | None:
    """Measure one feature's heatmaps over images, each with its parts; empty maps (None or no mass) are skipped."""
    total, n, skipped = None, 0, 0
    for i, heatmap in enumerate(heatmaps):
        if heatmap is None or float(heatmap.sum()) <= 0:
            skipped += 1
            continue
        mass = part_masses(heatmap / heatmap.sum(), parts if isinstance(parts, Tensor) else parts[i])
        total = mass if total is None else total + mass
        n += 1
    if total is None or float(total.sum()) <= 0:
        return None
    mean = total / n
    return Locality(entropy(mean), tuple(mean.tolist()), skipped)


def context_share(heatmap: Tensor, box: Box) -> float:
    """Return the share of heat outside a bounding box; NaN for an empty map."""
    whole = float(heatmap.sum())
    if whole <= 0:
        return math.nan
    return float(heatmap[~box_mask(box, (heatmap.shape[0], heatmap.shape[1]))].sum()) / whole


@dataclass(frozen=True, slots=True)
class PartMasks:
    """Soft masks (parts, height, width) of an image by its id and a size, and what the parts are called."""

    masks_of: Callable[[str, tuple[int, int]], Tensor]
    names: tuple[str, ...]

    def __call__(self, image_id: str, size: tuple[int, int]) -> Tensor:
        """Return the masks of one image."""
        return self.masks_of(image_id, size)


def part_masks(data: Data, pre: Preprocessing, parts: str | Path, boxes: str | Path | None = None) -> PartMasks:
    """Return a function from image id and size to masks (parts + 1, height, width), the last being the context.

    Without ``boxes`` the whole image counts as the object.
    """
    if not data.has_files:
        raise OptionError(f"parts are annotated for image files; {data.spec} is no image folder.")
    if not pre.shows_all:
        raise OptionError("parts can be placed in images that are stretched to size; this model crops the centre.")
    points: dict[str, Points] = {}
    for image, part, (x, y) in _rows(Path(parts), ("image", "part", "x", "y")):
        points.setdefault(image, {})[part] = (x, y)
    frames: dict[str, Box] = {}
    if boxes is not None:
        for image, _, (x, y, w, h) in _rows(Path(boxes), ("image", "x", "y", "width", "height")):
            frames[image] = (x, y, w, h)
    names = sorted({part for landmarks in points.values() for part in landmarks})

    def masks(image_id: str, size: tuple[int, int]) -> Tensor:
        name = Path(image_id).name
        landmarks, frame = points.get(name), frames.get(name)
        if landmarks is None or (boxes is not None and frame is None):
            raise DataError(
                f"{image_id} has no {'parts' if landmarks is None else 'box'} in the annotation; name all images."
            )
        content = data.image_file(image_id)
        if content is None:
            raise DataError(f"data {data.spec}: {image_id} is no image file.")
        with Image.open(io.BytesIO(content)) as image:
            width, height = ImageOps.exif_transpose(image).size
        sx, sy = size[1] / width, size[0] / height
        at = torch.tensor([landmarks.get(n, (math.nan, math.nan)) for n in names], dtype=torch.float64)
        scaled = None if frame is None else (frame[0] * sx, frame[1] * sy, frame[2] * sx, frame[3] * sy)
        return voronoi_parts(at * torch.tensor([sx, sy], dtype=torch.float64), size, scaled)

    return PartMasks(masks, (*names, "context"))


def object_masks(data: Data, pre: Preprocessing, folder: str | Path) -> PartMasks:
    """Return a function from image id and size to object masks (objects, height, width), from a folder of label images.

    ``folder`` has a PNG per image under the image's own path, as large as the image; the value of a pixel is the number
    of the object it belongs to, 0 none. An object is the same part in all images.
    """
    if not data.has_files:
        raise OptionError(f"masks are of image files; {data.spec} is no image folder.")
    if not pre.shows_all:
        raise OptionError("masks can be laid over images that are stretched to size; this model crops the centre.")
    root = Path(folder)
    files = {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.png"))}
    if not files:
        raise DataError(f"masks {folder}: there is no PNG; want one per image, under the image's own path.")
    numbers: set[int] = set()
    for path in files.values():
        with Image.open(path) as mask:
            numbers.update(int(n) for n in np.unique(np.asarray(mask)) if n)
    objects = sorted(numbers)
    if not objects:
        raise DataError(f"masks {folder}: every pixel of every mask is 0, so there is no object.")

    def masks(image_id: str, size: tuple[int, int]) -> Tensor:
        path = files.get(Path(image_id).with_suffix("").as_posix())
        content = data.image_file(image_id)
        if path is None or content is None:
            raise DataError(f"masks {folder}: there is none for {image_id}; want {Path(image_id).with_suffix('.png')}.")
        with Image.open(io.BytesIO(content)) as image, Image.open(path) as mask:
            wanted = ImageOps.exif_transpose(image).size
            if mask.size != wanted:
                raise DataError(
                    f"masks {folder}: {path.name} is {mask.size[0]} x {mask.size[1]} and its image {wanted[0]} x "
                    f"{wanted[1]}; a mask is as large as its image."
                )
            labels = torch.from_numpy(np.array(mask.resize(size[::-1], Image.Resampling.NEAREST)).astype(np.int64))
        return torch.stack([labels == n for n in objects])

    return PartMasks(masks, tuple(f"object {n}" for n in objects))


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
