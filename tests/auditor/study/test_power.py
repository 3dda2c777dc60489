"""Power against simulation and against the normal limit."""

import numpy as np
import pytest
from scipy import stats

from auditor.errors import OptionError
from auditor.study.power import paired_power, plan, sd_of_guessing
from tests.auditor.study.drawn import small_study


@pytest.mark.parametrize(("n", "d"), [(12, 0.9), (30, 0.5)])
def test_power_is_how_often_a_t_test_rejects(n, d):
    x = np.random.default_rng(0).normal(d, 1, (4000, n))
    share = (stats.ttest_1samp(x, 0, axis=1).pvalue <= 0.05).mean()
    assert paired_power(n, d, 0.05) == pytest.approx(share, abs=4 * 0.5 / 4000**0.5)


def test_a_plan_is_the_first_number_that_is_enough():
    made = plan(0.1, sd=0.15, batches=2, comparisons=3)
    d = 0.1 / made.sd_of_difference
    assert made.sd_of_difference == pytest.approx(0.15)
    assert paired_power(made.people_t, d, 0.05 / 3) >= 0.8 > paired_power(made.people_t - 1, d, 0.05 / 3)
    assert made.people == int(np.ceil(made.people_t * np.pi / 3))
    normal = ((stats.norm.ppf(1 - 0.05 / 6) + stats.norm.ppf(0.8)) / d) ** 2  # the limit of many people
    assert made.people_t == pytest.approx(normal, rel=0.2)
    assert plan(0.1, sd=0.15, correlation=0.5).people < plan(0.1, sd=0.15).people
    assert plan(-0.1).people == plan(0.1).people


@pytest.mark.parametrize(
    "options", [{"difference": 0}, {"sd": 0}, {"power": 1}, {"alpha": 0.6}, {"correlation": 1}, {"batches": 0}]
)
def test_what_makes_no_sense_is_named(options):
    with pytest.raises(OptionError, match="makes no sense"):
        plan(**{"difference": 0.1, **options})


def test_a_difference_that_needs_everybody_is_refused():
    with pytest.raises(OptionError, match="more than 100000 people"):
        plan(0.0005)


def test_the_spread_of_guessing_is_measured_on_the_drawn_batches():
    study, _ = small_study()
    assert 0.08 < sd_of_guessing(study) < 0.14
