"""The seam: results in the order of the items, lazily, counted; and which runner a computation has."""

import pytest

from auditor.runners.cluster import counted_work, on_cluster
from auditor.runners.runner import Counted, LocalRunner, current, using


def test_results_come_in_order_and_only_when_asked_for():
    begun = []

    def work(item):
        begun.append(item)
        yield item, 0
        yield item, 1

    results = LocalRunner().stream(work, iter(range(5)))
    assert next(results) == (0, 0)
    assert begun == [0]
    assert list(results) == [(k, i) for k in range(5) for i in range(2)][1:]
    assert list(LocalRunner().map(abs, [-3, 2])) == [3, 2]


def test_parts_that_say_how_much_they_are_are_counted():
    runner = LocalRunner()
    list(runner.map(lambda k: Counted(k, 10 * k, 0.5), [1, 2]))
    said = runner.tally.to_json(3.0)
    assert (said["images"], said["bytes_read"], said["images_per_second"]) == (3, 30, 1.0)
    assert said["workers"]["this process"]["images_per_second"] == 3.0
    assert LocalRunner().tally.to_json(0.0)["images_per_second"] is None


def test_the_current_runner_is_that_of_the_block():
    first = current()
    other = LocalRunner()
    with using(other):
        assert current() is other
        with pytest.raises(ValueError, match="x"), using(LocalRunner()):
            raise ValueError("x")
        assert current() is other
    assert current() is first
    with on_cluster("") as runner:
        assert current() is runner
        assert not runner.is_remote
        with on_cluster(None) as inner:
            assert inner is runner
    with counted_work(None) as work:
        pass
    assert work == {}
