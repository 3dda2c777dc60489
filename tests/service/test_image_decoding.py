"""Images as callers send them: within limits, or a problem with its code."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from auditor.service.image_decoding import FORMATS, decode, from_base64, from_numbers
from auditor.service.problems import Problem
from auditor.subject.preprocessing import Preprocessing

GREY = Preprocessing.of((1, 5, 7), None, None, "stretch")
COLOUR = Preprocessing.of((3, 5, 7), None, None, "stretch")


def file_of(pixels, kind="PNG", **options) -> bytes:
    with io.BytesIO() as stream:
        Image.fromarray(pixels).save(stream, kind, **options)
        return stream.getvalue()


PIXELS = np.arange(35, dtype=np.uint8).reshape(5, 7) * 7


@pytest.mark.parametrize(
    "text",
    [
        "+/+/AA==",
        "data:image/png;base64,+/+/AA==",
        "data:;base64,+/+/AA==",
        "-_-_AA==",  # the alphabet of URLs
        "-_-_AA",  # without its padding
        "+/+/\nAA==\r\n",  # line breaks, as the command writes them
    ],
)
def test_base64_in_every_form_gives_the_same_bytes(text):
    assert from_base64(text) == b"\xfb\xff\xbf\x00"


@pytest.mark.parametrize(
    "text", ["%%%", "a", "ab*d", "data:image/png,abcd", "data:image/png;base64", "é", "\x00\x00\x00\x00"]
)
def test_what_is_not_base64_is_a_400(text):
    with pytest.raises(Problem) as caught:
        from_base64(text)
    assert (caught.value.status, caught.value.code) == (400, "bad_base64")


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind not in ("JPEG", "WEBP")])
def test_lossless_formats_give_the_pixels_in_the_unit_interval(kind):
    x = decode(file_of(PIXELS, kind), GREY, 35)
    assert x.dtype == torch.float32
    torch.testing.assert_close(x[0], torch.from_numpy(PIXELS / np.float32(255)), rtol=0, atol=1e-6)


def test_as_many_pixels_as_allowed_and_not_one_more():
    assert decode(file_of(PIXELS), GREY, 35).shape == (1, 5, 7)
    with pytest.raises(Problem, match=r"7 x 5 pixels, 34 are allowed") as caught:
        decode(file_of(PIXELS), GREY, 34)
    assert (caught.value.status, caught.value.code) == (413, "too_many_pixels")


def test_pixels_are_counted_before_anything_is_decoded():
    content = bytearray(file_of(np.zeros((4, 4), np.uint8)))
    content[16:24] = (100_000).to_bytes(4, "big") * 2  # a header that promises 10,000 megapixels
    import zlib

    content[29:33] = zlib.crc32(bytes(content[12:29])).to_bytes(4, "big")
    with pytest.raises(Problem) as caught:
        decode(bytes(content), GREY, 10**6)
    assert (caught.value.status, caught.value.code) == (413, "too_many_pixels")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        file_of(PIXELS)[:40],
        file_of(PIXELS)[:-30],
        b"%PDF-1.4",
        b"%!PS-Adobe-3.0\n",
        b"\x80\x04.",
    ],
)
def test_what_cannot_be_read_is_a_400_without_details(content):
    with pytest.raises(Problem) as caught:
        decode(content, GREY, 10**6)
    assert (caught.value.status, caught.value.code) == (400, "bad_image")


def test_of_an_animation_the_first_frame_counts():
    frames = [Image.fromarray(np.full((5, 7), value, np.uint8)) for value in (10, 200)]
    with io.BytesIO() as stream:
        frames[0].save(stream, "GIF", save_all=True, append_images=frames[1:])
        assert decode(stream.getvalue(), GREY, 35).mean() == pytest.approx(10 / 255, abs=1e-6)


def test_numbers_are_pixels_with_channels_last():
    values = (np.arange(105, dtype=np.float32).reshape(5, 7, 3) / 104).tolist()
    x = from_numbers(values, COLOUR)
    assert x.shape == (3, 5, 7)
    assert float(x[2, 4, 6]) == pytest.approx(values[4][6][2])
    assert from_numbers([[0.5] * 7] * 5, GREY).shape == (1, 5, 7)


@pytest.mark.parametrize("values", [[1, [2]], ["a"], [0.5], [[[[0.5]]]], 0.5, [[0.5, "x"]], {"a": 1}, None])
def test_numbers_of_another_shape_are_a_422(values):
    with pytest.raises(Problem) as caught:
        from_numbers(values, GREY)
    assert (caught.value.status, caught.value.code) == (422, "bad_image")


def test_base64_of_a_file_is_an_image():
    content = file_of(PIXELS)
    assert from_base64(base64.b64encode(content).decode()) == content
