"""Records into requests, and answers back, over plain HTTP."""

import base64
import http.server
import json
import threading

import pandas as pd
import pytest

from auditor.plugins.service_http import ServiceError, ask, ask_each, records
from tests.plugins.small_service import small_service


@pytest.fixture(scope="module")
def service():
    with small_service() as running:
        yield running


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def test_records_from_everything_that_read_json_gives(tmp_path):
    picture = tmp_path / "seven.png"
    picture.write_bytes(b"png")
    file = tmp_path / "in.json"
    rows = [{"image": b64("one"), "target": "zwei", "top_k": 3, "explainers": ["a", "b"]}, {"image": str(picture)}]
    file.write_text(json.dumps(rows))
    expected = [
        {"image": b64("one"), "target": "zwei", "top_k": 3, "explainers": ["a", "b"]},
        {"image": base64.b64encode(b"png").decode()},
    ]
    assert records(pd.read_json(file)) == expected
    assert records(rows) == expected
    file.write_text(json.dumps({"image": {"0": b64("one"), "1": str(picture)}}))
    assert [r["image"] for r in records(pd.read_json(file))] == [r["image"] for r in expected]
    assert records({"image": b"png"}) == records([picture]) == records([b"png"]) == expected[1:]
    assert json.dumps(records(pd.DataFrame([{"image": b64("one"), "target": 3}])))  # numpy numbers become plain ones


def test_many_images_keep_their_order_and_a_busy_service_is_asked_again(service, monkeypatch):
    monkeypatch.setenv("AUDITOR_API_KEY", "secret")
    service.seen.clear()
    service.busy = 5
    texts = [f"image {k}" for k in range(40)]
    answers = ask_each(service.address, "/predict", records([{"image": b64(t)} for t in texts]))
    assert [a["prediction"]["label"] for a in answers] == texts
    assert len(service.seen) == 45
    assert {key for _, _, key in service.seen} == {"secret"}
    service.busy = 10**6
    try:
        with pytest.raises(ServiceError, match="too many requests wait"):
            ask(service.address, "/predict", {"image": b64("x")})
    finally:
        service.busy = 0


def test_an_old_name_of_an_option_warns_and_is_sent_by_its_new_one():
    with pytest.warns(DeprecationWarning, match="samples is called noise_samples now"):
        (body,) = records([{"image": b64("a"), "samples": 3}])
    assert body == {"image": b64("a"), "noise_samples": 3}


def test_the_key_does_not_follow_a_redirect(monkeypatch):
    """Old code sent X-API-Key on to wherever the service pointed."""
    requests = []

    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append((self.path, self.headers.get("X-API-Key")))
            if self.path == "/model":
                self.send_response(302)
                self.send_header("Location", f"http://localhost:{self.server.server_port}/elsewhere")
                self.end_headers()
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *args):
            pass

    monkeypatch.setenv("AUDITOR_API_KEY", "secret")
    with http.server.HTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        ask(f"http://127.0.0.1:{server.server_port}", "/model")
        server.shutdown()
    assert requests == [("/model", "secret"), ("/elsewhere", None)]
