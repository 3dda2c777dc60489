"""Traces arrive where they were sent: BentoML's span of the request, ours of its stages."""

from __future__ import annotations

import base64
import gzip
import importlib.util
import itertools
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from auditor.errors import OptionError
from auditor.service import tracing
from auditor.service.settings import Settings, from_environment
from tests.benchmarks import live_server as ls

ENDPOINT = "http://collector:4318/v1/traces"


def test_bentoml_is_configured_to_send_only_with_an_endpoint(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert tracing.tracing_config(Settings()) == {}
    config = tracing.tracing_config(Settings(otlp_endpoint=ENDPOINT, trace_rate=0.5))["tracing"]
    assert (config["exporter_type"], config["sample_rate"]) == ("otlp", 0.5)
    assert config["otlp"]["endpoint"] == ENDPOINT
    pytest.importorskip("bentoml")
    from _bentoml_sdk.service.config import validate

    validate({"tracing": config})


def test_a_missing_exporter_and_a_wrong_address_are_one_sentence(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    tracing.check_exporter(Settings())  # nothing is wanted
    with pytest.raises(OptionError, match=r"pip install 'mlflow-auditor\[otel\]'"):
        tracing.check_exporter(Settings(otlp_endpoint=ENDPOINT))
    with pytest.raises(OptionError, match="AUDITOR_OTLP_ENDPOINT"):
        from_environment({"AUDITOR_OTLP_ENDPOINT": "collector:4318"})


def test_stages_are_drawn_end_to_end_under_the_request(monkeypatch):
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "tracer_provider", lambda: provider)
    timings = {"read": 1.0, "queue": 2.5, "forward": 4.0, "concepts": 0.5, "total": 8.0}
    tracing.draw_stages(10**9, timings)
    assert tracing.trace_id() is None
    assert exporter.get_finished_spans() == (), "no request is traced, nothing is drawn"
    with provider.get_tracer("test").start_as_current_span("request") as parent:
        tracing.draw_stages(10**9, timings)
        tracing.describe_span(request_id="abc")
        assert tracing.trace_id() == f"{parent.get_span_context().trace_id:032x}"
    *stages, request = exporter.get_finished_spans()
    assert request.attributes["auditor.request_id"] == "abc"
    assert [s.name for s in stages] == ["auditor read", "auditor queue", "auditor forward", "auditor concepts"]
    assert all(s.parent.span_id == request.context.span_id for s in stages)
    assert stages[0].start_time == 10**9 - 8_000_000
    assert [s.end_time - s.start_time for s in stages] == [1_000_000, 2_500_000, 4_000_000, 500_000]
    assert all(a.end_time == b.start_time for a, b in itertools.pairwise(stages))


class Receiver(BaseHTTPRequestHandler):
    """Keeps every span that is posted to it by OTLP over HTTP."""

    def do_POST(self):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        exported = ExportTraceServiceRequest.FromString(body)
        self.server.spans += [s for r in exported.resource_spans for scope in r.scope_spans for s in scope.spans]
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


def _is_whole(span) -> bool:
    return any(a.key == "auditor.request_id" for a in span.attributes)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_spans_of_a_real_server_arrive_at_a_receiver(tmp_path, trained, concepts):
    pytest.importorskip(tracing.EXPORTER, reason="needs the extra otel")
    from auditor.plugins import attach, log_subject

    with ls.current_registry(f"sqlite:///{tmp_path}/unused.db"):
        store = ls.use_store(tmp_path / "store")
        attach(concepts, log_subject(trained[0], "digits", experiment="bench"), "concepts", subject=trained[0])
    concepts.name = ""
    receiver = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    receiver.spans = []
    threading.Thread(target=receiver.serve_forever, daemon=True).start()
    image = base64.b64encode(ls.digit_files()[0]).decode()
    endpoint = f"http://127.0.0.1:{receiver.server_port}/v1/traces"
    try:
        flags = ["--otlp-endpoint", endpoint]
        with ls.serve("models:/digits/1", store, tmp_path / "live", flags=flags) as server:
            caller = f"{7:032x}"
            headers = {"traceparent": f"00-{caller}-{9:016x}-01", "x-request-id": "traced"}
            status, _ = server.post("/explain", {"image": image}, headers)
            assert status == 200

            def arrived():
                return [s for s in list(receiver.spans) if s.trace_id.hex() == caller]

            ls.eventually(lambda: any(_is_whole(s) for s in arrived()), "the request's span arrives")
            mine = arrived()
            assert f'"trace_id": "{caller}"' in server.log.read_text()
    finally:
        receiver.shutdown()
        receiver.server_close()
    names = {s.name for s in mine}
    assert {"auditor read", "auditor queue", "auditor forward", "auditor concepts", "auditor stability"} <= names, names
    (request,) = [s for s in mine if _is_whole(s)]
    assert request.parent_span_id.hex() == f"{9:016x}", "the caller's trace goes on"
    attributes = {a.key: a.value.string_value for a in request.attributes if a.key.startswith("auditor.")}
    assert attributes == {"auditor.request_id": "traced", "auditor.route": "/explain", "auditor.version": "1"}
    assert not any("readyz" in str(s) for s in receiver.spans), "health is not traced"
    assert image not in str(receiver.spans)
