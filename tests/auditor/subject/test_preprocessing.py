"""Pixels from files, PIL images, arrays and tensors: each form against the same picture written by hand."""

import numpy as np
import pytest
import torch
from PIL import Image

from auditor.errors import DataError, OptionError, ShapeError
from auditor.subject.preprocessing import Preprocessing, as_pixels, from_array, read_image

GREY = Preprocessing.of((1, 3, 5), None, None, "stretch")
COLOUR = Preprocessing.of((3, 3, 5), None, None, "stretch")


def picture(channels=3, seed=0):
    shape = (3, 5) if channels == 1 else (3, 5, channels)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def test_defaults_change_nothing_and_one_number_counts_for_every_channel():
    x = torch.rand(2, 3, 3, 5)
    assert torch.equal(COLOUR.normalise(x), x)
    assert Preprocessing.of((3, 3, 5), 0.5, [0.25], "crop").to_json() == {
        "input_shape": [3, 3, 5],
        "mean": [0.5, 0.5, 0.5],
        "std": [0.25, 0.25, 0.25],
        "resize": "crop",
    }


def test_mean_and_std_belong_to_their_channels():
    pre = Preprocessing.of((2, 3, 5), (0.5, 0.25), (2.0, 0.125), "stretch")
    x = torch.rand(4, 2, 3, 5, dtype=torch.float64)
    by_hand = torch.stack([(x[:, 0] - 0.5) / 2, (x[:, 1] - 0.25) / 0.125], 1)
    torch.testing.assert_close(pre.normalise(x), by_hand, rtol=0, atol=0)  # every constant is a binary fraction


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"resize": "pad"}, "resize must be one of stretch, crop, crop-N or stretch-N .* got 'pad'"),
        ({"std": (0.5, 0.0, 0.5)}, "std must be positive in every channel"),
        ({"std": -1.0}, "std must be positive in every channel"),
        ({"mean": (0.5, 0.5)}, r"mean must be one finite number or 3 \(one per channel\)"),
        ({"mean": float("nan")}, "mean must be one finite number"),
        ({"std": (1, 1, float("inf"))}, "std must be one finite number"),
    ],
)
def test_wrong_values_are_refused(options, sentence):
    with pytest.raises(OptionError, match=sentence):
        Preprocessing.of((3, 3, 5), **{"mean": None, "std": None, "resize": "stretch", **options})


def test_a_tiny_std_is_allowed():
    assert Preprocessing.of((1, 3, 5), None, 1e-9, "stretch").std == (1e-9,)


def test_a_colour_image_is_read_pixel_by_pixel(tmp_path):
    array = picture()
    Image.fromarray(array).save(tmp_path / "a.png")
    pixels = read_image(tmp_path / "a.png", COLOUR)
    for c, i, j in np.ndindex(3, 3, 5):
        assert pixels[c, i, j] == np.float32(array[i, j, c]) / 255
    assert pixels.dtype == np.float32
    assert pixels.flags.c_contiguous


def test_a_turned_photo_is_turned_back(tmp_path):
    array = picture()
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    Image.fromarray(np.ascontiguousarray(np.rot90(array))).save(tmp_path / "a.png", exif=exif)
    np.testing.assert_array_equal(read_image(tmp_path / "a.png", COLOUR), array.transpose(2, 0, 1) / np.float32(255))


def test_files_that_are_no_image(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_image(tmp_path / "none.png", GREY)
    with pytest.raises(DataError, match="this is a folder"):
        read_image(tmp_path, GREY)
    (tmp_path / "a.png").write_bytes(b"not a picture")
    with pytest.raises(DataError, match=r"not a readable image \(UnidentifiedImageError"):
        read_image(tmp_path / "a.png", GREY)
    Image.fromarray(picture()).save(tmp_path / "b.png")
    (tmp_path / "c.png").write_bytes((tmp_path / "b.png").read_bytes()[:60])
    with pytest.raises(DataError, match="not a readable image"):
        read_image(tmp_path / "c.png", GREY)


def test_a_decompression_bomb_is_refused(tmp_path, monkeypatch):
    Image.fromarray(picture()).save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)  # 15 pixels: a warning of PIL, an error here
    with pytest.raises(DataError, match="DecompressionBombWarning"):
        read_image(tmp_path / "a.png", COLOUR)


FORMS = {
    "channels first": lambda a: a.transpose(0, 3, 1, 2),
    "channels last": lambda a: a,
    "float": lambda a: a.astype(np.float64) / 255,
}


