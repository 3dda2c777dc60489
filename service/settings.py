"""Settings of a server: one list, by four ways.

The fields of `Settings` are the options of ``auditor serve``, the ``AUDITOR_*`` variables, the config of the
deployments client (``-C name=value``) and its help. The command puts its options into the environment, each worker
reads them there; a bento started by ``bentoml serve`` is configured by the environment alone.
"""

from __future__ import annotations

import logging
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from auditor.errors import OptionError

log = logging.getLogger(__name__)

PREFIX = "AUDITOR_"
OLD_NAMES = {"samples": "sample_images"}  # names of the release before; they work until the next one, with a warning


class Settings(BaseModel):
    """What a worker needs to know; the variable of ``max_batch`` is ``AUDITOR_MAX_BATCH``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(default="", description="MLflow URI of the model; an alias is followed when it moves.")
    engine: Literal["auto", "torch", "onnx"] = Field(default="auto", description="What runs the forward pass.")
    device: str = Field(default="auto", description="cpu, cuda, cuda:1; auto: a GPU when there is one.")
    precision: Literal["float32", "bfloat16", "float16"] = Field(default="float32", description="Of the torch engine.")
    workers: int = Field(default=1, ge=1, le=256, description="Processes, each with its own copy of the model.")
    threads: int = Field(default=1, ge=1, le=256, description="Threads per worker inside torch and ONNX Runtime.")
    allow_pickle: bool = Field(default=False, description="Load models stored as pickles.")
    require_verdict: Path | None = Field(
        default=None, description="Folder of trusted keys; only what one of them signed as passed is served."
    )

    max_batch: int = Field(default=16, ge=1, le=1024, description="Images per forward pass.")
    max_wait_ms: float = Field(default=0.0, ge=0, le=1000, description="Wait this long for a batch to fill.")
    queue: int = Field(default=256, ge=1, description="Images that may wait; beyond it callers get 429.")
    slow_queue: int = Field(default=16, ge=1, description="The same for requests that search, iterate or cost much.")
    request_timeout_s: float = Field(default=30.0, gt=0, description="A request not answered by then gets 503.")
    search_timeout_s: float | None = Field(
        default=None, gt=0, description="Seconds per image for explainers that search; default: as they were fitted."
    )
    max_search_timeout_s: float = Field(default=10.0, gt=0, description="The most a request may ask for.")

    max_body_mb: float = Field(default=16.0, gt=0, description="Larger bodies get 413.")
    max_pixels: int = Field(default=40_000_000, ge=1, description="Images with more pixels get 413, undecoded.")
    decoders: int = Field(default=2, ge=1, le=64, description="Processes per worker that decode images.")
    decode_timeout_s: float = Field(
        default=10.0, gt=0, le=600, description="Images of a request not decoded in this time get 413."
    )
    decode_memory_mb: int = Field(
        default=1024, ge=64, description="Memory that decoding an image may take; one that needs more gets 413."
    )
    upload_timeout_s: float = Field(
        default=20.0, gt=0, description="Headers, or a body after them, not sent by then get 408."
    )
    api_keys: Path | None = Field(
        default=None, description="File of keys, one a line or TOML with scopes; read again when it changes."
    )
    keys_grace_s: float = Field(
        default=300.0, ge=0, description="How long the last keys stay valid while their file cannot be read."
    )
    oidc_issuer: str = Field(default="", description="Identity provider whose bearer tokens are taken; extra `oidc`.")
    oidc_audience: str = Field(default="", description="The name by which tokens mean this server.")
    oidc_scope: str = Field(default="", description="A scope that tokens must have.")
    oidc_rate_per_minute: float | None = Field(default=None, gt=0, description="Requests a minute of one bearer.")
    allowed_hosts: str = Field(
        default="",
        description="Names that requests may have as Host, with commas; * for any. Default: names and addresses of "
        "this machine, and any where keys or tokens guard the server.",
    )
    allowed_origins: str = Field(
        default="", description="Origins of other sites whose pages may ask, with commas; * for any."
    )

    poll_s: float = Field(default=5.0, gt=0, description="How often a worker asks whether the alias moved.")
    sample_images: str = Field(default="", description="Data source of the images to try on the page.")
    log_requests: bool = Field(default=True, description="One JSON line per request.")
    otlp_endpoint: str = Field(
        default="",
        pattern=r"^(https?://.+)?$",
        description="Traces go here by OTLP over HTTP, e.g. http://collector:4318/v1/traces.",
    )
    trace_rate: float = Field(default=1.0, ge=0, le=1, description="Share of the requests that are traced.")

    @property
    def is_guarded(self) -> bool:
        """Whether callers must show a key or a token."""
        return self.api_keys is not None or bool(self.oidc_issuer)


@dataclass(frozen=True, slots=True)
class Option:
    """A setting as commands and clients offer it."""

    name: str
    kind: type  # str, int, float, bool or Path
    choices: tuple[str, ...]
    default: Any
    description: str

    @property
    def flag(self) -> str:
        """Return the flag of ``auditor serve``."""
        return "--" + self.name.replace("_", "-")

    def flags(self, value: str) -> list[str]:
        """Return the arguments of ``auditor serve`` that set this value.

        >>> switch, number = (next(o for o in options() if o.name == name) for name in ("allow_pickle", "queue"))
        >>> switch.flags("true"), switch.flags("no"), number.flags("7")
        (['--allow-pickle'], ['--no-allow-pickle'], ['--queue', '7'])
        """
        if self.kind is bool:
            return [self.flag if value.lower() in ("1", "true", "yes", "on") else "--no-" + self.flag[2:]]
        return [self.flag, value]


def options() -> list[Option]:
    """Return every setting but the model, which is named apart from them."""
    return [_option(name) for name in Settings.model_fields if name != "model"]


def _option(name: str) -> Option:
    field = Settings.model_fields[name]
    kind: Any = field.annotation
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        (kind,) = (part for part in typing.get_args(kind) if part is not types.NoneType)
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
    return Option(name, str if choices else kind, choices, field.default, field.description or "")


def new_name(name: str) -> str:
    """Return the name that a setting has now; a name of the release before works, with a warning."""
    if name not in OLD_NAMES:
        return name
    log.warning("the setting %s is called %s now; the old name goes with the next release", name, OLD_NAMES[name])
    return OLD_NAMES[name]


def from_environment(environment: Mapping[str, str] | None = None) -> Settings:
    """Read the settings; a value that does not fit is one sentence.

    >>> from_environment({"AUDITOR_MAX_BATCH": "4", "HOME": "/root"}).max_batch
    4
    """
    variables = os.environ if environment is None else environment
    values = {name: variables[_variable(name)] for name in Settings.model_fields if variables.get(_variable(name))}
    for name in OLD_NAMES:
        if variables.get(_variable(name)) and OLD_NAMES[name] not in values:
            values[new_name(name)] = variables[_variable(name)]
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise OptionError(
            f"{_variable(where)}: {first['msg'].lower()}, got {first['input']!r}; see auditor serve --help."
        ) from None


def to_environment(settings: Settings) -> dict[str, str]:
    """Return the variables that make ``from_environment`` read these settings again.

    >>> from_environment(to_environment(Settings(queue=7))).queue
    7
    """
    values = {name: getattr(settings, name) for name in Settings.model_fields}
    return as_variables({name: value for name, value in values.items() if value is not None})


def as_variables(values: Mapping[str, Any]) -> dict[str, str]:
    """Return settings by name as variables; a name that is no setting is an error.

    >>> as_variables({"log_requests": False, "queue": 7})
    {'AUDITOR_LOG_REQUESTS': 'false', 'AUDITOR_QUEUE': '7'}
    """
    unknown = sorted(set(values) - set(Settings.model_fields) - set(OLD_NAMES))
    if unknown:
        raise OptionError(f"there is no setting {', '.join(unknown)}; there are: {', '.join(Settings.model_fields)}.")
    return {
        _variable(new_name(name)): str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in values.items()
    }


def _variable(name: str) -> str:
    return PREFIX + name.upper()
