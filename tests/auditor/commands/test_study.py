"""``auditor study``: drawn, attached, answered, its results in audit and gate; bad input in one line."""

import json
from dataclasses import replace

import pytest

from auditor import plugins
from auditor.plugins.registry.location import resolve
from auditor.plugins.registry.studies import study_measures, with_studies
from auditor.release.gate import judge
from auditor.release.policy import parse_policy
from auditor.study.answers import AnswerStore
from auditor.study.folder import read_study
from tests.auditor.study.drawn import take_part

NEW = ("--data", "sklearn:digits?split=test", "--conditions", "none,concepts", "--sets", "2", "--per-batch", "4")


@pytest.fixture(scope="module")
def drawn(gated, tmp_path_factory):
    """A small study attached to models:/gated/1, its folder, and answers of six people."""
    from tests.conftest import Cli

    uri, _ = gated
    folder = tmp_path_factory.mktemp("study")
    about = Cli().json("study", "new", uri, *NEW, "--name", "small", "--out", folder / "s")
    study, _, digest = read_study(folder / "s", about["digest"])
    store = AnswerStore(folder / "a.db", study, digest)
    codes = [take_part(store)[1].code for _ in range(6)]
    store.close()
    return uri, folder, codes, about


def test_new_draws_and_attaches(drawn, cli):
    uri, _, _, about = drawn
    assert about["data"][0]["name"] == "digits"
    assert len(about["data"][0]["classes"]) == 4
    assert about["sets"][0]["ceiling"] == 1.0
    assert "auditor.study.small" in resolve(uri).tags
    assert plugins.verify(uri)[0].verified
    said = cli("study", "plan", f"{uri}#small", "--difference", "0.2")
    assert "people find a difference of 0.2 in 80% of studies" in said.stdout
    assert cli.json("study", "plan", "--difference", "0.1", "--conditions", "3")["comparisons"] == 3


def test_results_go_to_page_table_version_audit_and_gate(drawn, cli, tmp_path):
    uri, folder, codes, _ = drawn
    files = ("--report", tmp_path / "r.html", "--csv", tmp_path / "r.csv", "--out", tmp_path / "r.json")
    said = cli("study", "results", f"{uri}#small", "--answers", folder / "a.db", *files)
    assert said.exit_code == 0, said.output
    assert "6 began, 6 finished" in said.stdout
    assert "<svg" in (tmp_path / "r.html").read_text()
    assert (tmp_path / "r.csv").read_text().count("\n") == 13
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["metrics"]["study/small/purity/concepts"]["value"] == 1.0
    audit = plugins.latest_audit(uri)
    assert audit.metrics["study/small/purity/concepts"].value == 1.0
    assert audit.metrics["study/small/purity/concepts"].null == pytest.approx(0.645, abs=0.1)
    assert list(audit.model["studies"]) == ["small"]
    policy = tmp_path / "p.toml"
    policy.write_text(
        '[limits."study/small/purity/concepts"]\nmin = 0.9\n[limits."study/small/gain/concepts"]\nmin = 0.5\n'
    )
    verdict = json.loads(cli("gate", uri, "--policy", policy, "--json").stdout)
    assert [c["verdict"] for c in verdict["checks"]] == ["pass", "fail"]
    assert not [code for code in codes if code in json.dumps(document)]


def test_a_study_of_the_model_as_it_was_counts_no_more(drawn, cli):
    uri, folder, _, _ = drawn
    assert cli("study", "results", f"{uri}#small", "--answers", folder / "a.db").exit_code == 0
    version, audit = resolve(uri), plugins.latest_audit(uri)
    name = "study/small/purity/concepts"
    assert study_measures(version, audit.model["digest"])[0][name].is_taken
    before = replace(audit, model={**audit.model, "digest": "0" * 64, "studies": {}})  # an audit of other weights
    measure = with_studies(before, version).metrics[name]
    assert measure.status == "skipped"
    assert "small" in measure.reason
    policy = parse_policy(f'[limits."{name}"]\nmin = 0.1\n')
    assert judge(with_studies(before, version), policy).verdict == "fail"


def test_erase_and_export(drawn, cli, tmp_path):
    _, folder, codes, _ = drawn
    assert cli.json("study", "erase", folder / "s", codes[0], "--answers", folder / "a.db")["erased"] > 3
    assert cli("study", "export", folder / "s", tmp_path / "e.json", "--answers", folder / "a.db").exit_code == 0
    assert [p["code"] for p in json.loads((tmp_path / "e.json").read_text())["participants"]] == codes[1:]
    assert "nobody has the code" in cli.fails("study", "erase", folder / "s", codes[0], "--answers", folder / "a.db")


def test_bad_input_is_one_line(drawn, cli, tmp_path):
    uri, folder, _, _ = drawn
    out = ("--out", tmp_path / "x")
    new = ("study", "new", uri, "--data", "sklearn:digits?split=test", *out)
    assert "need 500 images of each class" in cli.fails(*new, "--sets", "50", "--per-batch", "40")
    assert "no explainer called 'nosuch'" in cli.fails(*new, "--conditions", "none,nosuch")
    assert "at least two different" in cli.fails(*new, "--conditions", "none")
    assert "want 4 different classes" in cli.fails(*new, "--classes", "1,2")
    assert "one list, or 1" in cli.fails(*new, "--classes", "1;2")
    assert "--names" in cli.fails(*new, "--names", "a,b")
    assert "is not empty" in cli.fails("study", "new", uri, *NEW, "--out", folder / "s")
    assert "cannot be read as TOML" in cli.fails(*new, "--texts", tmp_path / "none.toml")
    assert "no study called 'other'; attached are: small" in cli.fails("study", "results", f"{uri}#other")
    assert "no drawn study" in cli.fails("study", "results", tmp_path)
    assert "no answers to small yet" in cli.fails("study", "results", folder / "s", "--answers", tmp_path / "n.db")
    assert "--store: name the study as" in cli.fails("study", "results", folder / "s", "--store")
    assert "at least 12 characters" in cli.fails("study", "serve", folder / "s", "--key", "short")
    assert "makes no sense" in cli.fails("study", "plan", "--difference", "0")
    assert not (tmp_path / "x").exists()


def test_a_study_of_another_version_is_refused(drawn, cli, store, trained):
    from mlflow import MlflowClient

    uri, _, _, _ = drawn
    tag = resolve(uri).tags["auditor.study.small"]
    other = resolve("models:/digits/1")
    MlflowClient().set_model_version_tag(other.name, other.version, "auditor.study.small", tag)
    try:
        said = cli.fails("study", "results", "models:/digits/1#small")
        assert "models:/digits/1" in said
    finally:
        MlflowClient().delete_model_version_tag(other.name, other.version, "auditor.study.small")
