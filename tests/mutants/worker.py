"""Runs tests against one changed file at a time: python -m tests.mutants.worker TREE

TREE is a copy of the repository that nobody else uses. torch and the other large libraries are imported once; each run
is a fork of this process that imports only the tree's own modules. Jobs arrive on standard input, one JSON object per
line, and are answered on standard output in the same way.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

LIBRARIES = (
    "numpy scipy.optimize sklearn.datasets torch torch.nn torchvision numba PIL.Image pydantic click rich hypothesis "
    "pytest safetensors.torch"
)
NAP_S = 0.02
MEMORY = 24 << 30  # address space; a mutant that allocates without end must not take the machine with it


def run(tests: list[str], log: Path, compiled: bool) -> None:
    """Run pytest in this process (a fork) and leave with its exit code."""
    import resource

    os.setsid()
    with log.open("wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    import numba
    import pytest
    import torch

    torch.set_num_threads(1)  # the workers share the cores
    numba.config.DISABLE_JIT = not compiled
    if not compiled:
        os.environ["NUMBA_DISABLE_JIT"] = "1"
    code = 3
    try:
        options = ["-x", "-q", "-m", "not slow", "--tb=line", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        code = int(pytest.main([*options, *tests]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int, timeout_s: float) -> int | None:
    """Return the exit code of a child, or None when it had to be stopped.

    Naps are counted, not the clock: a machine that is busy or paused must not look like a mutant that never ends.
    """
    for _ in range(round(timeout_s / NAP_S)):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(NAP_S)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def answer(job: dict[str, object], scratch: Path) -> dict[str, object]:
    """Put the mutated file in place, run its tests, and put the file back."""
    path = Path(str(job["file"]))
    original = path.read_bytes()
    log = scratch / "log"
    caches = scratch / "numba"  # a cached caller would still contain the unchanged function
    shutil.rmtree(caches, ignore_errors=True)
    started = time.monotonic()
    try:
        if job["source"] is not None:
            path.write_text(str(job["source"]))
        for stale in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):  # same size, same second: it would be believed
            stale.unlink()
        child = os.fork()
        if child == 0:
            os.environ["NUMBA_CACHE_DIR"] = str(caches)
            import numba

            numba.config.CACHE_DIR = str(caches)
            sys.dont_write_bytecode = job["source"] is not None
            run([str(test) for test in job["tests"]], log, bool(job["compiled"]))
        code = _wait(child, float(str(job["timeout_s"])))
    finally:
        path.write_bytes(original)
    tail = log.read_text(errors="replace")[-2000:] if log.exists() else ""
    return {"code": code, "seconds": time.monotonic() - started, "tail": tail}


def main() -> None:
    """Answer jobs until standard input ends."""
    os.chdir(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in LIBRARIES.split():
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as scratch:
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line), Path(scratch))), file=replies, flush=True)


if __name__ == "__main__":
    main()
