"""The routes of a study: a whole session by REST, and every wrong turn as one sentence that loses nothing."""

import json
import re

import pytest
from starlette.testclient import TestClient

from auditor.plugins.study_site.site import StudySite
from auditor.study.session import steps_of
from tests.auditor.study.drawn import opened, small_study

KEY = {"authorization": "Bearer the-owners-key"}


@pytest.fixture
def site(tmp_path):
    study, pictures = small_study()
    store = opened(tmp_path, study)
    yield StudySite(study, pictures, store, "the-owners-key", open_code="gulls")
    store.close()


@pytest.fixture
def app(site):
    return site.app()


def fresh(app):
    return TestClient(app, base_url="http://study.test")


def begin(client, base="/open", **body):
    return client.post(f"{base}/api/begin", json={"agreed": True, "code": "gulls", **body})


def whole(client, state, base="/open"):
    """Answer everything and return the last state."""
    while state["status"] == "running":
        step = state["step"]
        answer = {
            "practice": lambda s: {"groups": {i["id"]: 1 for i in s["images"]}},
            "group": lambda s: {"groups": {i["id"]: 1 + n % 4 for n, i in enumerate(s["images"])}},
            "confidence": lambda s: {"confidence": 2},
            "rating": lambda s: {"ratings": {a["key"]: 6 for a in s["assistants"]}},
            "comment": lambda s: {"comment": ""},
        }[step["kind"]](step)
        body = {"turn": state["turn"], "step": step["index"], "answer": answer, "seconds": 1.5}
        reply = client.post(f"{base}/api/answer", json=body)
        assert reply.status_code == 200, reply.text
        state = reply.json()
    return state


def test_a_whole_session_by_the_open_link(app, site):
    client = fresh(app)
    new = client.post("/open/api/resume", json={}).json()
    assert (new["status"], new["asks_code"]) == ("new", True)
    end = whole(client, begin(client).json())
    assert end["status"] == "finished"
    (person,) = site.store.everybody()
    assert person.is_finished
    assert person.code == end["code"]
    assert client.post("/open/api/leave", json={}).json() == {"left": True}
    assert client.post("/open/api/resume", json={}).json()["status"] == "new"


def test_a_link_is_used_up_by_beginning_and_not_by_opening(app, site):
    (link,) = fresh(app).post("/owner/api/links", json={"n": 1}, headers=KEY).json()["links"]
    base = re.fullmatch(r"http://study\.test(/p/[\w-]+)", link)[1]
    client, other = fresh(app), fresh(app)
    for c in (client, other):
        assert c.get(base).status_code == 200
        assert c.post(f"{base}/api/resume", json={}).json() == {**c.post(f"{base}/api/resume", json={}).json()}
    state = begin(client, base).json()
    refused = begin(other, base)
    assert refused.status_code == 409
    assert "used already" in refused.json()["error"]["message"]
    assert client.post(f"{base}/api/resume", json={}).json()["step"] == state["step"]  # a reload goes on
    assert fresh(app).post("/p/guess/api/resume", json={}).json()["error"]["code"] == "wrong_code"
    assert len(site.store.everybody()) == 1


def test_a_begin_whose_reply_was_lost_is_asked_again_and_uses_no_second_order(app, site):
    """The link was used up, and who held it was shut out, when the reply to the begin did not arrive."""
    (link,) = fresh(app).post("/owner/api/links", json={"n": 1}, headers=KEY).json()["links"]
    base, attempt = link.removeprefix("http://study.test"), "a1" * 24
    first = begin(fresh(app), base, attempt=attempt).json()
    client = fresh(app)
    second = begin(client, base, attempt=attempt).json()
    assert (second["code"], second["turn"]) == (first["code"], first["turn"] + 1)
    assert begin(fresh(app), base, attempt="b2" * 24).status_code == 409
    assert begin(fresh(app), base, attempt="short").status_code == 409
    assert whole(client, second, base)["code"] == first["code"]
    assert len(site.store.everybody()) == 1


def test_who_stops_sees_the_code_and_lets_the_next_person_begin(app, site):
    client = fresh(app)
    state = begin(client).json()
    assert client.post("/open/api/leave", json={}).status_code == 409
    assert client.post("/open/api/leave", json={"stopped": True}).json() == {"left": True}
    assert client.post("/open/api/resume", json={}).json()["status"] == "new"
    assert site.store.erase(state["code"]) == 1


def test_a_reload_gives_back_what_was_placed(app):
    client = fresh(app)
    state = begin(client).json()
    key = state["step"]["images"][0]["id"]
    draft = {"turn": state["turn"], "step": 0, "answer": {"groups": {key: 2}}, "seconds": 4}
    assert client.post("/open/api/draft", json=draft).json()["saved"]
    again = client.post("/open/api/resume", json={}).json()
    assert again["draft"]["groups"][key] == 2
    assert again["seconds"] == 4
    late = client.post("/open/api/draft", json=draft)
    assert late.status_code == 409
    assert late.json()["error"]["code"] == "other_tab"
    assert client.post("/open/api/draft", json={**draft, "turn": again["turn"]}).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"step": 3, "answer": {"confidence": 1}}, 409, "Step 1 is next"),
        ({"step": 0, "answer": {"groups": {}}}, 422, "8 of 8 images are in no group yet"),
        ({"step": 0, "answer": None}, 422, "named parts"),
        ({"step": 0}, 422, "named parts"),
        ({"answer": {}}, 422, "want turn and step"),
        ({"step": 0, "answer": {"groups": "x" * 70_000}}, 413, "at most 64 KB"),
    ],
)
def test_a_wrong_answer_is_one_sentence_and_nothing_is_lost(app, site, body, status, said):
    client = fresh(app)
    state = begin(client).json()
    refused = client.post("/open/api/answer", json={"turn": state["turn"], **body})
    assert refused.status_code == status
    message = refused.json()["error"]["message"]
    assert said in message
    assert "\n" not in message
    assert whole(client, client.post("/open/api/resume", json={}).json())["status"] == "finished"


