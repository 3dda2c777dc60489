"""Names of what fits measure: every kind's metrics have words and a direction, others keep their own name."""

import pytest

from auditor.metrics.fit_names import FIT, direction_of, fit_words


@pytest.mark.parametrize("metric", sorted(FIT))
def test_a_detail_changes_the_title_and_not_the_direction(metric):
    assert direction_of(f"{metric}/layer3") == direction_of(metric) in ("up", "down", "none")
    title, sentence = fit_words(metric)
    assert fit_words(f"{metric}/layer3") == (f"{title}, layer3", sentence)
    assert title.startswith("fit: ")
    assert title == title.strip()


def test_titles_tell_metrics_apart():
    assert len({fit_words(metric)[0] for metric in FIT}) == len(FIT)


def test_errors_fall_and_agreement_rises():
    assert {direction_of(m) for m in ("relative_error", "f_reg", "residual_layer", "dead", "flip_area")} == {"down"}
    assert {direction_of(m) for m in ("f_cls", "agreement", "accuracy_tree", "alive", "fidelity")} == {"up"}
    assert {direction_of(m) for m in ("accuracy_before", "accuracy_model", "probe_pca", "fidelity_floor")} == {"none"}


def test_a_metric_of_another_package_has_its_own_name_and_no_better_direction():
    assert direction_of("top_region_share") == "none"
    assert fit_words("top_region_share/left")[0] == "fit: top region share, left"
