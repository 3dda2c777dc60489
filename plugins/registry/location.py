"""Location: a model URI resolved to a version in the registry and the artifact folder behind it.

A version's source may be a logged model, another version (a copy; the chain is followed), or a plain artifact folder
(registered from an old run). Everything else in this package asks here and never looks at sources itself.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from auditor.errors import AuditError, ModelError, RegistryError, TamperError

CONNECT_TIMEOUT_S = 5.0
MAX_CHAIN = 32
EXTRAS = {"boto3": "s3", "botocore": "s3", "psycopg2": "postgres"}  # package: the extra that brings it
STORES = (
    "boto3",
    "botocore",
    "s3transfer",
    "azure",
    "google",
    "sqlalchemy",
    "psycopg2",
    "pymysql",
    "paramiko",
    "urllib3",
)
TAG_ATTEMPTS = 6
URI = re.compile(r"^models:/(?P<name>[^@]+?)(?:/(?P<version>[^/@]+)|@(?P<alias>[^/@]+))$")


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """A resolved model URI."""

    uri: str
    name: str  # registered name, or "" for a model that is not registered
    version: str
    root: str  # artifact URI of the folder that holds MLmodel
    model_id: str | None  # the logged model, when there is one
    experiment_id: str
    tags: dict[str, str]

    @property
    def label(self) -> str:
        """Return how messages name it."""
        return f"models:/{self.name}/{self.version}" if self.name else self.uri

    def repository(self) -> Any:
        """Return MLflow's artifact repository for the root."""
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        return get_artifact_repository(self.root)

    def download(self, location: str, folder: Path) -> Path:
        """Bring an artifact folder into a local one, and return where it is."""
        repository = self.repository()
        entries = repository.list_artifacts(location)
        if not entries:
            raise TamperError(f"{location} is missing from the artifact store of {self.label}; attach it again.")
        for entry in entries:
            try:
                repository.download_artifacts(entry.path, str(folder))
            except OSError as error:
                raise TamperError(
                    f"{entry.path} of {self.label} cannot be read ({error.strerror or error})."
                ) from error
        return folder / location


def resolve(uri: str | ModelVersion, *, registered: bool = False) -> ModelVersion:
    """Return the model version behind a URI; with ``registered`` only a version of a registered model will do.

    A command or request resolves its URI once and hands the version on: it stands for itself, with the tags it had, so
    an alias that moves meanwhile changes nothing under way. To write what depends on the current tags, resolve
    ``version.label``, which names the version and not the alias.
    """
    if isinstance(uri, ModelVersion):
        if registered and not uri.name:
            raise _not_registered(uri.uri)
        return uri
    check_server()
    with mlflow_errors(f"model {uri}"):
        from mlflow import MlflowClient

        client = MlflowClient()
        if uri.startswith("models:/m-") and "/" not in uri.removeprefix("models:/"):
            version = _logged(client, uri, uri.removeprefix("models:/"))
        elif uri.startswith("models:/"):
            return _version(client, uri)
        elif uri.startswith("runs:/"):
            version = _from_run(client, uri)
        elif "://" in uri or Path(uri).is_dir():
            version = ModelVersion(uri, "", "", uri, None, "0", {})
        else:
            raise ModelError(
                f"model {uri}: not an MLflow model URI; give models:/name/3, models:/name@alias or runs:/RUN_ID/path."
            )
    if registered:
        raise _not_registered(uri)
    return version


def _not_registered(uri: str) -> ModelError:
    return ModelError(
        f"model {uri}: explainers are attached to a version of a registered model; give models:/name/3 or "
        "models:/name@alias (register it with mlflow.register_model)."
    )


def set_tag(version: ModelVersion, key: str, value: str) -> None:
    """Set a tag on the version, the commit point of what it points to.

    MLflow's store looks for the tag and inserts it when it is not there. When two writers both find it missing, one
    insert fails; the same call again then finds the row and updates it.
    """
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    client = MlflowClient()
    for attempt in range(TAG_ATTEMPTS):
        try:
            client.set_model_version_tag(version.name, version.version, key, value)
            return
        except MlflowException as error:
            final = error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "PERMISSION_DENIED")
            if final or attempt == TAG_ATTEMPTS - 1:
                raise
            time.sleep(0.05 * 2**attempt)


def check_server() -> None:
    """Fail within seconds, and with the address, when the tracking or registry server is out of reach."""
    import mlflow

    for uri in {mlflow.get_tracking_uri(), mlflow.get_registry_uri()}:
        scheme = urlsplit(uri).scheme
        if scheme in ("http", "https"):
            _ask(uri)
        elif scheme == "sqlite":
            path = Path(uri.split("///", 1)[-1]) if "///" in uri else None
            if path is not None and str(path) and not path.exists():
                raise RegistryError(
                    f"there is no MLflow database at {path}; set MLFLOW_TRACKING_URI to your server or database "
                    "(auditor demo makes one to try)."
                )


def _ask(uri: str) -> None:
    """Ask a server for its health; any answer at all, even a refusal, shows that it is there."""
    import ssl
    import urllib.request
    from urllib.error import HTTPError

    try:
        urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=CONNECT_TIMEOUT_S).close()
    except (HTTPError, ssl.SSLError):
        return
    except OSError as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):
            return
        raise RegistryError(
            f"no MLflow server answers at {uri} within {CONNECT_TIMEOUT_S:g} s ({reason}); start it, or set "
            "MLFLOW_TRACKING_URI to the right address."
        ) from None


