"""Request parsing: multipart form, JSON with base64, or the bare image; the same options in all three.

Nothing is written to disk: forms are parsed in memory, within the limit on the body that the middleware holds.
"""

from __future__ import annotations

from typing import Any, TypeVar
from urllib.parse import parse_qsl

from pydantic import BaseModel, ValidationError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from auditor.explainers.answer_options import OLD_NAMES
from auditor.service.decoder_pool import DecoderPool
from auditor.service.json_bodies import GIVEN, MAX_BATCH, Part, from_base64, split_body
from auditor.service.kserve_v2 import HEADER, json_length_of, split_tensors
from auditor.service.problems import Problem, problem_of_validation

M = TypeVar("M", bound=BaseModel)
SMALL_JSON = 64 * 1024  # bytes of JSON that are read faster than they are sent to another process
MAX_FIELDS = 40
LISTS = ("explainers", *(old for old, new in OLD_NAMES.items() if new == "explainers"))  # repeated, or with commas


class _InMemory(MultiPartParser):
    spool_max_size = 1 << 40  # never to disk


async def read(
    request: Request, kind: type[M], images: str = "image", decoders: DecoderPool | None = None
) -> tuple[M, list[bytes]]:
    """Return the request's options and its image files; ``images`` is the JSON field that holds them."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media == "application/json" or media.endswith("+json"):
        body, parts = await read_json(request, kind, images, decoders)
        return body, [part.file or b"" for part in parts]
    if media == "multipart/form-data":
        fields, files = await _form(request)
        return _from_fields(kind, fields, files, images), files
    if media.startswith("image/") or media == "application/octet-stream":
        fields = parse_qsl(request.url.query, keep_blank_values=True, max_num_fields=MAX_FIELDS)
        files = [await request.body()]
        return _from_fields(kind, fields, files, images), files
    raise Problem(415)


async def read_json(
    request: Request, kind: type[M], images: str, decoders: DecoderPool | None = None
) -> tuple[M, list[Part]]:
    """Return a JSON body as its type, without its images, and the images; large bodies are read in a process."""
    content = await request.body()
    if decoders is None or len(content) <= SMALL_JSON:
        rest, parts = split_body(content, images)
    else:
        rest, parts = await decoders.split_body(content, images)
    try:
        return kind.model_validate(rest), parts
    except ValidationError as error:
        raise problem_of_validation(error) from None


async def read_tensors(request: Request, kind: type[M], decoders: DecoderPool | None = None) -> tuple[M, list[Part]]:
    """Return a body of KServe's V2 protocol as its type, without its data, and the images.

    Binary data is not parsed, however large it is; the JSON before it is like any other.
    """
    content = await request.body()
    length = json_length_of(request.headers.get(HEADER), content)
    if decoders is None or (len(content) if length is None else length) <= SMALL_JSON:
        rest, parts = split_tensors(content, length)
    else:
        rest, parts = await decoders.split_body(content, "inputs", length)
    try:
        return kind.model_validate(rest), parts
    except ValidationError as error:
        raise problem_of_validation(error) from None


async def _form(request: Request) -> tuple[list[tuple[str, str]], list[bytes]]:
    parser = _InMemory(
        request.headers, request.stream(), max_files=MAX_BATCH, max_fields=MAX_FIELDS, max_part_size=1 << 40
    )
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise Problem(400, f"the form cannot be read: {error.message[:120]}", code="bad_form") from None
    except (KeyError, ValueError, UnicodeDecodeError, LookupError, AssertionError):
        raise Problem(400, "the form cannot be read: it is not multipart/form-data.", code="bad_form") from None
    fields: list[tuple[str, str]] = []
    files: list[bytes] = []
    try:
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                if name not in ("image", "images"):
                    raise Problem(422, f"{name[:40]}: a file is sent as part 'image'.", code="invalid")
                files.append(value.file.read())
            else:
                fields.append((name, value))
    finally:
        await form.close()
    return fields, files


def _from_fields(kind: type[M], fields: list[tuple[str, str]], files: list[bytes], images: str) -> M:
    """Check options that came as text; ``explainers`` may be repeated or hold commas."""
    values: dict[str, Any] = {}
    for name, text in fields:
        if name in LISTS:
            values.setdefault(name, []).extend(part.strip() for part in text.split(",") if part.strip())
        elif name in ("image", "images"):
            files.append(from_base64(text))
        elif name in values:
            raise Problem(422, f"{name[:40]}: it is given twice.", code="invalid")
        else:
            values[name] = text
    if not files:
        raise Problem(422, "image: the part with the file is missing.", code="invalid")
    if images == "image" and len(files) > 1:
        raise Problem(422, "image: one image at a time; POST /explain_batch takes several.", code="invalid")
    try:
        return kind.model_validate({**values, images: GIVEN if images == "image" else [GIVEN] * len(files)})
    except ValidationError as error:
        raise problem_of_validation(error) from None
