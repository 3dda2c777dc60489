"""Memory of a process: freed buffers are kept for the next layer instead of being given back to the kernel.

glibc gives every large buffer back when it is freed, and each layer of the next batch faults its pages in again: for
batches of photos that is half of the time (tests/benchmarks/bench_page_faults.py). With memory kept a process is as
large as its largest moment was, and page faults end. ``malloc_trim`` gives pages back, as a server does that has
swapped its model.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys

VARIABLE = "AUDITOR_KEEP_MEMORY"  # 0 leaves the allocator as it is
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # numbers of mallopt, as malloc.h has them
_NEVER = 2**31 - 1


@functools.cache
def keep_memory() -> bool:
    """Let this process keep freed memory, and return whether it does: on Linux with glibc, unless the variable is 0."""
    if os.environ.get(VARIABLE) == "0" or not sys.platform.startswith("linux"):
        return False
    try:
        libc = ctypes.CDLL("libc.so.6")
        return bool(libc.mallopt(_MMAP_MAX, 0)) and bool(libc.mallopt(_TRIM_THRESHOLD, _NEVER))
    except (OSError, AttributeError):  # another C library
        return False
