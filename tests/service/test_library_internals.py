"""One test per private name: it is there, it does what it is used for, and when it is gone a sentence says so."""

import importlib
import inspect
import logging
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from auditor.errors import OptionError
from auditor.service import library_internals as internals

pytest.importorskip("bentoml")
ROOT = Path(__file__).parents[2]
CONTAINERS = "bentoml._internal.configuration.containers"
REACHES = [
    ("_bentoml_impl.loader", "load"),
    ("_bentoml_impl.server", "serve_http"),
    ("bentoml._internal.log", "configure_server_logging"),
    ("bentoml._internal.configuration.containers", "BentoMLContainer"),
    ("bentoml._internal.utils.circus", "create_standalone_arbiter"),
    ("bentoml._internal.server.http.traffic", "TimeoutMiddleware"),
    ("prometheus_client.mmap_dict", "_INITIAL_MMAP_SIZE"),
    ("uvicorn.protocols.http.h11_impl", "H11Protocol"),
]


@pytest.mark.parametrize(("module", "name"), REACHES)
def test_the_name_is_there(module, name):
    assert getattr(importlib.import_module(module), name) is not None


def test_the_versions_tried_are_the_ones_installed_here():
    assert {package: version(package) for package in internals.TRIED} == internals.TRIED


def test_the_server_is_loaded_configured_and_run(monkeypatch):
    calls = []

    class Service:
        def inject_config(self):
            calls.append("configured")

    loader, server = importlib.import_module("_bentoml_impl.loader"), importlib.import_module("_bentoml_impl.server")
    takes = inspect.signature(server.serve_http).parameters
    assert {"bento_identifier", "working_dir", "host", "port"} <= set(takes)
    assert "working_dir" in inspect.signature(loader.load).parameters
    monkeypatch.setattr(loader, "load", lambda name, working_dir: calls.append(name) or Service())
    monkeypatch.setattr(server, "serve_http", lambda name, **options: calls.append((name, options)))
    internals.serve("a:B", "127.0.0.1", 3000)
    assert calls == ["a:B", "configured", ("a:B", {"working_dir": ".", "host": "127.0.0.1", "port": 3000})]


