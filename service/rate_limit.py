"""Rate limit: requests per minute and caller, counted over all workers of a server.

The generic cell rate algorithm needs one number per caller: the time at which the next request would be on schedule,

    due' = max(due, now) + 60 / rate,      refused when  due' - now > 60

so a minute's worth may come at once, and then one request per 60 / rate seconds. The numbers lie in a small file that
all workers map into memory; one worker alone, or a server without such a folder, keeps them to itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

N_SLOTS = 4096  # callers that are distinguished; the one who asked longest ago makes room
SLOT = struct.Struct("<8sd")
WINDOW_S = 60.0
LOOKS = 16  # slots that a caller may stand in


class RateLimit:
    """Counts callers by the hash of their key or name."""

    def __init__(self, folder: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        size = N_SLOTS * SLOT.size
        if folder is None:
            self._file, self._slots = None, mmap.mmap(-1, size)
            return
        descriptor = os.open(folder / "rates", os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, size)
        self._file, self._slots = descriptor, mmap.mmap(descriptor, size)

    def wait_s(self, caller: bytes, rate_per_minute: float) -> float:
        """Count a request of a caller; returns the seconds to wait when it is one too many, which is not counted."""
        now, step = self.clock(), WINDOW_S / rate_per_minute
        with self._locked():
            at, due = self._slot(caller[:8], now)
            due = max(due, now) + step
            if due - now > max(WINDOW_S, step) + 1e-9:
                return due - now - WINDOW_S
            SLOT.pack_into(self._slots, at, caller[:8], due)
        return 0.0

    def _slot(self, tag: bytes, now: float) -> tuple[int, float]:
        """Return where a caller's number stands, and the number; a new caller takes the slot that is longest due."""
        start, oldest = int.from_bytes(tag, "little"), (float("inf"), 0)
        for i in range(LOOKS):
            at = (start + i) % N_SLOTS * SLOT.size
            there, due = SLOT.unpack_from(self._slots, at)
            if there == tag:
                return at, min(due, now + 2 * WINDOW_S)  # a file of another boot has another clock
            oldest = min(oldest, (due, at))
        return oldest[1], 0.0

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if self._file is None:
            yield
            return
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
