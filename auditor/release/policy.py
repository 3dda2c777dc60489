"""Policy: limits on audit metrics as a TOML file, absolute or against a baseline version.

::

    schema_version = 1
    explainers = ["concepts"]            # must be attached and verify

    [limits."model/accuracy"]
    min = 0.97                           # absolute; also max
    max_absolute_loss = 0.005            # against --baseline: may be worse by at most this
    min_relative_change = 0.0            # MLflow's MetricThreshold: must be better by at least this share

    [pins]                               # what the audit must have been made of; each is optional
    data_digest = "9f2c…"
    images = 1797                        # images in the data
    explained = 100                      # images that were explained, at least
    seed = 0
    auditor = ">=0.1,<0.3"               # versions of mlflow-auditor
    kinds = ["nmf", "tree"]              # of which an explainer must be attached
    baseline_differs = true              # the baseline must be another model, not the same weights registered anew

    [signers]                            # whose signatures count, by the names of trusted keys (--trusted keys/)
    audit = ["alice"]
    model = ["bob"]
    differ = true                        # whoever signed the model may not have signed the audit

``threshold`` with ``greater_is_better``, ``min_absolute_change`` and ``min_relative_change`` mean what they mean in
``mlflow.models.MetricThreshold``.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from auditor.errors import OptionError
from auditor.metrics.names import current

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


class Pins(BaseModel):
    """What an audit must have been made of; None asks for nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data_digest: str | None = Field(default=None, pattern=r"^[0-9a-f]{12,64}$", description="Digest of the data.")
    images: int | None = Field(default=None, ge=1, description="Images in the data, exactly.")
    explained: int | None = Field(default=None, ge=1, description="Images that were explained, at least.")
    seed: int | None = Field(default=None, ge=0, description="Seed of the audit.")
    auditor: str | None = Field(default=None, description="Versions of mlflow-auditor, such as >=0.1,<0.3.")
    kinds: tuple[str, ...] = Field(default=(), description="Kinds of which an explainer must be attached.")
    baseline_differs: bool = Field(default=False, description="The baseline must not be the same model.")

    @field_validator("auditor")
    @classmethod
    def _range(cls, text: str | None) -> str | None:
        from packaging.specifiers import InvalidSpecifier, SpecifierSet

        try:
            SpecifierSet(text or "")
        except InvalidSpecifier:
            raise ValueError(f"{text!r} is no range of versions such as >=0.1,<0.3") from None
        return text


class Signers(BaseModel):
    """Whose signatures count, by the names of trusted keys; an empty list asks for none."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    audit: tuple[str, ...] = Field(default=(), description="Who may sign the audit.")
    model: tuple[str, ...] = Field(default=(), description="Who may sign the model.")
    differ: bool = Field(default=False, description="Whether model and audit must have different signers.")

    @property
    def asked(self) -> bool:
        """Whether anything is asked of signatures."""
        return bool(self.audit or self.model or self.differ)


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = 1
    explainers: list[str] = Field(default_factory=list)
    limits: dict[str, Limit] = Field(default_factory=dict)
    pins: Pins = Pins()
    signers: Signers = Signers()
    drafted: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits by metric name, the explainers that must be there, and the digest of the file they came from."""

    limits: Mapping[str, Limit]
    explainers: tuple[str, ...] = ()
    digest: str = ""
    name: str = ""
    path: Path | None = None  # the file it was read from
    pins: Pins = field(default_factory=Pins)
    signers: Signers = field(default_factory=Signers)

    @property
    def needs_baseline(self) -> bool:
        """Whether any limit refers to a baseline or to drift."""
        changes = any(limit.needs_baseline for limit in self.limits.values())
        return changes or self.needs_drift or self.pins.baseline_differs

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
    return replace(parse_policy(text, str(path)), path=path)


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
    names = tuple(document.explainers)
    limits = {current(metric): limit for metric, limit in document.limits.items()}
    return Policy(limits, names, digest, name, pins=document.pins, signers=document.signers)


def in_words(policy: Policy) -> list[str]:
    """Return what a policy asks for, one sentence a line."""
    lines = [f"{name}: {_limit_words(limit)}." for name, limit in policy.limits.items()]
    lines += [f"The explainer {name} is attached and verifies." for name in policy.explainers]
    pins, signers = policy.pins, policy.signers
    asked = {
        "The audit was made on data with digest {}.": pins.data_digest,
        "The data has {} images.": pins.images,
        "At least {} images were explained.": pins.explained,
        "The seed of the audit is {}.": pins.seed,
        "The audit was made by mlflow-auditor {}.": pins.auditor,
        "There is an explainer of kind {}.": ", and one of kind ".join(pins.kinds) or None,
        "The audit is signed by {}.": " or ".join(signers.audit) or None,
        "The model is signed by {}.": " or ".join(signers.model) or None,
    }
    lines += [text.format(value) for text, value in asked.items() if value is not None]
    if pins.baseline_differs:
        lines.append("The baseline is another model than the one that is judged.")
    if signers.differ:
        lines.append("Whoever signed the audit did not sign the model.")
    return lines


def _limit_words(limit: Limit) -> str:
    up = {None: "", True: ", more being better", False: ", less being better"}[limit.greater_is_better]
    words = {
        "min": "at least {}",
        "max": "at most {}",
        "threshold": "no worse than {}" + up,
        "min_absolute_change": "better than the baseline by at least {}",
        "min_relative_change": "better than the baseline by at least {} of it",
        "max_absolute_loss": "worse than the baseline by at most {}",
        "max_relative_loss": "worse than the baseline by at most {} of it",
    }
    return ", and ".join(t.format(f"{getattr(limit, k):g}") for k, t in words.items() if getattr(limit, k) is not None)


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        tables: dict[str, type[BaseModel]] = {"limits": Limit, "pins": Pins, "signers": Signers}
        inside = tables.get(str(first["loc"][0]), _Document) if len(first["loc"]) > 1 else _Document
        names = ", ".join(inside.model_fields)
        return f"{where!r} is not known here; known are {names}."
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {message[0].lower()}{message[1:]}."
