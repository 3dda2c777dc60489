"""Batcher: collects validated jobs of all callers and runs them together, in a thread, one batch at a time per queue.

While a batch runs the next one fills, so batches grow with the load and no request waits on an idle machine. Jobs that
search, iterate or cost much go to a queue of their own and do not hold up the others; a batch ends where its estimated
cost does. A full queue, or one that would take longer than a caller waits, refuses at once and says when to come back.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from auditor.service.batch_answer import AnswerJson, Job
from auditor.service.problems import Problem
from auditor.service.prometheus import QUEUE_DEPTH

log = logging.getLogger(__name__)

FIRST_PACE_S, PACE_WEIGHT = 0.05, 0.1  # seconds per image, a moving mean: says to refused callers when to come back
MAX_RETRY_S = 60
MAX_BATCH_COST_S = 2.0  # a batch cannot be stopped once it runs

Work = Callable[[Sequence[Job]], list[AnswerJson | Problem]]


@dataclass
class _Waiting:
    job: Job
    future: asyncio.Future[AnswerJson]
    since: float
    cost_s: float = 0.0


class JobQueue:
    """A queue with a limit and one thread that works it off."""

    def __init__(
        self,
        name: str,
        work: Work,
        *,
        max_batch: int,
        limit: int,
        max_wait_s: float = 0.0,
        lets_large_in: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name, self.work, self.limit, self.clock = name, work, limit, clock
        self.max_batch, self.max_wait_s = max_batch, max_wait_s
        self.lets_large_in = lets_large_in  # a request of more images than the limit, when nobody else waits
        self._queue: deque[_Waiting] = deque()
        self._batch: list[_Waiting] = []  # what runs now
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"auditor-{name}")
        self._pace_s = FIRST_PACE_S
        self._task: asyncio.Task[None] | None = None
        self._depth = QUEUE_DEPTH.labels(name)

    def start(self) -> None:
        """Start the task that takes batches; call it inside the event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"queue {self.name}")

    async def stop(self) -> None:
        """Stop; callers that still wait for an answer get 503."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for item in (*self._batch, *self._queue):
            if not item.future.done():
                item.future.set_exception(Problem(503, "the server is shutting down.", retry_after_s=1))
        self._queue.clear()
        self._thread.shutdown(wait=False)

    async def answer(
        self, jobs: Sequence[Job], timeout_s: float, costs_s: Sequence[float] | None = None
    ) -> list[AnswerJson | Problem]:
        """Queue jobs together (all or none) and wait for their answers; a job that fails gives its problem."""
        costs_s = costs_s or [0.0] * len(jobs)
        self._check_room(len(jobs), sum(costs_s), timeout_s)
        loop, now = asyncio.get_running_loop(), self.clock()
        waiting = [_Waiting(job, loop.create_future(), now, s) for job, s in zip(jobs, costs_s, strict=True)]
        self._queue.extend(waiting)
        self._depth.set(len(self._queue))
        self._wake.set()
        futures = [item.future for item in waiting]
        done, pending = await asyncio.wait(futures, timeout=timeout_s)
        if pending:
            for future in futures:
                future.cancel()
            raise Problem(503, f"no answer within {timeout_s:g} s; try again.", code="timeout", retry_after_s=1)
        assert len(done) == len(futures)
        return [_outcome(future) for future in futures]

    def _check_room(self, n: int, cost_s: float, timeout_s: float) -> None:
        """Refuse what does not fit into the queue, or would be answered when its caller has gone."""
        if not self._queue and self.lets_large_in:
            return
        ahead_s = sum(item.cost_s for item in self._queue if not item.future.done())
        if len(self._queue) + n > self.limit or (ahead_s and ahead_s + cost_s > timeout_s):
            raise Problem(429, retry_after_s=max(self._retry_after_s(), min(MAX_RETRY_S, math.ceil(ahead_s))))

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            if self.max_wait_s and len(self._queue) < self.max_batch:
                await asyncio.sleep(self.max_wait_s)
            batch = self._batch = self._take()
            if not self._queue:
                self._wake.clear()
            self._depth.set(len(self._queue))
            if not batch:
                continue
            started = self.clock()
            for item in batch:
                item.job.timings["queue"] = round((started - item.since) * 1000, 3)
            try:
                answers = await loop.run_in_executor(self._thread, self.work, [item.job for item in batch])
            except Exception:
                log.exception("a batch failed")
                answers = [Problem(500)] * len(batch)
            pace = (self.clock() - started) / len(batch)
            self._pace_s += PACE_WEIGHT * (pace - self._pace_s)
            for item, answer in zip(batch, answers, strict=True):
                if item.future.done():
                    continue
                if isinstance(answer, Problem):
                    item.future.set_exception(answer)
                else:
                    item.future.set_result(answer)

    def _take(self) -> list[_Waiting]:
        """Take the longest waiting jobs of one model version; those whose caller has gone are dropped."""
        batch: list[_Waiting] = []
        cost_s = 0.0
        while self._queue and len(batch) < self.max_batch:
            if self._queue[0].future.done():
                self._queue.popleft()
                continue
            if batch and self._queue[0].job.version is not batch[0].job.version:
                break
            cost_s += self._queue[0].cost_s
            if batch and cost_s > MAX_BATCH_COST_S:
                break
            batch.append(self._queue.popleft())
        return batch

    def _retry_after_s(self) -> int:
        return max(1, min(MAX_RETRY_S, math.ceil(len(self._queue) * self._pace_s)))


def _outcome(future: asyncio.Future[AnswerJson]) -> AnswerJson | Problem:
    error = future.exception()
    if error is None:
        return future.result()
    return error if isinstance(error, Problem) else Problem(500)
