"""Orders: in which order participants see conditions, data sets and drawn sets of images, balanced over them.

``none`` comes first, as in [Khorram2020]: a person who has seen explanations cannot forget them. The others follow
in the rows of a balanced Latin square (every condition as often at every place, and as often directly after every
other one), or in an order that the seed draws for every participant. Data sets alternate within a stage, in an order
that stays the same for a participant; participants share the orders out evenly.

With an even number k of conditions a square has k rows; with an odd number it takes 2k, a square and its mirror image.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from auditor.errors import StudyError

NONE = "none"
By = Literal["latin", "seed"]


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch of a participant: the stage's condition, the data set, and which of its drawn sets."""

    condition: int
    data: int
    drawn: int


@dataclass(frozen=True, slots=True)
class Order:
    """What one participant sees, in turn; ``cell`` says which of the balanced orders it is."""

    cell: int
    batches: tuple[Batch, ...]


def latin_square(k: int) -> list[list[int]]:
    """Return the rows of a balanced Latin square of k conditions: k rows for an even k, 2k for an odd one.

    >>> latin_square(2), latin_square(3)
    ([[0, 1], [1, 0]], [[0, 1, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0], [0, 2, 1], [1, 0, 2]])
    """
    if k < 1:
        return [[]]
    first = [0]
    for step in range(1, k):  # 0, 1, k-1, 2, k-2, …
        first.append((step + 1) // 2 if step % 2 else k - step // 2)
    rows = [[(x + i) % k for x in first] for i in range(k)]
    return rows if k % 2 == 0 or k == 1 else rows + [row[::-1] for row in rows]


def cells(conditions: Sequence[str], n_data: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return every balanced pair of an order of conditions and an order of data sets, by their numbers.

    >>> cells(["none", "a", "b"], 2)[:2]
    [((0, 1, 2), (0, 1)), ((0, 1, 2), (1, 0))]
    """
    first = [i for i, name in enumerate(conditions) if name == NONE]
    others = [i for i, name in enumerate(conditions) if name != NONE]
    stages = [(*first, *(others[j] for j in row)) for row in latin_square(len(others))]
    data_orders = [tuple(row) for row in latin_square(n_data)]
    return list(itertools.product(stages, data_orders))


def order_of(number: int, conditions: Sequence[str], n_data: int, n_sets: int, by: By, seed: int) -> Order:
    """Return what the participant with this number sees; numbers 0, 1, 2, … are balanced.

    A participant never sees a set of images twice; which sets go with which condition turns from one round of orders
    to the next.
    """
    if n_sets < len(conditions):
        raise StudyError(
            f"study: {len(conditions)} conditions need as many sets of images, got {n_sets}; draw more (--sets)."
        )
    every = cells(conditions, n_data)
    cell, around = number % len(every), number // len(every)
    rng = np.random.default_rng([seed, number])
    stages, data_order = every[cell]
    if by == "seed":
        head = [i for i in stages if conditions[i] == NONE]
        rest = [i for i in range(len(conditions)) if conditions[i] != NONE]
        stages = (*head, *rng.permutation(rest).tolist())
        data_order = tuple(rng.permutation(n_data).tolist())
        sets = [rng.permutation(n_sets).tolist() for _ in range(n_data)]
    else:
        sets = [[(around + cell + c) % n_sets for c in range(n_sets)] for _ in range(n_data)]
    # the set belongs to the condition's number, so that the same set meets every condition over the rounds
    batches = [Batch(c, d, sets[d][c]) for c in stages for d in data_order]
    return Order(cell, tuple(batches))


def words(conditions: Sequence[str], n_data: int, by: By) -> str:
    """Return how participants are given their orders, in a sentence.

    >>> words(["none", "one-heatmap", "xnn"], 2, "latin")
    'Orders by a balanced Latin square: 2 of conditions (none first) x 2 of data sets, complete after 4 participants.'
    """
    n_first = sum(name == NONE for name in conditions)
    first = " (none first)" if n_first else ""
    if by == "seed":
        return f"Orders of conditions{first} and data sets drawn by the seed for every participant."
    square = len(latin_square(len(conditions) - n_first))
    data_orders = len(latin_square(n_data))
    return (
        f"Orders by a balanced Latin square: {square} of conditions{first} x {data_orders} of data sets, complete "
        f"after {square * data_orders} participants."
    )
