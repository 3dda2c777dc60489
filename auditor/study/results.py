"""Results: what a study found, as one document: means, comparisons, effects of order and data set, and metrics.

A person's value under a condition is the mean over the data sets; comparisons are between the values of people who have
both. All comparisons of purity over all data sets are corrected together, so are those within single data sets, and so
are those of confidence.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from itertools import combinations
from typing import Any

import numpy as np

from auditor.errors import StudyError
from auditor.metrics.measure import Direction, Measure, of_items
from auditor.metrics.multiple_tests import holm
from auditor.study.answers import Answered
from auditor.study.comparisons import Comparison, compare
from auditor.study.design import Study, shows
from auditor.study.order_effects import Effect, data_effect, order_effect
from auditor.study.orders import NONE, words
from auditor.study.scores import Rating, Score, ratings_of, scores_of

SCHEMA_VERSION = 1
NO_ANSWER = "no answer"
Value = Callable[[Score], float | None]
OF_BATCHES: Mapping[str, tuple[Value, Direction]] = {
    "purity": (lambda row: row.purity, "up"),
    "purity_of_labels": (lambda row: row.purity_of_labels, "up"),
    "confidence": (lambda row: row.confidence, "none"),
    "seconds": (lambda row: row.seconds, "none"),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """One question about the person that has choices, and how many people gave each answer."""

    key: str
    text: str
    counts: dict[str, int]  # choice, or "no answer": people


@dataclass(frozen=True)
class Results:
    """What a study found."""

    study: Study
    digest: str
    scores: tuple[Score, ...]
    ratings: tuple[Rating, ...]
    comparisons: tuple[Comparison, ...]
    effects: tuple[Effect, ...]
    metrics: dict[str, Measure]
    began: int
    finished: int
    comments: tuple[str, ...] = ()
    questions: tuple[Asked, ...] = ()
    time: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the document that is printed and stored; no code of a participant is in it."""
        return {
            "schema_version": SCHEMA_VERSION,
            "study": self.study.name,
            "digest": self.digest,
            "models": self.study.models,
            "time": self.time,
            "conditions": list(self.study.config.conditions),
            "orders": words(self.study.config.conditions, len(self.study.data), self.study.config.order),
            "participants": {
                "began": self.began,
                "finished": self.finished,
                "scored": len({s.code for s in self.scores}),
            },
            "questions": [asdict(asked) for asked in self.questions],
            "batches": [
                {"data": d.name, "set": s, **dict(zip(("chance", "ceiling"), self.study.levels(i, s), strict=True))}
                for i, d in enumerate(self.study.data)
                for s in range(self.study.config.sets)
            ],
            "metrics": {name: m.to_json() for name, m in self.metrics.items()},
            "by_data": self.by_data(),
            "comparisons": [{**asdict(c), "significant": c.is_significant} for c in self.comparisons],
            "effects": [asdict(effect) for effect in self.effects],
        }

    def by_data(self) -> dict[str, dict[str, Any]]:
        """Return the metrics of each data set alone."""
        return {
            d.name: {
                name: m.to_json()
                for name, m in measures(self.study, [s for s in self.scores if s.data == d.name], ()).items()
            }
            for d in self.study.data
        }

    def of_model(self, label: str) -> dict[str, Measure]:
        """Return the metrics of the data sets of one model version: what is said of it, and of no other."""
        names = {d.name for d in self.study.data if d.model == label}
        ratings = self.ratings if len(names) == len(self.study.data) else ()  # people rate assistants, not models
        return measures(self.study, [s for s in self.scores if s.data in names], ratings)


