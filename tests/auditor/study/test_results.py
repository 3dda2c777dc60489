"""Results from answers: planted orders are found, numbers are those of a plain count, and codes stay inside."""

import csv
import io
import json

import numpy as np
import pytest

from auditor.errors import StudyError
from auditor.metrics.grouping_purity import chance
from auditor.reports.study_page import study_page
from auditor.study.archive import archive
from auditor.study.results import pairs_of, results_of
from auditor.study.scores import as_csv, scores_of
from tests.auditor.study.drawn import opened, right_answer, small_study, take_part

SKILL = {"none": 0.1, "one-heatmap": 0.7, "concepts": 0.98}


def skilled(rng, skill=SKILL):
    """People who put an image right with a probability of their condition's."""

    def answer(study, number, step):
        given = right_answer(study, number, step)
        if step.kind == "group":
            p = skill[study.config.conditions[step.batch.condition]]
            groups = {k: g if rng.random() < p else int(rng.integers(1, 5)) for k, g in given["groups"].items()}
            return {"groups": groups}
        return given

    return answer


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    study, _ = small_study()
    store = opened(tmp_path_factory.mktemp("answers"), study)
    answer = skilled(np.random.default_rng(0))
    codes = [take_part(store, answer)[1].code for _ in range(12)]
    take_part(store, answer, until=4)  # one who stopped
    return store, codes


@pytest.fixture(scope="module")
def results(answered):
    store, _ = answered
    return results_of(store.study, store.digest, store.everybody())


def test_the_planted_order_is_found(results):
    assert (results.began, results.finished) == (13, 12)
    means = {c: results.metrics[f"study/small/purity/{c}"].value for c in SKILL}
    assert means["none"] < means["one-heatmap"] < means["concepts"]
    whole = {(c.a, c.b): c for c in results.comparisons if c.what == "purity" and not c.data}
    assert len(whole) == 3
    for pair, c in whole.items():
        assert c.is_significant, pair
        assert c.difference < 0
        assert c.n == 12
    assert {c.data for c in results.comparisons if c.what == "purity"} == {"", "birds", "digits"}
    (rated,) = [c for c in results.comparisons if c.what == "rating"]
    assert rated.p_permutation_holm == 1.0
    assert results.metrics["study/small/purity/none"].null == pytest.approx(0.5396, abs=1e-4)
    assert 0.4 < results.metrics["study/small/purity_of_labels/none"].null < 0.6
    gain = results.metrics["study/small/gain/concepts"]
    assert gain.value == pytest.approx(-whole["none", "concepts"].difference)
    assert gain.null == 0.0


def test_scores_are_those_of_a_plain_count(answered):
    store, codes = answered
    person = store.everybody()[3]
    rows = scores_of(store.study, [person])
    assert len(rows) == 6
    for row, index in zip(rows, [i for i, s in enumerate(person.steps) if s.kind == "group"], strict=True):
        groups, right = person.given[index].body["groups"], 0
        for g in set(groups.values()):
            inside = [store.study.images[k].predicted for k in groups if groups[k] == g]
            right += max(inside.count(c) for c in inside)
        assert row.purity == pytest.approx(right / 10)
        assert row.chance == pytest.approx(0.5396, abs=1e-4)
        assert row.confidence == pytest.approx(5 / 6)
        assert row.purity_of_labels < 1
        labels = [store.study.images[k].label for k in groups]
        assert row.chance_of_labels == pytest.approx(chance(labels, 4))
        assert row.ceiling_of_labels == 1.0
    assert rows[0].code == codes[3]
    table = list(csv.DictReader(io.StringIO(as_csv(rows))))
    assert [float(line["purity"]) for line in table] == [row.purity for row in rows]


def test_only_people_with_both_conditions_on_all_data_are_paired(answered):
    store, _ = answered
    scores = scores_of(store.study, store.everybody())
    assert len({s.code for s in scores}) == 13
    a, b = pairs_of(scores, ("none", "concepts"), "purity", "")
    assert len(a) == len(b) == 12


def test_no_code_leaves_in_the_document_or_on_the_page(answered, results):
    store, codes = answered
    page = study_page(results)
    document = json.dumps(results.to_json())
    assert not [code for code in codes if code in page or code in document]
    assert page.count("<svg") == 7
    assert "People group better with concepts than with none" in page
    assert "fine" in page  # comments
    archived = json.loads(archive(store))
    assert [p["code"] for p in archived["participants"]][:12] == codes
    assert archived["participants"][0]["answers"][2]["confidence_words"] == "Very high"


def test_metrics_of_a_version_are_of_its_own_data(results):
    birds = results.of_model("models:/birds/1")["study/small/purity/none"]
    assert birds.value == pytest.approx(results.by_data()["birds"]["study/small/purity/none"]["value"])
    assert "study/small/rating/concepts" not in results.of_model("models:/birds/1")
    assert not birds.per_image


def test_answers_about_the_person_are_counts_and_lines_of_text_stay_in_the_export(tmp_path):
    questions = (
        {"key": "ai", "text": "Courses in AI?", "choices": ("none", "some")},
        {"key": "job", "text": "Your job?"},
    )
    study, _ = small_study(questions=questions)
    store = opened(tmp_path, study)

    def answer(study, number, step):
        if step.kind == "questions":
            return {"questions": {"ai": ("none", "some", "")[number % 3], "job": "lighthouse keeper"}}
        return right_answer(study, number, step)

    for _ in range(6):
        take_part(store, answer)
    results = results_of(study, store.digest, store.everybody())
    document = results.to_json()
    assert document["questions"] == [
        {"key": "ai", "text": "Courses in AI?", "counts": {"none": 2, "some": 2, "no answer": 2}}
    ]
    page = study_page(results)
    assert "Courses in AI?" in page
    assert "2 (33%)" in page
    assert "lighthouse" not in json.dumps(document) + page
    assert b"lighthouse" in archive(store)


def test_the_page_that_is_stored_holds_nothing_that_one_person_wrote(results):
    assert "What people said" in study_page(results)
    assert "What people said" not in study_page(results, with_comments=False)


def test_confidence_is_compared_and_drawn_per_data_set(results):
    of = [c for c in results.comparisons if c.what == "confidence"]
    assert {c.data for c in of} == {"", "birds", "digits"}
    page = study_page(results)
    assert all(f"box plot of confidence, {name}" in page for name in ("all data sets", "birds", "digits"))


def test_no_answers_yet_is_one_sentence(tmp_path):
    study, _ = small_study()
    with pytest.raises(StudyError, match=r"nobody has grouped a batch of small yet \(0 people began\)"):
        results_of(study, "0" * 64, [])


def test_nobody_is_found_to_differ_where_nothing_does(tmp_path):
    study, _ = small_study(names=("birds",))
    store = opened(tmp_path, study)
    answer = skilled(np.random.default_rng(5), dict.fromkeys(SKILL, 0.5))
    for _ in range(10):
        take_part(store, answer)
    results = results_of(study, store.digest, store.everybody())
    assert not any(c.is_significant for c in results.comparisons)
    assert "No difference was found" in study_page(results)
