"""Annotated regions: masks or boxes of objects and parts, and how much of the heat lies on them.

``read_regions`` takes a folder of masks named as the images (white is inside; the images' own folders may be repeated,
a folder more is the name of a part), a COCO file (boxes and polygons) or a folder of VOC files (boxes). Masks go the
way of their images: the same resizing, the same crop. Input is hostile: sizes are bounded, XML entities are refused.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from auditor.errors import DataError
from auditor.subject.preprocessing import Preprocessing, from_pil

OBJECT = "object"
MOST_BYTES = 200_000_000
MOST_SIDE = 2048  # pixels of the canvas on which polygons are drawn
ODD_SHAPE = 0.03  # by which height to width of a mask and of its image may differ
VOID = 255  # of a palette: the rim around objects, which is neither inside nor outside
NOT_REGIONS = "--regions {path}: wanted a folder of masks, a COCO .json or a folder of VOC .xml files."
MASK_FILES = (".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".jpg", ".jpeg")
Regions = dict[str, dict[str, Tensor]]  # part -> image's name -> mask (height, width) of 0 and 1
SizeOf = Callable[[str], tuple[int, int] | None]  # an image's name -> its own width and height, as far as there is one
Annotation = tuple[str, str, Image.Image]  # part, the image's name, mask


def check_path(path: Path) -> None:
    """Raise when this cannot be annotations: cheap, before anything long begins."""
    if not path.is_dir() and not (path.is_file() and path.suffix.lower() == ".json"):
        raise DataError(NOT_REGIONS.format(path=path))


class Names:
    """The images' names, found by what an annotation calls them: with or without folders, whatever the ending."""

    def __init__(self, names: Sequence[str], wanted: Collection[str] | None = None) -> None:
        self.by_end: dict[str, set[str]] = {}
        self.wanted = set(names if wanted is None else wanted)
        for name in names:
            parts = PurePosixPath(name).with_suffix("").parts
            for k in range(len(parts)):
                self.by_end.setdefault("/".join(parts[k:]), set()).add(name)

    def of(self, called: str) -> str | None:
        """Return the one wanted image whose path ends in ``called``; None where there is none, or more than one."""
        matches = self.by_end.get(str(PurePosixPath(called).with_suffix("")), set())
        return next(iter(matches & self.wanted), None) if len(matches) == 1 else None

    def in_any_folder(self, called: str) -> str | None:
        """Return the same, or else the one image of that file name: annotations may name folders of another disk."""
        return self.of(called) or self.of(PurePosixPath(called).name)


def read_regions(
    path: Path,
    names: Sequence[str],
    pre: Preprocessing,
    size_of: SizeOf = lambda _: None,
    wanted: Collection[str] | None = None,
) -> Regions:
    """Return masks as large as the model's input for the images ``names``, by part; an error says what is wrong.

    ``wanted``: only the masks of these are read.
    """
    by_name = Names(names, wanted)
    if path.is_file() and path.suffix.lower() == ".json":
        annotations = _from_coco(path, by_name)
    elif path.is_dir() and any(path.rglob("*.xml")):
        annotations = _from_voc(path, by_name)
    elif path.is_dir():
        annotations = _from_masks(path, by_name)
    else:
        raise DataError(NOT_REGIONS.format(path=path))
    regions: Regions = {}
    for part, name, picture in annotations:
        _check_shape(path, name, picture, size_of(name))
        mask = _fitted(picture, pre)
        masks = regions.setdefault(part, {})
        masks[name] = torch.maximum(masks[name], mask) if name in masks else mask
    if not regions:
        some = ", ".join(sorted(names)[:3])
        raise DataError(f"--regions {path}: no mask is named as an image of the data ({some}, …); name them alike.")
    return regions


