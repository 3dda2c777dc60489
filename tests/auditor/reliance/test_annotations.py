"""Annotations: one box as mask, COCO polygon or box, or VOC box covers the same heat; bad files are one sentence."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from auditor.errors import DataError
from auditor.reliance.annotations import Names, read_regions, shares_of_heat
from auditor.subject.preprocessing import Preprocessing

NAMES = ["birds/a.jpg", "birds/b.jpg", "birds/c.jpg"]
SIZE = (20, 30)  # the images are 60 x 40: half of that
PRE = Preprocessing((3, *SIZE), (0.0,) * 3, (1.0,) * 3)
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
    regions = read_regions(annotated, NAMES, PRE)
    assert set(regions) == {"object"}
    assert set(regions["object"]) == {"birds/a.jpg", "birds/b.jpg"}
    assert abs(float(regions["object"]["birds/a.jpg"].sum()) - 8 * 12) <= 21  # a pixel along an edge
    maps = torch.zeros(3, *SIZE)
    maps[0, 6:10, 8:16] = 2.0
    maps[1, 6:10, 8:16], maps[1, 15:19, 20:28] = 1.0, 3.0
    shares = shares_of_heat(maps, NAMES, regions)
    assert torch.allclose(shares["object"], torch.tensor([1.0, 0.25, torch.nan]), equal_nan=True)
    assert torch.allclose(shares["background"], torch.tensor([0.0, 0.75, torch.nan]), equal_nan=True)


@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [
        ("a.json", "{}", "not COCO annotations"),
        ("a.json", '{"categories": [], "images": [], "annotations": []}', "no mask is named as an image"),
        ("a.txt", "", "wanted a folder of masks"),
        ("voc/a.xml", "<!DOCTYPE x><annotation/>", "DOCTYPE or entities"),
        ("voc/a.xml", "<annotation>", "not VOC annotations"),
        ("voc/a.xml", "<annotation><object><bndbox/></object></annotation>", "not VOC annotations"),
        ("a.json", '{"categories": 3, "images": [], "annotations": []}', "not COCO annotations"),
        ("masks/a.png", "no picture", "not an image that can be read"),
        ("masks/other.png", "no picture", "no mask is named as an image"),
    ],
)
def test_bad_annotations_are_one_sentence(tmp_path, file, text, sentence):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    with pytest.raises(DataError, match=sentence):
        read_regions(path if path.parent == tmp_path else path.parent, NAMES, PRE)


def test_an_image_is_called_by_any_end_of_its_path_that_is_its_own():
    names = Names(["cats/1.jpg", "dogs/1.jpg", "dogs/2.jpg"])
    assert names.of("dogs/1.png") == "dogs/1.jpg"
    assert names.of("1.png") is None  # there are two
    assert names.of("2") == "dogs/2.jpg"
    assert names.of("2.xml") == "dogs/2.jpg"
    assert names.of("birds/2.png") is None
    assert Names(["dogs/1.jpg", "dogs/2.jpg"], wanted=["dogs/1.jpg"]).of("2.png") is None


def test_folders_are_classes_where_the_images_have_them_and_parts_where_not(tmp_path):
    for file in ("cats/1.png", "dogs/1.png", "beak/dogs/1.png"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((40, 60), 255, np.uint8)).save(tmp_path / file)
    regions = read_regions(tmp_path, ["cats/1.jpg", "dogs/1.jpg"], PRE)
    assert {part: sorted(masks) for part, masks in regions.items()} == {
        "object": ["cats/1.jpg", "dogs/1.jpg"],
        "beak": ["dogs/1.jpg"],
    }


def test_masks_are_cropped_as_their_images_are(tmp_path):
    mask = np.zeros((40, 100), np.uint8)
    mask[:, :20] = 255  # of 100 columns the middle 60 remain
    Image.fromarray(mask).save(tmp_path / "a.png")
    crop = Preprocessing((3, *SIZE), (0.0,) * 3, (1.0,) * 3, "crop")
    assert float(read_regions(tmp_path, NAMES, crop)["object"]["birds/a.jpg"].sum()) == 0
    stretched = read_regions(tmp_path, NAMES, PRE)["object"]["birds/a.jpg"]
    assert float(stretched[:, :6].mean()) == 1
    assert float(stretched.sum()) == 20 * 6


def test_a_palette_has_objects_and_a_rim_that_is_none(tmp_path):
    values = np.array([[0, 3], [255, 7]], np.uint8).repeat(20, 0).repeat(30, 1)
    picture = Image.fromarray(values)
    picture.putpalette([v for k in range(256) for v in (k, 0, 0)])
    assert picture.mode == "P"
    picture.save(tmp_path / "a.png")
    mask = read_regions(tmp_path, NAMES, PRE)["object"]["birds/a.jpg"]
    assert float(mask.mean()) == 0.5
    assert float(mask[:, 15:].mean()) == 1


def test_a_mask_of_another_shape_is_one_sentence(tmp_path):
    Image.fromarray(np.full((40, 60), 255, np.uint8)).save(tmp_path / "a.png")
    sentence = "the mask of birds/a.jpg is 60 x 40, its image 50 x 60 pixels"
    with pytest.raises(DataError, match=sentence):
        read_regions(tmp_path, NAMES, PRE, lambda _: (50, 60))
    assert read_regions(tmp_path, NAMES, PRE, lambda _: (120, 80))  # another scale
    assert read_regions(tmp_path, NAMES, PRE, lambda _: (40, 60))  # a photo that is turned by its EXIF
