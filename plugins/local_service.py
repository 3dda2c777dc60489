"""Local service: explanation services that run as background processes of this machine, remembered in a folder.

Per deployment there is ``<name>.json`` (process, port, model, options) and ``<name>.log``. A lock makes two callers at
once safe. A process counts as ours only when its start time is the remembered one, since process ids are used again:
nothing else is ever stopped, and a deployment whose process has gone is ``stopped`` and may be created again.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from auditor.errors import ModelError, OptionError, RegistryError
from auditor.service import settings

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
SERVE = (sys.executable, "-c", "from auditor.cli import main; main()", "serve")
NOT_SETTINGS = ("host", "port", "start_timeout_s")
CONFIG = (*NOT_SETTINGS, *(option.name for option in settings.options()))


@dataclass(frozen=True, slots=True)
class LocalService:
    """One deployment on this machine."""

    name: str
    model_uri: str
    host: str
    port: int
    pid: int
    started: str  # start time of the process, as the system reports it
    created: str
    config: dict[str, str]
    log: str

    @property
    def address(self) -> str:
        """Return where it answers."""
        return f"http://{'127.0.0.1' if self.host in ('0.0.0.0', '::') else self.host}:{self.port}"

    @property
    def runs(self) -> bool:
        """Whether its process is still the one that was started."""
        return bool(self.started) and start_time(self.pid) == self.started

    def to_json(self) -> dict[str, Any]:
        """Return what ``mlflow deployments get`` prints of it."""
        return {
            "name": self.name,
            "status": ("ready" if is_ready(self.address) else "starting") if self.runs else "stopped",
            "model_uri": self.model_uri,
            "address": self.address,
            "pid": self.pid,
            "created": self.created,
            "config": self.config,
            "log": self.log,
        }


class LocalServices:
    """All deployments remembered in a folder."""

    def __init__(self, folder: Path | None = None, serve: Sequence[str] | None = None) -> None:
        self.folder = folder if folder is not None else default_folder()
        self._serve = tuple(serve if serve is not None else SERVE)

    def start(self, name: str, model_uri: str, config: Mapping[str, Any]) -> LocalService:
        """Start a service and return when it is ready; what goes wrong on the way leaves nothing behind."""
        options = check_config(config)
        timeout_s = _seconds(options, "start_timeout_s", START_TIMEOUT_S)
        with self._lock():
            running = self.find(name)
            if running is not None and running.runs:
                raise OptionError(
                    f"deployment {name}: there is one already, of {running.model_uri} at {running.address}; "
                    "delete it or choose another name."
                )
            service, process = self._spawn(name, model_uri, options)
        try:
            self._wait(service, process, timeout_s)
        except BaseException:
            self._end(service)
            self._state(name).unlink(missing_ok=True)
            raise
        return service

    def stop(self, name: str) -> bool:
        """Stop a service and forget it; returns whether there was one."""
        with self._lock():
            service = self.find(name)
            if service is None:
                return False
            self._end(service)
            self._state(name).unlink(missing_ok=True)
            Path(service.log).unlink(missing_ok=True)
            return True

    def find(self, name: str) -> LocalService | None:
        """Return a deployment by name; a state file that cannot be read counts as none."""
        from auditor.plugins.registry.attachments import check_name

        try:
            state = json.loads(self._state(check_name(name)).read_text(encoding="utf-8"))
            return LocalService(**state)
        except (OSError, ValueError, TypeError) as error:
            if isinstance(error, OptionError):
                raise
            return None

    def get(self, name: str) -> LocalService:
        """Return a deployment by name, or an error that says which there are."""
        service = self.find(name)
        if service is None:
            names = ", ".join(other.name for other in self.all()) or "none"
            raise ModelError(f"deployment {name}: there is none of this name; there are: {names}.")
        return service

    def running(self, name: str) -> LocalService:
        """Return a deployment that runs, or an error."""
        service = self.get(name)
        if not service.runs:
            raise RegistryError(f"deployment {name}: its service has stopped; see {service.log}, then create it again.")
        return service

    def all(self) -> list[LocalService]:
        """Return every deployment, sorted by name."""
        services = (self.find(path.stem) for path in sorted(self.folder.glob("*.json")))
        return [service for service in services if service is not None]

    def command(self, model_uri: str, config: Mapping[str, str], host: str, port: int) -> list[str]:
        """Return the command that serves a model."""
        command = [*self._serve, model_uri, "--host", host, "--port", str(port)]
        for option in settings.options():
            if option.name in config:
                command += option.flags(config[option.name])
        return command

    def _spawn(
        self, name: str, model_uri: str, options: dict[str, str]
    ) -> tuple[LocalService, subprocess.Popen[bytes]]:
        host = options.get("host", "127.0.0.1")
        used_ports = {service.port for service in self.all() if service.runs}
        port = _port(options, host, used_ports)
        log = self.folder / f"{name}.log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                self.command(model_uri, options, host, port),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=environment(),
                start_new_session=True,  # its own group: it outlives us, and is stopped with all its workers
            )
        stamp = datetime.now(timezone.utc).isoformat(timespec="seconds")
        started = start_time(process.pid)
        service = LocalService(name, model_uri, host, port, process.pid, started, stamp, options, str(log))
        temporary = self._state(name).with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(asdict(service), indent=1), encoding="utf-8")
        temporary.replace(self._state(name))
        return service, process

    def _wait(self, service: LocalService, process: subprocess.Popen[bytes], timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while not is_ready(service.address):
            if process.poll() is not None:
                raise ModelError(
                    f"deployment {service.name}: the service ended at once: {last_line(Path(service.log))}"
                )
            if time.monotonic() > end:
                raise RegistryError(
                    f"deployment {service.name}: the service was not ready within {timeout_s:.0f} s "
                    f"(set start_timeout_s for longer); it said: {last_line(Path(service.log))}"
                )
            time.sleep(0.2)
        if process.poll() is not None:  # another process answers at this address
            raise ModelError(f"deployment {service.name}: the service ended at once: {last_line(Path(service.log))}")

    def _end(self, service: LocalService) -> None:
        """Stop the process group of a service, if it is still the one that was started."""
        if not service.runs:
            return
        for sent, patience_s in ((signal.SIGTERM, STOP_TIMEOUT_S), (signal.SIGKILL, STOP_TIMEOUT_S)):
            try:
                os.killpg(service.pid, sent)
            except ProcessLookupError:
                return
            end = time.monotonic() + patience_s
            while time.monotonic() < end:
                if not service.runs:
                    return
                time.sleep(0.05)

    def _state(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _lock(self) -> Any:
        from filelock import FileLock

        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise OptionError(
                f"{self.folder}: {error.strerror}; set AUDITOR_DEPLOYMENTS to a folder of yours."
            ) from None
        return FileLock(str(self.folder / ".lock"))


def default_folder() -> Path:
    """Return where deployments are remembered: AUDITOR_DEPLOYMENTS, else the user's state folder."""
    if named := os.environ.get("AUDITOR_DEPLOYMENTS"):
        return Path(named)
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "auditor" / "deployments"


