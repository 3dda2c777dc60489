"""Gates in the registry: what is promoted is what was judged, and everything is written before an alias moves."""

import json
from pathlib import Path

import mlflow
import pytest

from auditor import fit, open_data, plugins
from auditor.errors import OptionError, TamperError
from auditor.plugins.registry import gates, subjects, tags
from auditor.plugins.registry.gates import run_gate
from auditor.plugins.registry.location import resolve, set_tag
from auditor.plugins.registry.onnx_exports import export
from auditor.plugins.registry.tags import OnnxTag
from auditor.plugins.registry.verdicts import latest_verdict

POLICY = '[limits."model/accuracy"]\nmin = 0.0\n'


@pytest.fixture(scope="module")
def judged(store, tmp_path_factory):
    """models:/judged/1 with concepts and an audit; its URI, its data and a policy that passes."""
    import numpy as np
    import torch
    from torch import nn

    from auditor import AuditConfig, Subject

    mlflow.set_tracking_uri(store)
    mlflow.set_registry_uri(store)
    folder = tmp_path_factory.mktemp("judged")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))
    uri = plugins.log_subject(Subject(net, input_shape=(1, 9, 11)), "judged", experiment="tests")
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 255, (200, 9, 11), dtype=np.uint8), np.arange(200) % 3
    np.savez(folder / "x.npz", images=images, labels=labels)
    data = open_data(folder / "x.npz")
    subject = plugins.load_subject(uri)
    plugins.attach(
        fit("nmf", subject, data, layer="1", rank=2, refits=1, max_eval=10), uri, "concepts", subject=subject,
        attach_anyway=True,
    )  # fmt: skip
    plugins.run_audit(uri, data, config=AuditConfig(images=20, layers=False, reliance=False))
    (folder / "policy.toml").write_text(POLICY)
    return uri, data, folder / "policy.toml"


@pytest.fixture
def version(registry, judged):
    """The same, with its tags put back afterwards."""
    before = dict(resolve(judged[0]).tags)
    yield judged
    client, current = mlflow.MlflowClient(), resolve(judged[0])
    for key in set(current.tags) - set(before):
        client.delete_model_version_tag(current.name, current.version, key)
    for key, value in before.items():
        set_tag(current, key, value)
    for alias in client.get_registered_model(current.name).aliases:
        client.delete_registered_model_alias(current.name, alias)


def aliases(uri: str) -> list[str]:
    return sorted(mlflow.MlflowClient().get_registered_model(resolve(uri).name).aliases)


def test_a_verdict_names_all_that_was_judged(version):
    uri, data, policy = version
    gate = run_gate(uri, policy, promote="best")
    assert (gate.verdict, gate.promoted, aliases(uri)) == ("pass", "best", ["best"])
    verdict = latest_verdict(uri)
    subject = plugins.load_subject(uri)
    document = verdict.document
    assert (verdict.verdict, document["model"], document["model_digest"]) == ("pass", uri, subject.digest)
    assert document["files"] == subject.files
    assert document["explainers"] == {"concepts": tags.explainer_tag(resolve(uri).tags, "concepts").digest}
    assert document["data_digest"] == data.digest
    assert document["policy_digest"] == gate.policy_digest
    assert document["audit_digest"] == plugins.latest_audit(uri).digest


def test_a_report_that_cannot_be_written_stops_the_promotion(cli, version, tmp_path):
    """The hole: the alias had moved before reports were written."""
    uri, _, policy = version
    line = cli.fails("gate", uri, "--policy", policy, "--promote", "best", "--junit", tmp_path)
    assert "is a folder" in line
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    line = cli.fails("gate", uri, "--policy", policy, "--promote", "best", "--junit", blocked / "j.xml")
    assert "nothing was promoted" in line
    assert aliases(uri) == []


def test_what_stops_before_promotion_stops_the_promotion(version):
    uri, _, policy = version

    def fails(gate):
        assert gate.promoted == "best"
        assert latest_verdict(uri).verdict == "pass"  # stored by now
        raise OSError("full disk")

    with pytest.raises(OSError, match="full disk"):
        run_gate(uri, policy, promote="best", before_promotion=fails)
    assert aliases(uri) == []


