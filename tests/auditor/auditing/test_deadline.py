"""The time an audit is given."""

import pytest

from auditor.auditing.deadline import Deadline, OutOfTimeError
from auditor.errors import AuditError


def test_work_ends_at_its_first_report_after_the_time():
    now = [0.0]
    deadline = Deadline(300, lambda: now[0])
    heard = []
    report = deadline.watching(lambda *call: heard.append(call))
    report("a", 1, 2)
    now[0] = 299.0
    report("a", 2, 2)
    assert deadline.left == 1.0
    now[0] = 300.0
    with pytest.raises(OutOfTimeError):
        report("b", 0, None)
    assert heard[-1] == ("b", 0, None)
    assert "budget of 5 min was used up" in deadline.reason


def test_without_a_budget_progress_is_left_as_it_is():
    def progress(*_):
        pass

    deadline = Deadline(None)
    assert deadline.watching(progress) is progress
    assert deadline.left == float("inf")


def test_being_out_of_time_is_not_the_fault_of_what_was_measured():
    assert not issubclass(OutOfTimeError, AuditError)
