"""Faults, each against the real server: what breaks around it, or in it, must not break its answers.

No test here measures time; waiting ends when the thing is there, with limits far above what a busy machine needs.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.benchmarks import live_server as ls
from tests.benchmarks import odd_images as odd

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FIELDS = [("explainers", "concepts"), ("heatmaps", "none"), ("stability", "off")]
POLL_S = 0.5
PNG = {"content-type": "image/png"}


@pytest.fixture(scope="module")
def versions(tmp_path_factory, trained, concepts):
    """A store with digits versions 1 to 3, all explained; version 3 is broken on disk. Returns folder and address."""
    from auditor.plugins import attach, log_subject

    folder = tmp_path_factory.mktemp("faults")
    with ls.current_registry(f"sqlite:///{folder}/unused.db"):
        store = ls.use_store(folder / "store")
        for _ in range(3):
            attach(concepts, log_subject(trained[0], "digits", experiment="bench"), "concepts", subject=trained[0])
    spoil(store, 3)
    return folder, store


def spoil(store: str, version: int) -> None:
    """Change one byte of an attached explainer's tensors, as a bad disk or a stranger would."""
    client = registry(store)
    location = json.loads(client.get_model_version("digits", str(version)).tags["auditor.explainer.concepts"])[
        "location"
    ]
    source = client.get_model_version("digits", str(version)).source
    root = client.get_logged_model(source.removeprefix("models:/")).artifact_location
    address = location if location.startswith("file:") else f"{root}/{location}"
    (path,) = Path(unquote(urlsplit(address).path)).rglob("tensors.safetensors")
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def registry(store: str):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=store, registry_uri=store)


def point(store: str, alias: str, version: int) -> None:
    registry(store).set_registered_model_alias("digits", alias, str(version))


@pytest.fixture(scope="module")
def live(versions):
    """Two workers that follow the alias ``champion``, at version 1."""
    folder, store = versions
    point(store, "champion", 1)
    settings = {"workers": 2, "poll_s": POLL_S, "upload_timeout_s": 3, "log_requests": "false"}
    with ls.serve("models:/digits@champion", store, folder / "live", **settings) as server:
        ls.eventually(lambda: server.log.read_text().count("model served") == 2, "both workers are warm")
        yield server


def body_of(file: bytes) -> dict[str, object]:
    return {
        "image": base64.b64encode(file).decode(),
        "explainers": ["concepts"],
        "heatmaps": "none",
        "stability": "off",
    }


def version_of(server: ls.Live) -> str:
    status, body = server.post("/explain", body_of(ls.digit_files()[0]))
    assert status == 200, body
    return str(body["model"]["version"])


def all_at(server: ls.Live, version: str, n: int = 20) -> bool:
    """Whether n answers in a row, each over a connection of its own, come from the version."""
    return all(version_of(server) == version for _ in range(n))


def test_a_client_that_stalls_its_upload_gets_408_and_delays_no_other(live):
    stalled = []
    for _ in range(50):
        line = socket.create_connection(("127.0.0.1", live.port))
        line.sendall(
            b"POST /explain HTTP/1.1\r\nhost: localhost\r\ncontent-type: image/png\r\ncontent-length: 5000\r\n\r\nfew"
        )
        stalled.append(line)
    silent = [socket.create_connection(("127.0.0.1", live.port)) for _ in range(50)]  # not even a header
    assert all_at(live, "1", 10)
    for line in stalled:
        line.settimeout(300)
        head, _, body = line.recv(65536).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408"), head
        assert json.loads(body or line.recv(65536))["error"]["code"] == "upload_timeout"
    for line in stalled + silent:
        line.close()
    assert version_of(live) == "1"


