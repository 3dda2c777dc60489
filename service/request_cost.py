"""Request cost: how long a request will take, estimated before it is queued.

    cost = images x (explanation + passes x seconds of a pass) + seconds of search

The passes are those of the stability (``fast`` with 8 noise samples: 14, ``docs/service.md``), the two paces are
measured while the model warms up. What cannot be answered in time is refused before it costs anything, and what takes
longer than one ordinary question goes to the slow queue, where it holds up nobody but its own kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from auditor.explainers.answer import Question
from auditor.explainers.answer_options import AnswerOptions
from auditor.service.batch_answer import Job
from auditor.service.problems import Problem
from auditor.service.settings import Settings
from auditor.stability.decision import POWER_STEPS

GRADIENT = 2  # forward passes that a gradient costs: there and back
POWER_STEP = 4  # forward passes of one power iteration: a Jacobian and its transpose, applied
FAST_S = 1.0  # requests that cost more leave the fast queue, unless they ask one ordinary question
SEARCH_S = 1.0  # of an explainer that searches, when nobody says how long


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of one image with the default explainers, without stability, and of one forward pass."""

    explain_s: float = 0.0
    pass_s: float = 0.0

    @classmethod
    def of(cls, without_s: float, with_stability_s: float) -> Pace:
        """Return the pace from the seconds of an image without and with the default stability.

        >>> Pace.of(0.5, 4.0).pass_s
        0.25
        """
        passes = stability_passes(AnswerOptions())
        return cls(without_s, max(0.0, with_stability_s - without_s) / passes)

    def after(self, estimated_s: float, took_s: float) -> Pace:
        """Return the pace after a batch: the best so far, since warming up may have met a busy machine.

        >>> Pace(0.5, 0.25).after(4.0, 3.0), Pace(0.5, 0.25).after(4.0, 5.0).explain_s
        (Pace(explain_s=0.375, pass_s=0.1875), 0.5)
        """
        if not 0 < took_s < estimated_s:
            return self
        share = max(0.5, took_s / estimated_s)  # one odd measurement does not count for much
        return Pace(share * self.explain_s, share * self.pass_s)


def stability_passes(options: AnswerOptions) -> int:
    """Return how many forward passes the stability of one image costs.

    >>> [stability_passes(AnswerOptions(noise_samples=n)) for n in (1, 8, 64)]
    [4, 14, 98]
    """
    n = options.noise_samples
    if options.stability == "off":
        return 0
    if options.stability == "fast":
        with_gradient = math.ceil(n / 2)
        return GRADIENT * (with_gradient + 1) + n - with_gradient
    return GRADIENT * (n + 3) + POWER_STEP * POWER_STEPS


def seconds(job: Job, pace: Pace, settings: Settings) -> float:
    """Return the estimated seconds of one image."""
    options, explainers = job.question.options, job.version.explainers
    n_searches = sum(explainers[name].searches for name in job.question.names)
    search_s = min(options.timeout_s or SEARCH_S, settings.max_search_timeout_s)
    return pace.explain_s + stability_passes(options) * pace.pass_s + n_searches * search_s


def is_ordinary(question: Question) -> bool:
    """Whether an image asks for no more passes than one with default options does."""
    return stability_passes(question.options) <= stability_passes(AnswerOptions())


def is_slow(jobs: Sequence[Job], cost_s: float) -> bool:
    """Whether a request belongs into the slow queue: it searches, iterates, or costs more than an ordinary one."""
    if any(job.is_slow for job in jobs):
        return True
    return cost_s > FAST_S and not (len(jobs) == 1 and is_ordinary(jobs[0].question))


def check_cost(jobs: Sequence[Job], cost_s: float, limit_s: float) -> None:
    """Refuse what could not be answered in time."""
    if cost_s <= limit_s or (len(jobs) == 1 and is_ordinary(jobs[0].question) and not jobs[0].is_slow):
        return
    most = max((job.question.options.noise_samples for job in jobs), default=0)
    raise Problem(
        422,
        f"this would take about {cost_s:.0f} s ({len(jobs)} images, up to {most} noise samples) and a request has "
        f"{limit_s:g} s; ask for fewer images, fewer noise_samples or less stability.",
        code="too_costly",
    )
