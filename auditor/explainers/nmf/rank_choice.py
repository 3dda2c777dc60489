"""Rank choice: how many concepts there are to see."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

from torch import Tensor

from auditor.explainers.nmf.basis_choice import relative_error
from auditor.kernels.factorization.projection import project
from auditor.metrics.concept_groups import groups

log = logging.getLogger(__name__)
RANKS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
POSITIONS = 2000  # of the images to choose on, by which concepts are grouped
GAIN = 0.03  # a next rank must lower the held-out error by this share of the smallest rank's to be worth it
SPLIT_GAIN = 0.15  # the same where concepts only split: those that fire together in the same places are one group


def chosen_rank(basis: Callable[[int], Tensor], most: int, Y: Tensor, seed: int) -> int:
    """Return the rank, at most ``most``, beyond which ``basis(rank)`` shows nothing new in images Y.

    That is where the error hardly falls. A next rank that has no more groups of concepts than this one only splits
    what is there, and must lower the error far more to be worth it.
    """
    errors: dict[int, float] = {}
    n_groups: dict[int, int] = {}
    for r in [r for r in RANKS if r <= most] or [1]:
        W = basis(r)
        errors[r] = relative_error(Y, W)
        n_groups[r] = len(groups(project(Y[:, :POSITIONS], W).T[:, :, None], seed=seed))
    ranks = sorted(errors)
    chosen = ranks[-1]
    for a, b in itertools.pairwise(ranks):
        needed = SPLIT_GAIN if n_groups[b] <= n_groups[a] else GAIN
        if errors[a] - errors[b] < needed * errors[ranks[0]]:
            chosen = a
            break
    log.info("nmf: rank %d chosen by trial error %s and groups of concepts %s", chosen, errors, n_groups)
    return chosen
