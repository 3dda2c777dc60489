"""Scores: what each answered batch is worth, one row per participant and batch.

The purity of a person's groups is taken against the model's predictions, as in [Khorram2020], and against the
labels of those images that have one; each row carries the chance levels and the ceilings of its own images
(`auditor.metrics.grouping_purity`).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from auditor.metrics.grouping_purity import ceiling, chance, purity
from auditor.study.answers import Answered
from auditor.study.design import CONFIDENCE, RATING, Study

MOST_CONFIDENCE = len(CONFIDENCE) - 1
MOST_RATING = len(RATING) - 1


@dataclass(frozen=True, slots=True)
class Score:
    """One batch that one participant grouped."""

    code: str
    condition: str
    data: str
    drawn: int
    stage: int  # 1, 2, … the place of the condition in the participant's order
    batch: int  # 1, 2, … the place of the batch
    purity: float
    purity_of_labels: float | None
    chance: float
    ceiling: float
    seconds: float
    confidence: float | None  # 0 for "Zero" to 1 for "100%"; None where it is not answered yet
    cell: int  # which of the balanced orders
    chance_of_labels: float | None = None
    ceiling_of_labels: float | None = None


@dataclass(frozen=True, slots=True)
class Rating:
    """What one participant thinks of one assistant, 0 for very poor to 1 for very good."""

    code: str
    condition: str
    rating: float


def scores_of(study: Study, everybody: Sequence[Answered]) -> list[Score]:
    """Return a row per batch that was grouped, unfinished participants included."""
    rows = []
    for person in everybody:
        body = {given.step: given for given in person.given}
        order = study.order_of(person.number)
        for index, step in enumerate(person.steps):
            if step.kind != "group" or index not in body or step.batch is None:
                continue
            groups = body[index].body["groups"]
            ids = study.data[step.batch.data].sets[step.batch.drawn]
            said = [groups[key] for key in ids]
            predicted = [study.images[key].predicted for key in ids]
            labelled = [
                (g, study.images[key].label) for g, key in zip(said, ids, strict=True) if study.images[key].label
            ]
            classes = [label for _, label in labelled]
            level, top = study.levels(step.batch.data, step.batch.drawn)
            sure = body.get(index + 1)
            rows.append(
                Score(
                    code=person.code,
                    condition=study.config.conditions[step.batch.condition],
                    data=study.data[step.batch.data].name,
                    drawn=step.batch.drawn,
                    stage=step.stage,
                    batch=step.number,
                    purity=purity(said, predicted),
                    purity_of_labels=purity(*zip(*labelled, strict=True)) if labelled else None,
                    chance=level,
                    ceiling=top,
                    seconds=body[index].seconds,
                    confidence=None if sure is None else sure.body["confidence"] / MOST_CONFIDENCE,
                    cell=order.cell,
                    chance_of_labels=chance(classes, study.config.n_classes) if classes else None,
                    ceiling_of_labels=ceiling(classes, study.config.n_classes) if classes else None,
                )
            )
    return rows


def ratings_of(everybody: Sequence[Answered]) -> list[Rating]:
    """Return what participants think of the assistants."""
    return [
        Rating(person.code, condition, step / MOST_RATING)
        for person in everybody
        for given in person.given
        for condition, step in given.body.get("ratings", {}).items()
    ]


def as_csv(rows: Sequence[Score]) -> str:
    """Return the scores as CSV, a line per participant and batch."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, [f.name for f in fields(Score)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return stream.getvalue()
