"""The BentoML service: ``bentoml serve auditor.service.service:AuditorService``, configured by ``AUDITOR_*``.

BentoML gives processes, lifecycle, tracing and packaging. The routes are a mounted ASGI application: BentoML's own
handling of a request costs several times more than a small model's forward pass, and its adaptive batching lets one bad
request fail its neighbours. Its metrics by path are off because every path a stranger types would become a label.
"""

from __future__ import annotations

import sys
from typing import Any

import bentoml

from auditor.service.library_internals import limit_header_time, remove_request_timeout
from auditor.service.middleware import Middleware
from auditor.service.problems import Problem, late_headers
from auditor.service.routes import mounted
from auditor.service.settings import from_environment
from auditor.service.tracing import tracing_config

_serving: list[Any] = []  # the one AuditorService of this process, once it has been made


def _handlers() -> Any:
    if not _serving:
        raise Problem(503, "the server is starting.", code="not_ready", retry_after_s=2)
    return _serving[-1].routes


remove_request_timeout()
limit_header_time(from_environment().upload_timeout_s, late_headers())


@bentoml.service(
    name="auditor",
    workers=from_environment().workers,
    traffic={"timeout": 3600},  # ours is shorter, and in our shape
    metrics={"enabled": False},
    logging={"access": {"enabled": False}},
    **tracing_config(from_environment()),
)
class AuditorService:
    """One worker process: it loads in the background and is ready when the model is warm."""

    def __init__(self) -> None:
        from auditor.service.handlers import Routes
        from auditor.service.launch import log_what_is_open
        from auditor.service.supervisor import follow_supervisor
        from auditor.service.worker import Worker

        settings = from_environment()
        _settle_in(settings.threads)
        if follow_supervisor() is None:  # `bentoml serve`: nobody has said it yet
            log_what_is_open(settings)
        self.worker = Worker(settings)
        self.routes = Routes(self.worker)
        _serving[:] = [self]

    @bentoml.on_startup  # type: ignore[untyped-decorator]
    async def start(self) -> None:
        """Begin to load; the process lives at once and is ready later."""
        await self.worker.start()

    @bentoml.on_shutdown  # type: ignore[untyped-decorator]
    async def stop(self) -> None:
        """Finish what runs."""
        _serving.clear()
        await self.worker.stop()

    async def __is_ready__(self) -> bool:
        return self.worker.served is not None


_service: Any = AuditorService  # the decorator has made it a bentoml.Service
_service.add_asgi_middleware(Middleware)
_service.mount_asgi_app(mounted(_handlers), path="/", name="auditor")


def _settle_in(threads: int) -> None:
    """Threads that do not fight, logs as JSON lines, foreign warnings left out."""
    import logging
    import warnings

    import torch

    from auditor.service.json_logs import JsonLines

    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(line_buffering=True)
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of every broken form
    logger = logging.getLogger("auditor")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonLines())
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
