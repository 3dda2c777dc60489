"""Design of a study: what its owner chooses, and the drawn study as it is stored.

A drawn study holds everything that a participant may see and everything that answers are scored against; the pictures
lie beside it (`auditor.study.folder`). What a participant is sent never says what the model predicted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from auditor.errors import StudyError
from auditor.metrics.grouping_purity import ceiling, chance
from auditor.study.orders import NONE, By, Order, order_of

SCHEMA_VERSION = 1
ONE_HEATMAP = "one-heatmap"
NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
CONFIDENCE = ("Zero", "Very low", "Low", "Mediocre", "High", "Very high", "100%")
RATING = ("Very poor", "Poor", "Slightly poor", "Neutral or N/A", "Slightly good", "Good", "Very good")
MOST_GROUPS = 9  # a digit key each

Shows = Literal["nothing", "heatmap", "concepts"]

WELCOME = (
    "You will see small sets of images and put them into groups of what belongs together. In some parts an assistant "
    "shows you what a computer program looks at. There is nothing to be prepared for, and you can stop at any time."
)
CONSENT = (
    "Your answers, and how long you take for them, are stored under a random code. No name, no address and nothing "
    "about your device is stored. With your code, which you see when you stop or finish, the owner of the study can "
    "erase all of it."
)


class Question(BaseModel):
    """A question about the person, asked before the practice batch; without choices the answer is a line of text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str = Field(pattern=r"^[a-z0-9_]{1,32}$", description="Its name in the results.")
    text: str = Field(min_length=1, max_length=300, description="What is asked.")
    choices: tuple[str, ...] = Field(default=(), max_length=20, description="What can be answered.")
    required: bool = Field(default=False, description="Whether it must be answered.")


