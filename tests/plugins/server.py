"""A real ``mlflow server`` in a folder of its own, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from tests.free_port import free_port


@contextmanager
def mlflow_server(folder: Path, *options: str, health: str = "/health", **variables: str):
    """Start a server with SQLite and proxied artifacts; yield its address; stop it and its children at the end."""
    port = free_port()
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    environment.pop("MLFLOW_TRACKING_URI", None)
    environment.update(variables)
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += [
        "--backend-store-uri",
        f"sqlite:///{folder}/m.db",
        "--artifacts-destination",
        f"{folder}/artifacts",
        *options,
    ]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{address}{health}", timeout=2).read()
                break
            except OSError:
                assert server.poll() is None, (folder / "server.log").read_text()[-2000:]
                time.sleep(0.5)
        yield address
    finally:
        os.killpg(server.pid, 15)
        server.wait(30)
