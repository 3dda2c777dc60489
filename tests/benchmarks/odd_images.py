"""Image files as nobody should send them, and mutations of good ones; every one is small to send and cheap to make."""

from __future__ import annotations

import io
import random
import struct
import zipfile
import zlib
from collections.abc import Callable

import numpy as np
from PIL import Image


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    """Return an image as a file of a kind."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def good_files(seed: int = 0) -> dict[str, bytes]:
    """Return readable files of all usual formats and modes; 13 x 17 pixels, so that sides differ."""
    rng = np.random.default_rng(seed)
    rgb = Image.fromarray(rng.integers(0, 256, (17, 13, 3), dtype=np.uint8))
    frames = [Image.fromarray(rng.integers(0, 256, (17, 13, 3), dtype=np.uint8)) for _ in range(3)]
    alpha = rgb.copy()
    alpha.putalpha(128)
    grey16 = Image.fromarray(rng.integers(0, 65536, (17, 13)).astype(np.uint16))
    animated = {"save_all": True, "append_images": frames, "duration": 40, "loop": 0}
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    return {
        "png": saved(rgb, "PNG"),
        "png grey": saved(rgb.convert("L"), "PNG"),
        "png 1 bit": saved(rgb.convert("1"), "PNG"),
        "png 16 bit": saved(grey16, "PNG"),
        "png palette": saved(rgb.convert("P"), "PNG"),
        "png palette, transparent": saved(rgb.convert("P"), "PNG", transparency=0),
        "png alpha": saved(alpha, "PNG"),
        "png animated": saved(rgb, "PNG", **animated),
        "png interlaced 1x1": saved(rgb.resize((1, 1)), "PNG"),
        "png 1x400": saved(rgb.resize((1, 400)), "PNG"),
        "png 20000 wide": saved(rgb.resize((20_000, 3)), "PNG"),
        "jpeg": saved(rgb, "JPEG"),
        "jpeg grey": saved(rgb.convert("L"), "JPEG"),
        "jpeg cmyk": saved(rgb.convert("CMYK"), "JPEG"),
        "jpeg progressive": saved(rgb, "JPEG", progressive=True),
        "jpeg turned": saved(rgb, "JPEG", exif=exif),
        "jpeg 20000 wide": saved(rgb.resize((20_000, 3)), "JPEG"),
        "gif": saved(rgb, "GIF"),
        "gif animated": saved(rgb, "GIF", **animated),
        "webp": saved(rgb, "WEBP"),
        "webp lossless alpha": saved(alpha, "WEBP", lossless=True),
        "webp animated": saved(rgb, "WEBP", **animated),
        "bmp": saved(rgb, "BMP"),
        "tiff": saved(rgb, "TIFF"),
        "tiff cmyk": saved(rgb.convert("CMYK"), "TIFF"),
        "tiff float": saved(Image.fromarray(rng.random((17, 13), dtype=np.float32)), "TIFF"),
        "tiff 16 bit": saved(grey16, "TIFF"),
        "ppm": saved(rgb, "PPM"),
    }


def every_format(seed: int = 0) -> dict[str, bytes]:
    """Return a file of every format that Pillow here can write, in the first mode that it takes."""
    rng = np.random.default_rng(seed)
    rgb = Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8))
    Image.init()
    files = {}
    for kind in sorted(Image.SAVE):
        for mode in ("RGB", "L", "1", "P", "F"):
            try:
                files[f"{kind} {mode}"] = saved(rgb.convert(mode), kind)
                break
            except Exception:  # this writer does not take this mode
                continue
    return files


def tiled_tiff(side: int) -> bytes:
    """Return a TIFF that says it has 1 x 1 pixels, in one deflated tile of side x side."""
    packer = zlib.compressobj(9)
    tile = b"".join(packer.compress(bytes(side)) for _ in range(side)) + packer.flush()
    tags = {256: 1, 257: 1, 258: 8, 259: 8, 262: 1, 277: 1, 322: side, 323: side, 324: 8, 325: len(tile)}
    folder = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", t, 4, 1, v) for t, v in tags.items())
    return b"II*\0" + struct.pack("<I", 8 + len(tile)) + tile + folder + bytes(4)


def bombs() -> dict[str, bytes]:
    """Return small files that decode to as many pixels as a service allows, or to more in one tile."""
    large = Image.new("RGB", (6320, 6320))
    return {
        "webp of 34 bytes": saved(large, "WEBP", lossless=True, method=0),
        "gif of 40 megapixels": saved(large.convert("P"), "GIF"),
        "png of 40 megapixels": saved(large.convert("1"), "PNG"),
        "tiff of 1 x 1 with a tile of 10000 x 10000": tiled_tiff(10_000),
        "tiff of 1 x 1 with a tile of 6000 x 6000": tiled_tiff(6_000),
    }


def chunk(name: bytes, data: bytes) -> bytes:
    """Return a PNG chunk with its checksum."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_saying(width: int, height: int, data: bytes = b"", *more: bytes) -> bytes:
    """Return a grey PNG whose header says a size, with any image data."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def bad_files() -> dict[str, bytes]:
    """Return files that are no images, lie, or swell when opened."""
    nothing = zlib.compress(bytes(50_000_000), 9)  # 50 MB in 50 kB
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as pack:
        pack.writestr("x", bytes(50_000_000))
    # what a pickle that runs a command looks like; written by hand, never loaded
    pickled = (
        b"\x80\x04\x95\x1d" + bytes(7) + b"\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02id\x94\x85\x94R\x94."
    )
    good = good_files()
    gif = bytearray(good["gif"])
    gif[6:10] = b"\xff\xff\xff\xff"
    return {
        "empty": b"",
        "one byte": b"\x00",
        "only a PNG's first bytes": b"\x89PNG\r\n\x1a\n",
        "only a JPEG's first bytes": b"\xff\xd8\xff\xe0",
        "a pickle": pickled,
        "a zip bomb": bomb.getvalue(),
        "gzip of nothing": zlib.compress(bytes(1_000_000)),
        "text": b"hello " * 100,
        "html": b"<!doctype html><script>alert(1)</script>",
        "svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9" height="9"/></svg>',
        "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n",
        "pdf": b"%PDF-1.4\n1 0 obj<</Type/Catalog>>endobj\ntrailer<</Root 1 0 R>>",
        "an executable": b"\x7fELF" + bytes(200),
        "png bomb by its header": png_saying(60_000, 60_000, nothing),
        "png bomb by its data": png_saying(13, 17, nothing),
        "png bomb in a text": png_saying(13, 17, zlib.compress(bytes(17 * 14)), chunk(b"zTXt", b"a\0\0" + nothing)),
        "png bomb in a profile": png_saying(13, 17, zlib.compress(bytes(17 * 14)), chunk(b"iCCP", b"a\0\0" + nothing)),
        "png of 20000 x 20000": png_saying(20_000, 20_000, zlib.compress(bytes(1000))),
        "png of size 0": png_saying(0, 0),
        "png of size 2^31": png_saying(2**31 - 1, 2**31 - 1),
        "png without data": png_saying(13, 17),
        "gif with a huge screen": bytes(gif),
        "webp that says more": good["webp"][:4] + b"\xff\xff\xff\x7f" + good["webp"][8:],
        "bmp of -1 x -1": good["bmp"][:18] + b"\xff\xff\xff\xff\xff\xff\xff\xff" + good["bmp"][26:],
        "tiff that points at itself": b"II*\0\x08\0\0\0" + b"\x01\0" + bytes(12) + b"\x08\0\0\0",
        "two images in one": good["png"] + good["jpeg"],
        "jpeg named png": b"\x89PNG\r\n\x1a\n" + good["jpeg"],
        "ppm bomb": b"P6 100000 100000 255\n" + bytes(100),
        "ppm without an end": b"P6 13 17 255\n",
        "10 MB of noise": random.Random(0).randbytes(10_000_000),
    }


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Return a file changed in one to four small ways."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        rng.choice(WAYS)(out, rng)
    return bytes(out[:200_000])


def _cut_end(out: bytearray, rng: random.Random) -> None:
    del out[rng.randrange(len(out) + 1) :]


def _flip(out: bytearray, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 8)):
        if out:
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)


def _flip_early(out: bytearray, rng: random.Random) -> None:
    if out:
        out[rng.randrange(min(len(out), 64))] = rng.randrange(256)


def _drop(out: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(out) + 1)
    del out[at : at + rng.randint(1, 32)]


def _double(out: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(out) + 1)
    out[at:at] = out[at : at + rng.randint(1, 64)]


def _noise(out: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(out) + 1)
    out[at:at] = rng.randbytes(rng.randint(1, 32))


def _extreme(out: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(out) + 1)
    out[at : at + 4] = rng.choice([b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0", b"\x80\0\0\0", b"\0\0\0\x01"])


WAYS: list[Callable[[bytearray, random.Random], None]] = [
    _cut_end,
    _flip,
    _flip,
    _flip_early,
    _drop,
    _double,
    _noise,
    _extreme,
]
