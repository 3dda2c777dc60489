"""A small real HTTP server with the shapes of the explanation service: in a thread, or as a program like auditor serve.

As a program it takes what ``auditor serve`` takes; the model ``models:/broken/1`` ends it at once with an error, and
``models:/slow/1`` never becomes ready.
"""

from __future__ import annotations

import base64
import json
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self):
        name = self.server.model.removeprefix("models:/").partition("/")[0]
        if self.path == "/readyz":
            return self.send(503 if name == "slow" else 200, {})
        if self.path == "/model":
            return self.send(200, {"name": name, "version": "1", "uri": self.server.model, "explainers": ["concepts"]})
        return self.fail(404, "not_found", f"there is no {self.path} here.")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, body, self.headers.get("X-API-Key")))
        if self.server.busy:
            self.server.busy -= 1
            return self.fail(429, "busy", "too many requests wait; try again.", {"Retry-After": "0"})
        content = base64.b64decode(body["image"])
        if content == b"bad":
            return self.fail(400, "bad_image", "the image cannot be read; send a PNG, JPEG or other image file.")
        prediction = {"index": len(content), "label": content.decode("latin1"), "probability": 1.0, "probabilities": []}
        if self.path == "/predict":
            return self.send(200, {"prediction": prediction})
        return self.send(200, {"prediction": prediction, "explanations": [], "target": body.get("target")})

    def fail(self, status, code, message, headers=None):
        self.send(status, {"error": {"code": code, "message": message, "request_id": "r"}}, headers)

    def send(self, status, answer, headers=None):
        content = json.dumps(answer).encode()
        self.send_response(status)
        for key, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(content)),
            **(headers or {}),
        }.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


def small_server(model: str, host: str = "127.0.0.1", port: int = 0) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer((host, port), Answers)
    server.daemon_threads = True
    server.model, server.seen, server.busy = model, [], 0
    return server


@contextmanager
def small_service(model: str = "models:/digits/1"):
    server = small_server(model)
    server.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


if __name__ == "__main__":
    model, options = sys.argv[1], dict(zip(sys.argv[2::2], sys.argv[3::2], strict=True))
    if model.startswith("models:/broken"):
        sys.stderr.write(f"starting\nauditor: error: model {model}: it is broken.\n")
        sys.exit(2)
    small_server(model, options["--host"], int(options["--port"])).serve_forever()
