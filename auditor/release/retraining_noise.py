"""Retraining noise: how unlike two honest versions of one model are that differ by nothing but their training run.

Every training finds somewhat other concepts, so re-fitting one version says too little: an honest retraining lies
beyond it as a rule. The band is a prediction interval from pairs of versions that passed (Student's t, one-sided, 1%):
with few pairs it is wide, with fewer than two it is unknown and no alarm is given either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import t as student

LEVEL = 0.01  # chance of a false alarm
LEAST_PAIRS = 2


@dataclass(frozen=True, slots=True)
class Band:
    """Similarities of pairs of honest versions; ``low`` is what another honest pair falls below once in a hundred."""

    similarities: tuple[float, ...]
    versions: tuple[str, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether there are pairs enough."""
        return len(self.similarities) >= LEAST_PAIRS

    @property
    def low(self) -> float:
        """Return the lower end; minus infinity where it is unknown."""
        n = len(self.similarities)
        if not self.is_known:
            return -np.inf
        values = np.array(self.similarities)
        return float(values.mean() - student.ppf(1 - LEVEL, n - 1) * values.std(ddof=1) * np.sqrt(1 + 1 / n))

    def words(self) -> str:
        """Return the band in a sentence.

        >>> Band(()).words()
        'the band of retraining is unknown: it takes at least two pairs of versions that passed, and there are 0'
        """
        n = len(self.similarities)
        if not self.is_known:
            return (
                "the band of retraining is unknown: it takes at least two pairs of versions that passed, "
                f"and there {'is 1' if n == 1 else f'are {n}'}"
            )
        return f"retraining explains down to {self.low:.3f} ({n} pairs of honest versions)"

    def to_json(self) -> dict[str, Any]:
        """Return plain Python for JSON."""
        low = self.low if self.is_known else None
        return {"low": low, "pairs": list(self.similarities), "versions": list(self.versions), "words": self.words()}


def band_of(similarity: np.ndarray[Any, Any], versions: Sequence[str] = ()) -> Band:
    """Return the band from a symmetric matrix of similarities between honest versions."""
    rows, columns = np.triu_indices(len(similarity), 1)
    return Band(tuple(float(v) for v in similarity[rows, columns]), tuple(versions))
