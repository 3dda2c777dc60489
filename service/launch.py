"""Serving: checks what can be checked at once, prepares the environment of the workers, and runs BentoML's server."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from auditor.errors import ModelError, OptionError, RegistryError
from auditor.service.json_logs import tell
from auditor.service.settings import from_environment, to_environment

SERVICE = "auditor.service.service:AuditorService"
WORKER_CHECK_S = 2.0
NEEDED = "auditor serve needs BentoML; install it with: pip install 'mlflow-auditor[serve]'."


def run_server(model: str, *, host: str, port: int, **options: Any) -> None:
    """Serve until stopped. What is wrong with the options or the model's name is told before anything starts."""
    settings = from_environment({**os.environ, "AUDITOR_MODEL": model, **_as_variables(options)})
    try:
        import bentoml  # noqa: F401
    except ImportError:
        raise OptionError(NEEDED) from None
    if settings.api_keys is not None:
        from auditor.service.keys import Keys

        Keys(settings.api_keys)
        settings = settings.model_copy(update={"api_keys": settings.api_keys.resolve()})
    from auditor.service.tracing import check_exporter

    check_exporter(settings)
    _check_port(host, port)
    _check_model(model)
    metrics = Path(tempfile.mkdtemp(prefix="auditor-metrics-", dir=_memory_folder()))
    try:
        os.environ.update(worker_environment(settings.threads, metrics))
        os.environ.update(to_environment(settings))
        tell("info", "serving", model=model, address=f"http://{host}:{port}", page=f"http://{host}:{port}/ui")
        _run_bentoml(host, port, metrics)
    finally:
        shutil.rmtree(metrics, ignore_errors=True)


def _memory_folder() -> str | None:
    """Return a folder in memory for the metrics, where there is one: a full disk must not stop new workers."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        return None
    found = os.statvfs(shared)
    return str(shared) if found.f_bavail * found.f_frsize > 64 << 20 else None


def worker_environment(threads: int, metrics: Path) -> dict[str, str]:
    """Return what every worker's environment needs beside the settings.

    Metrics live in a folder of this server alone: two servers on one machine would wipe each other's. Few malloc arenas
    keep memory flat over many requests, and threads that wait passively leave the cores to others.
    """
    import mlflow

    fixed = {
        "PROMETHEUS_MULTIPROC_DIR": str(metrics),
        "BENTOML_DO_NOT_TRACK": "True",
        "MLFLOW_TRACKING_URI": mlflow.get_tracking_uri(),
        "MLFLOW_REGISTRY_URI": mlflow.get_registry_uri(),
    }
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "MALLOC_ARENA_MAX": "2",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    return {**{k: v for k, v in defaults.items() if k not in os.environ}, **fixed}


def _run_bentoml(host: str, port: int, metrics: Path) -> None:
    from _bentoml_impl.loader import load
    from _bentoml_impl.server import serve_http
    from bentoml._internal.configuration.containers import BentoMLContainer
    from bentoml._internal.log import configure_server_logging
    from bentoml._internal.utils import circus

    BentoMLContainer.prometheus_multiproc_dir.set(str(metrics))  # its own is one for the machine, wiped at each start
    configure_server_logging()  # type: ignore[no-untyped-call]
    logging.getLogger("bentoml").setLevel(logging.WARNING)
    load(SERVICE, working_dir=".").inject_config()
    # BentoML looks for dead workers every 10 seconds; with a new one's start that would keep callers waiting for 20.
    circus.create_standalone_arbiter = partial(circus.create_standalone_arbiter, check_delay=WORKER_CHECK_S)
    serve_http(SERVICE, working_dir=".", host=socket.gethostbyname(host), port=port)


def _check_port(host: str, port: int) -> None:
    try:
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port))
    except OSError as error:
        raise OptionError(f"--port {port}: cannot listen on {host} ({error.strerror}); choose another port.") from None


def _check_model(model: str) -> None:
    """Refuse a wrong name at once; a server out of reach is told, and the workers try again."""
    import mlflow

    from auditor.plugins.registry.location import resolve

    try:
        place = resolve(model)
    except RegistryError as error:
        if not mlflow.get_tracking_uri().startswith("http"):
            raise
        tell("error", "MLflow cannot be reached; the server starts and tries again", reason=str(error))
        return
    if not any(key.startswith("auditor.explainers.base.") for key in place.tags):
        tell("warning", f"nothing is attached to {place.label}; only predictions are served", model=model)
    if place.name == "" and model.startswith("models:/"):
        raise ModelError(f"model {model}: serve a version of a registered model.")


def _as_variables(options: dict[str, Any]) -> dict[str, str]:
    return {f"AUDITOR_{k.upper()}": str(v).lower() if isinstance(v, bool) else str(v) for k, v in options.items()}
