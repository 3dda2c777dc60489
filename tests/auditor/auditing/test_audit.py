"""The whole audit: what it measures, its sealed JSON, going on after an interruption, other seeds."""

import math

import numpy as np
import pytest

import auditor
from auditor import AuditConfig, open_data
from auditor.auditing.audit import Audit
from auditor.auditing.explanation_quality import GROUPS, NAMES
from auditor.data.user_cache import KEY_FILE
from auditor.errors import TamperError


def test_an_audit_measures_model_layers_and_explanations(audited):
    names = set(audited.metrics)
    assert {f"explainer/concepts/{name}" for name in NAMES} <= names
    assert {"model/accuracy", "model/ece", "model/nll", "model/accuracy/7", "model/worst_class_accuracy"} <= names
    assert any(name.startswith("model/head.3/") for name in names)
    assert audited.metrics["model/accuracy"].n == audited.data["n"] == 1797  # all images, not only the explained
    for name, m in audited.metrics.items():
        assert m.status == "passed" or not name.startswith("explainer/"), (name, m)
        assert math.isfinite(m.value) == (m.status == "passed"), name
        if m.low is not None:
            assert m.low <= m.value <= m.high, name
    f_cls = audited.metrics["explainer/concepts/f_cls"]
    assert (f_cls.direction, f_cls.n, len(f_cls.per_image)) == ("up", 30, 30)
    assert f_cls.value > 2 * f_cls.null
    assert audited.metrics["explainer/concepts/randomisation"].value < 0.6


def test_the_sealed_audit_comes_back_and_any_edit_is_found(audited):
    sealed = audited.sealed()
    again = Audit.from_json(sealed)
    assert again.sealed() == sealed
    assert again.metrics["model/accuracy"] == audited.metrics["model/accuracy"]
    edited = sealed.replace(b'"seed": 0', b'"seed": 1', 1)
    assert edited != sealed
    with pytest.raises(TamperError, match=r"checksum does not match; run the audit again"):
        Audit.from_json(edited)
    with pytest.raises(TamperError, match="not an audit"):
        Audit.from_json({"schema_version": 1})
    with pytest.raises(TamperError, match="newer version"):
        Audit.from_json({"schema_version": 99})


def test_without_labels_accuracy_is_skipped_with_the_reason(tiny, tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "bare.npz", images=rng.integers(0, 256, (24, 13, 17), dtype=np.uint8))
    audit = auditor.audit(tiny, open_data(tmp_path / "bare.npz"), config=AuditConfig(images=20))
    assert audit.metrics["model/accuracy"].status == "skipped"
    assert "no labels" in audit.metrics["model/accuracy"].reason


def test_an_interrupted_audit_goes_on_where_it_stopped(tiny, tiny_npz, tmp_path, monkeypatch):
    from auditor.auditing import audit as module

    data, config = open_data(tiny_npz), AuditConfig(images=20)
    concepts = auditor.fit("nmf", tiny, open_data(tiny_npz, limit=12), rank=2, refits=1)
    concepts.save(tmp_path / "artifact")
    runs = []
    real = module.take

    def counted(group, case):
        runs.append(group)
        return real(group, case)

    monkeypatch.setattr(module, "take", counted)

    def stop(stage, done, total):
        if stage == "audit" and done == 4:
            raise KeyboardInterrupt

    def run(progress=lambda *_: None, cache=tmp_path / "cache"):
        return module.audit(tiny, data, {"concepts": concepts}, config, cache=cache, progress=progress)

    with pytest.raises(KeyboardInterrupt):
        run(stop)
    first = list(runs)
    assert first == list(GROUPS)[:3]
    runs.clear()
    audit = run()
    assert runs == list(GROUPS)[3:]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [
        KEY_FILE
    ]  # a finished audit leaves no part behind
    whole = run(cache=None)
    assert set(audit.metrics) == set(whole.metrics)
    for name, m in whole.metrics.items():
        got = audit.metrics[name]
        assert (got.status, got.n, got.direction) == (m.status, m.n, m.direction), name
        assert got.value == pytest.approx(m.value, nan_ok=True), name


def test_other_seeds_move_little_and_look_at_the_same_images(tiny, tiny_npz):
    data = open_data(tiny_npz)
    concepts = auditor.fit("nmf", tiny, open_data(tiny_npz, limit=12), rank=2, refits=1)
    a, b = (auditor.audit(tiny, data, {"c": concepts}, AuditConfig(images=20, seed=s)).metrics for s in (0, 7))
    assert a["explainer/c/f_reg"].per_image == b["explainer/c/f_reg"].per_image
    assert a["explainer/c/flip_area"].per_image != b["explainer/c/flip_area"].per_image


