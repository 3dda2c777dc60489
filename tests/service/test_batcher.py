"""Lanes: batches form while one runs, limits refuse at once, one failure stays one failure."""

import asyncio
import threading

import pytest

from auditor.service.batcher import Lane
from auditor.service.batch_answer import Job
from auditor.service.problems import Problem
from auditor.service.types import Options


def job(number: int, loaded=None) -> Job:
    return Job(loaded=loaded, x=number, options=Options(), names=[], target=None, is_strict=False)  # type: ignore[arg-type]


class Gate:
    """Work that waits until it is let go, and remembers its batches."""

    def __init__(self) -> None:
        self.open, self.batches = threading.Event(), []

    def __call__(self, jobs):
        self.batches.append([j.x for j in jobs])
        assert self.open.wait(60)
        return [Problem(422) if j.x == 13 else {"n": j.x} for j in jobs]


async def lane_with(gate, **options) -> Lane:
    lane = Lane("test", gate, **{"max_batch": 4, "limit": 6, **options})
    lane.start()
    return lane


async def until(condition) -> None:
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never happened")


def test_what_comes_while_a_batch_runs_goes_together():
    async def story():
        gate = Gate()
        lane = await lane_with(gate)
        first = asyncio.create_task(lane.answer([job(0)], 60))
        await until(lambda: gate.batches)
        rest = [asyncio.create_task(lane.answer([job(i)], 60)) for i in range(1, 6)]
        await until(lambda: len(lane._queue) == 5)
        gate.open.set()
        answers = await asyncio.gather(first, *rest)
        assert [a[0]["n"] for a in answers] == [0, 1, 2, 3, 4, 5]
        assert gate.batches == [[0], [1, 2, 3, 4], [5]]
        await lane.stop()

    asyncio.run(story())


def test_a_full_queue_refuses_at_once_and_says_when_to_return():
    async def story():
        gate = Gate()
        lane = await lane_with(gate, limit=3)
        running = asyncio.create_task(lane.answer([job(0)], 60))
        await until(lambda: gate.batches)
        waiting = asyncio.create_task(lane.answer([job(1), job(2)], 60))
        await until(lambda: len(lane._queue) == 2)
        with pytest.raises(Problem, match="too many requests are waiting") as caught:
            await lane.answer([job(3), job(4)], 60)  # two do not fit: none is taken
        assert caught.value.status == 429
        assert caught.value.retry_after_s >= 1
        gate.open.set()
        await asyncio.gather(running, waiting)
        assert gate.batches == [[0], [1, 2]]
        await lane.stop()

    asyncio.run(story())


def test_one_problem_stays_one_problem():
    async def story():
        gate = Gate()
        gate.open.set()
        lane = await lane_with(gate)
        answers = await lane.answer([job(1), job(13), job(2)], 60)
        assert [isinstance(a, Problem) for a in answers] == [False, True, False]
        await lane.stop()

    asyncio.run(story())


def test_work_that_breaks_is_told_and_the_lane_lives_on():
    async def story():
        calls = []

        def work(jobs):
            calls.append(len(jobs))
            if len(calls) == 1:
                raise RuntimeError("secret")
            return [{"n": j.x} for j in jobs]

        lane = await lane_with(work)
        (broken,) = await lane.answer([job(1)], 60)
        assert isinstance(broken, Problem)
        assert broken.status == 500
        assert "secret" not in broken.message
        assert await lane.answer([job(2)], 60) == [{"n": 2}]
        await lane.stop()

    asyncio.run(story())


def test_a_deadline_gives_503_and_the_job_is_dropped():
    async def story():
        gate = Gate()
        lane = await lane_with(gate)
        running = asyncio.create_task(lane.answer([job(0)], 60))
        await until(lambda: gate.batches)
        with pytest.raises(Problem, match="no answer within") as caught:
            await lane.answer([job(1)], 0.01)
        assert caught.value.status == 503
        last = asyncio.create_task(lane.answer([job(2)], 60))
        await until(lambda: len(lane._queue) == 2)
        gate.open.set()
        await asyncio.gather(running, last)
        assert gate.batches == [[0], [2]]  # the one that gave up was not worked on
        await lane.stop()

    asyncio.run(story())


def test_versions_are_not_mixed_in_a_batch():
    async def story():
        gate, old, new = Gate(), object(), object()
        lane = await lane_with(gate)
        running = asyncio.create_task(lane.answer([job(0, old)], 60))
        await until(lambda: gate.batches)
        rest = asyncio.create_task(lane.answer([job(1, old), job(2, new), job(3, new)], 60))
        await until(lambda: len(lane._queue) == 3)
        gate.open.set()
        await asyncio.gather(running, rest)
        assert gate.batches == [[0], [1], [2, 3]]
        await lane.stop()

    asyncio.run(story())
