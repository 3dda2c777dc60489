"""Cluster: the address that a command or a call was given, as a runner."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from auditor.errors import OptionError
from auditor.runners.runner import LocalRunner, Runner, chosen, using

VARIABLE = "AUDITOR_CLUSTER"
WORKERS, CPUS = "AUDITOR_CLUSTER_WORKERS", "AUDITOR_CLUSTER_CPUS"


@contextmanager
def on_cluster(address: str | None, device: str = "cpu") -> Iterator[Runner]:
    """Let everything inside run on a cluster: ``auto``, ``local`` or ``ray://HOST:PORT``.

    Without an address it runs where it runs already, else in this process.
    AUDITOR_CLUSTER_WORKERS says how many workers at most, AUDITOR_CLUSTER_CPUS how many processors each gets; each has
    a GPU where the device is one.

    >>> with on_cluster(None) as runner:
    ...     runner.n_workers
    1
    """
    if not address:
        with using(chosen() or LocalRunner()) as runner:
            yield runner
        return
    from auditor.runners.ray_pool import PoolOptions, ray_workers

    gpus = 1.0 if device.startswith("cuda") else 0.0
    options = PoolOptions(address, _number(WORKERS, 0), max(1, _number(CPUS, 1)), gpus)
    with ray_workers(options) as pool, using(pool) as runner:
        yield runner


@contextmanager
def counted_work(address: str | None) -> Iterator[dict[str, Any]]:
    """Let everything inside run on a cluster; what it gives has ``work`` in it afterwards, where there is a cluster."""
    about: dict[str, Any] = {}
    with on_cluster(address) as runner:
        began = time.monotonic()
        yield about
        if address:
            about["work"] = runner.tally.to_json(time.monotonic() - began)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or len(text) > 6:
        raise OptionError(f"{name} must be a whole number, got {text!r}.")
    return int(text)
