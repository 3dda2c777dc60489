"""Ports for the servers that tests start: workers of pytest-xdist, and runs side by side, draw from different ones."""

import itertools
import os
import socket

# below the range from which the kernel gives ports to outgoing connections (32768 and up on Linux)
FIRST, SHARE, WORKERS = 20_000, 1_000, 12
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
_turn = itertools.count(os.getpid() * 37)


def free_port() -> int:
    """Return a port of this worker's share on which nothing listens; not the same one twice in a row."""
    for turn in itertools.islice(_turn, SHARE):
        port = FIRST + SHARE * _worker + turn % SHARE
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free port in {FIRST + SHARE * _worker} and the {SHARE - 1} after it")