def test_codes_consent_and_content_types_are_checked(app):
    client = fresh(app)
    assert "not the code" in begin(client, code="gull").json()["error"]["message"]
    assert "agreed" in client.post("/open/api/begin", json={"code": "gulls"}).json()["error"]["message"]
    assert client.post("/open/api/begin", data={"agreed": "true"}).status_code == 422
    odd = {"content-type": "application/json"}
    assert "not readable JSON" in client.post("/open/api/begin", content=b"{", headers=odd).json()["error"]["message"]
    assert client.post("/open/api/answer", json={"turn": 1, "step": 0, "answer": {}}).status_code == 401


@pytest.mark.parametrize("text", [rb'"\ud800"', b"[" * 30_000, b"1" * 5000, b'"\xff"'])
def test_what_cannot_be_written_down_is_refused_at_once(app, site, text):
    """Half a character used to be a 500, and once saved as a comment it stopped the participant and the results."""
    client, kind = fresh(app), {"content-type": "application/json"}
    for path in ("/open/api/begin", "/open/api/draft", "/open/api/answer"):
        body = b'{"agreed": true, "code": ' + text + b', "turn": 1, "step": 0, "answer": {"comment": ' + text + b"}}"
        refused = client.post(path, content=body, headers=kind)
        assert (refused.status_code, "not readable JSON" in refused.text) == (422, True)
    erased = client.post("/owner/api/erase", content=b'{"code": ' + text + b"}", headers=KEY | kind)
    assert erased.status_code == 422
    assert site.store.everybody() == []


def test_pictures_are_given_for_the_current_step_only(app, site):
    client, stranger = fresh(app), fresh(app)
    state = begin(client).json()
    first = f"/open/picture/image/{state['step']['images'][0]['id']}"
    assert client.get(first).content == site.pictures[first.removeprefix("/open/picture/")]
    assert stranger.get(first).status_code == 401
    batch = steps_of(site.study, 0)[1].batch
    later = site.study.data[batch.data].sets[batch.drawn][0]
    assert client.get(f"/open/picture/image/{later}").status_code == 404
    assert client.get(f"/open/picture/heat/{later}/concepts/0").status_code == 404
    assert client.get("/open/picture/../study.json").status_code == 404


def test_the_owners_routes_want_the_key(app):
    client = fresh(app)
    whole(client, begin(client).json())
    for method, path in (("get", "progress"), ("get", "export"), ("post", "links"), ("post", "erase")):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "the-owners-key"}):
            options = {"json": {}} if method == "post" else {}
            assert getattr(client, method)(f"/owner/api/{path}", headers=headers, **options).status_code == 401
    progress = client.get("/owner/api/progress", headers=KEY).json()
    assert (progress["began"], progress["finished"]) == (1, 1)
    exported = json.loads(client.get("/owner/api/export", headers=KEY).content)
    code = exported["participants"][0]["code"]
    assert client.post("/owner/api/links", json={"n": 0}, headers=KEY).status_code == 422
    assert client.post("/owner/api/erase", json={"code": code}, headers=KEY).json()["erased"] > 1
    assert client.post("/owner/api/erase", json={"code": code}, headers=KEY).status_code == 422
    assert client.get("/owner/api/progress", headers=KEY).json()["began"] == 0


def test_every_reply_is_kept_from_caches_and_other_sites(app):
    client = fresh(app)
    for reply in (client.get("/"), client.get("/open"), client.get("/owner"), begin(client), client.get("/static/x")):
        assert "default-src 'none'" in reply.headers["content-security-policy"]
        assert reply.headers["cache-control"] == "no-store"
        assert reply.headers["referrer-policy"] == "no-referrer"
    cookie = begin(fresh(app)).headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "path=/open" in cookie
    assert "max-age=2592000" in cookie  # who closes the browser goes on later
    for name in ("study.js", "grouping.js", "study.css", "owner.js"):
        assert client.get(f"/static/{name}").status_code == 200


def test_a_connection_lost_within_a_request_is_no_error_of_ours(app, site):
    import anyio

    scope = {
        "type": "http", "method": "POST", "path": "/open/api/answer", "query_string": b"", "http_version": "1.1",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"999")],
    }  # fmt: skip
    parts = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]

    async def receive():
        return parts.pop(0)

    async def send(message):
        pass

    anyio.run(app, scope, receive, send)  # it used to be a stack trace in the server's log
    assert site.store.everybody() == []


def test_nothing_of_who_asks_is_stored(app, site, tmp_path):
    headers = {"user-agent": "Secret/1.0", "x-forwarded-for": "203.0.113.77", "referer": "http://mail.test/jane"}
    client = TestClient(app, base_url="http://study.test", headers=headers, client=("198.51.100.23", 1))
    whole(client, begin(client).json())
    content = b"".join(p.read_bytes() for p in tmp_path.iterdir())
    for secret in (b"Secret/1.0", b"203.0.113.77", b"198.51.100.23", b"mail.test"):
        assert secret not in content
