"""Stores on this machine: an S3 server in a process of its own, web servers, and pictures to put there."""

import http.client
import http.server
import io
import os
import subprocess
import sys
import threading
import time
import urllib.request
from functools import partial
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
from PIL import Image

from auditor.subject.preprocessing import Preprocessing
from tests.free_port import free_port

COLOUR = Preprocessing.of((3, 13, 17), mean=None, std=None, resize="stretch")


def picture(k, size=(17, 13), form="PNG"):
    """An image file whose pixels differ for every k."""
    rng = np.random.default_rng(k)
    stream = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(stream, form)
    return stream.getvalue()


def write_folder(folder, n=12, classes=("cat", "dog", "owl")):
    """A folder of n images in sub-folders of their classes, written some time ago."""
    for k in range(n):
        path = folder / classes[k % len(classes)] / f"{k:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(k))
        settle(path)
    return folder


def settle(path, seconds=10):
    """Let a file look as if it was written a while ago (its change time cannot be set, so a reader may still wait)."""
    long_ago = time.time() - seconds
    os.utime(path, (long_ago, long_ago))


def pixels_of(data, pre=COLOUR, batch_size=5):
    """All images of a source by name."""
    images = {}
    for batch in data.batches(pre, batch_size):
        images |= {
            name: (image.numpy(), int(label))
            for name, image, label in zip(batch.ids, batch.images, batch.source_labels, strict=True)
        }
    return images


def travelled(thing):
    """Return a thing as another process would get it."""
    return ForkingPickler.loads(ForkingPickler.dumps(thing))


def same_images(a, b):
    """Whether two readings gave the same images and labels, in the same order."""
    return len(a) == len(b) and all(
        np.array_equal(x[0], y[0]) and x[1] == y[1] for x, y in zip(a.values(), b.values(), strict=True)
    )


@pytest.fixture(scope="session")
def s3_server():
    """Moto's S3 server; returns its address."""
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        address = f"http://127.0.0.1:{port}"
        for _ in range(300):
            try:
                urllib.request.urlopen(address, timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield address
        process.terminate()


@pytest.fixture
def s3(s3_server, monkeypatch, tmp_path):
    """A bucket called photos on it, and credentials in the environment; returns a client."""
    import boto3

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-tests")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AUDITOR_CACHE", str(tmp_path / "cache"))
    urllib.request.urlopen(urllib.request.Request(f"{s3_server}/moto-api/reset", method="POST"), timeout=10).close()
    client = boto3.client("s3", endpoint_url=s3_server)
    client.create_bucket(Bucket="photos")
    return client


def upload(client, folder, prefix=""):
    """Put all files of a folder into the bucket."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            client.put_object(
                Bucket="photos", Key=f"{prefix}{path.relative_to(folder).as_posix()}", Body=path.read_bytes()
            )


class Counting(http.server.SimpleHTTPRequestHandler):
    """A web server that counts what it sends, and takes no ranges: Python's own."""

    def log_message(self, *args):
        self.server.requests.append((self.command, self.path))


@pytest.fixture
def web(tmp_path):
    """A web server over a folder; returns the folder, its address and the list of requests."""
    folder = tmp_path / "web"
    folder.mkdir()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Counting, directory=str(folder)))
    server.requests = []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}", server.requests
    server.shutdown()
    server.server_close()
    thread.join()


class Proxy(http.server.BaseHTTPRequestHandler):
    """Stands before a server, and does to answers what ``server.fault(path, n)`` says: a status, "cut", or nothing."""

    protocol_version = "HTTP/1.1"

    def _pass_on(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else None
        path = self.path.partition("?")[0]
        with self.server.lock:
            n = self.server.asked[path] = self.server.asked.get(path, 0) + 1
        fault = self.server.fault(self.path, n)
        if isinstance(fault, int):
            text = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
            if fault == 403:
                text = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
            self.send_response(fault)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else text)
            return
        connection = http.client.HTTPConnection(*self.server.behind, timeout=30)
        connection.request(self.command, self.path, body, dict(self.headers.items()))
        answer = connection.getresponse()
        content = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", answer.getheader("Content-Length") or str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault == "cut" and len(content) > 10:
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()
            return
        self.wfile.write(content)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _pass_on

    def log_message(self, *args):
        """Say nothing."""

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except (OSError, ValueError):
            self.close_connection = True


@pytest.fixture
def proxy(s3_server, s3, monkeypatch):
    """A proxy before the S3 server that obeys ``fault``; the environment points to it."""
    host, _, port = s3_server.removeprefix("http://").partition(":")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    server.behind, server.asked, server.lock = (host, int(port)), {}, threading.Lock()
    server.fault = lambda path, n: None
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    yield server
    server.shutdown()
    server.server_close()
    thread.join()