def test_bentomls_log_is_set_up_for_warnings_only():
    code = (
        "import logging; from auditor.service.library_internals import configure_logging; configure_logging(); "
        "log = logging.getLogger('bentoml'); assert log.level == logging.WARNING; assert log.handlers"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_metrics_folder_is_the_one_given(tmp_path):
    container = importlib.import_module("bentoml._internal.configuration.containers").BentoMLContainer
    internals.use_metrics_folder(tmp_path)
    try:
        assert container.prometheus_multiproc_dir.get() == str(tmp_path)
    finally:
        container.prometheus_multiproc_dir.reset()


def test_the_tracer_provider_is_bentomls():
    assert callable(internals.tracer_provider().get_tracer)


def test_the_arbiter_looks_for_dead_workers_as_often_as_asked(monkeypatch):
    circus = importlib.import_module("bentoml._internal.utils.circus")
    monkeypatch.setattr(circus, "create_standalone_arbiter", circus.create_standalone_arbiter)  # put back afterwards
    made = []
    monkeypatch.setattr(circus, "Arbiter", lambda watchers, **options: made.append(options))
    internals.check_workers_every(2.5)
    circus.create_standalone_arbiter([])
    assert made[0]["check_delay"] == 2.5
    used_late = re.compile(r"^ +from bentoml\._internal\.utils\.circus import create_standalone_arbiter", re.M)
    assert used_late.search(inspect.getsource(importlib.import_module("_bentoml_impl.server.serving").serve_http))


class Timeout:
    """Of the shape of BentoML's."""

    def __init__(self, app, timeout):
        raise AssertionError("BentoML's time-out is still there")


def test_bentomls_timeout_is_of_the_shape_that_is_replaced():
    script = (
        "import inspect; from bentoml._internal.server.http.traffic import TimeoutMiddleware as t; "
        "assert list(inspect.signature(t).parameters) == ['app', 'timeout']"
    )
    subprocess.run([sys.executable, "-c", script], check=True)  # here it may have been replaced already


def test_bentomls_timeout_does_nothing(monkeypatch):
    import asyncio

    from bentoml._internal.server.base_app import BaseAppFactory

    traffic = importlib.import_module("bentoml._internal.server.http.traffic")
    monkeypatch.setattr(traffic, "TimeoutMiddleware", Timeout)  # put back afterwards
    internals.remove_request_timeout()

    class Factory(BaseAppFactory):
        name = "test"
        is_main = True

        def __init__(self):
            super().__init__(timeout=1, max_concurrency=None)

    (middleware,) = Factory().middlewares
    called = []

    async def app(scope, receive, send):
        called.append((scope, receive, send))

    asyncio.run(middleware.cls(app, **middleware.kwargs)({"type": "http"}, 1, 2))
    assert called == [({"type": "http"}, 1, 2)]


def test_a_timeout_of_another_shape_is_left_in_place(monkeypatch, caplog):
    traffic = importlib.import_module("bentoml._internal.server.http.traffic")

    class Other:
        def __init__(self, app, seconds):
            pass

    monkeypatch.setattr(traffic, "TimeoutMiddleware", Other)
    with caplog.at_level(logging.WARNING, logger=internals.__name__):
        internals.remove_request_timeout()
    assert traffic.TimeoutMiddleware is Other
    assert "takes other arguments" in caplog.text


def test_files_of_metrics_have_their_size_from_the_start(tmp_path):
    code = (
        "from auditor.service.library_internals import reserve_metric_files; reserve_metric_files(123456); "
        "from prometheus_client import Counter; Counter('x', 'x').inc()"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    )
    assert {path.stat().st_size for path in tmp_path.glob("*.db")} == {123456}


def test_a_name_that_is_gone_is_said_with_the_versions(caplog):
    sentence = (
        r"bentoml \S+ has no json\.nosuch, which runs it; bentoml 1\.4\.39 has it: pip install 'bentoml==1\.4\.39'"
    )
    with pytest.raises(OptionError, match=sentence):
        internals.private_name("bentoml", "json", "nosuch", "runs it")
    with pytest.raises(OptionError, match=r"has no no\.such\.module\.x"):
        internals.private_name("bentoml", "no.such.module", "x", "runs it")
    with caplog.at_level(logging.WARNING, logger=internals.__name__):
        assert internals.optional_name("bentoml", "json", "nosuch", "it is slow") is None
    assert "has no json.nosuch, without which it is slow" in caplog.text


@pytest.mark.parametrize(
    ("act", "module", "name"),
    [
        (lambda: internals.check_workers_every(1.0), "bentoml._internal.utils.circus", "create_standalone_arbiter"),
        (internals.remove_request_timeout, "bentoml._internal.server.http.traffic", "TimeoutMiddleware"),
        (lambda: internals.reserve_metric_files(1), "prometheus_client.mmap_dict", "_INITIAL_MMAP_SIZE"),
    ],
)
def test_a_refinement_that_is_gone_is_a_warning(act, module, name, monkeypatch, caplog):
    monkeypatch.delattr(importlib.import_module(module), name)
    with caplog.at_level(logging.WARNING, logger=internals.__name__):
        act()
    assert f"has no {module}.{name}" in caplog.text
    assert not hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize(
    ("act", "module", "name"),
    [
        (lambda: internals.serve("a:B", "h", 1), "_bentoml_impl.loader", "load"),
        (lambda: internals.serve("a:B", "h", 1), "_bentoml_impl.server", "serve_http"),
        (internals.configure_logging, "bentoml._internal.log", "configure_server_logging"),
        (
            lambda: internals.use_metrics_folder(Path()),
            "bentoml._internal.configuration.containers",
            "BentoMLContainer",
        ),
        (internals.tracer_provider, CONTAINERS, "BentoMLContainer"),
    ],
)
def test_a_necessity_that_is_gone_ends_the_start_with_a_sentence(act, module, name, monkeypatch):
    monkeypatch.delattr(importlib.import_module(module), name)
    with pytest.raises(OptionError, match=re.escape(f"has no {module}.{name}, which ")):
        act()


def test_nothing_else_reaches_into_these_libraries():
    reach = re.compile(
        r"_bentoml_(impl|sdk)|bentoml\._internal|from circus|import circus|prometheus_client\.\w+|mmap_dict"
    )
    for folder in ("auditor", "kernels", "plugins", "service"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name != "library_internals.py":
                assert not reach.search(path.read_text()), path


HEADERS = """
import asyncio, sys, uvicorn
from auditor.service.library_internals import limit_header_time
limit_header_time(0.5, b"HTTP/1.1 408 Late\\r\\n\\r\\n")

async def app(scope, receive, send):
    await receive()
    await asyncio.sleep(1.0)  # a slow answer is no late header
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})

async def ask(port, *parts, pause=0.3):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await asyncio.sleep(pause)
    answer = await reader.readuntil(b"\\r\\n\\r\\n")
    return reader, writer, answer[:12]

async def main():
    config = uvicorn.Config(app, port=int(sys.argv[1]), lifespan="off", log_level="error")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port, whole = int(sys.argv[1]), b"GET / HTTP/1.1\\r\\nhost: x\\r\\n\\r\\n"
    reader, writer, answer = await ask(port, whole)
    assert answer == b"HTTP/1.1 200", answer
    await reader.readexactly(2)
    writer.write(b"GET / HTTP/1.1\\r\\nhost:")  # the next request of the same connection never ends
    assert (await asyncio.wait_for(reader.read(12), 30)) == b"HTTP/1.1 408"
    for parts in ((b"",), (b"GET / HT",), (b"GET / HTTP/1.1\\r\\n", b"a: b\\r\\n")):
        answer = (await asyncio.wait_for(ask(port, *parts), 30))[2]
        assert answer == b"HTTP/1.1 408", answer
    server.should_exit = True
    await task

asyncio.run(main())
"""


def test_connections_whose_headers_never_end_are_closed():
    from tests.free_port import free_port

    subprocess.run([sys.executable, "-c", HEADERS, str(free_port())], check=True, timeout=120)
