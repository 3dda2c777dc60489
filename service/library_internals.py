"""Library internals: every private name of BentoML, circus, uvicorn and prometheus_client that the service uses.

Private names may go in any release. Each is reached here and nowhere else, by a function that says what for. Without a
name the service cannot run on, starting ends with a sentence that names the versions; where only a refinement is lost,
it is a warning in the log.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from auditor.errors import OptionError

log = logging.getLogger(__name__)

TRIED = {
    "bentoml": "1.4.39",
    "prometheus_client": "0.26.0",
    "uvicorn": "0.54.0",
}  # the newest releases all names below were tried with


class _PassThrough:
    """Takes the place of BentoML's time-out middleware and does nothing."""

    def __init__(self, app: Any, timeout: float) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


def serve(service: str, host: str, port: int) -> None:
    """Run BentoML's server until it is stopped; the command ``bentoml serve`` cannot be given what we prepare."""
    load = private_name("bentoml", "_bentoml_impl.loader", "load", "loads the service")
    serve_http = private_name("bentoml", "_bentoml_impl.server", "serve_http", "runs the server")
    load(service, working_dir=".").inject_config()
    serve_http(service, working_dir=".", host=host, port=port)


def configure_logging() -> None:
    """Set up BentoML's log as its own command does, but only warnings."""
    configure = private_name("bentoml", "bentoml._internal.log", "configure_server_logging", "sets up logging")
    configure()
    logging.getLogger("bentoml").setLevel(logging.WARNING)


def use_metrics_folder(folder: Path) -> None:
    """Keep the metrics of BentoML's processes in a folder; its own is one for the machine, wiped at each start."""
    _container("holds the folder of the metrics").prometheus_multiproc_dir.set(str(folder))


def tracer_provider() -> Any:
    """Return BentoML's tracer provider, which it does not make the global one."""
    return _container("holds the tracer provider").tracer_provider.get()


def check_workers_every(seconds: float) -> None:
    """Look for dead workers more often than every 10 seconds, which with a new worker's start would keep callers 20."""
    module, name = "bentoml._internal.utils.circus", "create_standalone_arbiter"
    create = optional_name("bentoml", module, name, "dead workers are replaced after 10 s or more")
    if create is not None:
        setattr(importlib.import_module(module), name, partial(create, check_delay=seconds))


def remove_request_timeout() -> None:
    """Take BentoML's time-out out of the way: it leaves a timer behind for every request for as long as it lasts."""
    module, name = "bentoml._internal.server.http.traffic", "TimeoutMiddleware"
    middleware = optional_name("bentoml", module, name, "memory grows a little with every request for an hour")
    if middleware is None:
        return
    if list(inspect.signature(middleware).parameters) != ["app", "timeout"]:
        log.warning("BentoML's %s takes other arguments than it did and stays in place", name)
        return
    setattr(importlib.import_module(module), name, _PassThrough)


def limit_header_time(seconds: float, answer: bytes) -> None:
    """Close connections whose request headers are not there in time; uvicorn waits for them without end.

    A connection has the time from its start, and from the first byte of each further request, until a request begins.
    """
    module, name = "uvicorn.protocols.http.h11_impl", "H11Protocol"
    protocol = optional_name("uvicorn", module, name, "connections whose headers never end stay open")
    if protocol is not None:
        _limit_header_time(protocol, seconds, answer)
    if importlib.util.find_spec("httptools") is not None:  # uvicorn takes it when it is there
        module, name = "uvicorn.protocols.http.httptools_impl", "HttpToolsProtocol"
        protocol = optional_name("uvicorn", module, name, "connections whose headers never end stay open")
        if protocol is not None:
            _limit_header_time(protocol, seconds, answer)


def _limit_header_time(protocol: Any, seconds: float, answer: bytes) -> None:
    made, received, lost = protocol.connection_made, protocol.data_received, protocol.connection_lost

    def begin(self: Any) -> None:
        self.auditor_cycle = self.cycle  # a request has begun when this is another one
        self.auditor_timer = self.loop.call_later(seconds, end, self)

    def end(self: Any) -> None:
        if self.cycle is self.auditor_cycle and not self.transport.is_closing():
            self.transport.write(answer)
            self.transport.close()

    def connection_made(self: Any, transport: Any) -> None:
        made(self, transport)
        begin(self)

    def data_received(self: Any, data: bytes) -> None:
        is_waiting = self.cycle is None or self.cycle.response_complete
        if is_waiting and self.cycle is not self.auditor_cycle:
            begin(self)
        received(self, data)
        if self.cycle is not self.auditor_cycle:
            self.auditor_timer.cancel()

    def connection_lost(self: Any, error: Exception | None) -> None:
        self.auditor_timer.cancel()
        lost(self, error)

    protocol.connection_made, protocol.data_received = connection_made, data_received
    protocol.connection_lost = connection_lost


def reserve_metric_files(n_bytes: int) -> None:
    """Make the files of multi-process metrics large from the start; call it before a metric is made."""
    module, name = "prometheus_client.mmap_dict", "_INITIAL_MMAP_SIZE"
    size = optional_name("prometheus_client", module, name, "a disk that fills up can end a worker")
    if size is not None:
        setattr(importlib.import_module(module), name, n_bytes)


def private_name(package: str, module: str, name: str, purpose: str) -> Any:
    """Return a private name of a package, or say which version has it."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        raise OptionError(_sentence(package, module, name, f"which {purpose}")) from None


def optional_name(package: str, module: str, name: str, without: str) -> Any:
    """Return a private name of a package; when it is gone, None, and the log says what is lost."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        log.warning("%s", _sentence(package, module, name, f"without which {without}"))
        return None


def _container(purpose: str) -> Any:
    return private_name("bentoml", "bentoml._internal.configuration.containers", "BentoMLContainer", purpose)


def _sentence(package: str, module: str, name: str, consequence: str) -> str:
    try:
        installed = version(package)
    except PackageNotFoundError:
        installed = "(not installed)"
    return (
        f"{package} {installed} has no {module}.{name}, {consequence}; {package} {TRIED[package]} has it: "
        f"pip install '{package}=={TRIED[package]}'."
    )
