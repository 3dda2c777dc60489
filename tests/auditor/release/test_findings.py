"""What an audit means: each finding by its number, and the worst of them as the verdict."""

from dataclasses import replace

import pytest

from auditor.auditing.audit import Audit
from auditor.metrics.measure import Measure, of_items
from auditor.release.findings import findings
from auditor.release.questions import headline


def verdict(audit):
    return headline(audit)[0]


def test_findings_follow_the_numbers(audited):
    assert verdict(audited) in ("good", "warn")
    bad = {"explainer/concepts/randomisation": Measure(0.97, direction="down", status="failed", reason="same")}
    assert verdict(replace(audited, metrics=audited.metrics | bad)) == "bad"
    vague = {"explainer/concepts/flip_gain": of_items([0.3, -0.2, 0.1, -0.1], "up", null=0.0)}
    texts = [f.text for f in findings(replace(audited, metrics=audited.metrics | vague)) if f.level == "warn"]
    assert any("not shown to be better than random" in t for t in texts)
    blind = {"model/accuracy": of_items([0.0, 1.0] * 10, "up", null=0.9)}
    assert verdict(replace(audited, metrics=audited.metrics | blind)) == "bad"
    tampered = replace(audited, explainers=audited.explainers | {"x": {"problem": "bytes differ"}})
    assert verdict(tampered) == "bad"
    assert verdict(replace(audited, explainers={})) == "warn"


def audit_of(**values):
    """An audit of one explainer ``c`` with the given metrics of it, and a model that is right."""
    metrics = {"model/accuracy": Measure(0.9, 0.85, 0.95, 100, null=0.1, direction="up")}
    for name, value in values.items():
        measure = value if isinstance(value, Measure) else Measure(value, value, value, 10)
        metrics[f"explainer/c/{name}" if "/" not in name else name] = measure
    return Audit(model={}, data={}, seed=0, metrics=metrics, explainers={"c": {"kind": "x"}})


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("randomisation", 0.6, "good"),
        ("randomisation", 0.61, "warn"),
        ("f_cls", 0.95, "good"),
        ("f_cls", 0.94, "warn"),
        ("noise_similarity", 0.9, "good"),
        ("noise_similarity", 0.89, "warn"),
        ("basis_stability", 0.79, "warn"),
        ("basis_stability", 0.8, None),
        ("residual_share", 0.51, "warn"),
        ("residual_share", 0.5, None),
        ("flip_gain", 0.01, "good"),
        ("flip_gain", 0.0, "warn"),
    ],
)
def test_where_news_turns_from_good_to_doubtful(name, value, level):
    about = [f.level for f in findings(audit_of(**{name: value})) if f.about == "c"]
    assert about == ([] if level is None else [level])


def test_too_little_agreement_is_said_in_words():
    texts = {v: " ".join(f.text for f in findings(audit_of(f_cls=v))) for v in (0.79, 0.8)}
    assert "too little to read it as the model's reasons" in texts[0.79]
    assert "too little" not in texts[0.8]
    assert "same class on 79% of images" in texts[0.79]


@pytest.mark.parametrize("name", ["randomisation", "completeness_gap", "f_cls", "flip_gain", "noise_similarity"])
def test_a_check_that_failed_is_bad_news_with_its_reason(name):
    broken = Measure(float("nan"), status="failed", reason="no numbers")
    (finding,) = [f for f in findings(audit_of(**{name: broken})) if f.about == "c"]
    assert finding.level == "bad"
    assert finding.text == f"The check {name} failed: no numbers."
    skipped = Measure(float("nan"), status="skipped", reason="not here")
    levels = [f.level for f in findings(audit_of(**{name: skipped})) if f.about == "c"]
    assert levels == (["warn"] if name == "randomisation" else [])


def test_the_model_is_judged_against_the_most_frequent_class():
    def levels(**metrics):
        audit = audit_of()
        named = {f"model/{k}": m for k, m in metrics.items()}
        return [f.level for f in findings(replace(audit, metrics=audit.metrics | named)) if not f.about]

    assert levels() == ["good"]
    assert levels(accuracy=Measure(0.5, 0.41, 0.6, 100, null=0.4)) == ["good"]
    assert levels(accuracy=Measure(0.5, 0.4, 0.6, 100, null=0.4)) == ["bad"]
    assert levels(accuracy=Measure(float("nan"), status="skipped", reason="no labels")) == ["warn"]
    assert levels(worst_class_accuracy=Measure(0.71, 0.7, 0.72, 10)) == ["good", "warn"]  # below 0.8 of 0.9
    assert levels(worst_class_accuracy=Measure(0.73, 0.7, 0.75, 10)) == ["good"]
    assert levels(ece=Measure(0.11)) == ["good", "warn"]
    assert levels(ece=Measure(0.1)) == ["good"]
