"""Server: MLflow's own server with an Audits page at ``/auditor``: ``mlflow server --app-name auditor``.

The page only reads. Its routes stand inside MLflow's application, behind MLflow's Host and origin checks, and all they
show comes through MLflow's REST interface with the caller's own credentials (``rest_store``). Text is escaped by the
templates, no inline script can run, and a stored report is shown only after its digest was checked, in a sandbox
without scripts, forms or an origin.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from auditor.errors import AuditError
from auditor.pages.templates import STYLESHEET, stylesheet
from auditor.plugins.audits_site.audit_comparison import compare
from auditor.plugins.audits_site.page_text import environment
from auditor.plugins.audits_site.rest_store import Refused, ServerStore, mlflow_link
from auditor.plugins.audits_site.verified_files import (
    AnswerCache,
    check_explainer,
    check_verdict,
    read_audit,
    read_picture,
    read_report,
)
from auditor.plugins.audits_site.version_card import VersionCard, version_card
from auditor.plugins.registry import history
from auditor.signing.keys import TRUSTED_VARIABLE, TrustedKeys, read_trusted

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger(__name__)

PAGE = Path(__file__).parent / "audits_site" / "templates"
STATIC = {"style.css": "text/css; charset=utf-8", "audits.js": "text/javascript; charset=utf-8"}
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
REPORT_POLICY = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
LOGIN_SETTINGS = (
    "MLFLOW_AUTH_CONFIG_PATH",
    "MLFLOW_AUTH_ADMIN_USERNAME",
    "MLFLOW_AUTH_ADMIN_PASSWORD",
    "MLFLOW_FLASK_SERVER_SECRET_KEY",
)
MODELS_PER_PAGE = 20
VERSIONS_PER_PAGE = 25
ENTRIES_SHOWN = 100

Params = Mapping[str, str]


def create_app() -> Any:
    """Return MLflow's application with the Audits page, behind MLflow's login where there is one."""
    host = os.environ.get("_MLFLOW_SGI_NAME", "uvicorn")
    if host != "uvicorn":
        from mlflow.exceptions import MlflowException

        raise MlflowException(
            f"--app-name auditor: the Audits page needs uvicorn, MLflow's default server, but {host} was asked for; "
            "leave out --gunicorn-opts and --waitress-opts."
        )
    from mlflow.server import app as flask_app
    from mlflow.server.fastapi_app import create_fastapi_app

    return add_page(_with_login() if _wants_login() else create_fastapi_app(flask_app), flask_app)


def add_page(app: Any, flask_app: Any) -> Any:
    """Put the page's routes before MLflow's own, which end in one that takes everything."""
    from starlette.routing import Route

    site = Site(flask_app, os.environ.get("_MLFLOW_STATIC_PREFIX", "").rstrip("/"))
    app.router.routes[0:0] = [Route(site.base + path, answer, methods=["GET"]) for path, answer in site.routes()]
    return app


class Site:
    """The pages, by path below ``/auditor``."""

    def __init__(self, flask_app: Any, prefix: str = "", cache: AnswerCache | None = None) -> None:
        self.app, self.prefix, self.base = flask_app, prefix, f"{prefix}/auditor"
        self.cache = cache if cache is not None else AnswerCache()
        _trusted()  # a folder that cannot be read stops the server now, not at the first page
        self.templates = environment(PAGE)
        self.templates.globals.update(base=self.base, prefix=prefix)

    def routes(self) -> list[tuple[str, Callable[[Request], Response]]]:
        """Return path and endpoint of every page; endpoints are plain functions, so each runs in a thread."""
        pages: dict[str, Callable[[ServerStore, Params], Response]] = {
            "": self.home,
            "/": self.home,
            "/model": self.model,
            "/version": self.version,
            "/version/explainers": self.explainers,
            "/version/audit": self.audit,
            "/report": self.report,
            "/picture": self.picture,
            "/compare": self.compare,
        }
        static = [(f"/static/{name}", self._static(name, kind)) for name, kind in STATIC.items()]
        return [*((path, self._answering(page)) for path, page in pages.items()), *static]

    def home(self, store: ServerStore, query: Params) -> Response:
        """Show the registered models with their newest version."""
        text, token = query.get("q", "").strip()[:200], query.get("page", "")
        listing = store.models(text, token, MODELS_PER_PAGE)
        links = self._pages("", {"q": text}, token, listing.next_token)
        rows = [_model_row(m) for m in listing.entries]
        for row in rows:
            row["newest"] = row["newest"] and self._with_verdict(store, row["newest"])
        return self._page("home.html", cards=rows, text=text, **links)

    def model(self, store: ServerStore, query: Params) -> Response:
        """Show the versions of one model, newest first."""
        name, token = _parameter(query, "name"), query.get("page", "")
        model = store.model(name)
        listing = store.versions(name, token, VERSIONS_PER_PAGE)
        cards = [self._with_verdict(store, version_card(_with_aliases(entry, model))) for entry in listing.entries]
        return self._page(
            "model.html",
            name=name,
            description=str(model.get("description", "")),
            cards=cards,
            timeline=self._timeline(model),
            mlflow_link=mlflow_link(self.prefix, name),
            **self._pages("/model", {"name": name}, token, listing.next_token),
        )

    def version(self, store: ServerStore, query: Params) -> Response:
        """Show one version from its tags at once; what must be read from the artifact store follows."""
        card = self._card(store, query)
        full = query.get("full") == "1"
        return self._page(
            "version.html",
            card=card,
            mlflow_link=mlflow_link(self.prefix, card.name, card.version),
            checks=self._checks(store, card) if full else None,
            audit=self._audit(store, card) if full else None,
        )

    def explainers(self, store: ServerStore, query: Params) -> Response:
        """Return the part of the version's page that hashes every explainer."""
        card = self._card(store, query)
        return self._part("explainers.html", card=card, checks=self._checks(store, card))

    def audit(self, store: ServerStore, query: Params) -> Response:
        """Return the part of the version's page that reads the audit."""
        card = self._card(store, query)
        return self._part("audit.html", card=card, audit=self._audit(store, card))

    def report(self, store: ServerStore, query: Params) -> Response:
        """Return the stored report as it was written, after its digest was checked, in a sandbox."""
        from starlette.responses import Response

        card = self._card(store, query)
        return Response(read_report(store, card), headers=_headers(REPORT_POLICY), media_type="text/html")

    def picture(self, store: ServerStore, query: Params) -> Response:
        """Return the stored picture of what the classes hang on, after its digest was checked."""
        from starlette.responses import Response

        card = self._card(store, query)
        return Response(read_picture(store, card), headers=_headers(REPORT_POLICY), media_type="image/png")

    def compare(self, store: ServerStore, query: Params) -> Response:
        """Show the metrics of two versions side by side."""
        fields = {k: query.get(k, "").strip() for k in ("left", "left_version", "right", "right_version")}
        sides: list[VersionCard] = []
        both = []
        problems: list[str] = []
        if all(fields.values()):
            for side in ("left", "right"):
                try:
                    card = self._card(store, {"name": fields[side], "version": fields[f"{side}_version"]})
                except Refused as error:
                    if error.status in (401, 403):
                        raise
                    problems.append(str(error))
                    continue
                sides.append(card)
                audit = self._audit(store, card)
                if card.audit is None:
                    problems.append(f"{card.uri} has not been audited.")
                elif audit.problem:
                    problems.append(f"{card.uri}: {audit.problem}")
                both.append(audit.measures)
        left, right = sides if len(sides) == 2 else (None, None)
        if left and right and left.audit and right.audit and left.audit.data_digest != right.audit.data_digest:
            problems.append("The two audits used different data, so their numbers need not be comparable.")
        rows = compare(*both) if len(both) == 2 and all(both) else []
        counts = list(Counter(row.verdict for row in rows).items())
        return self._page(
            "compare.html", asked=fields, left=left, right=right, rows=rows, counts=counts, problems=problems
        )

    def _card(self, store: ServerStore, query: Params) -> VersionCard:
        name = _parameter(query, "name")
        return self._with_verdict(store, version_card(store.version(name, _parameter(query, "version"))))

    def _with_verdict(self, store: ServerStore, card: VersionCard) -> VersionCard:
        if card.gate is None:
            return card
        try:
            trusted = _trusted()  # as it is now: a key may have been revoked since the server started
        except AuditError as error:
            return replace(card, unverified=str(error))
        # per caller: what one may read, another may not
        state = "" if trusted is None else repr(trusted.state())
        key = ("verdict", store.caller, card.name, card.version, str(card.created_ms), repr(card.gate), state)
        checked: VersionCard = self.cache.get(key, lambda: check_verdict(store, card, trusted))
        return replace(card, unverified=checked.unverified, signer=checked.signer, failed=checked.failed)

    def _timeline(self, model: Mapping[str, Any]) -> list[history.Entry]:
        """Return the newest entries of a model's history, the newest first, each checked against the one before."""
        tags = {str(t.get("key")): str(t.get("value", "")) for t in model.get("tags", [])}
        try:
            trusted = _trusted()
        except AuditError:  # the verdict's row says why
            trusted = None
        return history.shown(history.verify(history.from_tags(tags), trusted=trusted))[::-1][:ENTRIES_SHOWN]

    def _checks(self, store: ServerStore, card: VersionCard) -> list[Any]:
        keys = [(card.name, card.version, str(card.created_ms), e.name, e.digest, e.location) for e in card.explainers]
        return [
            self.cache.get(("explainer", *key), lambda e=entry: check_explainer(store, card, e))  # type: ignore[misc]
            for key, entry in zip(keys, card.explainers, strict=True)
        ]

    def _audit(self, store: ServerStore, card: VersionCard) -> Any:
        digest = card.audit.digest if card.audit else ""
        key = ("audit", card.name, card.version, str(card.created_ms), digest)
        return self.cache.get(key, lambda: read_audit(store, card))

    def _pages(self, path: str, parameters: Params, token: str, next_token: str) -> dict[str, Any]:
        query = {k: v for k, v in parameters.items() if v}
        first = f"{self.base}{path}" + (f"?{urlencode(query)}" if query else "")
        further = f"{self.base}{path}?{urlencode({**query, 'page': next_token})}"
        return {"first_link": first if token else "", "next_link": further if next_token else ""}

    def _page(self, template: str, status: int = 200, headers: Params | None = None, **values: Any) -> Response:
        from starlette.responses import HTMLResponse

        body = self.templates.get_template(template).render(**values)
        return HTMLResponse(body, status, headers={**_headers(POLICY), **(headers or {})})

    def _part(self, template: str, **values: Any) -> Response:
        return self._page(template, headers={"X-Auditor-Part": "1"}, **values)

    def _answering(self, page: Callable[[ServerStore, Params], Response]) -> Callable[[Request], Response]:
        """Return an endpoint that answers every expected problem with one sentence."""

        def answer(request: Request) -> Response:
            store = ServerStore(self.app, request.headers, self.prefix)
            try:
                return page(store, request.query_params)
            except Refused as error:
                heading = {401: "Please log in", 403: "Not allowed", 404: "Not found"}.get(error.status, "No answer")
                return self._page("problem.html", error.status, error.headers, heading=heading, message=str(error))
            except AuditError as error:
                return self._page("problem.html", 409, heading="Not what was stored", message=str(error))

        return answer

    def _static(self, name: str, kind: str) -> Callable[[Request], Response]:
        content = stylesheet().encode() if name == STYLESHEET else (PAGE / name).read_bytes()

        def answer(request: Request) -> Response:
            from starlette.responses import Response

            return Response(content, headers={**_headers(POLICY), "Cache-Control": "no-cache"}, media_type=kind)

        return answer


