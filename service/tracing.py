"""Traces: BentoML's OpenTelemetry, with an address to send to and a span per stage of an explanation.

BentoML wraps every request in a span, joins a caller's ``traceparent`` and exports to what ``tracing`` of its own
configuration says (zipkin, jaeger, otlp). ``AUDITOR_OTLP_ENDPOINT`` is the short way to OTLP over HTTP. Stages of one
request run in batches with those of others, so their spans are drawn afterwards, end to end, from its timings.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from opentelemetry import trace

from auditor.errors import OptionError
from auditor.service.library_internals import tracer_provider
from auditor.service.routes import TABLE
from auditor.service.settings import Settings

NEEDED = "AUDITOR_OTLP_ENDPOINT needs OpenTelemetry's exporter; install it with: pip install 'mlflow-auditor[otel]'."
EXPORTER = "opentelemetry.exporter.otlp.proto.http"


def tracing_config(settings: Settings) -> dict[str, Any]:
    """Return what BentoML's service configuration says of tracing; nothing leaves it to ``BENTOML_CONFIG``."""
    if not settings.otlp_endpoint:
        return {}
    check_exporter(settings)
    return {
        "tracing": {
            "exporter_type": "otlp",
            "sample_rate": settings.trace_rate,
            "excluded_urls": [entry.path for entry in TABLE if not entry.is_logged],
            "otlp": {"protocol": "http", "endpoint": settings.otlp_endpoint, "http": {}},
        }
    }


def check_exporter(settings: Settings) -> None:
    """Fail when traces are wanted and the package that sends them is not there."""
    if not settings.otlp_endpoint:
        return
    try:
        spec = importlib.util.find_spec(EXPORTER)
    except ModuleNotFoundError:  # of a folder above it
        spec = None
    if spec is None:
        raise OptionError(NEEDED)


def trace_id() -> str | None:
    """Return the id of the request's trace, when it is sampled."""
    context = trace.get_current_span().get_span_context()
    return trace.format_trace_id(context.trace_id) if context.trace_flags.sampled else None


def describe_span(**attributes: str) -> None:
    """Write on the request's span who asked for what."""
    span = trace.get_current_span()
    if span.is_recording():
        span.set_attributes({f"auditor.{key}": value for key, value in attributes.items()})


def draw_stages(ended_ns: int, timings: Mapping[str, float]) -> None:
    """Draw a span per stage under the request's span; ``timings`` are milliseconds in the order of the stages."""
    parent = trace.get_current_span()
    if not parent.is_recording():
        return
    tracer = trace.get_tracer("auditor", tracer_provider=tracer_provider())
    at = ended_ns - int(timings.get("total", 0.0) * 1e6)
    for stage, took in timings.items():
        if stage != "total":
            span = tracer.start_span(f"auditor {stage}", start_time=at)
            at += int(took * 1e6)
            span.end(end_time=at)
