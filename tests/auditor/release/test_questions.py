"""The two questions and the headline: each answer by what was measured, and silence is never a good answer."""

from dataclasses import replace

import pytest

from auditor.auditing.audit import Audit
from auditor.metrics.measure import Measure
from auditor.release.questions import believed, headline, not_measured, reasons, to_look_at

GOOD = {"randomisation": 0.1, "f_cls": 0.99, "flip_gain": 0.5}


def measured(value):
    return Measure(value, value, value, 10, null=0.1, direction="up")


def entry(name, verdict):
    return {"name": name, "verdict": verdict, "sentence": f"{name} is {verdict}."}


def relied(*verdicts, **more):
    """What reliance says of classes a, b, c …"""
    names = "abcdefghij"
    return {"status": "measured", "findings": [entry(names[i], v) for i, v in enumerate(verdicts)], **more}


def audit_of(reliance, accuracy=0.9, explainers=("c",), **metrics):
    measures = {"model/accuracy": Measure(accuracy, accuracy - 0.05, accuracy + 0.05, 100, null=0.3, direction="up")}
    for name in explainers:
        measures |= {f"explainer/{name}/{k}": measured(v) for k, v in (GOOD | metrics).items()}
    about = {name: {"kind": "x"} for name in explainers}
    return Audit(model={}, data={}, seed=0, metrics=measures, explainers=about, reliance=reliance)


@pytest.mark.parametrize(
    ("verdicts", "level", "text"),
    [
        (["nothing", "nothing"], "good", "Nothing was found against it"),
        (["found", "nothing"], "bad", "Class a hangs on one thing"),
        (["look", "nothing", "look"], "warn", "Classes a and c may hang on one thing each"),
        (["look", "found", "found"], "bad", "Classes b and c hang on one thing each"),
        (["found"] * 6, "bad", "Classes a, b, c and 3 more hang on one thing each"),
        (["skipped", "nothing"], "warn", "Nothing was found against it"),
    ],
)
def test_what_classes_hang_on_decides_the_reasons(verdicts, level, text):
    answer = reasons(audit_of(relied(*verdicts)))
    assert (answer.level, answer.text) == (level, text)
    sentences = [f.text for f in answer.sentences]
    for name, verdict in zip("abcdefghij", verdicts, strict=False):
        assert (f"{name} is {verdict}." in sentences) == (verdict in ("found", "look", "skipped"))
    assert answer.to_json()["sentences"][0] == {
        "level": answer.sentences[0].level, "text": sentences[0], "about": ""
    }  # fmt: skip


def test_the_quiet_classes_are_counted():
    def quiet(*verdicts):
        return [f.text for f in reasons(audit_of(relied(*verdicts))).sentences if f.text.startswith("For none")]

    assert quiet("nothing", "nothing")[0].startswith("For none of any 2 classes")
    assert quiet("nothing", "nothing", "found")[0].startswith("For none of the other 2 classes")
    assert quiet("found") == []


def test_what_was_not_measured_is_no_good_answer():
    for about, text in (
        (None, "the audit is of a release that could not"),
        ({"status": "skipped", "reason": "too few"}, "not measured: too few."),
    ):
        answer = reasons(audit_of(about))
        assert (answer.level, answer.text) == ("warn", "Not measured")
        assert text in answer.sentences[0].text
        assert headline(audit_of(about))[0] == "warn"
    many = reasons(audit_of(relied(*["skipped"] * 7)))
    assert "7 classes were not measured (a, b, c, d, e, …)" in many.sentences[0].text
    assert any("its own" in f.text or "no labels" in f.text for f in reasons(
        audit_of(relied("nothing", by_prediction=True))).sentences)  # fmt: skip


def test_a_model_that_is_no_better_than_chance_has_no_good_reasons():
    answer = reasons(audit_of(relied("nothing"), accuracy=0.3))
    assert answer.level == "bad"
    assert "no better than always saying the most frequent class" in answer.text


def test_explanations_are_believed_when_every_check_holds():
    good = believed(audit_of(relied("nothing")))
    assert (good.level, good.text) == ("good", "Yes: every explainer holds in every check")
    poor = believed(audit_of(relied("nothing"), f_cls=0.5, explainers=("c", "d")))
    assert (poor.level, poor.text) == ("warn", "With reservations: look closer at c, d")
    none = believed(audit_of(relied("nothing"), explainers=()))
    assert (none.level, none.text) == ("warn", "There are none")


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"a": "nothing"}, "Its heat misses what a hangs on"),
        ({"a": "look", "b": "nothing"}, "By its heat it is less sure what a hangs on."),
        ({"a": "look", "b": "found"}, "By its heat b would hang on one thing"),
        ({"a": "found", "b": "nothing"}, None),
    ],
)
def test_heat_that_leads_elsewhere_is_a_reservation(said, text):
    answer = believed(audit_of(relied("found", "nothing", sources={"c": said})))
    assert answer.level == ("good" if text is None else "warn")
    assert text is None or any(text in f.text for f in answer.sentences)


@pytest.mark.parametrize(
    ("verdicts", "f_cls", "level", "lead"),
    [
        (["nothing"], 0.99, "good", "The explanations hold, and no class was found"),
        (["found"], 0.5, "bad", "Do not rely on this model yet: class a hangs on one thing"),
        (["look"], 0.99, "warn", "Look at the model's reasons first: class a may hang on one thing"),
        (["look"], 0.5, "warn", "Look at the model's reasons first"),  # of two alike the model comes first
        (["nothing"], 0.5, "warn", "The explanations have reservations: look closer at c"),
    ],
)
def test_the_headline_is_the_worse_answer(verdicts, f_cls, level, lead):
    got, text = headline(audit_of(relied(*verdicts), f_cls=f_cls))
    assert got == level
    assert text.startswith(lead)


def test_a_broken_explainer_makes_the_explanations_bad():
    audit = audit_of(relied("nothing"))
    broken = replace(audit, explainers={"c": {"kind": "x", "problem": "bytes differ"}})
    assert headline(broken) == ("bad", "Do not rely on the explanations yet: look closer at c")


def test_a_partial_audit_says_so():
    whole = audit_of(relied("nothing"), explainers=("c", "d"))
    assert (
        not_measured(replace(whole, not_measured={"noise of c": "", "noise of d": "", "layers": ""})) == "noise, layers"
    )
    partial = replace(whole, not_measured={"noise of c": "time is up"})
    level, text = headline(partial)
    assert level == "warn"
    assert text.endswith("This is a partial audit, not measured: noise of c")
    bad = replace(audit_of(relied("found")), not_measured={"layers": "not asked for"})
    assert headline(bad)[0] == "bad"


def test_a_person_looks_at_what_was_found():
    audit = audit_of(relied("found", "nothing", "look", "skipped"))
    assert [f["name"] for f in to_look_at(audit)] == ["a", "c"]
    assert to_look_at(audit_of(None)) == []