@pytest.mark.parametrize("form", FORMS)
def test_arrays_of_every_form_are_the_same_pixels(form):
    batch = np.stack([picture(seed=i) for i in range(4)])
    pixels = from_array(FORMS[form](batch), COLOUR, "here")
    np.testing.assert_array_equal(pixels, batch.transpose(0, 3, 1, 2).astype(np.float32) / 255)
    assert pixels.flags.c_contiguous


def test_grey_arrays_need_no_channel_axis():
    batch = np.stack([picture(1, seed=i) for i in range(4)])
    np.testing.assert_array_equal(from_array(batch, GREY, "here")[:, 0], batch / np.float32(255))
    np.testing.assert_array_equal(from_array(batch > 100, GREY, "here")[:, 0], (batch > 100).astype(np.float32))
    with pytest.raises(ShapeError, match=r"here: images must be \(N, 3, 5, 3\) or \(N, 3, 3, 5\)"):
        from_array(batch, COLOUR, "here")


def test_a_batch_of_no_images_is_a_batch():
    assert from_array(np.zeros((0, 3, 3, 5)), COLOUR, "here").shape == (0, 3, 3, 5)
    assert as_pixels(torch.zeros(0, 3, 3, 5), COLOUR).shape == (0, 3, 3, 5)


def test_arrays_are_copied():
    array = np.full((1, 3, 3, 5), 0.5, np.float32)
    array.flags.writeable = False
    pixels = from_array(array, COLOUR, "here")
    pixels[:] = 0
    assert (array == 0.5).all()


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (np.nan, "NaN or infinite"),
        (np.inf, "NaN or infinite"),
        (-np.inf, "NaN or infinite"),
        (-0.01, r"float images must lie in \[0, 1\], got -0.01 to 0.5"),
        (1.01, r"float images must lie in \[0, 1\], got 0.5 to 1.01"),
    ],
)
def test_arrays_outside_the_pixels_are_refused(value, sentence):
    array = np.full((2, 3, 3, 5), 0.5)
    array[1, 2, 0, 4] = value
    with pytest.raises(DataError, match=sentence):
        from_array(array, COLOUR, "here")
    if np.isfinite(value):
        with pytest.raises(DataError, match=r"images must be pixels in \[0, 1\]"):
            as_pixels(torch.from_numpy(array), COLOUR)


def test_both_ends_are_pixels():
    ends = np.zeros((1, 3, 3, 5))
    ends[0, 0] = 1
    assert from_array(ends, COLOUR, "here").max() == 1
    assert as_pixels(torch.from_numpy(ends), COLOUR).dtype == torch.float32


def test_text_is_no_image():
    with pytest.raises(DataError, match="must be uint8 or float, got <U1"):
        from_array(np.full((1, 3, 3, 5), "a"), COLOUR, "here")
    for nothing in ("a.png", [], None):
        with pytest.raises(DataError, match="must be a tensor, an array, PIL images or a list of them"):
            as_pixels(nothing, COLOUR)


def test_all_forms_of_images_give_the_same_tensor():
    arrays = [picture(seed=i) for i in range(2)]
    expected = torch.from_numpy(np.stack(arrays).transpose(0, 3, 1, 2).astype(np.float32) / 255)
    images = [Image.fromarray(a) for a in arrays]
    tensors = [torch.from_numpy(a.transpose(2, 0, 1)) for a in arrays]
    for form in (
        images,
        tuple(images),
        arrays,
        np.stack(arrays),
        torch.stack(tensors),
        expected,
        list(expected),
        tensors,
    ):
        torch.testing.assert_close(as_pixels(form, COLOUR), expected, rtol=0, atol=0)
    for form in (images[0], arrays[0], tensors[0], arrays[0].transpose(2, 0, 1), expected[0].double()):
        torch.testing.assert_close(as_pixels(form, COLOUR), expected[:1], rtol=0, atol=0)
    assert as_pixels(picture(1), GREY).shape == (1, 1, 3, 5)
    assert as_pixels(np.stack([picture(1)] * 4), GREY).shape == (4, 1, 3, 5)


def test_tensors_of_another_size_are_refused():
    with pytest.raises(
        ShapeError, match=r"images must be \(batch, 3, 3, 5\) like the model's input, got \(2, 3, 5, 3\)"
    ):
        as_pixels(torch.zeros(2, 3, 5, 3), COLOUR)
    with pytest.raises(DataError, match=r"pixels in \[0, 1\], got nan"):
        as_pixels(torch.full((1, 3, 3, 5), torch.nan), COLOUR)
