"""Order and data-set effects, by tests that redo the drawing of lots.

Whether it matters at which place a condition is seen is asked by giving the participants' orders to each other, as they
might have been given: what a person answered under a condition stays, only the place that it counts as being seen at
changes. Under the hypothesis that places do not matter all of these are as likely. The same for which data set is seen
first within a stage. Whether one data set is harder is a paired question, asked by changes of sign within persons,
the conditions being the strata; so is whether the help differs between data sets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from auditor.study.comparisons import FEWEST, sign_flip_p
from auditor.study.scores import Score

Array = np.ndarray[Any, Any]
DRAWS = 999


@dataclass(frozen=True, slots=True)
class Effect:
    """One effect that is no condition: how large, the p of its permutation test, and its values by name."""

    name: str
    n: int
    size: float
    p: float
    means: dict[str, float]
    reason: str = ""  # why there is no test


def order_effect(rows: Sequence[Score], *, by: str, seed: int) -> Effect:
    """Return whether the place matters: of the condition (``by`` stage) or of the batch within its stage (``batch``).

    The statistic is the sum over places of the squared mean of what is left of the values once every person's and every
    condition's (and data set's) mean is taken away.
    """
    name = "place of the condition" if by == "stage" else "place of the data set"
    people = _complete(rows)
    keys = sorted({key for one in people.values() for key in one})
    fixed = {key for key in keys if len({_place_of(one[key], by, one) for one in people.values()}) < 2}
    keys = [key for key in keys if key not in fixed]  # none is always first: its place says nothing
    if len(people) < FEWEST or not keys:
        why = (
            f"{len(people)} people with all batches, want {FEWEST}" if keys else "every order has it at the same place"
        )
        return Effect(name, len(people), 0.0, float("nan"), {}, why)
    values = np.array([[one[key].purity for key in keys] for one in people.values()])
    places = np.array([[_place_of(one[key], by, one) for key in keys] for one in people.values()])
    rest = values - values.mean(0) - values.mean(1, keepdims=True) + values.mean()
    kinds = np.unique(places)
    observed = _spread(rest, places, kinds)
    rng = np.random.default_rng(seed)
    drawn = [_spread(rest, places[rng.permutation(len(places))], kinds) for _ in range(DRAWS)]
    p = (1 + sum(value >= observed - 1e-12 for value in drawn)) / (1 + DRAWS)
    means = {str(int(k)): float(values[places == k].mean()) for k in kinds}
    return Effect(name, len(people), float(np.sqrt(observed / len(kinds))), p, means)


def data_effect(rows: Sequence[Score], *, seed: int) -> list[Effect]:
    """Return for each pair of data sets whether one is harder, and whether help against none differs between them."""
    names = sorted({row.data for row in rows})
    effects = []
    for a, b in combinations(names, 2):
        of: dict[str, dict[tuple[str, str], float]] = defaultdict(dict)
        for row in rows:
            of[row.code][row.condition, row.data] = row.purity
        conditions = sorted({row.condition for row in rows})
        whole = [one for one in of.values() if all((c, x) in one for c in conditions for x in (a, b))]
        d = np.array([np.mean([one[c, a] - one[c, b] for c in conditions]) for one in whole])
        means = {x: float(np.mean([one[c, x] for one in whole for c in conditions])) if whole else 0.0 for x in (a, b)}
        few = "" if len(d) >= FEWEST else f"{len(d)} people with all batches, want {FEWEST}"
        p = float("nan") if few else sign_flip_p(d, seed)
        effects.append(Effect(f"{a} against {b}", len(d), float(d.mean()) if len(d) else 0.0, p, means, few))
        for c1, c2 in combinations(conditions, 2):
            twice = np.array([(one[c1, a] - one[c2, a]) - (one[c1, b] - one[c2, b]) for one in whole])
            p = float("nan") if few else sign_flip_p(twice, seed)
            size = float(twice.mean()) if len(twice) else 0.0
            effects.append(Effect(f"{c1} less {c2}, {a} against {b}", len(twice), size, p, {}, few))
    return effects


def _complete(rows: Sequence[Score]) -> dict[str, Mapping[tuple[str, str], Score]]:
    """Return the people who answered every batch, each with their scores by condition and data set."""
    of: dict[str, dict[tuple[str, str], Score]] = defaultdict(dict)
    for row in rows:
        of[row.code][row.condition, row.data] = row
    every = {key for one in of.values() for key in one}
    return {code: one for code, one in of.items() if set(one) == every}


def _place_of(row: Score, by: str, one: Mapping[tuple[str, str], Score]) -> int:
    if by == "stage":
        return row.stage
    return 1 + sum(other.stage == row.stage and other.batch < row.batch for other in one.values())


def _spread(rest: Array, places: Array, kinds: Array) -> float:
    return float(sum(rest[places == k].mean() ** 2 for k in kinds))
