"""JSON bodies: what a request's JSON says, apart from its images. Needs pydantic's parser, and numpy for pixels.

Small bodies are read where the request arrives, large ones in a process of the decoder pool; both come here. The
client takes its limit from here, so numpy is imported where pixels are.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from auditor.service.problems import Problem

if TYPE_CHECKING:
    import numpy as np

MAX_BATCH = 64  # images of a request
MAX_REST = 64 * 1024  # bytes of JSON beside the images: options take a few hundred
PLAIN_ALPHABET, SPACES = bytes.maketrans(b"-_", b"+/"), b" \t\r\n\v\f"
GIVEN = "given"  # stands where an image was


@dataclass(frozen=True, slots=True)
class Part:
    """One image of a body: the bytes of a file or an array of numbers, with options of its own (KServe's instances)."""

    file: bytes | None = None
    numbers: np.ndarray[Any, Any] | None = None  # float32
    options: dict[str, Any] = field(default_factory=dict)


def split_body(body: bytes, images: str) -> tuple[Any, list[Part]]:
    """Return a JSON body with a short word where each image was, and the images.

    ``images`` names the field that holds them: ``image``, ``images`` or ``instances``. What does not fit stays as it
    came, for the request's type to refuse.
    """
    try:
        content = from_json(body)
    except ValueError:
        raise Problem(400, "the body is not JSON.", code="bad_json") from None
    given = content.get(images) if isinstance(content, dict) else None
    if isinstance(given, list):
        check_count(len(given), images)
    if images == "instances" and isinstance(given, list):
        return {**content, images: [GIVEN] * len(given)}, [_instance(i, value) for i, value in enumerate(given)]
    if isinstance(given, str) and given:
        return {**content, images: GIVEN}, [Part(from_base64(given))]
    if isinstance(given, list) and all(isinstance(text, str) and text for text in given):
        return {**content, images: [GIVEN] * len(given)}, [Part(from_base64(text)) for text in given]
    return content, []


def check_count(n: int, where: str) -> None:
    """Refuse more images than a request may have, before anything is made of each."""
    if n > MAX_BATCH:
        raise Problem(422, f"{where}: {n} images came, {MAX_BATCH} are taken at once.", code="invalid")


def from_base64(text: str) -> bytes:
    """Return the bytes behind base64 or a data URL.

    >>> from_base64("data:image/png;base64,aGk=")
    b'hi'
    """
    if text.startswith("data:"):
        head, comma, text = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise Problem(400, "image: a data URL must be base64: data:image/png;base64,…", code="bad_base64")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        pass
    try:  # line breaks, as the command base64 writes them, and the alphabet of URLs
        plain = text.encode("ascii").translate(PLAIN_ALPHABET, SPACES)  # in one pass, however many spaces there are
        return base64.b64decode(plain + b"=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise Problem(
            400, "image: this is not base64; send the image file's bytes in base64.", code="bad_base64"
        ) from None


def from_lists(values: Any) -> np.ndarray[Any, Any]:
    """Return nested lists (height, width[, channels]) of numbers as an array of float32."""
    import numpy as np

    try:
        array = np.asarray(values, dtype=np.float32)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise Problem(422, "pixels must be nested lists of numbers of one size.", code="bad_image") from None
    if array.ndim not in (2, 3):
        raise Problem(
            422, f"pixels must be (height, width, channels), got {array.ndim} dimensions.", code="bad_image"
        ) from None
    return array


def _instance(i: int, value: Any) -> Part:
    """Read one instance as KServe's clients send it."""
    try:
        if isinstance(value, list):
            return Part(numbers=from_lists(value))
        text, options = value, {}
        if isinstance(value, dict):
            options = dict(value)
            file = options.pop("b64", None) or options.pop("image", None) or options.pop("image_bytes", None)
            text = file.get("b64") if isinstance(file, dict) else file
        if not isinstance(text, str) or not text:
            raise Problem(422, "an instance is {'b64': …}, {'image': …}, a base64 string or nested lists of pixels.")
        return Part(from_base64(text), options=options)
    except Problem as problem:
        raise Problem(problem.status, f"instances.{i}: {problem.message}"[:400], code=problem.code) from None
