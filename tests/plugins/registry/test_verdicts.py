"""Verdicts beside the model: stored, read back byte by byte, and nothing else counts as one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from auditor import Subject, plugins
from auditor.auditing.audit import Audit
from auditor.errors import TamperError
from auditor.explainers.manifest import seal, sha256
from auditor.plugins.registry import history, tags
from auditor.plugins.registry.location import resolve, set_tag
from auditor.plugins.registry.tags import GateTag
from auditor.plugins.registry.verdicts import latest_verdict, open_verdict, store_verdict
from auditor.release.gate import Check, Gate

AUDIT = Audit(model={}, data={"digest": "d" * 64}, seed=0, metrics={}, explainers={"concepts": {"digest": "e" * 64}})


@pytest.fixture
def version(registry):
    """A new version of a model of two layers, and its subject."""
    torch.manual_seed(0)
    uri = plugins.log_subject(Subject(nn.Sequential(nn.Flatten(), nn.Linear(6, 2)), input_shape=(1, 2, 3)), "said",
                              experiment="tests")  # fmt: skip
    return resolve(uri), plugins.load_subject(uri)


def gate_of(version, *verdicts):
    checks = tuple(Check(f"model/{i}", 0.5, "min 0", verdict, "") for i, verdict in enumerate(verdicts))
    return Gate(checks, model=version.label, policy="p.toml", policy_digest="p" * 64, audit_digest="a" * 64)


@pytest.mark.parametrize(("checks", "verdict"), [(["pass", "pass"], "pass"), (["pass", "fail"], "fail"), ([], "fail")])
def test_what_is_stored_is_read_back(version, checks, verdict):
    where, subject = version
    assert latest_verdict(where) is None
    seen = []

    def signing(version, verdict):
        seen.append((latest_verdict(version.uri), verdict))
        return "auditor/signatures/1/2.json"

    stored = store_verdict(
        gate_of(where, *checks),
        where,
        subject,
        AUDIT,
        sign=signing,
    )
    assert seen == [(None, stored)]  # the tag comes last
    now = resolve(where.uri)
    again = latest_verdict(now)
    assert again.digest == stored.digest
    assert {k: v for k, v in again.document.items() if k != "checksum"} == stored.document
    assert again.verdict == verdict
    assert again.document["model_digest"] == subject.digest
    assert again.document["explainers"] == {"concepts": "e" * 64}
    assert (again.document["data_digest"], again.document["onnx"]) == ("d" * 64, "")
    assert again.document["baseline_digest"] == ""
    tag = tags.gate_tag(now.tags)
    assert tag.signature == "auditor/signatures/1/2.json"
    assert (tag.checks, tag.failed) == (len(checks), ("model/1",) if "fail" in checks else ())
    entry = history.entries(now.name)[-1]
    assert (entry.action, entry.detail, entry.version) == ("gate", verdict, now.version)


def test_the_baseline_is_named_by_its_digest(version):
    where, subject = version
    other = Subject(nn.Sequential(nn.Flatten(), nn.Linear(6, 2)), input_shape=(1, 2, 3))
    stored = store_verdict(gate_of(where, "pass"), where, subject, AUDIT, baseline=other)
    assert stored.document["baseline_digest"] == other.digest != subject.digest


def test_what_stops_before_the_tag_leaves_no_verdict(version):
    where, subject = version

    def fails(*_):
        raise OSError("no key")

    with pytest.raises(OSError, match="no key"):
        store_verdict(gate_of(where, "pass"), where, subject, AUDIT, sign=fails)
    assert latest_verdict(where.uri) is None


def test_a_tag_alone_is_no_verdict(version):
    where, subject = version
    set_tag(where, tags.GATE, GateTag("pass", "2026-01-01T00:00:00+00:00").encode())
    with pytest.raises(TamperError, match="names no verdict file, so it proves nothing"):
        latest_verdict(where.uri)
    store_verdict(gate_of(where, "fail"), where, subject, AUDIT)
    tag = tags.gate_tag(resolve(where.uri).tags)
    set_tag(where, tags.GATE, replace(tag, verdict="pass").encode())
    with pytest.raises(TamperError, match="has verdict 'fail', the version 'pass'"):
        latest_verdict(where.uri)


def test_a_file_that_is_gone_or_of_other_bytes_is_refused(version):
    where, subject = version
    store_verdict(gate_of(where, "pass"), where, subject, AUDIT)
    tag = tags.gate_tag(resolve(where.uri).tags)
    set_tag(where, tags.GATE, replace(tag, location="auditor/verdicts/000000000000").encode())
    with pytest.raises(TamperError, match=r"verdict\.json of models:/said/\d+ is missing"):
        latest_verdict(where.uri)
    set_tag(where, tags.GATE, tag.encode())
    file = Path(where.root.removeprefix("file://")) / tag.location / "verdict.json"
    file.write_bytes(file.read_bytes().replace(b'"pass"', b'"Pass"'))
    with pytest.raises(TamperError, match="run the gate again"):
        latest_verdict(where.uri)


@pytest.mark.parametrize("name", ["model", "verdict", "audit_digest"])
def test_a_verdict_of_something_else_is_refused(name):
    document = {"model": "models:/m/1", "verdict": "pass", "audit_digest": "a" * 64}
    tag = GateTag("pass", "now", audit_digest="a" * 64)
    sealed = seal(document)
    assert open_verdict(sealed, replace(tag, digest=sha256(sealed)), "models:/m/1")["verdict"] == "pass"
    other = seal(document | {name: "something else"})
    with pytest.raises(TamperError, match=f"has {name} 'something else'"):
        open_verdict(other, replace(tag, digest=sha256(other)), "models:/m/1")
    with pytest.raises(TamperError):
        open_verdict(json.dumps(document).encode(), replace(tag, digest=sha256(sealed)), "models:/m/1")
