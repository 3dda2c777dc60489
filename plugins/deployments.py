"""Deployments: ``mlflow deployments … -t auditor`` runs explanation services here, or talks to one that runs elsewhere.

The target is ``auditor`` for background processes of this machine, ``auditor:/http://host:port`` (or
``auditor://host:port``) for a service that runs already. Errors are MLflow's, and the command line prints them as one line.
"""  # noqa: E501

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click
from mlflow.deployments import BaseDeploymentClient, PredictionsResponse
from mlflow.exceptions import MlflowException

from auditor.errors import AuditError, ModelError, OptionError
from auditor.plugins.local_service import LocalServices, check_config, environment
from auditor.plugins.service_http import ask, ask_each, records
from auditor.service import settings

F = TypeVar("F", bound=Callable[..., Any])
FLAVOR = "pytorch"

HELP = """\
mlflow deployments … -t auditor
    runs `auditor serve` in the background on this machine. State is kept in ~/.local/state/auditor/deployments
    (AUDITOR_DEPLOYMENTS names another folder).

    mlflow deployments create -t auditor --name digits -m models:/digits@champion -C port=3000
    mlflow deployments list   -t auditor
    mlflow deployments get    -t auditor --name digits
    mlflow deployments explain -t auditor --name digits --input-path images.json
    mlflow deployments delete -t auditor --name digits

mlflow deployments … -t auditor:/http://host:3000     (or auditor://host:3000)
    talks to a service that runs already; --name is the name of the model it serves.

Input: records, [{"image": "seven.png"}, {"image": "iVBORw0…", "target": "7"}], where image is a path here or the file
in base64. A record may also have: explainers (list of names), target (class name or index), top_k, heatmaps
(png, array, none), stability (off, fast, full), noise_samples, radius, seed, timeout_s, max_steps. MLflow
reads the file with pandas, so a target written in digits is an index. A split file ({"columns": …}) is refused.

Config (-C name=value) for create, update and run-local: host, port, start_timeout_s (how long to wait until it is
ready, 300), and the settings of `auditor serve`:
{settings}

A service that wants a key gets the one in AUDITOR_API_KEY.
"""


class DeploymentError(MlflowException, click.ClickException):  # type: ignore[misc]
    """An MLflow error that MLflow's command line, which is click's, prints as one line instead of a traceback."""

    exit_code = 2


