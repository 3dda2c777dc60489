"""Images as callers send them: within limits, or a problem with its code."""

import io
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

from auditor.service.image_decoding import FORMATS, decode_pixels
from auditor.service.problems import Problem


def decode(content: bytes, max_pixels: int):
    return decode_pixels(content, (1, 5, 7), "stretch", max_pixels)


def file_of(pixels, kind="PNG", **options) -> bytes:
    with io.BytesIO() as stream:
        Image.fromarray(pixels).save(stream, kind, **options)
        return stream.getvalue()


PIXELS = np.arange(35, dtype=np.uint8).reshape(5, 7) * 7


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind not in ("JPEG", "WEBP")])
def test_lossless_formats_give_the_pixels(kind):
    np.testing.assert_array_equal(decode(file_of(PIXELS, kind), 35), PIXELS)


def test_as_many_pixels_as_allowed_and_not_one_more():
    assert decode(file_of(PIXELS), 35).shape == (5, 7)
    with pytest.raises(Problem, match=r"7 x 5 pixels, 34 are allowed") as caught:
        decode(file_of(PIXELS), 34)
    assert (caught.value.status, caught.value.code) == (413, "too_many_pixels")


def test_pixels_are_counted_before_anything_is_decoded():
    content = bytearray(file_of(np.zeros((4, 4), np.uint8)))
    content[16:24] = (100_000).to_bytes(4, "big") * 2  # a header that promises 10,000 megapixels
    content[29:33] = zlib.crc32(bytes(content[12:29])).to_bytes(4, "big")
    with pytest.raises(Problem) as caught:
        decode(bytes(content), 10**6)
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
        decode(content, 10**6)
    assert (caught.value.status, caught.value.code) == (400, "bad_image")


def tiled_tiff(side: int) -> bytes:
    """Return a TIFF that says it has 1 x 1 pixels, in one deflated tile of side x side."""
    tile = zlib.compress(bytes(side * side), 1)
    tags = {256: 1, 257: 1, 258: 8, 259: 8, 262: 1, 277: 1, 322: side, 323: side, 324: 8, 325: len(tile)}
    folder = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", t, 4, 1, v) for t, v in tags.items())
    return b"II*\0" + struct.pack("<I", 8 + len(tile)) + tile + folder + bytes(4)


def test_a_tile_counts_like_the_image_it_is_part_of():
    assert decode(tiled_tiff(992), 10**6).shape == (5, 7)
    with pytest.raises(Problem, match="tiles of 4000 x 4000 pixels") as caught:
        decode(tiled_tiff(4000), 10**6)
    assert (caught.value.status, caught.value.code) == (413, "too_many_pixels")


def test_decoding_needs_neither_torch_nor_pydantic():
    code = "import sys, auditor.service.decoder_process; assert not {'torch', 'pydantic', 'mlflow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_of_an_animation_the_first_frame_counts():
    frames = [Image.fromarray(np.full((5, 7), value, np.uint8)) for value in (10, 200)]
    with io.BytesIO() as stream:
        frames[0].save(stream, "GIF", save_all=True, append_images=frames[1:])
        assert decode(stream.getvalue(), 35).mean() == 10
