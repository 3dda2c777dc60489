"""Prometheus metrics of the service; labels have few values, whatever callers send.

With several workers each keeps its numbers in memory-mapped files. Their space is claimed when the process starts: a
disk that fills up later would otherwise end the process at the next new label, by a signal that nothing can catch.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):  # the client opens files there as soon as a metric is made
    Path(os.environ["PROMETHEUS_MULTIPROC_DIR"]).mkdir(parents=True, exist_ok=True)

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from auditor.service.library_internals import reserve_metric_files
from auditor.service.supervisor import is_alive

log = logging.getLogger(__name__)

FOLDER = os.environ.get("PROMETHEUS_MULTIPROC_DIR", "")
ROOM = 1 << 20  # bytes per file, more than all labels need: files that grow later are not claimed
reserve_metric_files(ROOM)

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

REQUESTS = Counter("auditor_requests", "Requests by route and status.", ["route", "status"])
REQUEST_DURATION = Histogram("auditor_request_duration_seconds", "Whole requests.", ["route"], buckets=SECONDS)
EXPLAIN_DURATION = Histogram(
    "auditor_explain_duration_seconds",
    "Stages of an explanation; kind is that of the explainer, or - where the stage is shared.",
    ["stage", "kind"],
    buckets=SECONDS,
)
STABILITY = Histogram(
    "auditor_stability",
    "Score of the stability, 1 says that nothing moves.",
    ["mode"],
    buckets=[i / 10 for i in range(1, 11)],
)
BATCH_SIZE = Histogram("auditor_batch_size", "Images per forward pass.", buckets=(1, 2, 4, 8, 16, 32, 64, 128))
QUEUE_DEPTH = Gauge("auditor_queue_depth", "Images waiting.", ["queue"], multiprocess_mode="livesum")
REFUSED = Counter("auditor_refused", "Requests refused, by code.", ["code"])
VERIFICATION_FAILURES = Counter(
    "auditor_verification_failures", "Model versions that were not served because something did not verify."
)
RELOADS = Counter("auditor_reloads", "Model versions loaded.", ["outcome"])
DECODERS_REPLACED = Counter(
    "auditor_decoders_replaced", "Processes for decoding that a file ended, by its time, its memory or a fault."
)
READY = Gauge("auditor_ready", "Workers that are warm.", multiprocess_mode="livesum")


def claim_room() -> None:
    """Claim the disk space of this process's files."""
    for path in Path(FOLDER).glob(f"*_{os.getpid()}.db") if FOLDER else ():
        try:
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except OSError as error:
            log.warning("metrics: no room could be claimed for %s: %s", path.name, error)


claim_room()


def forget_dead_workers() -> None:
    """Remove the gauges of workers that were killed: they would be counted as ready without end."""
    for path in Path(os.environ["PROMETHEUS_MULTIPROC_DIR"]).glob("gauge_live*_*.db"):
        pid = path.stem.rpartition("_")[2]
        if pid.isdigit() and not is_alive(int(pid)):
            path.unlink(missing_ok=True)


def exposition() -> tuple[bytes, str]:
    """Return all workers' metrics as text, and its media type."""
    if Path(os.environ.get("PROMETHEUS_MULTIPROC_DIR") or "/nonexistent").is_dir():  # else: this worker's alone
        from prometheus_client import multiprocess

        forget_dead_workers()
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry), CONTENT_TYPE_LATEST
    return generate_latest(), CONTENT_TYPE_LATEST
