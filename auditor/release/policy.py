"""Policy: limits on audit metrics as a TOML file, absolute or against a baseline version.

::

    schema_version = 1
    explainers = ["concepts"]            # must be attached and verify

    [limits."model/accuracy"]
    min = 0.97                           # absolute; also max
    max_absolute_loss = 0.005            # against --baseline: may be worse by at most this
    min_relative_change = 0.0            # MLflow's MetricThreshold: must be better by at least this share

``threshold`` with ``greater_is_better``, ``min_absolute_change`` and ``min_relative_change`` mean what they mean in
``mlflow.models.MetricThreshold``.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from auditor.errors import OptionError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCHEMA_VERSION = 1
RELATIVE = ("min_absolute_change", "min_relative_change", "max_absolute_loss", "max_relative_loss")


class Limit(BaseModel):
    """Limits on one metric; a value must keep all of them. NaN and skipped metrics keep none."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    min: float | None = Field(default=None, description="The value must be at least this.")
    max: float | None = Field(default=None, description="The value must be at most this.")
    threshold: float | None = Field(default=None, description="MLflow's: min or max, by greater_is_better.")
    greater_is_better: bool | None = Field(default=None, description="Default: the metric's own direction.")
    min_absolute_change: float | None = Field(default=None, ge=0, description="Better than the baseline by this.")
    min_relative_change: float | None = Field(default=None, ge=0, description="Better by this share of it.")
    max_absolute_loss: float | None = Field(default=None, ge=0, description="Worse than the baseline by at most this.")
    max_relative_loss: float | None = Field(default=None, ge=0, description="Worse by at most this share of it.")

    @model_validator(mode="after")
    def _sense(self) -> Limit:
        numbers = {k: v for k, v in self.model_dump(exclude={"greater_is_better"}).items() if v is not None}
        if not numbers:
            raise ValueError("it sets no limit")
        odd = [k for k, v in numbers.items() if not math.isfinite(v)]
        if odd:
            raise ValueError(f"{odd[0]} must be a finite number")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}, so nothing passes")
        return self

    @property
    def needs_baseline(self) -> bool:
        """Whether a limit refers to a baseline."""
        return any(getattr(self, name) is not None for name in RELATIVE)


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = 1
    explainers: list[str] = Field(default_factory=list)
    limits: dict[str, Limit] = Field(default_factory=dict)
    drafted: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits by metric name, the explainers that must be there, and the digest of the file they came from."""

    limits: Mapping[str, Limit]
    explainers: tuple[str, ...] = ()
    digest: str = ""
    name: str = ""

    @property
    def needs_baseline(self) -> bool:
        """Whether any limit refers to a baseline or to drift."""
        return any(limit.needs_baseline for limit in self.limits.values()) or self.needs_drift

    @property
    def needs_drift(self) -> bool:
        """Whether any limit refers to drift."""
        return any(name.startswith("drift/") for name in self.limits)


def read_policy(path: str | Path) -> Policy:
    """Read a policy file; everything wrong with it is one sentence."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"policy {path}: cannot be read ({error}); write one with auditor policy init MODEL > policy.toml."
        ) from None
    return parse_policy(text, str(path))


def parse_policy(text: str, name: str = "policy") -> Policy:
    """Check a policy's text.

    >>> parse_policy('[limits."model/accuracy"]' + chr(10) + 'min = 0.9').limits["model/accuracy"].min
    0.9
    """
    try:
        document = _Document(**tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise OptionError(f"policy {name}: it is not TOML ({error}).") from None
    except ValidationError as error:
        raise OptionError(f"policy {name}: {_first_problem(error)}") from None
    if document.schema_version > SCHEMA_VERSION:
        raise OptionError(f"policy {name}: schema_version {document.schema_version} is newer than this mlflow-auditor.")
    if not document.limits:
        raise OptionError(
            f"policy {name}: it sets no limits, so it would pass anything; write one with auditor policy init MODEL."
        )
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Policy(document.limits, tuple(document.explainers), digest, name)


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        inside = first["loc"][0] == "limits"
        names = ", ".join((Limit if inside else _Document).model_fields)
        return f"{where!r} is not known here; known are {names}."
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {message[0].lower()}{message[1:]}."
