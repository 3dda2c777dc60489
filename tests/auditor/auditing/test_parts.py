"""Parts in turn: announced, cached, left out, out of time."""

import pytest

from auditor.auditing.cache import AuditCache
from auditor.auditing.cost import Cost, Meter
from auditor.auditing.deadline import Deadline, OutOfTimeError
from auditor.auditing.parts import Part, Runner, Taken
from auditor.metrics.measure import Measure


def part(check, owners=(), take=None, **options):
    def taken(owner):
        return Taken({f"{check}/{owner}": Measure(1.0)}, {"of": owner})

    return Part(Cost(check, owners, 10, 2.0), take or taken, {"f": "up", "g": "down"}, **options)


def runner(folder, seconds=None, clock=None, **options):
    clock = clock or (lambda: 0.0)
    return Runner(AuditCache(folder, {"a": 1}), Meter(clock), Deadline(seconds, clock), **options)


def test_a_check_of_two_explainers_is_announced_once_and_taken_for_each(tmp_path):
    lines = []
    one = runner(tmp_path, say=lines.append)
    one.run([part("performance"), part("noise", ("a", "b"))])
    assert set(one.metrics) == {"performance/", "noise/a", "noise/b"}
    assert [line.split(":")[0] for line in lines] == ["performance", "noise of a, b"]
    assert one.records == {"performance": {"of": ""}, "noise": {"of": "b"}}
    assert [c.check for c in one.costs] == ["performance", "noise"]
    assert not one.missing


def test_what_was_not_asked_for_is_skipped_with_the_reason_and_costs_nothing(tmp_path):
    one = runner(tmp_path)
    one.run([part("noise", ("a",), left_out="not asked"), part("layers", left_out="no")])
    assert set(one.metrics) == {"explainer/a/f", "explainer/a/g", "model/f", "model/g"}
    assert {(m.status, m.reason) for m in one.metrics.values()} == {("skipped", "not asked"), ("skipped", "no")}
    assert one.metrics["explainer/a/g"].direction == "down"
    assert one.missing == {"noise of a": "not asked", "layers": "no"}
    assert not one.costs


def test_after_the_time_nothing_is_started_and_what_runs_ends(tmp_path):
    now = [0.0]

    def slow(owner):
        now[0] += 60
        if now[0] > 100:
            raise OutOfTimeError
        return Taken({f"x/{owner}": Measure(1.0)})

    one = runner(tmp_path, 100, lambda: now[0])
    one.run([part("noise", ("a", "b", "c"), slow), part("layers")])
    assert one.metrics["x/a"].status == "passed"
    assert {k: m.status for k, m in one.metrics.items() if k != "x/a"} == dict.fromkeys(
        ("explainer/b/f", "explainer/b/g", "explainer/c/f", "explainer/c/g", "model/f", "model/g"), "skipped"
    )
    assert list(one.missing) == ["noise of b", "noise of c", "layers"]
    again = runner(tmp_path)  # another command goes on: a is not taken again
    took = []
    again.run([part("noise", ("a", "b"), lambda owner: took.append(owner) or Taken({f"x/{owner}": Measure(2.0)}))])
    assert took == ["b"]
    assert again.metrics["x/a"].value == 1.0


def test_a_part_that_is_interrupted_keeps_the_ones_before_it(tmp_path):
    def stop(owner):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner(tmp_path).run([part("performance"), part("layers", take=stop)])
    lines = []
    again = runner(tmp_path, say=lines.append)
    again.run([part("performance", take=stop), part("layers")])
    assert [line.split(":")[0] for line in lines] == ["layers"]
    assert again.costs[0].note == "finished before an interruption"
    assert again.records["performance"] == {"of": ""}


def test_missing_measures_may_have_a_record_of_their_own(tmp_path):
    one = runner(tmp_path)
    one.run([part("reliance", left_out="no", missing=lambda why: Taken({"model/x": Measure(0.0)}, {"reason": why}))])
    assert one.records == {"reliance": {"reason": "no"}}
