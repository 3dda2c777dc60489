"""Power: how many people a study needs, before it is held.

    power(n) = P(|T| > t_{1 - alpha/2, n-1}),   T noncentral t with n - 1 degrees and noncentrality  d sqrt(n)

for a paired comparison of two conditions with  d = difference / sd of a person's difference. With several comparisons
alpha is divided by their number, the worst that Holm's correction does. Wilcoxon's test needs pi/3 as many people where
the differences are normal (its efficiency is .955), so the number given is n pi/3, rounded up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from auditor.errors import OptionError
from auditor.metrics.grouping_purity import purity
from auditor.study.design import Study

USUAL_SD = 0.14  # of the purity of one batch of ten, as in the box plots of [Khorram2020]
MOST_PEOPLE = 100_000


@dataclass(frozen=True, slots=True)
class Plan:
    """How many people are needed, and what that number was made of."""

    people: int  # with Wilcoxon's test
    people_t: int  # with a t test of normal differences
    difference: float
    sd_of_batch: float
    sd_of_difference: float
    alpha: float
    power: float
    comparisons: int
    batches: int  # per condition and person


def plan(
    difference: float,
    *,
    sd: float = USUAL_SD,
    batches: int = 1,
    correlation: float = 0.0,
    comparisons: int = 1,
    alpha: float = 0.05,
    power: float = 0.8,
) -> Plan:
    """Return how many people find a difference of mean purity; ``correlation`` is that of one person's two means.

    >>> plan(0.1, sd=0.2, batches=2).people_t
    34
    """
    checks = {
        "--difference": 0 < abs(difference) <= 1,
        "--sd": 0 < sd <= 1,
        "--correlation": -1 < correlation < 1,
        "--alpha": 0 < alpha < 0.5,
        "--power": alpha < power < 1,
        "--comparisons": comparisons >= 1,
        "the number of batches": batches >= 1,
    }
    for name, ok in checks.items():
        if not ok:
            raise OptionError(f"study plan: {name} has a value that makes no sense; see auditor study plan --help.")
    spread = sd * math.sqrt(2 * (1 - correlation) / batches)
    d = abs(difference) / spread
    n = 2
    while paired_power(n, d, alpha / comparisons) < power:
        n += 1 if n < 1000 else n // 100
        if n > MOST_PEOPLE:
            raise OptionError(
                f"study plan: more than {MOST_PEOPLE} people would be needed; look for a larger difference."
            )
    return Plan(math.ceil(n * math.pi / 3 - 1e-9), n, abs(difference), sd, spread, alpha, power, comparisons, batches)


def paired_power(n: int, d: float, alpha: float) -> float:
    """Return the power of a two-sided paired t test with n people and standardised difference d."""
    from scipy.stats import nct, t

    limit = t.ppf(1 - alpha / 2, n - 1)
    shift = d * math.sqrt(n)
    return float(nct.sf(limit, n - 1, shift) + nct.cdf(-limit, n - 1, shift))


def sd_of_guessing(study: Study, draws: int = 2000) -> float:
    """Return how much the purity of one batch varies between people who guess, on the drawn batches."""
    rng = np.random.default_rng(study.config.seed)
    values = []
    for data in range(len(study.data)):
        for drawn in range(study.config.sets):
            classes = study.classes_of(data, drawn)
            each = draws // (len(study.data) * study.config.sets) + 1
            groups = rng.integers(0, study.config.n_classes, (each, len(classes)))
            values += [purity(row.tolist(), classes) for row in groups]
    return float(np.std(values, ddof=1))