def check_config(config: Mapping[str, Any]) -> dict[str, str]:
    """Return options of ``auditor serve`` as strings; unknown ones are refused."""
    unknown = sorted(set(config) - set(CONFIG) - set(settings.OLD_NAMES))
    if unknown:
        raise OptionError(f"config: unknown {', '.join(unknown)}; there are: {', '.join(sorted(CONFIG))}.")
    texts = {settings.new_name(key): str(config[key]).strip() for key in sorted(config)}
    for key, value in texts.items():
        if not value or value.startswith("-"):
            raise OptionError(f"config: {key} must have a value, got {value!r}.")
    return texts


def start_time(pid: int) -> str:
    """Return when a process was started, as the system reports it; empty when there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except OSError:
        if Path("/proc/self/stat").exists():
            return ""
    process = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state, _, since = process.stdout.strip().partition(" ")
    return "" if state.startswith("Z") else since.strip()


def is_ready(address: str) -> bool:
    """Whether a service says that it can answer."""
    try:
        with urllib.request.urlopen(f"{address}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def environment() -> dict[str, str]:
    """Return our environment with the tracking server and registry that this process uses."""
    import mlflow

    return {
        **os.environ,
        "MLFLOW_TRACKING_URI": mlflow.get_tracking_uri(),
        "MLFLOW_REGISTRY_URI": mlflow.get_registry_uri(),
    }


def last_line(log: Path) -> str:
    """Return the last line of a log, where ``auditor serve`` writes its error."""
    try:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    return lines[-1].removeprefix("auditor: error: ")[:300] if lines else "it said nothing."


def _port(options: Mapping[str, str], host: str, used: set[int]) -> int:
    option = options.get("port")
    if option is not None:
        if not option.isascii() or not option.isdigit() or not 0 < int(option) < 65536:
            raise OptionError(f"config: port must be 1 to 65535, got {option}.")
        if int(option) in used:
            raise OptionError(f"config: port {option} belongs to another deployment; choose another.")
        return int(option)
    while True:
        with socket.socket() as free:
            try:
                free.bind((host, 0))
            except OSError as error:
                raise OptionError(f"config: host {host} is no address of this machine ({error.strerror}).") from None
            port = int(free.getsockname()[1])
        if port not in used:
            return port


def _seconds(options: Mapping[str, str], key: str, default: float) -> float:
    try:
        value = float(options.get(key, default))
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise OptionError(f"config: {key} must be seconds above 0, got {options[key]}.")
    return value
