"""Decoder pool: image files are decoded, and large JSON is read, in a few processes with limits on memory and time.

Whatever a file does to its decoder happens in such a process: it may die, hang or ask for all the memory there is. The
request that sent it gets a 4xx, the process is replaced, and the worker's event loop and memory never notice. One
request has at most all but one of the processes at a time, so that others come through beside it, and all of its images
together have the time that one has.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from auditor.service.decoder_process import LENGTHS, packed
from auditor.service.json_bodies import Part
from auditor.service.problems import Problem
from auditor.service.prometheus import DECODERS_REPLACED
from auditor.service.settings import Settings
from auditor.subject.image_pixels import unit_interval
from auditor.subject.preprocessing import Preprocessing

log = logging.getLogger(__name__)

START_S, RETRY_S = 60.0, 2.0
GRACE_S = 5  # beyond the time limit a process ends itself, should nobody be left to end it
BUFFER = 1 << 20
PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "LANG", "TZ", "SYSTEMROOT")  # of the environment
FIXED = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
# A bento's folders lie side by side and the package finds its parts by its path: the process takes both paths over.
CODE = (
    "import sys, json; sys.path[:], parts, args = json.loads(sys.argv[1]); import auditor; auditor.__path__ = parts; "
    "from auditor.service.decoder_process import main; main(*args)"
)
NOT_READABLE = "the image cannot be read; send a whole PNG, JPEG or other image file."


class Decoder:
    """One process and the socket to it."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process, self.reader, self.writer = process, reader, writer

    @classmethod
    async def opened(cls, memory_bytes: int, timeout_s: float) -> Decoder:
        """Start a process and wait until it is ready."""
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        with theirs:
            args = [theirs.fileno(), memory_bytes, math.ceil(timeout_s) + GRACE_S]
            process = await loop.run_in_executor(None, _start, theirs, args)
        reader, writer = await asyncio.open_connection(sock=ours, limit=BUFFER)
        decoder = cls(process, reader, writer)
        try:
            await asyncio.wait_for(decoder.receive(), START_S)
        except (OSError, EOFError, asyncio.TimeoutError):
            await decoder.close()
            raise OSError(f"a process for decoding did not start (exit code {process.returncode})") from None
        return decoder

    @property
    def is_alive(self) -> bool:
        """Whether the process waits for work."""
        return not self.reader.at_eof() and self.process.poll() is None

    async def ask(self, header: Mapping[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        """Send a message and return the answer."""
        self.writer.write(packed(header, payload))
        await self.writer.drain()
        return await self.receive()

    async def receive(self) -> tuple[dict[str, Any], bytes]:
        """Return the next message."""
        n_head, n_payload = LENGTHS.unpack(await self.reader.readexactly(LENGTHS.size))
        head = json.loads(await self.reader.readexactly(n_head))
        return head, await self.reader.readexactly(n_payload) if n_payload else b""

    async def close(self) -> None:
        """End the process."""
        self.writer.close()
        self.process.kill()
        await asyncio.get_running_loop().run_in_executor(None, self.process.wait)


class DecoderPool:
    """The processes of one worker."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.memory_bytes = settings.decode_memory_mb << 20
        self._idle: list[Decoder] = []
        self._waiting: deque[asyncio.Future[Decoder]] = deque()
        self._all: set[Decoder] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin to start the processes; who asks earlier waits for them."""
        for _ in range(self.settings.decoders):
            self._later(self._open())

    async def stop(self) -> None:
        """End all processes."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        decoders, self._all = self._all, set()
        await asyncio.gather(*(decoder.close() for decoder in decoders))

    async def pixels(self, files: Sequence[bytes], pre: Preprocessing) -> list[Tensor | Problem]:
        """Return the image files of one request as pixels (channels, height, width) in [0, 1], or their problems."""
        limit_s = self.settings.decode_timeout_s
        too_slow = f"the images of the request take longer than {limit_s:g} s to decode; make them smaller."
        clock = _Clock(limit_s, Problem(413, too_slow, code="decode_timeout"))
        turns = asyncio.Semaphore(max(1, self.settings.decoders - 1))
        return list(await asyncio.gather(*(self._decode(file, pre, clock, turns) for file in files)))

    async def split_body(self, body: bytes, images: str, json_length: int | None = None) -> tuple[Any, list[Part]]:
        """Read a JSON body, as ``json_bodies.split_body`` does; one with ``inputs`` as ``kserve_v2`` does."""
        too_slow = Problem(413, "the JSON takes too long to read; make it smaller.", code="decode_timeout")
        dead = Problem(413, "the JSON takes too much memory to read; make it smaller.", code="too_much_memory")
        clock = _Clock(self.settings.decode_timeout_s, too_slow)
        wanted = {"do": "json", "images": images, "json_length": json_length}
        header, payload = await self._ask(wanted, body, clock, dead)
        parts, start = [], 0
        for listed in header["parts"]:
            content, start = payload[start : start + listed["bytes"]], start + listed["bytes"]
            if listed["shape"] is None:
                parts.append(Part(content, options=listed["options"]))
            else:
                parts.append(Part(numbers=np.frombuffer(bytearray(content), np.float32).reshape(listed["shape"])))
        return header["rest"], parts

    async def _decode(
        self, file: bytes, pre: Preprocessing, clock: _Clock, turns: asyncio.Semaphore
    ) -> Tensor | Problem:
        header = {
            "do": "decode",
            "shape": pre.input_shape,
            "resize": pre.resize,
            "max_pixels": self.settings.max_pixels,
        }
        not_readable = Problem(400, NOT_READABLE, code="bad_image")
        try:
            async with turns:
                answer, content = await self._ask(header, file, clock, not_readable)
        except Problem as problem:
            return problem
        c, h, w = pre.input_shape
        shape = (h, w) if c == 1 else (h, w, 3)
        if tuple(answer["shape"]) != shape or len(content) != math.prod(shape):
            return not_readable
        return torch.from_numpy(unit_interval(np.frombuffer(content, np.uint8).reshape(shape)))

    async def _ask(
        self, header: Mapping[str, Any], payload: bytes, clock: _Clock, if_dead: Problem
    ) -> tuple[dict[str, Any], bytes]:
        """Ask the next free process within the request's time; one that did not answer is replaced."""
        clock.check()
        decoder, answer = await self._take(), None
        try:
            answer, content = await clock.limit(decoder.ask(header, payload))
        except (OSError, EOFError, ValueError):
            raise if_dead from None
        finally:
            if answer is None:  # cancelled, too slow or dead: what is still on the line belongs to nobody
                self._all.discard(decoder)
                self._later(self._replace(decoder))
            else:
                self._give(decoder)
        if "problem" in answer:
            status, message, code = answer["problem"]
            raise Problem(status, message, code=code)
        return answer, content

    async def _take(self) -> Decoder:
        """Return a process that waits; the one that worked last, whose memory is warm."""
        while self._idle:
            decoder = self._idle.pop()
            if decoder.is_alive:
                return decoder
            self._all.discard(decoder)
            self._later(self._replace(decoder))
        if len(self._waiting) >= self.settings.queue:
            raise Problem(429, retry_after_s=1)
        future: asyncio.Future[Decoder] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await asyncio.wait([future], timeout=self.settings.request_timeout_s)
        except asyncio.CancelledError:
            if future.done():
                self._give(future.result())
            raise
        finally:
            future.cancel()
        if not future.cancelled():
            return future.result()
        raise Problem(503, "no image could be decoded in time; try again.", code="timeout", retry_after_s=1)

    def _give(self, decoder: Decoder) -> None:
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(decoder)
                return
        self._idle.append(decoder)

    async def _open(self) -> None:
        while True:
            try:
                decoder = await Decoder.opened(self.memory_bytes, self.settings.decode_timeout_s)
            except OSError as error:
                log.error("images cannot be decoded: %s; trying again", error)
                await asyncio.sleep(RETRY_S)
                continue
            self._all.add(decoder)
            self._give(decoder)
            return

    async def _replace(self, decoder: Decoder) -> None:
        DECODERS_REPLACED.inc()
        await decoder.close()
        await self._open()

    def _later(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Clock:
    """The time that a request has left for decoding; waiting for a free process does not count."""

    def __init__(self, seconds: float, problem: Problem) -> None:
        self.left_s, self.problem = seconds, problem

    def check(self) -> None:
        if self.left_s <= 0:
            raise self.problem

    async def limit(self, work: Any) -> Any:
        started = time.perf_counter()
        try:
            return await asyncio.wait_for(work, max(0.001, self.left_s))
        except asyncio.TimeoutError:
            self.left_s = 0.0
            raise self.problem from None
        finally:
            self.left_s -= time.perf_counter() - started


def _start(theirs: socket.socket, args: Sequence[Any]) -> subprocess.Popen[bytes]:
    """Start a process that inherits one end of the socket and nearly nothing else."""
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ} | FIXED
    paths = json.dumps([sys.path, list(sys.modules["auditor"].__path__), args])
    return subprocess.Popen(
        [sys.executable, "-c", CODE, paths],
        env=environment,
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
