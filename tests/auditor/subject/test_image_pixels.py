"""Pixels of decoded files: deep, floating, transparent, turned and colour images, each against numbers by hand."""

import numpy as np
import pytest
from PIL import Image

from auditor.errors import ShapeError
from auditor.subject.image_pixels import model_pixels, unit_interval

GREY, COLOUR = (1, 3, 5), (3, 3, 5)


def picture(channels=3, seed=0):
    shape = (3, 5) if channels == 1 else (3, 5, channels)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def pixels(array, input_shape, resize="stretch"):
    return model_pixels(Image.fromarray(array), input_shape, resize)


def test_what_fits_is_left_as_it_is():
    np.testing.assert_array_equal(pixels(picture(), COLOUR), picture())
    np.testing.assert_array_equal(pixels(picture(1), GREY), picture(1))


def test_a_colour_image_for_a_grey_model_is_its_brightness_and_grey_for_colour_is_repeated():
    light = picture().astype(float) @ [0.299, 0.587, 0.114]  # ITU-R 601
    np.testing.assert_allclose(pixels(picture(), GREY), light, atol=1.01)  # rounded to 8 bits
    np.testing.assert_array_equal(pixels(picture(1), COLOUR), np.repeat(picture(1)[..., None], 3, 2))


def test_sixteen_bits_are_scaled_and_not_clipped():
    deep = (np.arange(15, dtype=np.uint16) * 4681).reshape(3, 5)  # 0 to 65534
    np.testing.assert_allclose(pixels(deep, GREY), deep / 257, atol=0.51)


@pytest.mark.parametrize("top", [0.5, 1.0, 8.0])
def test_floats_are_taken_as_they_are_up_to_one_and_by_their_largest_beyond(top):
    values = np.linspace(0, top, 15, dtype=np.float32).reshape(3, 5)
    np.testing.assert_allclose(pixels(values, GREY), values / max(top, 1) * 255, atol=0.51)
    assert (pixels(values - top, GREY) == 0).all()  # below zero is black


def test_what_is_transparent_is_white():
    array = np.concatenate([picture(), np.full((3, 5, 1), 255, np.uint8)], 2)
    array[1, 2, 3], array[0, 0, 3] = 0, 128
    shown = pixels(array, COLOUR)
    assert (shown[1, 2] == 255).all()
    half = (array[0, 0, :3] * 128.0 + 255.0 * 127) / 255
    np.testing.assert_allclose(shown[0, 0], half, atol=1.01)
    np.testing.assert_array_equal(shown[2, 4], array[2, 4, :3])
    palette = Image.new("P", (5, 3), 1)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    assert (model_pixels(palette, COLOUR, "stretch")[0, 0] == [255, 0, 0]).all()
    palette.info["transparency"] = 1
    assert (model_pixels(palette, COLOUR, "stretch") == 255).all()


def test_a_turned_photo_is_turned_back():
    image = Image.fromarray(np.ascontiguousarray(np.rot90(picture())))
    image.getexif()[0x0112] = 6  # to be turned by 90 degrees clockwise
    np.testing.assert_array_equal(model_pixels(image, COLOUR, "stretch"), picture())


def test_stretch_shows_all_and_crop_the_centre():
    array = np.zeros((4, 12), np.uint8)
    array[:, 4:8] = 255  # the middle third is white
    assert (pixels(array, (1, 4, 4), "crop") == 255).all()
    stretched = pixels(array, (1, 4, 4))
    assert stretched[:, [0, 3]].max() < 26
    assert pixels(picture(1), (1, 6, 4)).shape == (6, 4)  # height, width


def test_other_numbers_of_channels_need_arrays():
    with pytest.raises(ShapeError, match="takes 2 channels and image files have 1, 3 or 4"):
        pixels(picture(), (2, 3, 5))


@pytest.mark.parametrize("channels", [1, 3])
def test_bytes_become_floats_with_the_channels_first(channels):
    array = picture(channels)
    floats = unit_interval(array)
    assert floats.shape == (channels, 3, 5)
    assert floats.dtype == np.float32
    assert floats.flags.c_contiguous
    for c, i, j in np.ndindex(channels, 3, 5):
        assert floats[c, i, j] == np.float32(array[i, j] if channels == 1 else array[i, j, c]) / 255