@pytest.mark.parametrize("change", ["explainer", "description", "audit", "file", "policy"])
def test_a_version_that_changed_while_it_was_judged_is_not_promoted(version, tmp_path, change):
    uri, _, policy = version
    rules = tmp_path / "policy.toml"
    rules.write_text(policy.read_text())
    current = resolve(uri)
    path = Path(current.root.removeprefix("file://")) / "requirements.txt"
    content = path.read_bytes()

    def meanwhile(_gate):
        if change == "explainer":
            plugins.detach(uri, "concepts")
        elif change == "description":
            set_tag(current, tags.SUBJECT, current.tags[tags.SUBJECT].replace("0.0", "0.5"))
        elif change == "audit":
            set_tag(current, tags.AUDIT, current.tags[tags.AUDIT].replace('"seed": 0', '"seed": 1').replace("a", "b"))
        elif change == "file":
            path.write_bytes(content + b"more")
        else:
            rules.write_text(POLICY + "\n")

    try:
        with pytest.raises(TamperError, match=r"nothing was promoted|has changed while"):
            run_gate(uri, rules, promote="best", before_promotion=meanwhile)
    finally:
        path.write_bytes(content)
    assert aliases(uri) == []


def test_a_baseline_that_is_the_candidate_is_refused(version):
    """The hole: a version passed every limit on changes against itself."""
    uri, _, policy = version
    with pytest.raises(OptionError, match="is models:/judged/1 itself"):
        run_gate(uri, policy, baseline=uri)
    copy = mlflow.MlflowClient().copy_model_version(uri, "judged-copy")
    with pytest.raises(OptionError, match="is a copy of"):
        run_gate(uri, policy, baseline=f"models:/judged-copy/{copy.version}")


