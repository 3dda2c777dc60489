"""Session: what one participant is asked, step by step, and which answers are taken.

Pure: a list of steps made from the study and the participant's number, and a check of an answer against a step. What
a participant is sent holds no class, no prediction and nothing of other participants.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from auditor.errors import AnswerError
from auditor.study.design import CONFIDENCE, RATING, Study, shows
from auditor.study.orders import Batch

Kind = Literal["questions", "practice", "group", "confidence", "rating", "comment"]
LONGEST_COMMENT = 5000
LONGEST_LINE = 200
LONGEST_S = 30 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that is asked; ``batch`` for grouping and the confidence after it."""

    kind: Kind
    batch: Batch | None = None
    stage: int = 0  # 1, 2, … of the condition; 0 outside of stages
    number: int = 0  # 1, 2, … of the batch


def steps_of(study: Study, number: int) -> list[Step]:
    """Return everything that the participant with this number is asked, in order."""
    steps = [Step("questions")] if study.config.questions else []
    steps.append(Step("practice"))
    batches = study.order_of(number).batches
    conditions = list(dict.fromkeys(b.condition for b in batches))
    for n, batch in enumerate(batches, 1):
        stage = 1 + conditions.index(batch.condition)
        steps += [Step("group", batch, stage, n), Step("confidence", batch, stage, n)]
    if any(shows(name) != "nothing" for name in study.config.conditions):
        steps.append(Step("rating"))
    return [*steps, Step("comment")]


def images_of(study: Study, number: int, step: Step) -> list[str]:
    """Return the ids of a step's images, in an order of the participant's own."""
    if step.kind == "practice":
        return list(study.practice)
    if step.batch is None:
        return []
    ids = study.data[step.batch.data].sets[step.batch.drawn]
    seed = [study.config.seed, number, step.batch.data, step.batch.drawn]
    return [ids[i] for i in np.random.default_rng(seed).permutation(len(ids))]


def pictures_of(study: Study, number: int, step: Step) -> set[str]:
    """Return the names of the pictures that may be seen in a step, and only in it."""
    if step.kind not in ("practice", "group"):
        return set()
    names = {f"image/{key}" for key in images_of(study, number, step)}
    if step.kind == "group" and step.batch is not None:
        condition = study.config.conditions[step.batch.condition]
        for key in images_of(study, number, step):
            for slot, there in enumerate(study.images[key].heats.get(condition, ())):
                if there:
                    names.add(f"heat/{key}/{condition}/{slot}")
    return names


def assistants(study: Study, number: int) -> list[tuple[str, str]]:
    """Return condition and name of every assistant, in the order in which the participant met them."""
    order = dict.fromkeys(study.config.conditions[b.condition] for b in study.order_of(number).batches)
    helping = [name for name in order if shows(name) != "nothing"]
    return [(name, f"Assistant {chr(65 + i)}") for i, name in enumerate(helping)]


def described(study: Study, number: int, index: int) -> dict[str, Any]:
    """Return what a participant's page is sent about a step."""
    steps = steps_of(study, number)
    about: dict[str, Any] = {"index": index, "of": len(steps)}
    if index >= len(steps):
        return {**about, "kind": "end"}
    step, config = steps[index], study.config
    about["kind"] = step.kind
    if step.kind == "questions":
        return {**about, "questions": [q.model_dump(mode="json") for q in config.questions]}
    if step.kind == "confidence":
        return {**about, "choices": list(CONFIDENCE)}
    if step.kind == "rating":
        names = [
            {"key": _opaque(study, key), "name": name, "shows": shows(key)} for key, name in assistants(study, number)
        ]
        return {**about, "choices": list(RATING), "assistants": names}
    if step.kind == "comment":
        return {**about, "longest": LONGEST_COMMENT}
    about |= {"n_groups": config.n_classes, "shows": "nothing", "slots": None}
    ids = images_of(study, number, step)
    if step.kind == "practice":
        return {**about, "images": [{"id": key} for key in ids]}
    assert step.batch is not None
    condition = config.conditions[step.batch.condition]
    batches = len(study.data) * len(config.conditions)
    named = dict(assistants(study, number)).get(condition, "")
    about |= {
        "stage": step.stage,
        "stages": len(config.conditions),
        "batch": step.number,
        "batches": batches,
        "shows": shows(condition),
        "assistant": named,
        "slots": study.data[step.batch.data].slots.get(condition),
    }
    about["images"] = [
        {
            "id": key,
            "values": study.images[key].values.get(condition, []),
            "heats": [
                f"heat/{key}/{_opaque(study, condition)}/{slot}" if there else None
                for slot, there in enumerate(study.images[key].heats.get(condition, ()))
            ],
        }
        for key in ids
    ]
    return about