def _headers(policy: str) -> dict[str, str]:
    return {
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }


def _parameter(query: Params, key: str) -> str:
    value = query.get(key, "").strip()
    if not value or len(value) > 500:
        raise Refused(400, f"The address lacks {key}; start from the list of models.")
    return value


def _model_row(model: Mapping[str, Any]) -> dict[str, Any]:
    aliases = sorted((str(a["alias"]), str(a["version"])) for a in model.get("aliases", []))
    latest = max(model.get("latest_versions", []), key=lambda v: int(v["version"]), default=None)
    newest = version_card(_with_aliases(latest, model)) if latest else None
    return {"name": str(model["name"]), "aliases": aliases, "newest": newest}


def _with_aliases(entry: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    aliases = [a["alias"] for a in model.get("aliases", []) if str(a["version"]) == str(entry["version"])]
    return {**entry, "aliases": aliases}


def _trusted() -> TrustedKeys | None:
    """Return the keys whose verdicts count, from AUDITOR_TRUSTED; None: verdicts are shown signed or not."""
    folder = os.environ.get(TRUSTED_VARIABLE, "")
    return read_trusted(folder) if folder else None


def _wants_login() -> bool:
    """Whether MLflow's login goes before every page: it was asked for, or settings of it are there.

    Somebody who set a login up and forgot to ask for it would otherwise serve reads and writes to everybody.
    """
    setting = os.environ.get("AUDITOR_SERVER_AUTH", "")
    if setting not in ("", "basic-auth", "none"):
        from mlflow.exceptions import MlflowException

        raise MlflowException(f"AUDITOR_SERVER_AUTH: want basic-auth or none, got {setting!r}.")
    present = [name for name in LOGIN_SETTINGS if os.environ.get(name)]
    if setting == "" and present:
        log.warning("%s is set, so MLflow's login is used; AUDITOR_SERVER_AUTH=none goes without.", present[0])
        return True
    if setting != "basic-auth":
        log.warning(
            "OPEN: no login is asked for: everybody who reaches this server may read and write models, tags and runs; "
            "AUDITOR_SERVER_AUTH=basic-auth puts MLflow's login before it."
        )
    return setting == "basic-auth"


def _with_login() -> Any:
    try:
        from mlflow.server.auth import create_app as create_auth_app
    except ImportError as error:
        from mlflow.exceptions import MlflowException

        raise MlflowException(
            f"AUDITOR_SERVER_AUTH=basic-auth: MLflow's login lacks a package ({error.name}); install it with: "
            "pip install 'mlflow-auditor[auth]'."
        ) from None
    return create_auth_app()