def test_a_thousand_connections_at_once(live):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3000:
        pytest.skip(f"this machine allows {hard} open files, 3000 are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3000), hard))
    request = ls.multipart(live.port, "/explain", ls.digit_files()[1], FIELDS)

    async def one(go: asyncio.Event) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
        await go.wait()
        writer.write(request)
        status, body, _ = await ls.answer_of(reader)
        writer.close()
        return status, body

    async def all_of_them():
        go = asyncio.Event()
        tasks = [asyncio.create_task(one(go)) for _ in range(1000)]
        await asyncio.sleep(1)
        go.set()
        return await asyncio.wait_for(asyncio.gather(*tasks), 600)

    answers = asyncio.run(all_of_them())
    assert {status for status, _ in answers} <= {200, 429, 503}
    assert sum(status == 200 for status, _ in answers) >= 200, "the queue holds more than that"
    for status, body in answers:
        document = json.loads(body)
        assert (
            document["model"]["version"] == "1"
            if status == 200
            else set(document["error"]) == {"code", "message", "request_id"}
        )
    assert version_of(live) == "1"


def bomb(kind: str = "WEBP", **options: object) -> bytes:
    """Return a small file of 6320 x 6320 pixels, just below the limit."""
    return odd.saved(odd.Image.new("RGB", (6320, 6320)), kind, **options)


def test_small_files_of_many_pixels_stall_nobody(live):
    """Old code decoded files below 32 KiB on the event loop: one request held /livez up for 5 seconds."""
    image = base64.b64encode(bomb(lossless=True, method=0)).decode()
    assert len(image) < 100
    body = {"images": [image] * 8, "explainers": ["concepts"], "heatmaps": "none", "stability": "off"}
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(live.post("/explain_batch", body, timeout_s=300)[0]))]
    threads += [threading.Thread(target=lambda: answers.append(live.post("/explain", b"II*", PNG)[0]))]
    for thread in threads:
        thread.start()
    worst = 0.0
    while any(thread.is_alive() for thread in threads):
        began = time.perf_counter()
        assert live.get("/livez")[0] == 200
        worst = max(worst, time.perf_counter() - began)
        time.sleep(0.02)
    assert sorted(answers) == [200, 400]
    assert worst < 1.0  # on an idle machine .03; a decode on the loop takes several seconds
    assert version_of(live) == "1"


def test_headers_that_never_end_are_closed(live):
    """Old code kept such connections open without end."""
    late = [socket.create_connection(("127.0.0.1", live.port)) for _ in range(20)]
    for line in late:
        line.sendall(b"POST /explain HTTP/1.1\r\nhost: localhost\r\nx-")
        line.settimeout(300)
    for line in late:
        assert line.recv(65536).startswith(b"HTTP/1.1 408")
        line.close()
    assert version_of(live) == "1"


def test_large_json_costs_the_worker_nothing(live):
    """Old code read 15 MB of nested lists on the event loop: half a GB, and seconds without an answer."""
    before = sum(ls.rss_mb(pid) for pid in live.workers())
    body = b'{"instances": [[' + b"[0]," * 3_800_000 + b"[0]]]}"
    statuses: list[int] = []
    media = {"content-type": "application/json"}
    post = lambda: statuses.append(live.post("/v1/models/digits:explain", body, media, timeout_s=300)[0])  # noqa: E731
    thread = threading.Thread(target=post)
    thread.start()
    worst = 0.0
    while thread.is_alive():
        began = time.perf_counter()
        assert live.get("/livez")[0] == 200
        worst = max(worst, time.perf_counter() - began)
        time.sleep(0.02)
    assert statuses[0] in (413, 422)
    assert worst < 1.0
    assert sum(ls.rss_mb(pid) for pid in live.workers()) < before + 200


def mount(folder: Path, name: str, key: str) -> None:
    """Turn the link ``..data`` to a new folder of secrets, as Kubernetes does."""
    (folder / name).mkdir(parents=True)
    (folder / name / "keys").write_text(key + "\n")
    (folder / "..fresh").symlink_to(name)
    (folder / "..fresh").rename(folder / "..data")


def test_keys_mounted_as_a_secret_are_rotated_and_survive_a_new_worker(versions, tmp_path):
    """Old code answered 401 to the new key, and 500 to everything once a worker had been replaced."""
    folder, store = versions
    mount(tmp_path, "..1", "the-first-key-of-all")
    (tmp_path / "keys").symlink_to("..data/keys")

    def status_of(server: ls.Live, key: str) -> int:
        return server.get("/model", headers={"x-api-key": key})[0]

    with ls.serve("models:/digits/1", store, folder / "secret", api_keys=tmp_path / "keys") as server:
        assert status_of(server, "the-first-key-of-all") == 200
        mount(tmp_path, "..2", "the-second-key-of-all")
        shutil.rmtree(tmp_path / "..1")
        ls.eventually(lambda: status_of(server, "the-second-key-of-all") == 200, "the new key is taken")
        assert status_of(server, "the-first-key-of-all") == 401
        (worker,) = server.workers()
        os.kill(worker, signal.SIGKILL)
        ls.eventually(lambda: server.workers() not in ([], [worker]) and server.is_ready(), "a new worker")
        assert status_of(server, "the-second-key-of-all") == 200
        status, text = server.get("/metrics", headers={"x-api-key": "the-second-key-of-all"})
        assert status == 200
        assert "auditor_ready 1.0" in text, "the killed worker is not counted"


