"""Launch: checks what can be checked at once, prepares the environment of the workers, and runs BentoML's server."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

from auditor.errors import ModelError, OptionError, RegistryError
from auditor.service import library_internals
from auditor.service.json_logs import log_event
from auditor.service.settings import as_variables, from_environment, to_environment

SERVICE = "auditor.service.service:AuditorService"
WORKER_CHECK_S = 2.0
NEEDED = "auditor serve needs BentoML; install it with: pip install 'mlflow-auditor[serve]'."


def run_server(model: str, *, host: str, port: int, **options: Any) -> None:
    """Serve until stopped. What is wrong with the options or the model's name is an error before anything starts."""
    settings = from_environment({**os.environ, **as_variables({"model": model, **options})})
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
        log_event("info", "serving", model=model, address=f"http://{host}:{port}", page=f"http://{host}:{port}/ui")
        library_internals.use_metrics_folder(metrics)
        library_internals.configure_logging()
        library_internals.check_workers_every(WORKER_CHECK_S)
        library_internals.serve(SERVICE, socket.gethostbyname(host), port)
    finally:
        shutil.rmtree(metrics, ignore_errors=True)


def _memory_folder() -> str | None:
    """Return a folder in memory for the metrics, where there is one: a full disk must not stop new workers."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        return None
    space = os.statvfs(shared)
    return str(shared) if space.f_bavail * space.f_frsize > 64 << 20 else None


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


def _check_port(host: str, port: int) -> None:
    try:
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port))
    except OSError as error:
        raise OptionError(f"--port {port}: cannot listen on {host} ({error.strerror}); choose another port.") from None


def _check_model(model: str) -> None:
    """Refuse a wrong name at once; a server out of reach is logged, and the workers try again."""
    import mlflow

    from auditor.plugins.registry.location import resolve
    from auditor.plugins.registry.tags import explainer_names

    try:
        version = resolve(model)
    except RegistryError as error:
        if not mlflow.get_tracking_uri().startswith("http"):
            raise
        log_event("error", "MLflow cannot be reached; the server starts and tries again", reason=str(error))
        return
    if not explainer_names(version.tags):
        log_event("warning", f"nothing is attached to {version.label}; only predictions are served", model=model)
    if version.name == "" and model.startswith("models:/"):
        raise ModelError(f"model {model}: serve a version of a registered model.")