def _opaque(study: Study, condition: str) -> str:
    """Return a name of a condition that says nothing of it: the name of an explainer may."""
    return hashlib.sha256(f"{study.name} {study.config.seed} {condition}".encode()).hexdigest()[:8]


def picture_name(study: Study, sent: str) -> str:
    """Return the name of a picture as it is stored, from the one that a page was sent."""
    parts = sent.split("/")
    if len(parts) == 4 and parts[0] == "heat":
        names = {_opaque(study, name): name for name in study.config.conditions}
        parts[2] = names.get(parts[2], "")
    return "/".join(parts)


def checked_answer(study: Study, number: int, step: Step, answer: Any, *, draft: bool = False) -> dict[str, Any]:
    """Return an answer as it is stored, or one sentence about what is wrong with it; a draft may be unfinished."""
    if not isinstance(answer, Mapping):
        raise AnswerError("want the answer as an object with named parts.")
    if step.kind in ("practice", "group"):
        return {"groups": _groups(study, number, step, answer.get("groups"), draft)}
    if step.kind == "confidence":
        return {"confidence": _choice(answer.get("confidence"), len(CONFIDENCE), "confidence", draft)}
    if step.kind == "rating":
        ratings = answer.get("ratings")
        if not isinstance(ratings, Mapping):
            raise AnswerError("ratings: want a rating for every assistant.")
        return {
            "ratings": {
                key: _choice(ratings.get(_opaque(study, key)), len(RATING), f"the rating of {name}", draft)
                for key, name in assistants(study, number)
            }
        }
    if step.kind == "comment":
        return {"comment": _text(answer.get("comment", ""), LONGEST_COMMENT, "the comment")}
    return {"questions": _questions(study, answer.get("questions"), draft)}


def as_sent(study: Study, step: Step, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored answer as the page gave it."""
    if step.kind != "rating":
        return dict(stored)
    return {"ratings": {_opaque(study, key): value for key, value in stored.get("ratings", {}).items()}}


def _groups(study: Study, number: int, step: Step, groups: Any, draft: bool) -> dict[str, int | None]:
    ids, n = images_of(study, number, step), study.config.n_classes
    if not isinstance(groups, Mapping):
        raise AnswerError("groups: want a group for every image.")
    strangers = set(groups) - set(ids)
    if strangers:
        raise AnswerError(
            "groups: there is an image that is not of this batch; reload the page, nothing is lost.", "out_of_order"
        )
    placed: dict[str, int | None] = {}
    for key in ids:
        group = groups.get(key)
        if group is not None and (isinstance(group, bool) or not isinstance(group, int) or not 1 <= group <= n):
            raise AnswerError(f"groups: want a group from 1 to {n} for each image, got {str(group)[:20]!r}.")
        placed[key] = group
    left = sum(group is None for group in placed.values())
    if left and not draft:
        raise AnswerError(f"groups: {left} of {len(ids)} images are in no group yet; put every image into one.")
    return placed


def _choice(value: Any, n: int, what: str, draft: bool) -> int | None:
    if value is None and draft:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < n:
        raise AnswerError(f"{what}: choose one of the {n} steps.")
    return value


def _text(value: Any, longest: int, what: str) -> str:
    if not isinstance(value, str) or len(value) > longest:
        raise AnswerError(f"{what}: want text of at most {longest} characters.")
    return "".join(c for c in value if c.isprintable() or c == "\n").strip()


def _questions(study: Study, answers: Any, draft: bool) -> dict[str, str]:
    if not isinstance(answers, Mapping):
        raise AnswerError("questions: want an answer by the key of each question.")
    given = {}
    for q in study.config.questions:
        text = _text(answers.get(q.key, ""), LONGEST_LINE, f"{q.text!r}")
        if q.choices and text and text not in q.choices:
            raise AnswerError(f"{q.text!r}: choose one of the answers.")
        if q.required and not text and not draft:
            raise AnswerError(f"{q.text!r}: please answer this one.")
        given[q.key] = text
    return given


def checked_seconds(value: Any) -> float:
    """Return a duration that a page measured; what is no duration counts as 0.

    >>> checked_seconds(12.34), checked_seconds("no"), checked_seconds(float("nan"))
    (12.3, 0.0, 0.0)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= LONGEST_S:
        return 0.0
    return round(float(value), 1)