def test_when_the_supervisor_is_killed_nothing_is_left(versions):
    """Old code left a worker on the port and its metrics in shared memory."""
    folder, store = versions
    with ls.serve("models:/digits/1", store, folder / "orphan") as server:
        processes = server.processes()
        environment = Path(f"/proc/{server.workers()[0]}/environ").read_bytes().split(b"\0")
        (metrics,) = [v.partition(b"=")[2].decode() for v in environment if v.startswith(b"PROMETHEUS_MULTIPROC_DIR=")]
        assert Path(metrics).is_dir()
        assert len(processes) >= 4, "supervisor, worker and two for decoding"
        os.kill(processes[0], signal.SIGKILL)
        server.process.wait()
        ls.eventually(lambda: not any(ls.rss_mb(pid) for pid in processes), "every process has ended", 120)
        assert not Path(metrics).exists()
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", server.port))


def test_refused_callers_get_the_time_to_retry(versions):
    folder, store = versions
    with ls.serve("models:/digits/1", store, folder / "narrow", queue=1, max_batch=1, log_requests="false") as server:
        request = ls.multipart(server.port, "/explain", ls.digit_files()[1], FIELDS)

        async def head_of() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            writer.close()
            return head

        async def many() -> list[bytes]:
            return await asyncio.gather(*(head_of() for _ in range(200)))

        heads = asyncio.run(many())
    refused = [head for head in heads if head.startswith(b"HTTP/1.1 429")]
    assert refused, "200 at once must not fit into a queue of one"
    assert all(b"retry-after: " in head.lower() for head in refused)
    assert {head.split()[1] for head in heads} <= {b"200", b"429"}


def test_the_alias_moves_under_load(live, versions):
    _, store = versions
    requests = [ls.multipart(live.port, "/explain", f, FIELDS) for f in ls.digit_files()]
    with ls.under_load(live.port, requests, concurrency=4, keep=True) as load:
        point(store, "champion", 2)
        ls.eventually(lambda: all_at(live, "2"), "both workers serve version 2")
        point(store, "champion", 1)
        ls.eventually(lambda: all_at(live, "1"), "both workers serve version 1 again")
    assert load.lost == 0
    assert set(load.statuses) == {200}, load.statuses
    values = [json.loads(body)["model"]["version"] for body in load.bodies]
    assert set(values) == {"1", "2"}, "every answer says which version gave it"


def test_a_version_that_does_not_verify_is_never_served(live, versions):
    _, store = versions
    point(store, "champion", 3)
    try:
        ls.eventually(lambda: live.log.read_text().count("failed verification") >= 2, "both workers refuse version 3")
        assert all_at(live, "1")
        status, body = live.get("/metrics")
        assert status == 200
        failures = [line for line in body.splitlines() if line.startswith("auditor_verification_failures")]
        assert any(float(line.split()[-1]) >= 1 for line in failures), failures
    finally:
        point(store, "champion", 1)
    assert "Traceback" not in live.log.read_text()


def test_a_killed_worker_comes_back_under_load(live):
    before = live.workers()
    requests = [ls.multipart(live.port, "/explain", f, FIELDS) for f in ls.digit_files()]
    with ls.under_load(live.port, requests, concurrency=8) as load:
        os.kill(before[0], signal.SIGKILL)
        fresh = ls.eventually(lambda: [p for p in live.workers() if p not in before], "a new worker process")
        ls.eventually(lambda: ls.cpu_s(fresh[0]) > 1 and all_at(live, "1"), "the new worker answers")
    assert load.lost <= 8, "only what was in flight is lost"
    assert set(load.statuses) <= {200, 503}, load.statuses
    assert load.statuses[200] > 0
    ls.eventually(lambda: ls.run_load(live.port, requests, n=50, concurrency=8).statuses == {200: 50}, "all is well")
    assert before[1] in live.workers(), "the other one was not touched"


def test_with_one_worker_killed_the_waiting_are_answered_by_the_next(versions):
    folder, store = versions
    with ls.serve("models:/digits/1", store, folder / "single", log_requests="false") as server:
        (pid,) = server.workers()
        os.kill(pid, signal.SIGKILL)
        ls.eventually(lambda: server.workers() not in ([], [pid]), "a new worker")
        server.wait_ready()
        assert version_of(server) == "1"


def test_a_broken_model_at_the_start_is_not_served_and_says_so(versions):
    folder, store = versions
    with ls.serve("models:/digits/3", store, folder / "broken", wait=False) as server:
        ls.eventually(lambda: "failed verification" in server.log.read_text(), "it says why")
        assert not server.is_ready()
        status, body = server.post("/explain", body_of(ls.digit_files()[0]))
        assert (status, body["error"]["code"]) == (503, "not_ready")
        assert str(folder) not in json.dumps(body), "callers do not learn where things lie"
        assert "Traceback" not in server.log.read_text()


