"""Batch answer: answers a batch of requests of different callers, times its stages and counts them.

The answer for an image comes from ``auditor.explainers.answer``; here are the clock, the metrics and the problems.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from auditor.errors import AuditError
from auditor.explainers.answer import Answer, Question, answer
from auditor.service.problems import Problem, problem_of
from auditor.service.prometheus import BATCH_SIZE, EXPLAIN_DURATION, STABILITY
from auditor.service.served_version import ServedVersion

AnswerJson = dict[str, Any]


@dataclass
class Job:
    """One image to answer by one version, with the time its stages took in milliseconds."""

    version: ServedVersion
    question: Question
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def is_slow(self) -> bool:
        """Whether it takes seconds rather than one pass: it searches or iterates."""
        explainers = self.version.explainers
        return self.question.options.stability == "full" or any(explainers[n].searches for n in self.question.names)


def answer_batch(jobs: Sequence[Job]) -> list[AnswerJson | Problem]:
    """Answer jobs of the same version, in order; a job that fails gets its problem and the others their answers."""
    BATCH_SIZE.observe(len(jobs))
    clock = _Clock(jobs)
    results = answer(jobs[0].version.explained, [job.question for job in jobs], clock.stop)
    answers: list[AnswerJson | Problem] = []
    for i, (job, result) in enumerate(zip(jobs, results, strict=True)):
        if not isinstance(result, Answer):
            answers.append(problem_of(result) if isinstance(result, AuditError) else Problem(500))
            continue
        if result.stability is not None:
            STABILITY.labels(result.stability["mode"]).observe(result.stability["score"])
        answers.append({**result.to_json(), "timings": job.timings})
        clock.stop("draw", "-", [i])
    return answers


class _Clock:
    """Writes how long each stage took into the jobs' timings and the metrics."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs, self.last = jobs, time.perf_counter()

    def stop(self, stage: str, kind: str, rows: Sequence[int]) -> None:
        """End a stage that was for the given rows."""
        now = time.perf_counter()
        took, self.last = now - self.last, now
        EXPLAIN_DURATION.labels("explain" if kind != "-" else stage, kind).observe(took)
        for i in rows:
            self.jobs[i].timings[stage] = round(took * 1000, 3)