def with_mlflow_errors(function: F) -> F:
    """Raise every AuditError of a function as an error of MLflow."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except AuditError as error:
            code = "RESOURCE_DOES_NOT_EXIST" if isinstance(error, ModelError) else "INVALID_PARAMETER_VALUE"
            raise DeploymentError(" ".join(str(error).split()), error_code=_code(code)) from error

    return run  # type: ignore[return-value]


def target_help() -> str:
    """Return what ``mlflow deployments help -t auditor`` prints."""
    lines = [
        f"    {option.name}: {option.description}"
        + (f" ({option.default})" if option.default not in (None, "") else "")
        for option in settings.options()
    ]
    return HELP.replace("{settings}", "\n".join(lines))


@with_mlflow_errors
def run_local(name: str, model_uri: str, flavor: str | None = None, config: dict[str, Any] | None = None) -> None:
    """Serve a model in the foreground until it is stopped."""
    _check_flavor(flavor)
    options = check_config(config or {})
    command = LocalServices().command(
        model_uri, options, options.get("host", "127.0.0.1"), int(options.get("port", 3000))
    )
    try:
        code = subprocess.run(command, env=environment(), check=False).returncode
    except KeyboardInterrupt:
        return
    if code not in (0, 130):
        raise OptionError(f"run-local {name}: auditor serve ended with {code}; its own message is above.")


class AuditorDeploymentClient(BaseDeploymentClient):
    """Explanation services as MLflow deployments: ``mlflow.deployments.get_deploy_client("auditor")``."""

    @with_mlflow_errors
    def __init__(self, target_uri: str = "auditor") -> None:
        super().__init__(target_uri)  # type: ignore[no-untyped-call]
        self.address = _address(target_uri)
        self._local = LocalServices()

    @with_mlflow_errors
    def create_deployment(
        self,
        name: str,
        model_uri: str,
        flavor: str | None = None,
        config: dict[str, Any] | None = None,
        endpoint: str | None = None,
    ) -> dict[str, Any]:
        """Start a service for a model and return when it is ready to answer."""
        self._only_local("create", endpoint)
        _check_flavor(flavor)
        return {**self._local.start(name, model_uri, config or {}).to_json(), "flavor": FLAVOR}

    @with_mlflow_errors
    def update_deployment(
        self,
        name: str,
        model_uri: str | None = None,
        flavor: str | None = None,
        config: dict[str, Any] | None = None,
        endpoint: str | None = None,
    ) -> dict[str, Any]:
        """Stop a service and start it again with another model or config; what is not given stays as it was."""
        self._only_local("update", endpoint)
        _check_flavor(flavor)
        service = self._local.get(name)
        options = check_config({**service.config, **(config or {})})
        self._local.stop(name)
        started = self._local.start(name, model_uri or service.model_uri, {"port": service.port, **options})
        return {**started.to_json(), "flavor": FLAVOR}

    @with_mlflow_errors
    def delete_deployment(self, name: str, config: dict[str, Any] | None = None, endpoint: str | None = None) -> None:
        """Stop a service and forget it; one that is not there is no error."""
        self._only_local("delete", endpoint)
        self._local.stop(name)

    @with_mlflow_errors
    def list_deployments(self, endpoint: str | None = None) -> list[dict[str, Any]]:
        """Return every deployment with its state and address."""
        if self.address is not None:
            return [self._served()]
        return [{**service.to_json(), "flavor": FLAVOR} for service in self._local.all()]

    @with_mlflow_errors
    def get_deployment(self, name: str, endpoint: str | None = None) -> dict[str, Any]:
        """Return one deployment; when it runs, with the model and the explainers it serves."""
        if self.address is not None:
            self._address_of(name)
            return self._served()
        service = self._local.get(name)
        state = {**service.to_json(), "flavor": FLAVOR}
        if state["status"] == "ready":
            state["model"] = ask(service.address, "/model")
        return state

    @with_mlflow_errors
    def predict(self, deployment_name: str | None = None, inputs: Any = None, endpoint: str | None = None) -> Any:
        """Return predictions for records with ``image``; see ``mlflow deployments help -t auditor``."""
        bodies = [{"image": body["image"]} for body in records(inputs)]
        answers = ask_each(self._address_of(deployment_name or endpoint), "/predict", bodies)
        return PredictionsResponse({"predictions": [answer["prediction"] for answer in answers]})

    @with_mlflow_errors
    def explain(
        self, deployment_name: str | None = None, df: Any = None, endpoint: str | None = None
    ) -> list[dict[str, Any]]:
        """Return one explanation per record, each the answer of ``POST /explain``."""
        bodies = records(df)
        return ask_each(self._address_of(deployment_name or endpoint), "/explain", bodies)

    def _address_of(self, name: str | None) -> str:
        if not name:
            raise OptionError("name the deployment.")
        if self.address is None:
            return self._local.running(name).address
        served = ask(self.address, "/model")["name"]
        if name != served:
            raise ModelError(f"deployment {name}: the service at {self.address} serves {served!r}.")
        return self.address

    def _served(self) -> dict[str, Any]:
        assert self.address is not None
        model = ask(self.address, "/model")
        return {"name": model["name"], "status": "ready", "address": self.address, "flavor": FLAVOR, "model": model}

    def _only_local(self, what: str, endpoint: str | None) -> None:
        if endpoint is not None:
            raise OptionError(f"{what}: this target has no endpoints; leave out --endpoint.")
        if self.address is not None:
            raise OptionError(f"{what}: the service at {self.address} runs elsewhere; use -t auditor for one here.")


def _address(target: str) -> str | None:
    """Return the service a target names; None for this machine's own.

    >>> _address("auditor"), _address("auditor:/http://h:3000/"), _address("auditor://h:3000")
    (None, 'http://h:3000', 'http://h:3000')
    """
    rest = target.removeprefix("auditor").removeprefix(":")
    if not rest.strip("/"):
        return None
    address = "http:" + rest if rest.startswith("//") else rest.lstrip("/")
    try:
        parts = urlsplit(address)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise OptionError(f"target {target}: want auditor, auditor:/http://host:port or auditor://host:port.")
    return address.rstrip("/")


def _check_flavor(flavor: str | None) -> None:
    if flavor not in (None, FLAVOR):
        raise OptionError(f"flavor {flavor}: only {FLAVOR} models are served.")


def _code(name: str) -> int:
    from mlflow.protos.databricks_pb2 import ErrorCode

    return int(ErrorCode.Value(name))