def results_of(study: Study, digest: str, everybody: Sequence[Answered], seed: int = 0) -> Results:
    """Return what a study found."""
    scores, ratings = scores_of(study, everybody), ratings_of(everybody)
    if not scores:
        raise StudyError(
            f"study results: nobody has grouped a batch of {study.name} yet ({len(everybody)} people began)."
        )
    effects = [order_effect(scores, by="stage", seed=seed)]
    if len(study.data) > 1:
        effects += [order_effect(scores, by="batch", seed=seed), *data_effect(scores, seed=seed)]
    return Results(
        study,
        digest,
        tuple(scores),
        tuple(ratings),
        tuple(comparisons_of(study, scores, ratings, seed)),
        tuple(effects),
        measures(study, scores, ratings),
        len(everybody),
        sum(person.is_finished for person in everybody),
        tuple(g.body["comment"] for p in everybody for g in p.given if g.body.get("comment")),
        tuple(asked_of(study, everybody)),
        datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def asked_of(study: Study, everybody: Sequence[Answered]) -> list[Asked]:
    """Return the answers to questions about the person as counts; lines of text are in the export alone."""
    given = [g.body["questions"] for person in everybody for g in person.given if "questions" in g.body]
    asked = []
    for q in study.config.questions:
        if q.choices and given:
            counts = {choice: sum(one.get(q.key) == choice for one in given) for choice in q.choices}
            left = len(given) - sum(counts.values())
            asked.append(Asked(q.key, q.text, counts | ({NO_ANSWER: left} if left else {})))
    return asked


def comparisons_of(study: Study, scores: Sequence[Score], ratings: Sequence[Rating], seed: int = 0) -> list[Comparison]:
    """Return every paired comparison: purity and confidence over all data sets and in each, and ratings."""
    pairs = list(combinations(study.config.conditions, 2))
    names = [d.name for d in study.data]
    families = [
        [_paired(scores, pair, "purity", "", seed) for pair in pairs],
        [_paired(scores, pair, "purity", name, seed) for name in names for pair in pairs] if len(names) > 1 else [],
        [_paired(scores, pair, "confidence", "", seed) for pair in pairs],
        [_paired(scores, pair, "confidence", name, seed) for name in names for pair in pairs] if len(names) > 1 else [],
        [_rated(ratings, pair, seed) for pair in pairs if all(shows(name) != "nothing" for name in pair)],
    ]
    return [one for family in families for one in corrected([c for c in family if c.n > 1])]


def corrected(family: Sequence[Comparison]) -> list[Comparison]:
    """Return comparisons with their p values corrected for being made together."""
    wilcoxon, permutation = holm([c.p_wilcoxon for c in family]), holm([c.p_permutation for c in family])
    return [
        replace(c, p_wilcoxon_holm=w, p_permutation_holm=p)
        for c, w, p in zip(family, wilcoxon, permutation, strict=True)
    ]


def measures(study: Study, scores: Sequence[Score], ratings: Sequence[Rating]) -> dict[str, Measure]:
    """Return the metrics ``study/<name>/<metric>/<condition>``, with intervals over people."""
    metrics: dict[str, Measure] = {}

    def add(metric: str, condition: str, values: Sequence[float], way: Direction, null: float | None = None) -> None:
        if values:
            measure = of_items(values, way, null=null, seed=study.config.seed)
            metrics[f"study/{study.name}/{metric}/{condition}"] = replace(measure, per_image=())

    for condition in study.config.conditions:
        rows = [row for row in scores if row.condition == condition]
        for metric, (value, way) in OF_BATCHES.items():
            add(metric, condition, list(by_person(rows, value).values()), way, _chance(rows, metric))
        add("rating", condition, [r.rating for r in ratings if r.condition == condition], "up", 0.5)
    for condition in study.config.conditions:
        if condition != NONE and NONE in study.config.conditions:
            helped, alone = pairs_of(scores, (condition, NONE), "purity", "")
            add("gain", condition, [a - b for a, b in zip(helped, alone, strict=True)], "up", 0.0)
    return metrics


def _chance(rows: Sequence[Score], metric: str) -> float | None:
    """Return what groups made at random would have; None for what is no purity."""
    by_metric: dict[str, list[float | None]] = {
        "purity": [r.chance for r in rows],
        "purity_of_labels": [r.chance_of_labels for r in rows],
    }
    levels = [level for level in by_metric.get(metric, []) if level is not None]
    return float(np.mean(levels)) if levels else None


def by_person(rows: Sequence[Score], value: Value) -> dict[str, float]:
    """Return the mean value of each person's batches."""
    of: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        x = value(row)
        if x is not None and math.isfinite(x):
            of[row.code].append(x)
    return {code: float(np.mean(xs)) for code, xs in of.items()}


def pairs_of(scores: Sequence[Score], pair: tuple[str, str], metric: str, data: str) -> tuple[list[float], list[float]]:
    """Return the values of people who have all batches of both conditions, in the same order."""
    rows = [row for row in scores if not data or row.data == data]
    wanted = {row.data for row in rows}
    value = OF_BATCHES[metric][0]
    sides = []
    for condition in pair:
        own_rows = [row for row in rows if row.condition == condition]
        has = defaultdict(set)
        for row in own_rows:
            if value(row) is not None:
                has[row.code].add(row.data)
        sides.append({code: x for code, x in by_person(own_rows, value).items() if has[code] == wanted})
    both = [code for code in sides[0] if code in sides[1]]
    return [sides[0][code] for code in both], [sides[1][code] for code in both]


def _paired(scores: Sequence[Score], pair: tuple[str, str], metric: str, data: str, seed: int) -> Comparison:
    return compare(*pairs_of(scores, pair, metric, data), (pair[0], pair[1]), metric, data, seed)


def _rated(ratings: Sequence[Rating], pair: tuple[str, str], seed: int) -> Comparison:
    sides = [{r.code: r.rating for r in ratings if r.condition == name} for name in pair]
    both = [code for code in sides[0] if code in sides[1]]
    return compare([sides[0][c] for c in both], [sides[1][c] for c in both], pair, "rating", "", seed)
