"""Queues: batches form while one runs, limits refuse at once, one failure stays one failure."""

import asyncio
import threading

import pytest

from auditor.explainers.answer import Question
from auditor.service.batch_answer import Job
from auditor.service.batcher import FIRST_PACE_S, MAX_BATCH_COST_S, JobQueue, _Waiting
from auditor.service.problems import Problem
from auditor.service.types import Options


def job(number: int, version=None) -> Job:
    return Job(version, Question(number, Options(), [], None, False))  # type: ignore[arg-type]


class Gate:
    """Work that waits until it is let go, and remembers its batches."""

    def __init__(self) -> None:
        self.open, self.batches, self.work = threading.Event(), [], lambda: None

    def __call__(self, jobs):
        self.batches.append([j.question.x for j in jobs])
        self.work()
        assert self.open.wait(60)
        return [Problem(422) if j.question.x == 13 else {"n": j.question.x} for j in jobs]


async def queue_with(gate, **options) -> JobQueue:
    queue = JobQueue("test", gate, **{"max_batch": 4, "limit": 6, **options})
    queue.start()
    return queue


async def until(condition) -> None:
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never happened")


def test_what_comes_while_a_batch_runs_goes_together():
    async def story():
        gate = Gate()
        queue = await queue_with(gate)
        first = asyncio.create_task(queue.answer([job(0)], 60))
        await until(lambda: gate.batches)
        rest = [asyncio.create_task(queue.answer([job(i)], 60)) for i in range(1, 6)]
        await until(lambda: len(queue._queue) == 5)
        gate.open.set()
        answers = await asyncio.gather(first, *rest)
        assert [a[0]["n"] for a in answers] == [0, 1, 2, 3, 4, 5]
        assert gate.batches == [[0], [1, 2, 3, 4], [5]]
        await queue.stop()

    asyncio.run(story())


def test_a_full_queue_refuses_at_once_and_says_when_to_return():
    async def story():
        gate = Gate()
        queue = await queue_with(gate, limit=3)
        running = asyncio.create_task(queue.answer([job(0)], 60))
        await until(lambda: gate.batches)
        waiting = asyncio.create_task(queue.answer([job(1), job(2)], 60))
        await until(lambda: len(queue._queue) == 2)
        with pytest.raises(Problem, match="too many requests are waiting") as caught:
            await queue.answer([job(3), job(4)], 60)  # two do not fit: none is taken
        assert caught.value.status == 429
        assert caught.value.retry_after_s >= 1
        gate.open.set()
        await asyncio.gather(running, waiting)
        assert gate.batches == [[0], [1, 2]]
        await queue.stop()

    asyncio.run(story())


def test_one_problem_stays_one_problem():
    async def story():
        gate = Gate()
        gate.open.set()
        queue = await queue_with(gate)
        answers = await queue.answer([job(1), job(13), job(2)], 60)
        assert [isinstance(a, Problem) for a in answers] == [False, True, False]
        await queue.stop()

    asyncio.run(story())


def test_work_that_fails_is_reported_and_the_queue_goes_on():
    async def story():
        calls = []

        def work(jobs):
            calls.append(len(jobs))
            if len(calls) == 1:
                raise RuntimeError("secret")
            return [{"n": j.question.x} for j in jobs]

        queue = await queue_with(work)
        (broken,) = await queue.answer([job(1)], 60)
        assert isinstance(broken, Problem)
        assert broken.status == 500
        assert "secret" not in broken.message
        assert await queue.answer([job(2)], 60) == [{"n": 2}]
        await queue.stop()

    asyncio.run(story())


def test_a_deadline_gives_503_and_the_job_is_dropped():
    async def story():
        gate = Gate()
        queue = await queue_with(gate)
        running = asyncio.create_task(queue.answer([job(0)], 60))
        await until(lambda: gate.batches)
        with pytest.raises(Problem, match="no answer within") as caught:
            await queue.answer([job(1)], 0.01)
        assert caught.value.status == 503
        last = asyncio.create_task(queue.answer([job(2)], 60))
        await until(lambda: len(queue._queue) == 2)
        gate.open.set()
        await asyncio.gather(running, last)
        assert gate.batches == [[0], [2]]  # the one that gave up was not worked on
        await queue.stop()

    asyncio.run(story())


