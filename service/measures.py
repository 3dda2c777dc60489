"""Prometheus metrics of the service; labels have few values, whatever callers send."""

from __future__ import annotations

import os

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

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
QUEUE_DEPTH = Gauge("auditor_queue_depth", "Images waiting.", ["lane"], multiprocess_mode="livesum")
REFUSED = Counter("auditor_refused", "Requests refused, by code.", ["code"])
VERIFICATION_FAILURES = Counter(
    "auditor_verification_failures", "Model versions that were not served because something did not verify."
)
RELOADS = Counter("auditor_reloads", "Model versions loaded.", ["outcome"])
READY = Gauge("auditor_ready", "Workers that are warm.", multiprocess_mode="livesum")


def exposition() -> tuple[bytes, str]:
    """Return all workers' metrics as text, and its media type."""
    if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        from prometheus_client import multiprocess

        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry), CONTENT_TYPE_LATEST
    return generate_latest(), CONTENT_TYPE_LATEST
