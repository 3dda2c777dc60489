"""Rate limit: a minute's worth at once, then one at a time, over all workers."""

import subprocess
import sys

import pytest

from auditor.service.rate_limit import LOOKS, N_SLOTS, RateLimit


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def allowed(times, rate):
    """Return which of the requests at these times a bucket of a minute's worth lets through: plainly right."""
    tokens, last, answers = rate, times[0], []
    for now in times:
        tokens, last = min(rate, tokens + (now - last) * rate / 60), now
        answers.append(tokens >= 1 - 1e-6)
        tokens -= answers[-1]
    return answers


@pytest.mark.parametrize("rate", [1, 3, 60])
def test_it_lets_through_what_a_bucket_does(rate):
    clock = Clock()
    limit, times, answers = RateLimit(clock=clock), [], []
    for i in range(4 * rate + 20):
        clock.now += (0.0, 0.3, 7.0 / rate)[i % 3]
        times.append(clock.now)
        answers.append(limit.wait_s(b"caller-1", rate) == 0)
    assert answers == allowed(times, rate)
    assert not all(answers)


def test_who_waits_as_long_as_was_said_is_let_in():
    clock = Clock()
    limit = RateLimit(clock=clock)
    while not (wait_s := limit.wait_s(b"caller-1", 7)):
        pass
    clock.now += wait_s - 0.01
    assert limit.wait_s(b"caller-1", 7) > 0
    clock.now += 0.02
    assert limit.wait_s(b"caller-1", 7) == 0


def test_callers_do_not_share():
    limit = RateLimit(clock=Clock())
    assert limit.wait_s(b"caller-1", 1) == 0
    assert limit.wait_s(b"caller-1", 1) > 0
    assert limit.wait_s(b"caller-2", 1) == 0


def test_more_callers_than_slots_forget_the_oldest_only():
    clock = Clock()
    limit = RateLimit(clock=clock)
    same_slot = [(i * N_SLOTS + 5).to_bytes(8, "little") for i in range(LOOKS + 1)]
    for caller in same_slot:
        clock.now += 0.1
        assert limit.wait_s(caller, 1) == 0
    assert all(limit.wait_s(caller, 1) > 0 for caller in same_slot[1:])
    assert limit.wait_s(same_slot[0], 1) == 0  # forgotten: the last one took its slot


ASK = """
import sys; from pathlib import Path; from auditor.service.rate_limit import RateLimit
limit = RateLimit(Path(sys.argv[1]))
print(sum(limit.wait_s(b"caller-1", 50) == 0 for _ in range(40)))
"""


def test_workers_count_together(tmp_path):
    command = [sys.executable, "-c", ASK, str(tmp_path)]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
    let_in = sum(int(worker.communicate()[0]) for worker in workers)
    assert 50 <= let_in <= 80  # of 120; a few more when the machine takes seconds for them
