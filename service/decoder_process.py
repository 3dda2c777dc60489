"""Decoder process: a small program that decodes image files and reads large JSON for a worker, and does nothing else.

It knows neither the model nor the keys: its environment is empty, its memory has a limit, it may write no file, nor
start a process. It answers one message at a time over a socket; when the worker is gone the socket ends and so does it.

A message is two lengths (4 bytes each, most significant first), a JSON object of the first length and bytes of the
second.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from typing import Any

from auditor.service.image_decoding import decode_pixels
from auditor.service.json_bodies import MAX_REST, Part, split_body
from auditor.service.kserve_v2 import split_tensors
from auditor.service.problems import Problem

LENGTHS = struct.Struct(">II")
NICE = 5  # answers of the service go before the decoding of further images
OPEN_FILES = 64


def packed(header: Mapping[str, Any], payload: bytes = b"") -> bytes:
    r"""Return a message.

    >>> packed({}, b"abc")
    b'\x00\x00\x00\x02\x00\x00\x00\x03{}abc'
    """
    head = json.dumps(header).encode()
    return LENGTHS.pack(len(head), len(payload)) + head + payload


def answer(header: Mapping[str, Any], payload: bytes) -> bytes:
    """Return the message that answers a message; whatever goes wrong is a problem."""
    try:
        if header["do"] == "decode":
            c, h, w = header["shape"]
            pixels = decode_pixels(payload, (c, h, w), header["resize"], header["max_pixels"])
            return packed({"shape": pixels.shape}, pixels.tobytes())
        images = header["images"]
        if images == "inputs":
            rest, parts = split_tensors(payload, header.get("json_length"))
        else:
            rest, parts = split_body(payload, images)
        return _packed_body(rest, parts)
    except Problem as problem:
        return packed({"problem": [problem.status, problem.message, problem.code]})
    except MemoryError:
        status, message = 413, "the request takes too much memory to read; make it smaller."
        return packed({"problem": [status, message, "too_much_memory"]})


def _packed_body(rest: Any, parts: list[Part]) -> bytes:
    if len(json.dumps(rest)) > MAX_REST:
        raise Problem(422, f"there are more than {MAX_REST:,} bytes beside the images; leave them out.", code="invalid")
    listed = [
        {
            "options": part.options,
            "shape": None if part.numbers is None else part.numbers.shape,
            "bytes": len(part.file or b"") if part.numbers is None else part.numbers.nbytes,
        }
        for part in parts
    ]
    payload = b"".join(part.file or b"" if part.numbers is None else part.numbers.tobytes() for part in parts)
    return packed({"rest": rest, "parts": listed}, payload)


def limit_process(memory_bytes: int) -> None:
    """Give up what decoding does not need: memory beyond the limit, files, processes, core dumps."""
    base = _address_space()
    limits = {
        resource.RLIMIT_AS: base + memory_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_NPROC: 0,
    }
    for kind, value in limits.items():
        with contextlib.suppress(ValueError, OSError):  # a lower limit holds already
            resource.setrlimit(kind, (value, value))
    with contextlib.suppress(OSError):
        os.nice(NICE)


def _address_space() -> int:
    """Return the bytes of address space in use, which the libraries take before any image comes."""
    try:
        with open("/proc/self/statm") as file:  # noqa: PTH123, pathlib is not loaded here
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 512 << 20


def serve(line: socket.socket, timeout_s: int) -> None:
    """Answer messages until the other end is closed; one that takes far too long ends the process."""
    line.sendall(packed({"ready": True}))
    while (lengths := _read(line, LENGTHS.size)) is not None:
        n_head, n_payload = LENGTHS.unpack(lengths)
        head, payload = _read(line, n_head), _read(line, n_payload)
        if head is None or payload is None:
            return
        signal.alarm(timeout_s)
        reply = answer(json.loads(head), bytes(payload))
        signal.alarm(0)
        line.sendall(reply)
        del head, payload, reply


def _read(line: socket.socket, n: int) -> bytearray | None:
    """Return exactly n bytes, or None at the end."""
    content = bytearray(n)
    view, done = memoryview(content), 0
    while done < n:
        got = line.recv_into(view[done:], n - done)
        if not got:
            return None
        done += got
    return content


def main(fd: int, memory_bytes: int, timeout_s: int) -> None:
    """Run until the worker closes the socket."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a whole group is stopped: the worker closes the socket when done
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=fd) as line:
        limit_process(memory_bytes)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # libraries print what they think of a file
        serve(line, timeout_s)
