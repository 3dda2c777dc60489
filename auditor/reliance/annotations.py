"""Annotated regions: masks or boxes of objects and parts, and how much of the heat lies on them.

``read_regions`` takes a folder of masks named as the images (white is inside; a sub-folder per part), a COCO file
(boxes and polygons) or a folder of VOC files (boxes). Input is hostile: sizes are bounded, XML entities are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from auditor.errors import DataError

OBJECT = "object"
MOST_BYTES = 200_000_000
MASK_FILES = (".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".jpg", ".jpeg")
Regions = dict[str, dict[str, Tensor]]  # part -> image's name without its ending -> mask (height, width) of 0 and 1


def read_regions(path: Path, names: Sequence[str], size: tuple[int, int]) -> Regions:
    """Return masks as large as the model's input for the images ``names``; an error says which images lack one."""
    stems = {Path(n).stem for n in names}
    if path.is_file() and path.suffix.lower() == ".json":
        regions = _from_coco(path, stems, size)
    elif path.is_dir() and any(path.glob("*.xml")):
        regions = _from_voc(path, stems, size)
    elif path.is_dir():
        regions = _from_masks(path, stems, size)
    else:
        raise DataError(f"--regions {path}: wanted a folder of masks, a COCO .json or a folder of VOC .xml files.")
    annotated = {stem for masks in regions.values() for stem in masks}
    if not annotated:
        some = ", ".join(sorted(stems)[:3])
        raise DataError(f"--regions {path}: no mask is named as an image of the data ({some}, …); name them alike.")
    return regions


def shares_of_heat(
    maps: Tensor, names: Sequence[str], regions: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Return per part, and for the background, the share of each annotated image's heat that lies on it.

    The background is what no part covers. An image without annotation is left out; one without heat counts as 0.
    """
    stems = [Path(n).stem for n in names]
    rows = [i for i, stem in enumerate(stems) if any(stem in masks for masks in regions.values())]
    out: dict[str, list[float]] = {part: [] for part in (*regions, "background")}
    for i in rows:
        heat = maps[i] / maps[i].sum().clamp_min(1e-12)
        covered = torch.zeros_like(heat)
        for part, masks in regions.items():
            mask = masks.get(stems[i], torch.zeros_like(heat))
            out[part].append(float((heat * mask).sum()))
            covered = torch.maximum(covered, mask)
        out["background"].append(float((heat * (1 - covered)).sum()))
    return {part: torch.tensor(values) for part, values in out.items()}


def _from_masks(path: Path, stems: set[str], size: tuple[int, int]) -> Regions:
    folders = sorted(p for p in path.iterdir() if p.is_dir())
    parts = {p.name: p for p in folders} or {OBJECT: path}
    regions: Regions = {}
    for part, folder in parts.items():
        files = [f for f in sorted(folder.rglob("*")) if f.suffix.lower() in MASK_FILES and f.stem in stems]
        regions[part] = {f.stem: _mask(f, size) for f in files}
    return regions


def _mask(file: Path, size: tuple[int, int]) -> Tensor:
    try:
        with Image.open(file) as picture:
            grey = picture.convert("L").resize((size[1], size[0]), Image.Resampling.NEAREST)
    except (OSError, ValueError, Image.DecompressionBombError) as err:
        raise DataError(f"--regions {file}: not an image that can be read ({err}); save the mask as PNG.") from err
    data = torch.frombuffer(bytearray(grey.tobytes()), dtype=torch.uint8).view(size)
    mask = data > (0 if int(data.max()) <= 1 else 127)
    return mask.float()


def _from_coco(path: Path, stems: set[str], size: tuple[int, int]) -> Regions:
    if path.stat().st_size > MOST_BYTES:
        raise DataError(f"--regions {path}: larger than {MOST_BYTES // 10**6} MB; split the file.")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        categories = {c["id"]: str(c["name"]) for c in data["categories"]}
        images = {
            i["id"]: (Path(str(i["file_name"])).stem, float(i["width"]), float(i["height"])) for i in data["images"]
        }
        regions: Regions = {name: {} for name in categories.values()}
        for a in data["annotations"]:
            stem, width, height = images[a["image_id"]]
            if stem not in stems:
                continue
            polygons = a.get("segmentation")
            if not isinstance(polygons, list) or not polygons:
                x, y, w, h = (float(v) for v in a["bbox"])
                polygons = [[x, y, x + w, y, x + w, y + h, x, y + h]]
            mask = _drawn(polygons, (width, height), size)
            before = regions[categories[a["category_id"]]].get(stem)
            regions[categories[a["category_id"]]][stem] = mask if before is None else torch.maximum(before, mask)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, RecursionError) as err:
        raise DataError(f"--regions {path}: not COCO annotations ({type(err).__name__}: {err}).") from err
    return regions


def _from_voc(path: Path, stems: set[str], size: tuple[int, int]) -> Regions:
    regions: Regions = {}
    for file in sorted(path.glob("*.xml")):
        if file.stem not in stems:
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        if "<!DOCTYPE" in text or "<!ENTITY" in text:
            raise DataError(f"--regions {file}: XML with a DOCTYPE or entities is not read; remove them.")
        try:
            root = ElementTree.fromstring(text)
            extent = (float(root.findtext("size/width", "0")), float(root.findtext("size/height", "0")))
            for item in root.iter("object"):
                x0, y0, x1, y1 = (float(item.findtext(f"bndbox/{k}", "")) for k in ("xmin", "ymin", "xmax", "ymax"))
                mask = _drawn([[x0, y0, x1, y0, x1, y1, x0, y1]], extent, size)
                part = regions.setdefault(item.findtext("name", OBJECT), {})
                part[file.stem] = torch.maximum(part[file.stem], mask) if file.stem in part else mask
        except (ElementTree.ParseError, ValueError, ZeroDivisionError) as err:
            raise DataError(f"--regions {file}: not VOC annotations ({err}).") from err
    return regions


def _drawn(polygons: Sequence[Sequence[float]], extent: tuple[float, float], size: tuple[int, int]) -> Tensor:
    """Return polygons of an image of ``extent`` (width, height) as a mask of ``size`` (height, width)."""
    sx, sy = size[1] / extent[0], size[0] / extent[1]
    picture = Image.new("L", (size[1], size[0]))
    draw = ImageDraw.Draw(picture)
    for polygon in polygons:
        points = [(x * sx - 0.5, y * sy - 0.5) for x, y in zip(polygon[::2], polygon[1::2], strict=True)]
        draw.polygon(points, fill=1)
    return torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(size).float()
