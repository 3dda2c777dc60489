"""Answer options: what a caller may ask of an explanation. One table for the terminal, REST and Python.

The fields of ``AnswerOptions`` are the flags of ``auditor explain`` (``top_k`` is ``--top-k``), the fields of every
REST request that explains, the columns of a record for the deployments client and the keywords of the Python functions:
the same names, defaults and limits everywhere. This module needs pydantic only, as the
client of the service does.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from auditor.errors import OptionError

HeatmapStyle = Literal["png", "array", "none"]
StabilityMode = Literal["off", "fast", "full"]
Target = Annotated[int, Field(strict=True, ge=0, le=1_000_000)] | Annotated[str, Field(max_length=200)]
ExplainerName = Annotated[str, Field(min_length=1, max_length=64)]

EVERY = "*"  # names every attached explainer, those that search included
MAX_EXPLAINERS = 64
OLD_NAMES: Mapping[str, str] = {"explainer": "explainers", "samples": "noise_samples", "timeout": "timeout_s"}


class AnswerOptions(BaseModel):
    """What a caller may ask of an explanation; every field has a default."""

    model_config = ConfigDict(extra="forbid")
    old_names: ClassVar[Mapping[str, str]] = OLD_NAMES

    explainers: list[ExplainerName] | None = Field(
        default=None,
        max_length=MAX_EXPLAINERS,
        description="Names of attached explainers; `*` means all. Default: all that answer from one forward pass, "
        "which leaves out those that search per image.",
        examples=[["concepts"]],
    )
    target: Target | None = Field(
        default=None, description="Class to explain, by name or index; default: the prediction.", examples=["7"]
    )
    top_k: int | None = Field(
        default=None, ge=1, le=10_000, description="Keep this many concepts, the strongest first; default: all."
    )
    heatmaps: HeatmapStyle = Field(
        default="png", description="Per concept a PNG overlay (data URL), a raw grid of floats, or nothing."
    )
    stability: StabilityMode = Field(
        default="fast", description="`fast`: sampled in one batched pass; `full`: power iteration; `off`: null."
    )
    noise_samples: int = Field(default=8, ge=1, le=64, description="Noise samples of the stability.")
    radius: float = Field(
        default=0.02, ge=1e-6, le=1, description="Root mean square change of a pixel in the stability's noise."
    )
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Seed of the stability's noise.")
    timeout_s: float | None = Field(
        default=None,
        gt=0,
        le=60,
        description="Seconds per image for explainers that search; default: as they were fitted. A server may cap it.",
    )
    max_steps: int | None = Field(
        default=None, ge=1, le=10_000, description="Steps for explainers that search; default: as they were fitted."
    )

    _renamed: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def renamed(self) -> dict[str, str]:
        """Old names that were used, with the new name of each."""
        return self._renamed

    @model_validator(mode="wrap")
    @classmethod
    def _take_old_names(cls, values: Any, handler: ModelWrapValidatorHandler[AnswerOptions]) -> AnswerOptions:
        used: dict[str, str] = {}
        if isinstance(values, dict):
            values, used = with_new_names(values)
        options = handler(values)
        if used:
            options._renamed = used
        return options


OPTION_NAMES = tuple(AnswerOptions.model_fields)


def with_new_names(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values under their names of today, and the old names that were used; a new name given too wins.

    >>> with_new_names({"samples": 4, "seed": 1})
    ({'noise_samples': 4, 'seed': 1}, {'samples': 'noise_samples'})
    """
    used = {old: new for old, new in OLD_NAMES.items() if old in values}
    if not used:
        return values, used
    return {**{used.get(name, name): value for name, value in values.items()}, **_without(values, used)}, used


def _without(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def deprecation(old: str, new: str) -> str:
    """Return the sentence about an old name."""
    return f"{old} is called {new} now; the old name goes with the next release."


def options_of(where: str, values: Mapping[str, Any]) -> AnswerOptions:
    """Check keywords; old names warn, and the first problem becomes one sentence that begins with ``where``."""
    try:
        options = AnswerOptions.model_validate(dict(values))
    except ValidationError as error:
        raise option_error(where, error) from None
    for old, new in options.renamed.items():
        warnings.warn(deprecation(old, new), DeprecationWarning, stacklevel=3)
    return options


def option_error(where: str, error: ValidationError) -> OptionError:
    """Return the first problem of a validation as one sentence."""
    first = error.errors(include_input=False, include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"][:1]) or "options"
    if first["type"] == "extra_forbidden":
        return OptionError(f"{where}: unknown option {name!r}; the options are {', '.join(OPTION_NAMES)}.")
    return OptionError(f"{where}: {name}: {first['msg'].lower()}.")
