"""One image in every form a program holds it: the same pixels, bytes that change with it, and what is refused."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from auditor.data.image_items import (
    Normalisation,
    as_array,
    bytes_of,
    content_of,
    is_array,
    is_image,
    is_same,
    pixels_of,
    size_of,
)
from auditor.errors import DataError, OptionError
from auditor.subject.preprocessing import Preprocessing

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
PICTURE = Image.fromarray(PIXELS)
PRE = Preprocessing.of((3, 5, 7), (0.5,) * 3, (0.25,) * 3, "stretch")


def encoded(image=PICTURE, form="PNG"):
    buffer = io.BytesIO()
    image.save(buffer, form)
    return buffer.getvalue()


@pytest.fixture
def forms(tmp_path):
    path = tmp_path / "p.png"
    path.write_bytes(encoded())
    channels_first = PIXELS.transpose(2, 0, 1)
    return {
        "picture": PICTURE,
        "bytes": encoded(),
        "path": path,
        "text": str(path),
        "mapping of bytes": {"bytes": encoded(), "path": None},
        "mapping of a path": {"bytes": None, "path": str(path)},
        "array": PIXELS,
        "channels first": channels_first,
        "floats": channels_first.astype(np.float64) / 255,
        "tensor": torch.from_numpy(channels_first.astype(np.float32) / 255),
        "tensor that learns": torch.from_numpy(channels_first.astype(np.float32) / 255).requires_grad_(),
        "rows of a table": [list(row) for row in PIXELS],
    }


def test_all_forms_are_the_same_pixels(forms):
    want = PIXELS.transpose(2, 0, 1) / 255
    for name, item in forms.items():
        pixels = pixels_of(item, PRE, None, "here")
        assert pixels.dtype == np.float32, name
        np.testing.assert_allclose(pixels, want, atol=1e-6, err_msg=name)


def test_all_forms_but_rows_of_a_table_are_known_as_images(forms):
    assert [name for name, item in forms.items() if not is_image(item)] == ["rows of a table"]
    others = (None, 3, "no file", {"label": 1}, np.zeros(4), np.zeros((2, 0)), b"short", {}, np.array(["a", "b"]))
    assert not any(is_image(item) for item in others)


def test_half_precision_and_what_is_no_array():
    assert as_array(torch.ones(2, dtype=torch.bfloat16)).dtype == np.float32
    assert is_array(np.zeros((2, 2), dtype=bool))
    assert not is_array(np.array(["a"]))
    assert not is_array([[1.0]])


def test_a_damaged_file_is_named_and_its_cause_kept():
    with pytest.raises(DataError, match="row 3: not a readable image") as caught:
        pixels_of(b"not an image at all", PRE, None, "row 3")
    assert caught.value.__cause__ is not None
    with pytest.raises(DataError, match="row 3"):
        pixels_of(encoded()[:-60], PRE, None, "row 3")


def test_every_bit_of_an_item_and_its_label_are_in_its_content(forms):
    for name, item in forms.items():
        if name == "rows of a table":
            continue
        content = list(content_of(item, "cat"))
        assert content == list(content_of(item, "cat")), name
        assert content != list(content_of(item, "dog")), name
    changed = PIXELS.copy()
    changed[2, 3, 1] ^= 1
    assert not is_same(PIXELS, changed)
    assert not is_same(PICTURE, Image.fromarray(changed))
    assert not is_same(PIXELS, PIXELS.astype(np.int16))
    assert not is_same(PIXELS, PIXELS.reshape(7, 5, 3))
    assert is_same(PIXELS, np.asfortranarray(PIXELS))


def test_palette_and_orientation_are_part_of_a_picture():
    one = Image.fromarray(PIXELS[..., 0], "P")
    other = one.copy()
    one.putpalette([0, 0, 0, 255, 0, 0])
    other.putpalette([0, 0, 0, 0, 255, 0])
    assert not is_same(one, other)
    turned = PICTURE.copy()
    turned.getexif()[0x0112] = 6
    assert not is_same(PICTURE, turned)


def test_a_missing_file_has_a_content_of_its_own(tmp_path):
    assert list(content_of(tmp_path / "none.png", "0"))[-1] == b"missing"


def test_sizes_and_memory(forms, tmp_path):
    assert {size_of(forms[name]) for name in ("picture", "path", "text")} == {(7, 5)}
    (tmp_path / "broken.png").write_bytes(b"no")
    assert size_of(tmp_path / "broken.png") is None
    assert size_of(PIXELS) is None
    assert bytes_of(PICTURE) == bytes_of(PIXELS) == 105
    assert bytes_of(torch.zeros(3, 5, 7)) == 420
    assert bytes_of(b"1234") == 4
    assert bytes_of("path") == 1024


@pytest.mark.parametrize("last", [False, True])
def test_what_was_applied_is_undone_per_channel(last):
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.5)
    pixels = PIXELS[None].astype(np.float64) / 255
    given = (pixels - mean) / std
    if not last:
        given, pixels = given.transpose(0, 3, 1, 2), pixels.transpose(0, 3, 1, 2)
    undone = Normalisation.of(mean, torch.tensor(std)).undone(given)
    np.testing.assert_allclose(undone, pixels, atol=1e-6)
    assert undone.min() >= 0
    assert undone.max() <= 1


def test_rounding_is_clipped_and_more_is_not():
    given = np.array([[[[-0.0005, 1.0005, -0.2, 1.2]]]])
    np.testing.assert_allclose(Normalisation.of(0.0, 1.0).undone(given).ravel(), [0, 1, -0.2, 1.2], atol=1e-7)


def test_one_of_the_two_is_enough_and_neither_is_nothing():
    assert Normalisation.of(None, None) is None
    assert Normalisation.of((0.1, 0.2), None) == Normalisation((0.1, 0.2), (1.0, 1.0))
    assert Normalisation.of(None, 2.0) == Normalisation((0.0,), (2.0,))


@pytest.mark.parametrize(("mean", "std"), [((0.1, 0.2), (1.0, 1.0, 1.0)), (0.0, 0.0), (0.0, -1.0), (float("nan"), 1.0)])
def test_what_cannot_be_undone_is_refused(mean, std):
    with pytest.raises(OptionError, match="a finite number per channel and std above 0"):
        Normalisation.of(mean, std)


def test_other_channels_are_refused():
    with pytest.raises(DataError, match="of 2 channels cannot be undone in images of shape"):
        Normalisation.of((0.0, 0.0), (1.0, 1.0)).undone(np.zeros((1, 3, 5, 7)))