class StudyConfig(BaseModel):
    """What the owner of a study chooses."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(default="study", description="Its name on the version, in metrics and pages.")
    title: str = Field(default="Which images belong together?", min_length=1, max_length=120)
    conditions: tuple[str, ...] = Field(default=(NONE, ONE_HEATMAP), description="none, one-heatmap, explainers.")
    n_classes: int = Field(default=4, ge=2, le=MOST_GROUPS, description="Classes per data set, and groups to make.")
    per_batch: int = Field(default=10, ge=2, le=40, description="Images per batch.")
    sets: int = Field(default=5, ge=1, le=50, description="Sets of images drawn beforehand per data set.")
    order: By = Field(default="latin", description="How participants are given their orders.")
    seed: int = Field(default=0, ge=0, description="Seed of all that is drawn.")
    welcome: str = Field(default=WELCOME, max_length=5000)
    consent: str = Field(default=CONSENT, max_length=5000)
    questions: tuple[Question, ...] = ()

    @field_validator("name")
    @classmethod
    def _plain(cls, name: str) -> str:
        if not NAME.match(name):
            raise ValueError(f"want 1 to 64 letters, digits, '_', '-' or '.', got {name!r}")
        return name

    @model_validator(mode="after")
    def _sense(self) -> StudyConfig:
        if len(set(self.conditions)) < len(self.conditions) or len(self.conditions) < 2:
            raise ValueError(
                f"conditions: want at least two different ones, got {', '.join(self.conditions) or 'none'}"
            )
        odd = [name for name in self.conditions if not NAME.match(name)]
        if odd:
            raise ValueError(f"conditions: {odd[0]!r} is neither none, one-heatmap nor the name of an explainer")
        if self.per_batch < self.n_classes:
            raise ValueError(
                f"images per batch: want at least one of each of {self.n_classes} classes, got {self.per_batch}"
            )
        if self.sets < len(self.conditions):
            raise ValueError(
                f"sets: {len(self.conditions)} conditions need as many, so that nobody sees an image twice, got "
                f"{self.sets}"
            )
        keys = [question.key for question in self.questions]
        if len(set(keys)) < len(keys):
            raise ValueError("questions: two have the same key")
        return self


def checked_config(**options: Any) -> StudyConfig:
    """Return a checked design, or one sentence about what is wrong with it."""
    try:
        return StudyConfig(**options)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise StudyError(f"study: {where + ': ' if where else ''}{message[0].lower()}{message[1:]}.") from None


def shows(condition: str) -> Shows:
    """Return what participants see beside the images.

    >>> shows("none"), shows("one-heatmap"), shows("xnn")
    ('nothing', 'heatmap', 'concepts')
    """
    if condition == NONE:
        return "nothing"
    return "heatmap" if condition == ONE_HEATMAP else "concepts"


@dataclass(frozen=True, slots=True)
class DrawnImage:
    """One image of a study: what the model predicts, what the data says, and the values of its concepts."""

    predicted: str
    label: str | None
    source: str  # what the data calls it
    values: dict[str, list[float]] = field(default_factory=dict)  # condition: a number per slot
    heats: dict[str, list[bool]] = field(default_factory=dict)  # condition: whether a slot has a heatmap


@dataclass(frozen=True, slots=True)
class DrawnData:
    """One data set of a study: its classes, its sets of images, and the slots of each condition."""

    name: str
    spec: str
    digest: str
    model: str  # the label of the version that was asked, models:/birds/3
    model_digest: str
    classes: tuple[str, ...]
    chosen_by: str
    sets: tuple[tuple[str, ...], ...]  # ids of images
    slots: dict[str, dict[str, Any]] = field(default_factory=dict)  # condition: n, by_rank, contributions, labels
    side: tuple[int, int] = (0, 0)  # of its pictures in pixels, height and width


@dataclass(frozen=True)
class Study:
    """A drawn study."""

    config: StudyConfig
    data: tuple[DrawnData, ...]
    images: dict[str, DrawnImage]
    practice: tuple[str, ...] = ()
    time: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return its name."""
        return self.config.name

    @property
    def models(self) -> list[str]:
        """Return the labels of the model versions it was drawn from."""
        return list(dict.fromkeys(d.model for d in self.data))

    def order_of(self, number: int) -> Order:
        """Return what the participant with this number sees."""
        c = self.config
        return order_of(number, c.conditions, len(self.data), c.sets, c.order, c.seed)

    def classes_of(self, data: int, drawn: int, of: Literal["predicted", "label"] = "predicted") -> list[str | None]:
        """Return the predicted class, or the label, of every image of a set."""
        return [getattr(self.images[i], of) for i in self.data[data].sets[drawn]]

    def levels(self, data: int, drawn: int) -> tuple[float, float]:
        """Return chance level and ceiling of the purity of a set against the predictions."""
        predicted = self.classes_of(data, drawn)
        return chance(predicted, self.config.n_classes), ceiling(predicted, self.config.n_classes)

    def to_json(self) -> dict[str, Any]:
        """Return plain Python for JSON."""
        return {
            "schema_version": SCHEMA_VERSION,
            "config": self.config.model_dump(mode="json"),
            "data": [{k: getattr(d, k) for k in DrawnData.__slots__} for d in self.data],
            "images": {key: {k: getattr(i, k) for k in DrawnImage.__slots__} for key, i in self.images.items()},
            "practice": list(self.practice),
            "time": self.time,
            "versions": self.versions,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Study:
        """Restore what `to_json` gave, after a trip through JSON."""
        if document.get("schema_version", 0) > SCHEMA_VERSION:
            raise StudyError("study: it is of a newer version; upgrade mlflow-auditor.")
        try:
            data = tuple(
                DrawnData(
                    **{
                        **d,
                        "classes": tuple(d["classes"]),
                        "sets": tuple(tuple(s) for s in d["sets"]),
                        "side": tuple(d["side"]),
                    }
                )
                for d in document["data"]
            )
            images = {str(key): DrawnImage(**image) for key, image in document["images"].items()}
            rest = {k: document[k] for k in ("time", "versions")}
            practice = tuple(document["practice"])
        except (KeyError, TypeError, AttributeError) as error:
            raise StudyError(f"study: it is not one of mlflow-auditor ({error} is missing or odd).") from None
        return cls(checked_config(**document["config"]), data, images, practice, **rest)
