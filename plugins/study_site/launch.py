"""Launch: a study served until it is stopped, with no log of requests."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from auditor.errors import StudyError

if TYPE_CHECKING:
    from auditor.plugins.study_site.site import StudySite

log = logging.getLogger(__name__)


def run(site: StudySite, host: str, port: int, on_ready: Callable[[str], object] | None = None) -> None:
    """Serve a study until a signal ends it; ``on_ready`` is called with its address when it listens."""
    import uvicorn

    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise StudyError(
            f"study serve: {host}:{port} cannot be used ({error.strerror or error}); choose another --port."
        ) from None
    config = uvicorn.Config(
        site.app(), log_level="warning", access_log=False, proxy_headers=True, server_header=False, lifespan="off"
    )
    with listener:
        shown = f"[{host}]" if ":" in host else host
        if on_ready is not None:
            on_ready(f"http://{shown}:{listener.getsockname()[1]}")
        uvicorn.Server(config).run(sockets=[listener])
    site.store.close()