def test_a_tampered_graph_with_the_right_digests_is_neither_judged_nor_verified(version, tmp_path):
    """The hole: whoever may edit the version can store a graph that answers otherwise, digests and all."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from auditor.explainers.artifact import write_artifact

    uri, _, policy = version
    good = export(uri)
    subject = plugins.load_subject(uri)
    problems = {x.kind: x.problem for x in plugins.verify(uri) if not x.verified}
    assert set(problems) <= {"history"}  # says that the fixture has put tags back
    model = onnx.load_model_from_string(good.content)
    biases = [t for t in model.graph.initializer if list(t.dims) == [3]]
    assert biases
    for tensor in biases:
        values = onnx.numpy_helper.to_array(tensor) + 5.0 * (onnx.numpy_helper.to_array(tensor).argsort() == 0)
        tensor.CopyFrom(onnx.numpy_helper.from_array(values.astype("float32"), tensor.name))
    manifest = {
        "kind": "onnx", "subject_digest": subject.digest, "subject": subject.identity.to_json(), "undone": "none",
        "layers": list(good.layers), "features": {}, "worst_difference": 1e-6,
    }  # fmt: skip
    digest = write_artifact(tmp_path / "a", manifest, {}, {"explain.onnx": model.SerializeToString()})
    location = f"auditor/exports/{digest[:12]}"
    current = resolve(uri)
    current.repository().log_artifacts(str(tmp_path / "a"), location)
    set_tag(current, tags.ONNX, OnnxTag(digest, location, "", tuple(good.layers), ()).encode())
    with pytest.raises(TamperError, match=r"explain\.onnx of models:/judged/1 does not answer as the model does"):
        run_gate(uri, policy, promote="best")
    assert any("does not answer as the model" in x.problem for x in plugins.verify(uri))
    assert aliases(uri) == []


def test_another_graph_makes_the_audit_stale(version, monkeypatch):
    uri, _, policy = version
    current = resolve(uri)
    monkeypatch.setattr(gates, "check_graph", lambda *_: None)
    ran = []
    monkeypatch.setattr(gates, "run_audit", lambda *a, **k: ran.append(a) or plugins.latest_audit(uri))
    run_gate(uri, policy)
    assert ran == []
    set_tag(current, tags.ONNX, OnnxTag("1" * 64, "auditor/exports/111111111111").encode())
    run_gate(uri, policy)
    assert len(ran) == 1


def test_a_hand_made_verdict_is_none(version):
    """The hole: one tag turned a fail into a pass."""
    uri, _, policy = version
    hard = policy.with_name("hard.toml")
    hard.write_text('[limits."model/accuracy"]\nmin = 1.01\n')
    assert run_gate(uri, hard).verdict == "fail"
    current = resolve(uri)
    tag = json.loads(current.tags[tags.GATE])
    set_tag(current, tags.GATE, json.dumps({**tag, "verdict": "pass", "failed": []}))
    with pytest.raises(TamperError, match=r"verdict\.json of models:/judged/1 has verdict 'fail', the version 'pass'"):
        latest_verdict(uri)
    set_tag(current, tags.GATE, json.dumps({"verdict": "pass", "audit_digest": tag["audit_digest"]}))
    with pytest.raises(TamperError, match="names no verdict file"):
        latest_verdict(uri)
    set_tag(current, tags.GATE, json.dumps({**tag, "location": "auditor/verdicts/none"}))
    with pytest.raises(TamperError, match="is missing"):
        latest_verdict(uri)


def test_an_edited_tag_is_no_ground_for_a_verdict(version):
    """A stored audit that ``verify`` calls edited was judged all the same, and its version promoted."""
    uri, _, policy = version
    current = resolve(uri)
    tag = json.loads(current.tags[tags.AUDIT])
    set_tag(current, tags.AUDIT, json.dumps({**tag, "time": "2031-01-01"}, sort_keys=True))
    with pytest.raises(TamperError, match=r"the tag auditor\.audit of models:/judged/1 is not as it was written"):
        run_gate(uri, policy, promote="best")
    assert aliases(uri) == []


def test_a_verdict_of_another_version_is_none(version, tiny):
    uri, _, policy = version
    run_gate(uri, policy)
    other = plugins.log_subject(tiny, "judged-other", experiment="tests")
    tag, verdict = tags.gate_tag(resolve(uri).tags), latest_verdict(uri)
    root = Path(resolve(uri).root.removeprefix("file://")) / tag.location
    resolve(other).repository().log_artifacts(str(root), tag.location)
    set_tag(resolve(other), tags.GATE, tag.encode())
    with pytest.raises(TamperError, match="has model 'models:/judged/1'"):
        latest_verdict(other)
    assert verdict.verdict == "pass"


def test_other_preprocessing_after_the_audit_voids_it(version):
    """The hole: the stored audit still counted, and the gate promoted a model that answers otherwise."""
    from auditor import AuditConfig

    uri, _, policy = version
    plugins.describe(uri, mean=[0.9], std=[0.05])
    gate = run_gate(uri, policy, promote="best", config=AuditConfig(images=20, layers=False, reliance=False))
    assert gate.verdict == "fail"
    (check,) = [c for c in gate.checks if c.metric == "explainer/concepts/verified"]
    assert "other preprocessing" in check.reason
    assert aliases(uri) == []


def test_other_weights_than_those_audited_are_no_reason_to_audit_again(version, monkeypatch):
    """The hole: a tampered model without a pin was audited anew, and a red verdict stored over the good one."""
    import torch

    uri, data, policy = version
    run_gate(uri, policy)
    current = resolve(uri)
    mlflow.MlflowClient().delete_model_version_tag(current.name, current.version, tags.MODEL)
    real, before = subjects.load_subject, dict(resolve(uri).tags)

    def tampered(*args, **options):
        subject = real(*args, **options)
        with torch.no_grad():
            next(iter(subject.module.parameters())).mul_(1.5)
        return subject

    monkeypatch.setattr(subjects, "load_subject", tampered)
    for given in (None, data):
        with pytest.raises(TamperError, match=r"has other weights than when it was audited .* Nothing was stored"):
            run_gate(uri, policy, data=given)
    assert dict(resolve(uri).tags) == before
