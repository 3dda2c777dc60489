"""Launch: checks what can be checked at once, prepares the environment of the workers, and runs BentoML's server."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from auditor.errors import ModelError, OptionError, RegistryError
from auditor.service import library_internals
from auditor.service.host_check import EVERY
from auditor.service.json_logs import log_event
from auditor.service.settings import Settings, as_variables, from_environment, to_environment
from auditor.service.supervisor import VARIABLE

SERVICE = "auditor.service.service:AuditorService"
WORKER_CHECK_S = 2.0
PREFIX = "auditor-metrics-"
YOUNG_S = 24 * 3600.0  # what is younger is left alone, locked or not
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

        Keys(settings.api_keys).check()
        # absolute, but not resolved: mounted secrets are links that move to another folder when they change
        settings = settings.model_copy(update={"api_keys": Path(os.path.abspath(settings.api_keys))})  # noqa: PTH100
    from auditor.service.oidc import check_oidc
    from auditor.service.tracing import check_exporter

    check_oidc(settings)
    check_exporter(settings)
    _check_port(host, port)
    _check_model(model)
    remove_left_folders()
    metrics = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_memory_folder()))
    try:
        lock = _lock(metrics)
        os.environ.update(worker_environment(settings.threads, metrics))
        os.environ[VARIABLE] = str(os.getpid())
        os.environ.update(to_environment(settings))
        log_event("info", "serving", model=model, address=f"http://{host}:{port}", page=f"http://{host}:{port}/ui")
        log_what_is_open(settings, host)
        library_internals.use_metrics_folder(metrics)
        library_internals.configure_logging()
        library_internals.check_workers_every(WORKER_CHECK_S)
        library_internals.serve(SERVICE, socket.gethostbyname(host), port)
    finally:
        shutil.rmtree(metrics, ignore_errors=True)
        _lock_file(metrics).unlink(missing_ok=True)
        os.close(lock)


def log_what_is_open(settings: Settings, host: str = "") -> list[str]:
    """Log in one loud line what strangers may do; returns the sentences."""
    sentences = []
    if not settings.is_guarded:
        who = "every user of this machine" if is_loopback(host) else f"everybody who can reach {host or 'this server'}"
        sentences.append(f"no key is asked for: {who} may ask (--api-keys FILE, --oidc-issuer URL)")
    if EVERY in settings.allowed_hosts.split(","):
        sentences.append("any Host is answered, so other sites' pages may read this server (--allowed-hosts)")
    if EVERY in settings.allowed_origins.split(","):
        sentences.append("pages of every site may ask (--allowed-origins)")
    if settings.allow_pickle:
        sentences.append("models stored as pickles are loaded, which may run code (--no-allow-pickle)")
    if sentences:
        log_event("warning", "OPEN: " + "; ".join(sentences))
    return sentences


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine only.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0"), is_loopback("")
    (True, True, False, False)
    """
    try:
        return ipaddress.ip_address(socket.gethostbyname(host) if host else "0.0.0.0").is_loopback
    except (OSError, ValueError):
        return False


def remove_left_folders() -> None:
    """Remove metrics of servers that were killed: nobody holds the lock of their folder any more."""
    for parent in {Path(folder) for folder in (_memory_folder(), tempfile.gettempdir()) if folder}:
        for folder in parent.glob(f"{PREFIX}*"):
            try:
                if folder.stat().st_uid != os.getuid() or time.time() - folder.stat().st_mtime < YOUNG_S:
                    continue
                if folder.suffix == ".lock":  # of a folder that is gone: nobody will look for it again
                    folder = folder.with_suffix("")
                elif not folder.is_dir():
                    continue
                os.close(_lock(folder))
            except OSError:  # in use, or just gone
                continue
            shutil.rmtree(folder, ignore_errors=True)
            _lock_file(folder).unlink(missing_ok=True)


def _lock(folder: Path) -> int:
    """Return a descriptor that holds a folder for as long as this process lives; OSError when another has it."""
    descriptor = os.open(_lock_file(folder), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _lock_file(folder: Path) -> Path:
    """Return the file beside a folder that is locked for it; BentoML makes the folder itself anew when it starts."""
    return folder.with_name(folder.name + ".lock")


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
