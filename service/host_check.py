"""Host check: requests that a page of another site makes a browser send are refused.

A site may let its own name point to this machine (DNS rebinding) and so read a service that listens on 127.0.0.1: the
browser then sends that site's name as ``Host``. Where no key guards the service, only names of this machine, bare
addresses and ``--allowed-hosts`` are answered. A request with an ``Origin`` of another site is refused everywhere.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from auditor.service.problems import Problem
from auditor.service.settings import Settings

EVERY = "*"


class HostCheck:
    """What a server's settings allow."""

    def __init__(self, settings: Settings) -> None:
        given = {name.strip().lower() for name in settings.allowed_hosts.split(",") if name.strip()}
        self.allows_every = EVERY in given or (not given and settings.is_guarded)
        self.hosts = {name.rstrip(".") for name in given} | {"localhost", socket.gethostname().lower()}
        self.origins = {name.strip().rstrip("/") for name in settings.allowed_origins.split(",") if name.strip()}

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse a request by its ``Host`` and ``Origin``; one without them is no browser's."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if host and not self.allows_every and not self._is_ours(host):
            raise Problem(
                403,
                f"this server does not answer to the name {name_of(host)[:100]!r}; start it with --allowed-hosts to "
                "name it, or guard it with --api-keys.",
                code="host_not_allowed",
            )
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and not self._is_same(origin, host):
            raise Problem(
                403,
                "a page of another site may not ask this server; --allowed-origins names those that may.",
                code="origin_not_allowed",
            )

    def _is_ours(self, host: str) -> bool:
        name = name_of(host)
        if name in self.hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True  # a bare address is no name that somebody could point here

    def _is_same(self, origin: str, host: str) -> bool:
        if EVERY in self.origins or origin in self.origins:
            return True
        try:
            return bool(host) and urlsplit(origin).netloc.lower() == host
        except ValueError:
            return False


def name_of(host: str) -> str:
    """Return the name in a ``Host`` header without its port.

    >>> [name_of(host) for host in ("example.org:3000", "[::1]:80", "localhost.", "::1")]
    ['example.org', '::1', 'localhost', '::1']
    """
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name = host if host.count(":") > 1 else host.partition(":")[0]
    return name.rstrip(".")
