"""Annotations: one box as mask, COCO polygon or box, or VOC box covers the same heat; bad files are one sentence."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from auditor.errors import DataError
from auditor.reliance.annotations import read_regions, shares_of_heat

NAMES = ["birds/a.jpg", "birds/b.jpg", "birds/c.jpg"]
SIZE = (20, 30)  # the images are 60 x 40: half of that
BOX = (12.0, 8.0, 36.0, 24.0)  # left, top, right, bottom in the image: rows 4 to 12, columns 6 to 18 of the input


@pytest.fixture(params=["mask", "parts", "coco-box", "coco-polygon", "voc"])
def annotated(request, tmp_path):
    left, top, right, bottom = BOX
    if request.param in ("mask", "parts"):
        folder = tmp_path / "masks"
        inner = folder / "object" if request.param == "parts" else folder
        inner.mkdir(parents=True)
        mask = np.zeros((40, 60), np.uint8)
        mask[8:24, 12:36] = 255
        for stem in ("a", "b"):
            Image.fromarray(mask).save(inner / f"{stem}.png")
        return folder
    if request.param == "voc":
        folder = tmp_path / "voc"
        folder.mkdir()
        box = f"<xmin>{left}</xmin><ymin>{top}</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax>"
        text = "<annotation><size><width>60</width><height>40</height></size>"
        text += f"<object><name>object</name><bndbox>{box}</bndbox></object></annotation>"
        for stem in ("a", "b"):
            (folder / f"{stem}.xml").write_text(text)
        return folder
    shape = {"bbox": [left, top, right - left, bottom - top]}
    if request.param == "coco-polygon":
        shape["segmentation"] = [[left, top, right, top, right, bottom, left, bottom]]
    data = {
        "categories": [{"id": 7, "name": "object"}],
        "images": [{"id": i, "file_name": f"x/{s}.jpg", "width": 60, "height": 40} for i, s in enumerate("ab")],
        "annotations": [{"image_id": i, "category_id": 7, **shape} for i in range(2)],
    }
    file = tmp_path / "coco.json"
    file.write_text(json.dumps(data))
    return file


def test_heat_on_the_object_and_on_the_background(annotated):
    regions = read_regions(annotated, NAMES, SIZE)
    assert set(regions) == {"object"}
    assert set(regions["object"]) == {"a", "b"}
    assert abs(float(regions["object"]["a"].sum()) - 8 * 12) <= 21  # a pixel along an edge
    maps = torch.zeros(3, *SIZE)
    maps[0, 6:10, 8:16] = 2.0
    maps[1, 6:10, 8:16], maps[1, 15:19, 20:28] = 1.0, 3.0
    shares = shares_of_heat(maps, NAMES, regions)
    assert torch.allclose(shares["object"], torch.tensor([1.0, 0.25]))
    assert torch.allclose(shares["background"], torch.tensor([0.0, 0.75]))


@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [
        ("a.json", "{}", "not COCO annotations"),
        ("a.json", '{"categories": [], "images": [], "annotations": []}', "no mask is named as an image"),
        ("a.txt", "", "wanted a folder of masks"),
        ("voc/a.xml", "<!DOCTYPE x><annotation/>", "DOCTYPE or entities"),
        ("voc/a.xml", "<annotation>", "not VOC annotations"),
        ("masks/a.png", "no picture", "not an image that can be read"),
        ("masks/other.png", "no picture", "no mask is named as an image"),
    ],
)
def test_bad_annotations_are_one_sentence(tmp_path, file, text, sentence):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    with pytest.raises(DataError, match=sentence):
        read_regions(path if path.parent == tmp_path else path.parent, NAMES, SIZE)
