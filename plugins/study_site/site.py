"""Site: the routes of a study as one ASGI application.

A participant's address is ``/p/LINK/`` (a link of their own, which works once) or ``/open/`` (with the code that the
owner gives to everybody). Below it the page asks ``api/resume``, ``api/begin``, ``api/draft`` and ``api/answer``; the
session is a cookie of that address alone, so several people can use one browser one after the other. The owner's
routes below ``/owner/api/`` want the owner's key as a bearer token.

No address, no agent and no referrer of a request is read, logged or stored.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from auditor.errors import AnswerError, AuditError
from auditor.plugins.audits_site.page_text import environment
from auditor.study.answers import AnswerStore, Participant
from auditor.study.archive import archive
from auditor.study.design import Study
from auditor.study.session import as_sent, described, picture_name, pictures_of, steps_of

log = logging.getLogger(__name__)

PAGE = Path(__file__).parent / "page"
STATIC = {
    "study.css": "text/css; charset=utf-8",
    "study.js": "text/javascript; charset=utf-8",
    "grouping.js": "text/javascript; charset=utf-8",
    "owner.js": "text/javascript; charset=utf-8",
}
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
COOKIE = "study"
COOKIE_S = 30 * 24 * 3600  # a session outlives the window it was begun in: a link works once, and people come back
ATTEMPT = re.compile(r"[A-Za-z0-9_-]{32,100}")
LARGEST_BODY = 64 << 10
MOST_LINKS = 1000
STATUS = {
    "wrong_code": 403,
    "no_session": 401,
    "used": 409,
    "other_tab": 409,
    "out_of_order": 409,
    "too_many": 429,
    "not_found": 404,
    "key": 401,
    "too_large": 413,
}

Body = Mapping[str, Any]


class StudySite:
    """One study, its pictures and its answers, served."""

    def __init__(
        self,
        study: Study,
        pictures: Mapping[str, bytes],
        store: AnswerStore,
        owner_key: str,
        *,
        open_code: str | None = None,
    ) -> None:
        self.study, self.pictures, self.store = study, dict(pictures), store
        self._owner_key, self._open_code = owner_key, open_code
        self._templates = environment(PAGE)
        self._static = {name: (PAGE / name).read_bytes() for name in STATIC}

    def app(self) -> Starlette:
        """Return the application."""
        routes = [
            Route("/", self._page("home.html")),
            Route("/healthz", self._answering(self.healthz)),
            Route("/static/{name}", self.static),
            Route("/owner", self._page("owner.html")),
            Route("/owner/api/progress", self._answering(self.progress)),
            Route("/owner/api/links", self._answering(self.links), methods=["POST"]),
            Route("/owner/api/erase", self._answering(self.erase), methods=["POST"]),
            Route("/owner/api/export", self._answering(self.export)),
        ]
        for base in ("/open", "/p/{link}"):
            routes += [
                Route(base, self._page("participant.html")),
                Route(f"{base}/api/resume", self._answering(self.resume), methods=["POST"]),
                Route(f"{base}/api/begin", self._answering(self.begin), methods=["POST"]),
                Route(f"{base}/api/draft", self._answering(self.draft), methods=["POST"]),
                Route(f"{base}/api/answer", self._answering(self.answer), methods=["POST"]),
                Route(f"{base}/api/leave", self._answering(self.leave), methods=["POST"]),
                Route(f"{base}/picture/{{name:path}}", self._answering(self.picture)),
            ]
        return Starlette(routes=routes)

    # participants

    def resume(self, request: Request, body: Body) -> Response:
        """Return where the session of this browser is; without one, what the owner says before the begin."""
        who = self.store.open(_token(request))
        if who is not None:
            return JSONResponse(self._state(who))
        self._check_link(request)
        c = self.study.config
        asks_code = _link(request) is None
        if asks_code and self._open_code is None:
            raise AnswerError("This study is not open to everybody; use the link that you were given.", "wrong_code")
        return JSONResponse(
            {"status": "new", "title": c.title, "welcome": c.welcome, "consent": c.consent, "asks_code": asks_code}
        )

    def begin(self, request: Request, body: Body) -> Response:
        """Begin a session, once consent is given; the link is used up now and not when the page is merely opened.

        The page sends an ``attempt``, a random secret of its own, so that it can ask again when the reply was lost.
        """
        if body.get("agreed") is not True:
            raise AnswerError("The study begins when you have agreed to it.")
        link = _link(request)
        if link is None and not (
            self._open_code is not None and _same(str(body.get("code", "")).strip(), self._open_code)
        ):
            raise AnswerError("That is not the code of this study; check how it is written.", "wrong_code")
        attempt = body.get("attempt")
        secret = attempt if isinstance(attempt, str) and ATTEMPT.fullmatch(attempt) else None
        token, who = self.store.begin(link, secret)
        answer = JSONResponse(self._state(who))
        secure = request.url.scheme == "https"
        path = _base(request)
        answer.set_cookie(COOKIE, token, COOKIE_S, path=path, httponly=True, samesite="strict", secure=secure)
        return answer

    def draft(self, request: Request, body: Body) -> Response:
        """Save what is chosen so far in a step."""
        who = self._save(request, body, draft=True)
        return JSONResponse({"saved": True, "index": who.answered})

    def answer(self, request: Request, body: Body) -> Response:
        """Save the answer to a step and return the next one."""
        return JSONResponse(self._state(self._save(request, body, draft=False)))

    def leave(self, request: Request, body: Body) -> Response:
        """Forget the session in this browser, for the next person: a finished one, or one that is stopped for good."""
        who = self.store.participant(_token(request))
        is_open = who is not None and who.answered < len(steps_of(self.study, who.number))
        if is_open and body.get("stopped") is not True:
            raise AnswerError(
                "This session is not finished; finish or stop it before somebody else begins.", "out_of_order"
            )
        answer = JSONResponse({"left": True})
        answer.delete_cookie(COOKIE, path=_base(request))
        return answer

    def picture(self, request: Request, body: Body) -> Response:
        """Return a picture of the current step, and of no other."""
        who = self.store.participant(_token(request))
        name = picture_name(self.study, request.path_params["name"])
        if who is None:
            raise AnswerError("There is no session here; open your link again.", "no_session")
        steps = steps_of(self.study, who.number)
        if who.answered >= len(steps) or name not in pictures_of(self.study, who.number, steps[who.answered]):
            raise AnswerError("There is no such picture in this step.", "not_found")
        return Response(self.pictures[name], media_type="image/png")

    def _save(self, request: Request, body: Body, draft: bool) -> Participant:
        turn, step = body.get("turn"), body.get("step")
        if not isinstance(turn, int) or not isinstance(step, int):
            raise AnswerError("want turn and step, as the last reply gave them.")
        return self.store.save(_token(request), turn, step, body.get("answer"), body.get("seconds"), draft=draft)

    def _state(self, who: Participant) -> dict[str, Any]:
        """Return the step that a participant is at, with what is saved of it."""
        step = described(self.study, who.number, who.answered)
        state = {
            "status": "running",
            "title": self.study.config.title,
            "turn": who.turn,
            "step": step,
            "code": who.code,
        }
        if step["kind"] == "end":
            return {**state, "status": "finished"}
        draft = self.store.draft(who.code, who.answered)
        if draft is not None:
            kind = steps_of(self.study, who.number)[who.answered]
            state |= {"draft": as_sent(self.study, kind, draft.body), "seconds": draft.seconds}
        return state

    def _check_link(self, request: Request) -> None:
        link = _link(request)
        if link is not None and not self.store.has_link(link):
            raise AnswerError("This link is not known here; check that it was copied whole.", "wrong_code")

    # the owner

    def progress(self, request: Request, body: Body) -> Response:
        """Return how many began and finished."""
        self._check_owner(request)
        return JSONResponse({"study": self.study.name, "models": self.study.models, **self.store.progress()})

    def links(self, request: Request, body: Body) -> Response:
        """Make links that work once each."""
        self._check_owner(request)
        n = body.get("n")
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MOST_LINKS:
            raise AnswerError(f"want the number of links, n, from 1 to {MOST_LINKS}.")
        return JSONResponse({"links": [f"{request.base_url}p/{link}" for link in self.store.add_links(n)]})

    def erase(self, request: Request, body: Body) -> Response:
        """Erase everything of one participant."""
        self._check_owner(request)
        return JSONResponse({"erased": self.store.erase(str(body.get("code", "")))})

    def export(self, request: Request, body: Body) -> Response:
        """Return all answers for archiving."""
        self._check_owner(request)
        name = f"attachment; filename={self.study.name}-answers.json"
        return Response(archive(self.store), media_type="application/json", headers={"Content-Disposition": name})

    def healthz(self, request: Request, body: Body) -> Response:
        """Return that the server is up."""
        return JSONResponse({"ok": True})

    def _check_owner(self, request: Request) -> None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not _same(key.strip(), self._owner_key):
            raise AnswerError("This needs the owner's key, as a bearer token.", "key")

    # requests

    async def static(self, request: Request) -> Response:
        """Return a file of the page."""
        name = request.path_params["name"]
        if name not in self._static:
            return _problem("not_found", "There is no such file.")
        return Response(self._static[name], media_type=STATIC[name], headers=_headers() | {"Cache-Control": "no-cache"})

    def _page(self, template: str) -> Callable[[Request], Response]:
        html = self._templates.get_template(template).render(
            title=self.study.config.title, name=self.study.name, is_open=self._open_code is not None
        )

        def answer(request: Request) -> Response:
            return HTMLResponse(html, headers=_headers())

        return answer

    def _answering(self, handler: Callable[[Request, Body], Response]) -> Callable[[Request], Any]:
        """Return an endpoint that reads a small JSON body and answers every expected problem with one sentence."""

        async def endpoint(request: Request) -> Response:
            try:
                body = await _body(request) if request.method == "POST" else {}
                answer = await run_in_threadpool(handler, request, body)
            except ClientDisconnect:  # a lost connection: there is nobody to answer, and nothing is half saved
                return Response(status_code=400)
            except AnswerError as error:
                return _problem(error.code, str(error))
            except AuditError as error:
                return _problem("bad_answer", str(error))
            answer.headers.update(_headers())
            return answer

        return endpoint


async def _body(request: Request) -> Body:
    if not request.headers.get("content-type", "").lower().startswith("application/json"):
        raise AnswerError("want the answer as application/json.")  # no form of another site can send that unasked
    content = b""
    async for chunk in request.stream():
        content += chunk
        if len(content) > LARGEST_BODY:
            raise AnswerError(f"an answer has at most {LARGEST_BODY >> 10} KB.", "too_large")
    try:
        body = json.loads(content)
        json.dumps(body, ensure_ascii=False).encode()  # half a character can be written nowhere later
    except (ValueError, RecursionError):
        raise AnswerError("the answer is not readable JSON.") from None
    if not isinstance(body, dict):
        raise AnswerError("want the answer as an object with named parts.")
    return body


def _problem(code: str, message: str) -> Response:
    status = STATUS.get(code, 422)
    return JSONResponse({"error": {"code": code, "message": message}}, status, headers=_headers())


def _link(request: Request) -> str | None:
    """Return the participant's own link; None at the address that is open to all."""
    link = request.path_params.get("link")
    return None if link is None else str(link)


def _base(request: Request) -> str:
    link = _link(request)
    return "/open" if link is None else f"/p/{link}"


def _token(request: Request) -> str:
    return request.cookies.get(COOKIE, "")


def _same(a: str, b: str) -> bool:
    return hmac.compare_digest(a.encode(), b.encode())


def _headers() -> dict[str, str]:
    return {
        "Content-Security-Policy": POLICY,
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "X-Content-Type-Options": "nosniff",
        "X-Robots-Tag": "noindex",
        "Cache-Control": "no-store",
    }