@contextmanager
def mlflow_errors(where: str) -> Iterator[None]:
    """Turn MLflow's errors into ours: one sentence, no data dump, no minute of retries."""
    import requests
    from mlflow.exceptions import MlflowException

    _impatient()
    try:
        yield
    except AuditError:
        raise
    except MlflowException as error:
        text = " ".join(str(error).split())[:240]
        if "Max retries exceeded" in text or "failed with exception" in text or "Connection" in text:
            raise RegistryError(
                f"{where}: the MLflow server did not answer ({text[:160]}); check its address."
            ) from error
        raise ModelError(f"{where}: MLflow says: {text}") from error
    except (requests.RequestException, ConnectionError) as error:
        raise RegistryError(f"{where}: the MLflow server did not answer ({str(error)[:160]}).") from error
    except ImportError as error:  # MLflow loads what an artifact store needs when it is first used
        missing = (error.name or str(error)).partition(".")[0]
        if missing == "auditor":  # a module of ours is missing: nobody can install that
            raise
        raise RegistryError(
            f"{where}: its store needs {missing}, which is not installed; {_remedy(missing)}."
        ) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in STORES:
            raise
        text = " ".join(str(error).split())[:200]
        raise RegistryError(f"{where}: its store failed: {type(error).__name__}: {text.rstrip('.')}.") from error


def _remedy(package: str) -> str:
    """Return how to install what a store needs."""
    extra = EXTRAS.get(package)
    return f"pip install 'mlflow-auditor[{extra}]'" if extra else f"pip install {package}"


def _impatient() -> None:
    """Do not retry for minutes; what the user has set stands."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")


def _version(client: Any, uri: str) -> ModelVersion:
    from mlflow.exceptions import MlflowException

    parts = URI.match(uri)
    if parts is None:
        raise ModelError(f"model {uri}: want models:/name/3, models:/name@alias or models:/name/latest.")
    name, version, alias = parts["name"], parts["version"], parts["alias"]
    try:
        registered = client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        others = ", ".join(sorted(m.name for m in client.search_registered_models(max_results=20))[:8]) or "none"
        raise ModelError(f"model {uri}: no registered model is called {name!r}; there are: {others}.") from None
    try:
        if alias is not None:
            entry = client.get_model_version_by_alias(name, alias)
        elif version == "latest":
            versions = client.search_model_versions(f"name='{name}'")
            if not versions:
                raise ModelError(f"model {uri}: {name!r} has no version yet.")
            entry = max(versions, key=lambda v: int(v.version))
        else:
            entry = client.get_model_version(name, version)
    except MlflowException:
        if alias is not None:
            aliases = ", ".join(sorted(registered.aliases)) or "none"
            raise ModelError(f"model {uri}: {name!r} has no alias {alias!r}; its aliases are: {aliases}.") from None
        numbers = sorted(int(v.version) for v in client.search_model_versions(f"name='{name}'"))
        newest = ", ".join(map(str, numbers[-8:])) or "none"
        raise ModelError(f"model {uri}: {name!r} has no version {version!r}; there are: {newest}.") from None
    root, model_id, experiment = _follow(client, entry)
    return ModelVersion(uri, name, str(entry.version), root, model_id, experiment, dict(entry.tags))


def _follow(client: Any, version: Any) -> tuple[str, str | None, str]:
    """Return root, logged model and experiment of a version, following copies to their origin."""
    for _ in range(MAX_CHAIN):
        source = str(version.source)
        if not source.startswith("models:/"):
            experiment = client.get_run(version.run_id).info.experiment_id if version.run_id else "0"
            root = source
            if source.startswith("runs:/"):
                from mlflow.store.artifact.runs_artifact_repo import RunsArtifactRepository

                root = RunsArtifactRepository.get_underlying_uri(source)
            return root, None, experiment
        rest = source.removeprefix("models:/")
        if "/" not in rest and "@" not in rest:
            logged = client.get_logged_model(rest)
            return logged.artifact_location, rest, logged.experiment_id
        name, _, number = rest.rpartition("/")
        version = client.get_model_version(name, number)
    raise ModelError(f"model {version.name}/{version.version}: its chain of copies is longer than {MAX_CHAIN}.")


def _logged(client: Any, uri: str, model_id: str) -> ModelVersion:
    from mlflow.exceptions import MlflowException

    try:
        logged = client.get_logged_model(model_id)
    except MlflowException:
        raise ModelError(f"model {uri}: there is no logged model {model_id!r}.") from None
    return ModelVersion(uri, "", "", logged.artifact_location, model_id, logged.experiment_id, {})


def _from_run(client: Any, uri: str) -> ModelVersion:
    from mlflow.exceptions import MlflowException
    from mlflow.store.artifact.runs_artifact_repo import RunsArtifactRepository

    run_id, _, path = uri.removeprefix("runs:/").partition("/")
    try:
        run = client.get_run(run_id)
    except MlflowException:
        raise ModelError(f"model {uri}: there is no run {run_id!r}.") from None
    for output in run.outputs.model_outputs if run.outputs else []:
        logged = client.get_logged_model(output.model_id)
        if logged.name == path:
            return ModelVersion(uri, "", "", logged.artifact_location, output.model_id, logged.experiment_id, {})
    return ModelVersion(uri, "", "", RunsArtifactRepository.get_underlying_uri(uri), None, run.info.experiment_id, {})
