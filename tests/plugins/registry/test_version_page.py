"""Version pages in MLflow: a person reads the verdict and where the report is; what people wrote stays theirs."""

import mlflow

from auditor import plugins
from auditor.plugins.registry import tags
from auditor.plugins.registry.audits import _card_of
from auditor.plugins.registry.gates import run_gate
from auditor.plugins.registry.location import resolve
from auditor.plugins.registry.version_page import BEGIN, END, update, verdict_words, without_section


def description(uri):
    version = resolve(uri)
    return mlflow.MlflowClient().get_model_version(version.name, version.version).description or ""


def test_the_words_of_a_verdict():
    audit = tags.AuditTag("1" * 64, "audits/1", "2026-11-17T09:00:00", n_metrics=244)
    failed = tags.GateTag("fail", "2026-11-18T10:00:00", checks=12, failed=("model/accuracy", "model/ece"))
    assert verdict_words(failed, audit) == "FAIL: 10 of 12 checks hold, 2026-11-18"
    assert verdict_words(None, audit) == "no verdict yet; audited 2026-11-17, 244 metrics"
    assert verdict_words(None, None) == "no verdict, not audited"
    assert verdict_words(tags.GateTag(problem="odd"), None) == "no verdict, not audited"


def test_a_section_is_replaced_and_what_people_wrote_stays():
    text = f"Birds of Oregon.\n\n{BEGIN}\nold\n{END}\n\nAsk Ann."
    assert without_section(text) == "Birds of Oregon.\n\nAsk Ann."
    assert without_section(None) == without_section(f"{BEGIN}\nx\n{END}") == ""


def test_the_page_says_verdict_explainers_and_where_the_report_is(registry, gated, tmp_path):
    uri, _ = gated
    client, version = mlflow.MlflowClient(), resolve(uri)
    try:
        client.update_model_version(version.name, version.version, "My digits.")
        for limit, verdict in ((0.0, "PASS: 1 of 1 checks hold"), (1.01, "FAIL: 0 of 1 checks hold")):
            (tmp_path / "p.toml").write_text(f'[limits."model/accuracy"]\nmin = {limit}\n')
            run_gate(uri, tmp_path / "p.toml")
            text = description(uri)
            assert text.startswith("My digits.\n\n" + BEGIN)
            assert text.count(BEGIN) == 1
            assert f"**{verdict}" in text
            assert resolve(uri).tags[tags.VERDICT].startswith(verdict)
        assert "Failed: `model/accuracy`." in text
        assert "`concepts` (nmf, attached " in text
        assert "/auditor/version?name=gated&version=1" in text
        assert _card_of(resolve(uri))["description"] == "My digits."
        assert [x.problem for x in plugins.verify(uri) if not x.verified] == []
    finally:
        client.update_model_version(version.name, version.version, "")


def test_what_mlflow_refuses_is_a_warning(registry, gated, monkeypatch, caplog):
    def refuse(*_, **__):
        raise mlflow.exceptions.MlflowException("read only")

    monkeypatch.setattr(mlflow.MlflowClient, "set_model_version_tag", refuse)
    monkeypatch.setattr("auditor.plugins.registry.location.TAG_ATTEMPTS", 1)
    update(resolve(gated[0]))
    assert "the page of models:/gated/1 in MLflow was not updated: read only" in caplog.text


def test_the_metrics_of_an_audit_stand_together_in_its_run_and_few_on_the_models_page(registry, gated):
    version = resolve(gated[0])
    run, *_ = mlflow.MlflowClient().search_runs(
        [version.experiment_id], "attributes.run_name = 'audit gated/1'"
    )  # newest
    audit = plugins.latest_audit(gated[0])
    taken = {name for name, m in audit.metrics.items() if m.status == "passed"}
    assert set(run.data.metrics) <= taken
    assert len(run.data.metrics) > 30
    logged = mlflow.MlflowClient().get_logged_model(version.model_id).metrics
    on_page = {m.key for m in logged if m.run_id == run.info.run_id}
    # another test of this session may have audited some checks only: what was not taken cannot stand on the page
    assert {"model/accuracy", "explainer/concepts/f_cls"} & taken <= on_page
    assert "model/accuracy" in on_page
    assert len(on_page) <= 3
