"""Scores: one row per batch that was grouped, with the numbers of that batch and nobody else's."""

import csv
import io

import pytest

from auditor.metrics.grouping_purity import purity
from auditor.study.design import DrawnImage
from auditor.study.scores import Score, as_csv, ratings_of, scores_of
from tests.auditor.study.drawn import opened, right_answer, small_study, take_part


def one_group(study, number, step):
    """Put every image into the first group."""
    given = right_answer(study, number, step)
    return {"groups": dict.fromkeys(given["groups"], 1)} if step.kind == "group" else given


def test_groups_by_the_prediction_score_one_and_one_group_scores_its_most_frequent_class(tmp_path):
    study, _ = small_study()
    store = opened(tmp_path, study)
    take_part(store)
    take_part(store, one_group)
    right, lumped = (scores_of(study, [person]) for person in store.everybody())
    assert [row.purity for row in right] == [1.0] * 6
    for row in lumped:
        (data,) = [d for d in study.data if d.name == row.data]
        classes = [study.images[key].predicted for key in data.sets[row.drawn]]
        assert row.purity == max(map(classes.count, classes)) / len(classes)
        assert row.chance < row.ceiling == 1.0
    assert {row.code for row in right}.isdisjoint(row.code for row in lumped)
    assert {row.condition for row in right} == set(study.config.conditions)
    assert [row.confidence for row in right] == [pytest.approx(5 / 6)] * 6
    assert {row.seconds for row in right} == {2.0}


def test_labels_that_differ_from_predictions_have_a_purity_of_their_own(tmp_path):
    study, _ = small_study(conditions=("none", "concepts"), names=("birds",))
    store = opened(tmp_path, study)
    take_part(store)
    for row in scores_of(study, store.everybody()):
        keys = study.data[0].sets[row.drawn]
        groups = [study.images[key].predicted for key in keys]
        assert row.purity_of_labels == purity(groups, [study.images[key].label for key in keys]) < 1
    for key, image in study.images.items():
        study.images[key] = DrawnImage(image.predicted, None, image.source, image.values, image.heats)
    for row in scores_of(study, store.everybody()):
        assert row.purity == 1.0
        assert row.purity_of_labels is row.chance_of_labels is row.ceiling_of_labels is None


def test_somebody_who_stopped_counts_as_far_as_they_came(tmp_path):
    study, _ = small_study()
    store = opened(tmp_path, study)
    take_part(store, until=2)  # the practice batch and the first of the study
    (person,) = store.everybody()
    (row,) = scores_of(study, [person])
    assert row.confidence is None
    assert (row.stage, row.batch) == (1, 1)
    assert ratings_of([person]) == []
    assert scores_of(study, []) == []


def test_ratings_run_from_zero_to_one_and_a_table_has_a_line_per_score(tmp_path):
    study, _ = small_study()
    store = opened(tmp_path, study)
    take_part(store)
    ratings = ratings_of(store.everybody())
    assert {r.condition for r in ratings} == {"one-heatmap", "concepts"}
    assert [r.rating for r in ratings] == [4 / 6] * 2
    rows = scores_of(study, store.everybody())
    read = list(csv.DictReader(io.StringIO(as_csv(rows))))
    assert [float(line["purity"]) for line in read] == [row.purity for row in rows]
    assert list(read[0]) == list(Score.__dataclass_fields__)
