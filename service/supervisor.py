"""Supervisor: the process that started the workers. When it is gone, however it went, a worker goes too.

A worker that outlives its supervisor would hold the port, answer from an old model and never be replaced.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

VARIABLE = "AUDITOR_SUPERVISOR_PID"  # set by the launch
LOOK_EVERY_S = 0.5
TIME_TO_STOP_S = 15.0


def follow_supervisor(stop: Callable[[], None] | None = None) -> threading.Thread | None:
    """End this process soon after its supervisor ended; without one there is nothing to follow."""
    pid = os.environ.get(VARIABLE, "")
    if not pid.isdigit():
        return None
    thread = threading.Thread(target=_follow, args=(int(pid), stop or _stop), daemon=True, name="auditor-supervisor")
    thread.start()
    return thread


def _follow(pid: int, stop: Callable[[], None]) -> None:
    _wait_for_end(pid)
    log.error("the supervisor (process %d) has ended, so this worker stops", pid)
    stop()


def _wait_for_end(pid: int) -> None:
    """Return when a process has ended: at once by its descriptor where the system has those, else by looking."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (OSError, AttributeError):
        while is_alive(pid):
            time.sleep(LOOK_EVERY_S)
        return
    try:
        select.select([descriptor], [], [])
    finally:
        os.close(descriptor)


def _stop() -> None:
    """Remove what the supervisor would have removed, finish what runs, and end."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR", "")
    if folder and Path(folder).name.startswith("auditor-metrics-"):
        shutil.rmtree(folder, ignore_errors=True)
        Path(folder + ".lock").unlink(missing_ok=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(TIME_TO_STOP_S)
    os._exit(1)


def is_alive(pid: int) -> bool:
    """Whether there is a process of this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
