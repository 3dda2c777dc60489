"""Several servers behind one address: nginx as docs/examples/nginx.conf has it, a replica killed, a rolling restart.

.venv/bin/python -m pytest tests/service/test_replicas.py -m slow
"""

import os
import re
import shutil
import signal
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.benchmarks import live_server as ls

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed"),
]

CONFIG = Path(__file__).parent.parent.parent / "docs" / "examples" / "nginx.conf"
FIELDS = [("explainers", "concepts"), ("heatmaps", "none"), ("stability", "off")]
KEYS, CALLERS = ("first-key-of-the-tests", "second-key-of-the-tests"), 6


@pytest.fixture(scope="module")
def registry(tmp_path_factory, trained, concepts):
    """A store with two versions, version 1 the champion."""
    from auditor.plugins import attach, log_subject

    folder = tmp_path_factory.mktemp("replicas")
    with ls.current_registry(f"sqlite:///{folder}/unused.db"):
        store = ls.use_store(folder / "store")
        for _ in range(2):
            attach(concepts, log_subject(trained[0], "digits", experiment="bench"), "concepts", subject=trained[0])
    return folder, store


def point(store, version):
    from mlflow import MlflowClient

    MlflowClient(tracking_uri=store, registry_uri=store).set_registered_model_alias("digits", "champion", version)


def replica(registry, keys, port, name):
    folder, store = registry
    command = [*ls.AUDITOR, "serve", "models:/digits@champion", "--port", str(port)]
    settings = {"AUDITOR_API_KEYS": str(keys), "AUDITOR_POLL_S": "0.5", "AUDITOR_LOG_REQUESTS": "false"}
    settings["AUDITOR_DECODE_TIMEOUT_S"] = "60"  # a busy machine is none of the service's faults
    return ls.started(command, port, folder / name, {**ls.at(store), **settings})


@contextmanager
def proxy(folder, ports):
    """nginx with the example's configuration, at another port and before these servers."""
    port = ls.free_port()
    text = CONFIG.read_text().replace("127.0.0.1:3000", f"127.0.0.1:{port}")
    for k, own in enumerate(ports, 1):
        text = text.replace(f"127.0.0.1:300{k}", f"127.0.0.1:{own}")
    assert not re.search(r"127\.0\.0\.1:300\d", text)
    file = folder / "nginx.conf"
    file.write_text(f"pid {folder}/nginx.pid;\nerror_log {folder}/nginx.log;\n{text}")
    with subprocess.Popen(["nginx", "-p", str(folder), "-c", str(file), "-g", "daemon off;"]) as process:
        try:
            ls.eventually(lambda: ls.Live(port, process, folder / "nginx.log").is_ready(), "nginx answers")
            yield port
        finally:
            process.terminate()


def requests(port, key):
    whole = [ls.multipart(port, "/explain", f, FIELDS) for f in ls.digit_files()]
    return [body.replace(b"\r\n", f"\r\nx-api-key: {key}\r\n".encode(), 1) for body in whole]


def served_version(port, key):
    live = ls.Live(port, None, None)
    return live.get("/model", headers={"x-api-key": key})[1].get("version")


def test_replicas_behind_one_address(registry, tmp_path):
    folder, store = registry
    point(store, "1")
    keys, ports = tmp_path / "keys", [ls.free_port() for _ in range(3)]
    keys.write_text(KEYS[0] + "\n")
    with ExitStack() as stack:
        replicas = [stack.enter_context(replica(registry, keys, p, f"replica-{k}")) for k, p in enumerate(ports)]
        port = stack.enter_context(proxy(folder, ports))
        calls = requests(port, KEYS[0])

        with ls.under_load(port, calls, concurrency=CALLERS) as load:  # one is killed, with all its processes
            ls.eventually(lambda: all(live.cpu_s() > 0 for live in replicas), "all replicas work")
            os.killpg(replicas[0].process.pid, signal.SIGKILL)
            replicas[0].process.wait()
            ls.eventually(lambda: ls.run_load(port, calls, n=40, concurrency=2).statuses == {200: 40}, "others go on")
        failed = load.lost + sum(n for status, n in load.statuses.items() if status != 200)
        assert failed <= CALLERS, (load.lost, load.statuses)
        assert load.statuses[200] > 40

        with ls.under_load(port, calls, concurrency=2) as load:  # another one comes in its stead, then each in turn
            stack.enter_context(replica(registry, keys, ports[0], "replica-0b"))
            for k in (1, 2):
                ls.stop(replicas[k])
                stack.enter_context(replica(registry, keys, ports[k], f"replica-{k}b"))
        assert load.lost == 0
        assert set(load.statuses) == {200}, load.statuses

        with ls.under_load(port, calls, concurrency=2) as load:  # the alias moves, a key is added
            point(store, "2")
            keys.write_text("\n".join(KEYS) + "\n")
            ls.eventually(lambda: {served_version(p, KEYS[1]) for p in ports} == {"2"}, "all serve version 2")
        assert load.lost == 0
        assert set(load.statuses) == {200}, load.statuses
        assert ls.Live(port, None, None).get("/model", headers={"x-api-key": "nobody's"})[0] == 401