@pytest.fixture
def two_concepts(tiny, tiny_npz, tmp_path):
    concepts = auditor.fit("nmf", tiny, open_data(tiny_npz, limit=12), rank=2, refits=1)
    concepts.save(tmp_path / "concepts")
    return {"a": concepts, "b": concepts}


def test_a_partial_audit_never_looks_like_a_whole_one(tiny, tiny_npz, two_concepts):
    from auditor.release.gate import judge
    from auditor.release.policy import parse_policy
    from auditor.release.questions import believed, headline, reasons
    from auditor.reports.audit_report import report_html

    config = AuditConfig(images=20, checks=("faithfulness", "noise"), explainers=("a",))
    part = auditor.audit(tiny, open_data(tiny_npz), two_concepts, config)
    taken = {name for name, m in part.metrics.items() if m.status == "passed"}
    assert {"explainer/a/f_reg", "explainer/a/noise_c2", "explainer/a/verified", "explainer/b/verified"} <= taken
    whole = set(GROUPS["flipping"].names) | set(GROUPS["randomisation"].names)
    assert all(part.metrics[f"explainer/a/{name}"].status == "skipped" for name in whole)
    assert all("--checks" in part.metrics[f"explainer/a/{name}"].reason for name in whole)
    assert all("--explainers" in part.metrics[f"explainer/b/{name}"].reason for name in NAMES - {"verified"})
    assert part.metrics["model/c1_local"].status == part.metrics["model/reliance/found"].status == "skipped"
    assert part.explainers["b"]["digest"] == two_concepts["b"].digest_  # so that the audit is not called stale
    level, text = headline(part)
    assert level != "good"
    assert "partial audit, not measured: " in text
    assert all(word in text for word in ("flipping", "faithfulness of b", "reliance", "layers"))
    assert believed(part).level != "good"
    assert "Not checked: flipping" in " ".join(f.text for f in believed(part).sentences)
    assert reasons(part).level != "good"
    assert "partial audit" in report_html(part)
    assert Audit.from_json(part.sealed()).not_measured == part.not_measured
    gate = judge(
        part, parse_policy('[limits]\n"explainer/a/flip_gain" = {min = -9}\n"explainer/b/f_cls" = {min = 0}', "p")
    )
    assert gate.verdict == "fail"
    assert gate.failed == ["explainer/a/flip_gain", "explainer/b/f_cls"]
    assert "skipped in the audit" in gate.checks[0].reason


def test_the_budget_in_passes_is_said_first_and_kept(tiny, tiny_npz, two_concepts):
    lines = []
    audit = auditor.audit(tiny, open_data(tiny_npz), two_concepts, AuditConfig(images=20), say=lines.append)
    assert not audit.not_measured
    by_check = {c["check"]: c for c in audit.cost}
    assert set(by_check) == {"performance", "reliance", "layers", *GROUPS}
    for check, c in by_check.items():
        assert c["passes_per_image"] <= c["passes_per_image_at_most"], check
        assert any(line.startswith(check) and "at most" in line for line in lines), check
    assert by_check["faithfulness"]["explainers"] == ["a", "b"]
    assert by_check["flipping"]["passes_per_image"] > 1


def test_a_budget_that_is_over_leaves_the_rest_for_the_next_command(tiny, tiny_npz, two_concepts, tmp_path):
    from auditor.release.questions import headline

    data, cache = open_data(tiny_npz), tmp_path / "cache"
    part = auditor.audit(tiny, data, two_concepts, AuditConfig(images=20, budget_s=1e-6), cache=cache)
    assert part.metrics["explainer/a/f_cls"].status == "skipped"
    assert "budget of 0.0 s was used up" in part.metrics["explainer/a/f_cls"].reason
    assert "partial audit" in headline(part)[1]
    whole = auditor.audit(tiny, data, two_concepts, AuditConfig(images=20), cache=cache)
    assert whole.metrics["explainer/a/f_cls"].status == "passed"
    assert not whole.not_measured


def test_an_explainer_that_is_not_attached_and_a_check_that_does_not_exist(tiny, tiny_npz, two_concepts):
    from pydantic import ValidationError

    from auditor.errors import UnknownExplainerError

    with pytest.raises(UnknownExplainerError, match="no explainer 'c'; attached are: a, b"):
        auditor.audit(tiny, open_data(tiny_npz), two_concepts, AuditConfig(images=20, explainers=("c",)))
    with pytest.raises(ValidationError, match="want some of performance"):
        AuditConfig(checks=("all",))
