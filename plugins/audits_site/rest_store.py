"""REST store: what the Audits page reads, requested from the server's own REST interface inside the same process.

Every request goes through MLflow's Flask application with the caller's own headers, so the page shows exactly what the
caller may read through MLflow itself: workspaces, authentication and permissions are MLflow's, not ours.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from auditor.errors import AuditError, TamperError
from auditor.plugins.registry.tags import safe_path

API = "/api/2.0/mlflow"
FORWARDED = ("authorization", "cookie", "host", "x-mlflow-workspace")
LARGEST_TEXT = 64 << 20  # bytes of a report or a manifest; tensors are hashed as a stream and never held


class Refused(AuditError):
    """MLflow's refusal of a request: its status, one sentence, and headers to pass on."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})


@dataclass(frozen=True, slots=True)
class Listing:
    """One page of a longer list; ``next_token`` is empty on the last."""

    entries: list[dict[str, Any]]
    next_token: str


class ServerStore:
    """The registry as one caller may see it."""

    def __init__(self, app: Any, headers: Mapping[str, str], prefix: str = "") -> None:
        self._app, self._prefix = app, prefix
        self._headers = {k: v for k, v in headers.items() if k.lower() in FORWARDED}

    @property
    def caller(self) -> str:
        """A digest of the headers that say who asks: cached answers are given to the same caller only."""
        return hashlib.sha256(repr(sorted(self._headers.items())).encode()).hexdigest()

    def models(self, text: str = "", token: str = "", limit: int = 20) -> Listing:
        """Return registered models whose name contains ``text``, each with its latest versions and aliases."""
        query = {"max_results": str(limit), "page_token": token}
        if text:
            query["filter"] = f"name ILIKE {quoted('%' + text + '%')}"
        answer = self._json("/registered-models/search", query)
        return Listing(answer.get("registered_models", []), answer.get("next_page_token", ""))

    def model(self, name: str) -> dict[str, Any]:
        """Return one registered model."""
        answer: dict[str, Any] = self._json("/registered-models/get", {"name": name})["registered_model"]
        return answer

    def versions(self, name: str, token: str = "", limit: int = 25) -> Listing:
        """Return versions of a model, newest first."""
        query = {"filter": f"name = {quoted(name)}", "max_results": str(limit), "page_token": token}
        answer = self._json("/model-versions/search", {**query, "order_by": "version_number DESC"})
        return Listing(answer.get("model_versions", []), answer.get("next_page_token", ""))

    def version(self, name: str, version: str) -> dict[str, Any]:
        """Return one version; an alias is taken too."""
        if version.isascii() and version.isdigit():
            answer = self._json("/model-versions/get", {"name": name, "version": version})
        else:
            answer = self._json("/registered-models/alias", {"name": name, "alias": version})
        entry: dict[str, Any] = answer["model_version"]
        return entry

    def read(self, name: str, version: str, path: str) -> bytes:
        """Return a file beside the model, at most 64 MB of it."""
        content = bytearray()
        for chunk in self._chunks(name, version, path):
            content += chunk
            if len(content) > LARGEST_TEXT:
                raise Refused(413, f"{path} is larger than {LARGEST_TEXT >> 20} MB; download it with MLflow instead.")
        return bytes(content)

    def sha256(self, name: str, version: str, path: str) -> tuple[str, int]:
        """Return the digest and the size of a file beside the model, whatever its size."""
        h, size = hashlib.sha256(), 0
        for chunk in self._chunks(name, version, path):
            h.update(chunk)
            size += len(chunk)
        return h.hexdigest(), size

    def _json(self, path: str, parameters: Mapping[str, str]) -> dict[str, Any]:
        query = {k: v for k, v in parameters.items() if v}
        with self._app.test_client(use_cookies=False) as client:
            answer = client.get(f"{self._prefix}{API}{path}", query_string=query, headers=self._headers)
            if answer.status_code != 200:
                raise _refusal(answer)
            document: dict[str, Any] = json.loads(answer.data)
            return document

    def _chunks(self, name: str, version: str, path: str) -> Iterator[bytes]:
        query = {"name": name, "version": version, "path": safe_path(path)}
        with self._app.test_client(use_cookies=False) as client:
            answer = client.get(
                f"{self._prefix}/model-versions/get-artifact", query_string=query, headers=self._headers, buffered=False
            )
            try:
                if answer.status_code in (401, 403):
                    raise _refusal(answer)
                if answer.status_code != 200:
                    raise TamperError(f"{path} cannot be read from the artifact store.")
                yield from answer.iter_encoded()
            finally:
                answer.close()


def quoted(text: str) -> str:
    """Return a string as MLflow's filters read it; they know no escapes, so one kind of quote must be free.

    >>> quoted("digits")
    "'digits'"
    """
    if "'" not in text:
        return f"'{text}'"
    if '"' not in text:
        return f'"{text}"'
    raise Refused(400, "MLflow cannot search for a name that holds both kinds of quotes.")


def mlflow_link(prefix: str, name: str, version: str = "") -> str:
    """Return MLflow's own page of a model or version."""
    return f"{prefix}/#/models/{quote(name, safe='')}" + (f"/versions/{quote(version, safe='')}" if version else "")


def _refusal(answer: Any) -> Refused:
    """Return MLflow's refusal as one sentence; a challenge to log in keeps its header."""
    try:
        message = str(json.loads(answer.data)["message"])
    except (ValueError, KeyError, TypeError):
        message = "" if answer.status_code >= 500 else answer.get_data(as_text=True)
    message = " ".join(message.split())[:200] or "MLflow could not answer."
    challenge = answer.headers.get("WWW-Authenticate")
    return Refused(answer.status_code, message, {"WWW-Authenticate": challenge} if challenge else None)
