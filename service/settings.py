"""Settings of a server: flags of ``auditor serve`` and ``AUDITOR_*`` in the environment are the same thing.

The command puts its flags into the environment, each worker reads them there; a bento started by ``bentoml serve`` is
configured by the environment alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from auditor.errors import OptionError

PREFIX = "AUDITOR_"


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

    max_batch: int = Field(default=16, ge=1, le=1024, description="Images per forward pass.")
    max_wait_ms: float = Field(default=0.0, ge=0, le=1000, description="Wait this long for a batch to fill.")
    queue: int = Field(default=256, ge=1, description="Images that may wait; beyond it callers get 429.")
    slow_queue: int = Field(default=16, ge=1, description="The same for requests that search or iterate.")
    request_timeout_s: float = Field(default=30.0, gt=0, description="A request not answered by then gets 503.")
    search_timeout_s: float = Field(default=1.0, gt=0, description="Budget of explainers that search per image.")
    max_search_timeout_s: float = Field(default=10.0, gt=0, description="The most a request may ask for.")

    max_body_mb: float = Field(default=16.0, gt=0, description="Larger bodies get 413.")
    max_pixels: int = Field(default=40_000_000, ge=1, description="Images with more pixels get 413, undecoded.")
    upload_timeout_s: float = Field(default=20.0, gt=0, description="A body not sent by then gets 408.")
    api_keys: Path | None = Field(default=None, description="File with one key per line; read again when it changes.")

    poll_s: float = Field(default=5.0, gt=0, description="How often a worker asks whether the alias moved.")
    samples: str = Field(default="", description="Data source of the sample images on the page.")
    log_requests: bool = Field(default=True, description="One JSON line per request.")
    otlp_endpoint: str = Field(
        default="",
        pattern=r"^(https?://.+)?$",
        description="Traces go here by OTLP over HTTP, e.g. http://collector:4318/v1/traces.",
    )
    trace_rate: float = Field(default=1.0, ge=0, le=1, description="Share of the requests that are traced.")


def from_environment(environment: Mapping[str, str] | None = None) -> Settings:
    """Read the settings; a value that does not fit is one sentence.

    >>> from_environment({"AUDITOR_MAX_BATCH": "4", "HOME": "/root"}).max_batch
    4
    """
    found = os.environ if environment is None else environment
    values = {
        name: found[key] for name in Settings.model_fields if (key := PREFIX + name.upper()) in found and found[key]
    }
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise OptionError(
            f"{PREFIX}{where.upper()}: {first['msg'].lower()}, got {first['input']!r}; see auditor serve --help."
        ) from None


def to_environment(settings: Settings) -> dict[str, str]:
    """Return the variables that make ``from_environment`` read these settings again.

    >>> from_environment(to_environment(Settings(queue=7))).queue
    7
    """
    values = {name: getattr(settings, name) for name in Settings.model_fields}
    return {
        PREFIX + name.upper(): str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in values.items()
        if value is not None
    }