@contextmanager
def mlflow_at(port: int, folder: Path):
    """A real MLflow server on a port, with its artifacts proxied."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/m.db", "--artifacts-destination", f"{folder}/artifacts"]
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_TRACKING_URI": "", "MLFLOW_REGISTRY_URI": ""}
    with ls.started(command, port, folder, environment, wait=False) as server:
        ls.eventually(lambda: _healthy(server), "MLflow answers")
        yield server


def _healthy(server: ls.Live) -> bool:
    assert server.process.poll() is None, server.tail()
    try:
        return server.get("/health", timeout_s=5)[0] == 200
    except OSError:
        return False


def test_mlflow_out_of_reach_at_the_start_and_while_serving(tmp_path, trained, concepts):
    import mlflow

    from auditor.plugins import attach, log_subject

    port = ls.free_port()
    address = f"http://127.0.0.1:{port}"
    with mlflow_at(port, tmp_path), ls.current_registry(address):
        attach(concepts, log_subject(trained[0], "digits"), "concepts", subject=trained[0])
        mlflow.MlflowClient().set_registered_model_alias("digits", "champion", "1")
    with ls.serve("models:/digits@champion", address, tmp_path / "serve", wait=False, poll_s=POLL_S) as server:
        ls.eventually(lambda: server.log.read_text().count("MLflow cannot be reached") >= 2, "it says so and retries")
        assert not server.is_ready()
        status, body = server.post("/explain", body_of(ls.digit_files()[0]))
        assert (status, body["error"]["code"]) == (503, "not_ready")
        told_before = server.log.read_text().count("MLflow cannot be reached")
        with mlflow_at(port, tmp_path):
            server.wait_ready()
            assert version_of(server) == "1"
        ls.eventually(
            lambda: server.log.read_text().count("MLflow cannot be reached") > told_before, "the worker noticed"
        )
        assert all_at(server, "1", 5), "it serves on"
        assert server.is_ready()
        assert "Traceback" not in server.log.read_text()


@contextmanager
def small_disk(folder: Path, size: str):
    """A file system of its own that is soon full."""
    folder.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("a small file system can be mounted by root only")
    done = subprocess.run([mount, "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"tmpfs cannot be mounted here: {done.stderr.decode()[:200]}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def test_a_full_disk_for_temporary_files(versions, tmp_path):
    folder, store = versions
    point(store, "beta", 1)
    with small_disk(tmp_path / "tmp", "64m") as disk:
        port = ls.free_port()
        command = [*ls.AUDITOR, "serve", "models:/digits@beta", "--port", str(port), "--poll-s", str(POLL_S)]
        variables = {**ls.at(store), "TMPDIR": str(disk)}
        with ls.started(command, port, folder / "full", variables) as server:
            assert version_of(server) == "1"
            workers = server.workers()
            fill(disk)
            large = odd.saved(odd.Image.new("RGB", (1500, 1500), "red"), "BMP")  # 6.7 MB
            for _ in range(3):
                status, body = server.post("/explain?heatmaps=none", large, {"content-type": "image/bmp"})
                assert status == 200, body
                form = ls.run_load(port, [ls.multipart(port, "/explain", large, FIELDS)], n=2, concurrency=2)
                assert form.statuses == {200: 2}
            image = base64.b64encode(ls.digit_files()[0]).decode()
            for mode in ("off", "fast", "full"):  # much that was not counted before: the metrics need room too
                for style in ("none", "array", "png"):
                    status, body = server.post("/explain", {"image": image, "stability": mode, "heatmaps": style})
                    assert status == 200, body
            assert server.post("/explain", b"junk", {"content-type": "image/png"})[0] == 400
            assert server.post("/explain_batch", {"images": [image]})[0] == 200
            assert server.post("/predict", {"image": image})[0] == 200
            values = [server.get(path)[0] for path in ("/ui/", "/gallery/concepts", "/model", "/nosuch", "/metrics")]
            assert values == [200, 200, 200, 404, 200]
            point(store, "beta", 2)  # to load it needs room
            assert all(version_of(server) in ("1", "2") for _ in range(30))
            assert server.workers() == workers, server.tail()


def fill(disk: Path) -> None:
    """Leave no byte free."""
    with (disk / "ballast").open("wb", buffering=0) as ballast:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    ballast.write(bytes(size))
            except OSError:
                continue