def shares_of_heat(
    maps: Tensor, names: Sequence[str], regions: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Return per part, and for the background, the share of each image's heat that lies on it.

    Maps are (images, height, width). The background is what no part covers. An image without annotation is NaN; one
    without heat counts as 0. Maps of ones give the areas.
    """
    out = {part: torch.full((len(names),), torch.nan) for part in (*regions, "background")}
    for i, name in enumerate(names):
        if not any(name in masks for masks in regions.values()):
            continue
        heat = maps[i] / maps[i].sum().clamp_min(1e-12)
        covered = torch.zeros_like(heat)
        for part, masks in regions.items():
            mask = masks.get(name, torch.zeros_like(heat))
            out[part][i] = (heat * mask).sum()
            covered = torch.maximum(covered, mask)
        out["background"][i] = (heat * (1 - covered)).sum()
    return out


def _from_masks(path: Path, by_name: Names) -> Iterator[Annotation]:
    for file in sorted(f for f in path.rglob("*") if f.suffix.lower() in MASK_FILES):
        inside = file.relative_to(path)
        part, name = OBJECT, by_name.of(inside.as_posix())
        if len(inside.parts) > 1 and name is None:
            part, name = inside.parts[0], by_name.of("/".join(inside.parts[1:]))
        if name is not None:
            yield part, name, _picture(file)


def _picture(file: Path) -> Image.Image:
    """Return a mask file as a picture of 0 and 255."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file) as picture:
                values = np.asarray(picture if picture.mode in ("P", "1") else picture.convert("L"))
                is_palette = picture.mode == "P"
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as err:
        raise DataError(f"--regions {file}: not an image that can be read ({err}); save the mask as PNG.") from err
    threshold = 0 if is_palette or int(values.max()) <= 1 else 127
    inside = (values > threshold) & ~(is_palette & (values == VOID))
    return Image.fromarray(inside.astype(np.uint8) * 255)


def _from_coco(path: Path, by_name: Names) -> Iterator[Annotation]:
    if path.stat().st_size > MOST_BYTES:
        raise DataError(f"--regions {path}: larger than {MOST_BYTES // 10**6} MB; split the file.")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        categories = {c["id"]: str(c["name"]) for c in data["categories"]}
        images = {i["id"]: (str(i["file_name"]), i["width"], i["height"]) for i in data["images"]}
        for a in data["annotations"]:
            file_name, width, height = images[a["image_id"]]
            name = by_name.in_any_folder(file_name)
            if name is None:
                continue
            polygons = a.get("segmentation")
            if not isinstance(polygons, list) or not polygons:
                x, y, w, h = (float(v) for v in a["bbox"])
                polygons = [[x, y, x + w, y, x + w, y + h, x, y + h]]
            yield categories[a["category_id"]], name, _drawn(polygons, (float(width), float(height)))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as err:
        raise DataError(f"--regions {path}: not COCO annotations ({type(err).__name__}: {err}).") from err


def _from_voc(path: Path, by_name: Names) -> Iterator[Annotation]:
    for file in sorted(path.rglob("*.xml")):
        name = by_name.in_any_folder(file.relative_to(path).as_posix())
        if name is None:
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        if "<!DOCTYPE" in text or "<!ENTITY" in text:
            raise DataError(f"--regions {file}: XML with a DOCTYPE or entities is not read; remove them.")
        try:
            root = ElementTree.fromstring(text)
            extent = (float(root.findtext("size/width", "0")), float(root.findtext("size/height", "0")))
            for item in root.iter("object"):
                x0, y0, x1, y1 = (float(item.findtext(f"bndbox/{k}", "")) for k in ("xmin", "ymin", "xmax", "ymax"))
                mask = _drawn([[x0, y0, x1, y0, x1, y1, x0, y1]], extent)
                yield item.findtext("name", OBJECT), name, mask
        except (ElementTree.ParseError, ValueError) as err:
            raise DataError(f"--regions {file}: not VOC annotations ({err}).") from err


def _drawn(polygons: Sequence[Sequence[float]], extent: tuple[float, float]) -> Image.Image:
    """Return polygons of an image of ``extent`` (width, height) as a mask of its shape, within `MOST_SIDE`."""
    width, height = extent
    if not (1 <= width < 1e6 and 1 <= height < 1e6):
        raise ValueError(f"an image of {width:g} x {height:g} pixels")
    scale = min(1.0, MOST_SIDE / max(width, height))
    picture = Image.new("L", (max(1, round(width * scale)), max(1, round(height * scale))))
    draw = ImageDraw.Draw(picture)
    for polygon in polygons:
        points = [(x * scale - 0.5, y * scale - 0.5) for x, y in zip(polygon[::2], polygon[1::2], strict=True)]
        draw.polygon(points, fill=255)
    return picture


def _check_shape(path: Path, name: str, picture: Image.Image, size: tuple[int, int] | None) -> None:
    if size is None:
        return
    ratio = picture.width * size[1] / (picture.height * size[0])
    if abs(ratio - 1) > ODD_SHAPE and abs(picture.width * size[0] / (picture.height * size[1]) - 1) > ODD_SHAPE:
        raise DataError(
            f"--regions {path}: the mask of {name} is {picture.width} x {picture.height}, its image {size[0]} x "
            f"{size[1]} pixels; masks must have the shape of their images."
        )


def _fitted(picture: Image.Image, pre: Preprocessing) -> Tensor:
    """Return a mask (height, width) of 0 and 1 as large as the model's input, resized as its image is."""
    grey = Preprocessing((1, *pre.input_shape[1:]), (0.0,), (1.0,), pre.resize)
    return (torch.from_numpy(from_pil(picture, grey))[0] >= 0.5).float()
