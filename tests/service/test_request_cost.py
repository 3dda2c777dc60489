"""Request cost: images x (explanation + passes x seconds of a pass), before anything is queued."""

from types import SimpleNamespace

import pytest

from auditor.explainers.answer import Question
from auditor.service.batch_answer import Job
from auditor.service.problems import Problem
from auditor.service.request_cost import FAST_S, Pace, check_cost, is_slow, seconds, stability_passes, within_time
from auditor.service.settings import Settings
from auditor.service.types import Options

SETTINGS = Settings(max_search_timeout_s=4.0)
EXPLAINERS = {"concepts": SimpleNamespace(searches=False), "suffices": SimpleNamespace(searches=True)}


def job(*names: str, **options) -> Job:
    question = Question(None, Options(**options), list(names or ["concepts"]), None, False)  # type: ignore[arg-type]
    return Job(SimpleNamespace(explainers=EXPLAINERS), question)  # type: ignore[arg-type]


def counted(n: int) -> int:
    """Passes of ``fast``, one copy at a time: one in eight, and the image itself, with a gradient."""
    return 2 + sum(2 if i % 8 == 0 else 1 for i in range(n))


@pytest.mark.parametrize("n", [1, 2, 7, 8, 63, 64])
def test_passes_of_the_fast_stability(n):
    assert stability_passes(Options(noise_samples=n)) == counted(n)


def test_full_costs_more_than_fast_and_off_nothing():
    assert stability_passes(Options(stability="off", noise_samples=64)) == 0
    assert stability_passes(Options(stability="full")) > 5 * stability_passes(Options())


def test_the_pace_gives_back_what_was_measured():
    pace = Pace.of(0.25, 3.05)
    assert seconds(job(stability="off"), pace, SETTINGS) == pytest.approx(0.25)
    assert seconds(job(), pace, SETTINGS) == pytest.approx(3.05)
    assert Pace.of(0.5, 0.4).pass_s == 0.0  # a measurement that a busy machine spoilt


def test_the_pace_learns_from_batches_that_were_faster():
    pace = Pace(8.0, 4.0)  # warming up met a busy machine
    for _ in range(20):
        estimated_s = 3 * seconds(job(), pace, SETTINGS)
        pace = pace.after(estimated_s, took_s=0.3)
    assert seconds(job(), pace, SETTINGS) == pytest.approx(0.1)
    assert pace.after(1.0, 2.0) == pace.after(0.0, 0.0) == pace


def test_searching_takes_the_time_it_is_given():
    assert seconds(job("suffices", stability="off"), Pace(), SETTINGS) == 1.0
    assert seconds(job("suffices", stability="off", timeout_s=3), Pace(), SETTINGS) == 3.0
    assert seconds(job("suffices", stability="off", timeout_s=30), Pace(), SETTINGS) == 4.0


def test_many_samples_on_a_large_model_are_slow_and_on_a_small_one_are_not():
    """Old code kept stability=fast with 64 samples in the fast queue: 10 seconds an image on resnet18."""
    asked = [job(noise_samples=64)]
    for pass_s, slow in ((0.06, True), (0.0005, False)):
        cost_s = seconds(asked[0], Pace(pass_s, pass_s), SETTINGS)
        assert is_slow(asked, cost_s) is slow


def test_an_ordinary_question_is_never_slow_but_many_of_them_are():
    pace = Pace(0.2, 0.1)  # 1.3 s an image
    assert seconds(job(), pace, SETTINGS) > FAST_S
    assert not is_slow([job()], seconds(job(), pace, SETTINGS))
    assert is_slow([job()] * 2, 2 * seconds(job(), pace, SETTINGS))
    assert is_slow([job("suffices")], 0.0)
    assert is_slow([job(stability="full")], 0.0)


def test_what_cannot_be_answered_in_time_is_refused_with_the_reason():
    check_cost([job(noise_samples=64)], 29.0, 30.0)
    check_cost([job()], 31.0, 30.0)  # one ordinary question is always tried
    with pytest.raises(Problem, match=r"about 31 s \(2 images, up to 64 noise samples\)") as caught:
        check_cost([job(noise_samples=64)] * 2, 31.0, 30.0)
    assert (caught.value.status, caught.value.code) == (422, "too_costly")


def test_searches_share_the_time_of_a_request_that_they_would_exceed():
    """Old code refused two images with a search limit of 60 s where a request has 30: a limit is not what it takes."""
    settings, pace = Settings(max_search_timeout_s=60.0, request_timeout_s=30.0), Pace(0.5, 0.1)
    asked = [job("suffices", "concepts", stability="off", timeout_s=60) for _ in range(8)]
    cut = within_time(asked, pace, settings)
    assert [j.question.options.timeout_s for j in cut] == [pytest.approx((24 - 8 * 0.5) / 8)] * 8
    assert [j.question.names for j in cut] == [["suffices", "concepts"]] * 8
    check_cost(cut, sum(seconds(j, pace, settings) for j in cut), 30.0)
    unsaid = within_time([job("suffices", stability="off")] * 40, Pace(), settings)  # 1 s each by the estimate
    assert [j.question.options.timeout_s for j in unsaid] == pytest.approx([0.6] * 40)
    few = [job("suffices", stability="off", timeout_s=2)] * 8
    assert within_time(few, pace, settings) == few


def test_what_does_not_fit_however_little_it_searches_is_refused_and_says_so():
    settings = Settings(request_timeout_s=30.0)
    asked = within_time([job("suffices", stability="off", timeout_s=2)] * 60, Pace(), settings)
    assert {j.question.options.timeout_s for j in asked} == {2}
    with pytest.raises(Problem, match=r"about 120 s \(60 images, .* 60 searches\) .* fewer explainers that search"):
        check_cost(asked, sum(seconds(j, Pace(), settings) for j in asked), 30.0)
