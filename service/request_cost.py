"""Request cost: how long a request will take, estimated before it is queued.

    cost = images x (explanation + passes x seconds of a pass) + seconds of search

The passes are those of the stability (``fast`` with 8 noise samples: 11, ``docs/service.md``), the two paces are
measured while the model warms up. A search takes any time: where all of a request would take longer than the request
has, they share what it has. What cannot be answered in time even so is refused before it costs anything, and what takes
longer than one ordinary question goes to the slow queue, where it holds up nobody but its own kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
SEARCH_SHARE = 0.8  # of the time of a request that searches may take together: the rest is slack
SHORTEST_SEARCH_S = 0.5  # with less a search finds nothing, and the request is refused


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of one image with the default explainers, without stability, and of one forward pass."""

    explain_s: float = 0.0
    pass_s: float = 0.0

    @classmethod
    def of(cls, without_s: float, with_stability_s: float) -> Pace:
        """Return the pace from the seconds of an image without and with the default stability.

        >>> Pace.of(0.5, 3.25).pass_s
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
    [4, 11, 74]
    """
    n = options.noise_samples
    if options.stability == "off":
        return 0
    if options.stability == "fast":
        with_gradient = math.ceil(n / 8)
        return GRADIENT * (with_gradient + 1) + n - with_gradient
    return GRADIENT * (n + 3) + POWER_STEP * POWER_STEPS


def seconds(job: Job, pace: Pace, settings: Settings) -> float:
    """Return the estimated seconds of one image."""
    options = job.question.options
    search_s = min(options.timeout_s or SEARCH_S, settings.max_search_timeout_s)
    return pace.explain_s + stability_passes(options) * pace.pass_s + n_searches(job) * search_s


def n_searches(job: Job) -> int:
    """Return how many explainers search for an image."""
    return sum(job.version.explainers[name].searches for name in job.question.names)


def within_time(jobs: Sequence[Job], pace: Pace, settings: Settings) -> list[Job]:
    """Return the jobs with their searches cut to what the request has time for, all alike.

    ``timeout_s`` is the most a search may take, so less keeps to it; jobs that fit are left as they are, and so are
    those that do not fit whatever is cut.
    """
    n, limit_s = sum(n_searches(job) for job in jobs), settings.request_timeout_s
    if not n or sum(seconds(job, pace, settings) for job in jobs) <= limit_s:
        return list(jobs)
    no_search_s = sum(pace.explain_s + stability_passes(job.question.options) * pace.pass_s for job in jobs)
    share_s = (SEARCH_SHARE * limit_s - no_search_s) / n
    if share_s < SHORTEST_SEARCH_S:
        return list(jobs)
    return [_searching_at_most(job, share_s) for job in jobs]


def _searching_at_most(job: Job, limit_s: float) -> Job:
    options = job.question.options
    if options.timeout_s is not None and options.timeout_s <= limit_s:
        return job
    shorter = options.model_copy(update={"timeout_s": limit_s})
    return replace(job, question=replace(job.question, options=shorter))


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
    searches = sum(n_searches(job) for job in jobs)
    named = f", {searches} searches" if searches else ""
    fewer = "fewer images, fewer explainers that search" if searches else "fewer images"
    raise Problem(
        422,
        f"this would take about {cost_s:.0f} s ({len(jobs)} images, up to {most} noise samples{named}) and a "
        f"request has {limit_s:g} s; ask for {fewer}, fewer noise_samples or less stability.",
        code="too_costly",
    )
