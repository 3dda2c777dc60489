"""Comparisons of two conditions by the same people: tests, effect sizes with intervals, correction for several.

Both tests look at the differences  d_i = a_i - b_i  of participants:

    Wilcoxon     signed ranks of |d_i|, zeros left out [Wilcoxon1945]
    permutation  mean d under all (or many) changes of sign; exact for n <= 14, else 1 + count of draws as far out

    d_z            mean d / sd d, with the interval of the noncentral t distribution
    rank-biserial  (W+ - W-) / (W+ + W-), in [-1, 1], with a bootstrap interval over participants

Purity of ten images takes few values, so ties are many; the permutation test is right with any of them, and it decides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from auditor.metrics.measure import bootstrap

Array = np.ndarray[Any, Any]
EXACT_UP_TO = 14  # participants: 16384 changes of sign
DRAWS = 9999
N_BOOTSTRAP = 2000
FEWEST = 5  # pairs below which no test can say anything at 5%: 2 / 2^5 = .06
QUADRATURE = 200  # points of an integral over quantiles
NEARLY = 1e-9  # sums of the same numbers in another order differ by less


@dataclass(frozen=True, slots=True)
class Comparison:
    """One pair of conditions; ``p_…_holm`` are corrected for all comparisons made together."""

    a: str
    b: str
    what: str
    data: str  # the data set; empty: all of them
    n: int
    mean_a: float
    mean_b: float
    difference: float
    low: float | None
    high: float | None
    d_z: float | None
    d_z_low: float | None
    d_z_high: float | None
    rank_biserial: float | None
    rank_biserial_low: float | None
    rank_biserial_high: float | None
    p_wilcoxon: float
    p_permutation: float
    p_wilcoxon_holm: float = math.nan
    p_permutation_holm: float = math.nan

    @property
    def is_significant(self) -> bool:
        """Whether the corrected permutation test rejects at 5% that there is no difference."""
        return self.p_permutation_holm <= 0.05


def compare(
    a: Sequence[float], b: Sequence[float], names: tuple[str, str], what: str, data: str, seed: int
) -> Comparison:
    """Compare the values of the same people under two conditions, entry by entry."""
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    d = x - y
    low, high = bootstrap(d, seed)
    effect = cohens_dz(d)
    r = rank_biserial(d)
    r_low = r_high = None
    if r is not None and len(d) >= 2:
        rows = np.random.default_rng(seed).integers(0, len(d), (N_BOOTSTRAP, len(d)))
        spread = _rank_biserials(d[rows])
        r_low, r_high = (float(q) for q in np.nanquantile(spread, [0.025, 0.975]))
    return Comparison(
        *names, what, data, len(d), _mean(x), _mean(y), _mean(d), low, high, *effect, r, r_low, r_high,
        wilcoxon_p(d), sign_flip_p(d, seed),
    )  # fmt: skip


def wilcoxon_p(d: Array) -> float:
    """Return the two-sided p of Wilcoxon's signed-rank test; 1 where nobody differs.

    >>> wilcoxon_p(np.array([1.0, 2, 3, 4, 5, 6]))
    0.03125
    """
    from scipy.stats import wilcoxon

    nonzero = d[np.abs(d) > NEARLY]
    if not len(nonzero):
        return 1.0
    rounded = np.round(nonzero, 9)  # sums of tenths that are equal must tie
    has_ties = len(np.unique(np.abs(rounded))) < len(rounded)
    method = "exact" if not has_ties and len(rounded) <= 50 else "approx"
    return float(wilcoxon(rounded, method=method, correction=method == "approx").pvalue)


def sign_flip_p(d: Array, seed: int = 0) -> float:
    """Return the two-sided p of the permutation test of mean d = 0, every sign being as likely as its opposite.

    >>> sign_flip_p(np.array([1.0, 2, 3, 4, 5, 6]))
    0.03125
    """
    d = d[np.abs(d) > NEARLY]  # zeros have no sign
    n = len(d)
    if not n:
        return 1.0
    observed = abs(d.sum())
    slack = NEARLY * max(1.0, np.abs(d).sum())
    if n <= EXACT_UP_TO:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=n)))
        return float((np.abs(signs @ d) >= observed - slack).mean())
    signs = np.random.default_rng(seed).integers(0, 2, (DRAWS, n)) * 2.0 - 1.0
    return float((1 + (np.abs(signs @ d) >= observed - slack).sum()) / (1 + DRAWS))


def cohens_dz(d: Array) -> tuple[float | None, float | None, float | None]:
    """Return mean d / sd d with its 95% interval; None where the differences do not vary."""
    n = len(d)
    if n < 2 or d.std(ddof=1) < NEARLY:
        return None, None, None
    effect = float(d.mean() / d.std(ddof=1))
    t = effect * math.sqrt(n)
    return effect, _noncentral(t, n - 1, 0.975) / math.sqrt(n), _noncentral(t, n - 1, 0.025) / math.sqrt(n)


def _noncentral(t: float, df: int, level: float) -> float:
    """Return the noncentrality under which a noncentral t variable is at most ``t`` with probability ``level``."""
    from scipy.optimize import brentq
    from scipy.stats import chi2, norm

    # P(T <= t) = E norm.cdf(t s - nc), s = sqrt(chi2 / df); scipy's nct.cdf is NaN far out
    nodes, weights = np.polynomial.legendre.leggauss(QUADRATURE)
    scale = t * np.sqrt(chi2.ppf((nodes + 1) / 2, df) / df)
    reach = 10 + 2 * float(np.abs(scale).max())
    return float(brentq(lambda nc: float(weights @ norm.cdf(scale - nc)) / 2 - level, -reach, reach))


def rank_biserial(d: Array) -> float | None:
    """Return the matched-pairs rank-biserial correlation; None where nobody differs.

    >>> rank_biserial(np.array([3.0, -1.0, 2.0]))
    0.6666666666666666
    """
    value = float(_rank_biserials(d[None])[0])
    return None if math.isnan(value) else value


def _rank_biserials(rows: Array) -> Array:
    """Return the correlation of every row; NaN where nobody differs."""
    from scipy.stats import rankdata

    size = np.where(np.abs(rows) > NEARLY, np.round(np.abs(rows), 9), 0.0)
    ranks = rankdata(size, axis=1) - (size == 0).sum(1, keepdims=True)  # as if the zeros were not there
    ranks = np.where(size > 0, ranks, 0.0)
    with np.errstate(invalid="ignore"):
        return (ranks * np.sign(rows)).sum(1) / ranks.sum(1)  # type: ignore[no-any-return]


def _mean(x: Array) -> float:
    return float(x.mean()) if len(x) else math.nan