def test_versions_are_not_mixed_in_a_batch():
    async def story():
        gate, old, new = Gate(), object(), object()
        queue = await queue_with(gate)
        running = asyncio.create_task(queue.answer([job(0, old)], 60))
        await until(lambda: gate.batches)
        rest = asyncio.create_task(queue.answer([job(1, old), job(2, new), job(3, new)], 60))
        await until(lambda: len(queue._queue) == 3)
        gate.open.set()
        await asyncio.gather(running, rest)
        assert gate.batches == [[0], [1], [2, 3]]
        await queue.stop()

    asyncio.run(story())


class Clock:
    """A clock that stands still until it is moved."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_time_in_the_queue_is_from_arrival_to_the_start_of_the_batch():
    async def story():
        gate, clock = Gate(), Clock()
        queue = await queue_with(gate, clock=clock)
        first, second = job(0), job(1)
        running = asyncio.create_task(queue.answer([first], 60))
        await until(lambda: gate.batches)
        clock.now = 101.5  # the second comes while the first runs
        waiting = asyncio.create_task(queue.answer([second], 60))
        await until(lambda: len(queue._queue) == 1)
        clock.now = 103.75
        gate.open.set()
        await asyncio.gather(running, waiting)
        assert first.timings["queue"] == 0.0
        assert second.timings["queue"] == 2250.0  # milliseconds
        await queue.stop()

    asyncio.run(story())


@pytest.mark.parametrize(("took_s", "n"), [(4.0, 1), (4.0, 4), (0.0, 2)])
def test_the_pace_is_a_moving_mean_of_seconds_per_image(took_s, n):
    async def story():
        gate, clock = Gate(), Clock()
        gate.open.set()

        def work():
            clock.now += took_s

        gate.work = work
        queue = await queue_with(gate, clock=clock)
        pace = FIRST_PACE_S
        for _ in range(3):
            await queue.answer([job(i) for i in range(n)], 60)
            pace = 0.9 * pace + 0.1 * took_s / n
            assert queue._pace_s == pytest.approx(pace, rel=1e-12)
        await queue.stop()

    asyncio.run(story())


@pytest.mark.parametrize(
    ("n_waiting", "pace_s", "wanted"), [(10, 0.05, 1), (6, 0.5, 3), (7, 0.5, 4), (500, 1.0, 60), (0, 9.0, 1)]
)
def test_a_refused_caller_comes_back_when_the_queue_should_be_empty(n_waiting, pace_s, wanted):
    async def story():
        queue = JobQueue("test", Gate(), max_batch=1, limit=n_waiting)
        future = asyncio.get_running_loop().create_future()
        queue._queue.extend(_Waiting(job(i), future, 0.0) for i in range(n_waiting))
        queue._pace_s = pace_s
        with pytest.raises(Problem) as caught:
            await queue.answer([job(0)], 60)
        assert (caught.value.status, caught.value.retry_after_s) == (429, wanted)

    asyncio.run(story())


def test_as_many_as_the_limit_may_wait_and_not_one_more():
    async def story():
        gate = Gate()
        queue = await queue_with(gate, limit=3)
        running = asyncio.create_task(queue.answer([job(0)], 60))
        await until(lambda: gate.batches)
        waiting = asyncio.create_task(queue.answer([job(1), job(2), job(3)], 60))
        await until(lambda: len(queue._queue) == 3)
        with pytest.raises(Problem):
            await queue.answer([job(4)], 60)
        gate.open.set()
        assert len(await waiting) == 3
        await running
        await queue.stop()

    asyncio.run(story())


def test_it_waits_for_a_batch_to_fill_only_when_asked_and_not_when_it_is_full(monkeypatch):
    async def story():
        slept = []
        real = asyncio.sleep

        async def sleep(seconds, *rest):
            if seconds == 0.125:
                slept.append(seconds)
                seconds = 0
            await real(seconds, *rest)

        monkeypatch.setattr(asyncio, "sleep", sleep)
        gate = Gate()
        gate.open.set()
        for max_wait_s, n_jobs, n_sleeps in ((0.125, 1, 1), (0.125, 4, 0), (0.0, 1, 0)):
            queue = await queue_with(gate, max_wait_s=max_wait_s)
            slept.clear()
            await queue.answer([job(i) for i in range(n_jobs)], 60)
            assert len(slept) == n_sleeps
            await queue.stop()

    asyncio.run(story())


def test_stopping_answers_those_that_wait_and_those_that_run():
    async def story():
        gate = Gate()
        queue = await queue_with(gate)
        running = asyncio.create_task(queue.answer([job(0)], 60))
        await until(lambda: gate.batches)
        waiting = asyncio.create_task(queue.answer([job(1)], 60))
        await until(lambda: len(queue._queue) == 1)
        await queue.stop()
        for task in (running, waiting):
            (problem,) = await task
            assert (problem.status, problem.retry_after_s) == (503, 1)
        gate.open.set()
        assert gate.batches == [[0]]

    asyncio.run(story())


def test_the_depth_is_what_waits_now():
    async def story():
        gate = Gate()
        queue = await queue_with(gate)
        running = asyncio.create_task(queue.answer([job(0)], 60))
        await until(lambda: gate.batches)
        waiting = asyncio.create_task(queue.answer([job(1), job(2)], 60))
        await until(lambda: queue._depth._value.get() == 2)
        gate.open.set()
        await asyncio.gather(running, waiting)
        assert queue._depth._value.get() == 0
        await queue.stop()

    asyncio.run(story())


def test_a_batch_ends_where_its_cost_does():
    async def story():
        gate = Gate()
        queue = await queue_with(gate)
        running = asyncio.create_task(queue.answer([job(0)], 60))
        await until(lambda: gate.batches)
        costs = [0.75 * MAX_BATCH_COST_S, 0.2 * MAX_BATCH_COST_S, 0.1 * MAX_BATCH_COST_S, 3 * MAX_BATCH_COST_S]
        rest = asyncio.create_task(queue.answer([job(i) for i in range(1, 5)], 60, costs))
        await until(lambda: len(queue._queue) == 4)
        gate.open.set()
        await asyncio.gather(running, rest)
        assert gate.batches == [[0], [1, 2], [3], [4]]
        await queue.stop()

    asyncio.run(story())


def test_what_would_be_answered_too_late_is_refused_at_once():
    async def story():
        gate = Gate()
        queue = await queue_with(gate)
        running = asyncio.create_task(queue.answer([job(0)], 60))
        await until(lambda: gate.batches)
        waiting = asyncio.create_task(queue.answer([job(1)], 60, [40.0]))
        await until(lambda: len(queue._queue) == 1)
        with pytest.raises(Problem) as caught:
            await queue.answer([job(2)], 60, [25.0])
        assert (caught.value.status, caught.value.retry_after_s) == (429, 40)
        fits = asyncio.create_task(queue.answer([job(3)], 60, [15.0]))
        await until(lambda: len(queue._queue) == 2)
        gate.open.set()
        await asyncio.gather(running, waiting, fits)
        await queue.stop()

    asyncio.run(story())


@pytest.mark.parametrize("lets_large_in", [True, False])
def test_a_request_larger_than_the_queue_is_let_in_when_nobody_waits(lets_large_in):
    async def story():
        gate = Gate()
        gate.open.set()
        queue = await queue_with(gate, limit=2, lets_large_in=lets_large_in)
        many = [job(i) for i in range(3)]
        if lets_large_in:
            assert len(await queue.answer(many, 60)) == 3
        else:
            with pytest.raises(Problem):
                await queue.answer(many, 60)
        await queue.stop()

    asyncio.run(story())
