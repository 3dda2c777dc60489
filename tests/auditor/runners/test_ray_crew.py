"""Members of a crew on Ray workers: asked all at once, and made again with all their questions where a worker ends.

.venv/bin/python -m pytest tests/auditor/runners/test_ray_crew.py -m slow
"""

import os
import signal
from pathlib import Path

import pytest

from auditor.errors import ClusterError, OptionError
from auditor.runners.ray_pool import PoolOptions, ray_workers
from auditor.runners.runner import LocalRunner

pytestmark = pytest.mark.slow


class Sum:
    """Adds up what it is given."""

    def __init__(self, start):
        self.total = start

    def add(self, more, own=0):
        self.total += more + own
        return self.total

    def process(self):
        return os.getpid()

    def fail(self):
        raise OptionError("not this one")

    def die(self, flag, times):
        for k in range(times):
            try:
                Path(f"{flag}-{k}").touch(exist_ok=False)
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)
        return self.total


@pytest.fixture(scope="module")
def pool():
    with ray_workers(PoolOptions("local", 2)) as pool:
        yield pool


def asked(runner):
    with runner.crew(Sum, [10, 20, 30]) as crew:
        return len(crew), crew.ask("add", 1), crew.ask("add", 2, each=[(100,), (200,), (300,)])


def test_answers_are_those_of_this_process(pool):
    assert asked(pool) == asked(LocalRunner()) == (3, [11, 21, 31], [113, 223, 333])
    with pool.crew(Sum, [1, 2, 3]) as crew:
        assert len(set(crew.ask("process"))) == 2
        with pytest.raises(OptionError, match="not this one"):
            crew.ask("fail")


def test_a_killed_worker_costs_no_state(pool, tmp_path):
    with pool.crew(Sum, [10, 20, 30]) as crew:
        crew.ask("add", 5)
        flags = [(tmp_path / str(i),) for i in range(3)]
        assert crew.ask("die", each=[(*flag, int(i == 1)) for i, flag in enumerate(flags)]) == [15, 25, 35]
        assert pool.tally.lost
        assert crew.ask("add", 1) == [16, 26, 36]


def test_a_member_that_ends_every_worker_is_an_error_that_names_it(pool, tmp_path):
    with pool.crew(Sum, [10, 20]) as crew, pytest.raises(ClusterError, match="part 2 of 2 ended 3 workers"):
        crew.ask("die", each=[(tmp_path / "a", 0), (tmp_path / "b", 99)])
    assert pool.n_workers == 2
