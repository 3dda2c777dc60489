"""Files of the Audits page: nothing is shown whose digest is not the registry's."""

import hashlib
import json
import math

import pytest

from auditor.errors import TamperError
from auditor.explainers.manifest import seal, sha256
from auditor.plugins.audits_site import verified_files
from auditor.plugins.audits_site.rest_store import Refused
from auditor.plugins.audits_site.verified_files import (
    AnswerCache,
    check_explainer,
    check_verdict,
    of_document,
    read_audit,
    read_report,
)
from auditor.plugins.audits_site.version_card import version_card
from auditor.plugins.registry.attestations import signature_path
from auditor.plugins.registry.tags import GATE, AuditTag, ExplainerTag, GateTag
from auditor.signing.keys import new_key, read_trusted, revoke
from tests.auditor.signing.authority import Issuer, person

TENSORS = b"\x01tensors"
MANIFEST = {
    "schema_version": 1, "kind": "nmf", "layer": "relu", "subject_digest": "5" * 64,
    "metrics": {"a": 0.5, "b": None, "c": "x"},
    "files": {"tensors.safetensors": {"sha256": sha256(TENSORS), "size": len(TENSORS)}},
}  # fmt: skip
AUDIT = json.dumps({"metrics": {"model/accuracy": {"value": 0.75, "status": "passed", "n": 4}}}).encode()
REPORT = b"<p>report</p>"


class Store:
    """Files by path; an exception in place of bytes is raised."""

    def __init__(self, files):
        self.files, self.asked = files, []

    def read(self, name, version, path):
        self.asked.append((name, version, path))
        content = self.files.get(path)
        if content is None:
            raise TamperError(f"{path} cannot be read from the artifact store.")
        if isinstance(content, Exception):
            raise content
        return content

    def sha256(self, name, version, path):
        content = self.read(name, version, path)
        return hashlib.sha256(content).hexdigest(), len(content)


def explained(manifest=MANIFEST, **files):
    sealed = seal(manifest)
    tag = ExplainerTag("parts", "nmf", sha256(sealed), "explainers/parts/0123", "2026-11-18")
    here = {"manifest.json": sealed, "tensors.safetensors": TENSORS, **files}
    return Store({f"{tag.location}/{name}": content for name, content in here.items()}), tag


CARD = version_card({"name": "m", "version": "3"})


def audited(**changed):
    tag = AuditTag(sha256(AUDIT), "audits/0123", files={"report.html": sha256(REPORT)})
    value = {**json.loads(tag.encode()), **changed}
    tags = [{"key": "auditor.audit", "value": json.dumps(value)}]
    return version_card({"name": "m", "version": "3", "tags": tags})


def test_whole_files_verify_and_say_what_they_are():
    store, tag = explained()
    checked = check_explainer(store, CARD, tag)
    assert (checked.problem, checked.layer, checked.subject_digest) == ("", "relu", "5" * 64)
    assert checked.metrics["a"] == 0.5
    assert math.isnan(checked.metrics["b"])
    assert set(checked.metrics) == {"a", "b"}
    assert ("m", "3", "explainers/parts/0123/tensors.safetensors") in store.asked


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tensors.safetensors": b"\x02tensors"}, "tensors.safetensors in artifact 0123 is not what was attached"),
        ({"tensors.safetensors": TENSORS + b"x"}, "tensors.safetensors in artifact 0123 is not what was attached"),
        ({"tensors.safetensors": None}, "cannot be read"),
        ({"manifest.json": seal({**MANIFEST, "layer": "other"})}, "manifest.json of 0123 is not what was attached"),
        ({"manifest.json": None}, "cannot be read"),
    ],
)
def test_every_changed_file_is_a_problem(change, problem):
    store, tag = explained()
    store.files |= {f"{tag.location}/{name}": content for name, content in change.items()}
    checked = check_explainer(store, CARD, tag)
    assert problem in checked.problem
    assert (checked.layer, checked.metrics) == ("", {})


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [
        ({**MANIFEST, "kind": "tree"}, "its tag says kind nmf, the artifact tree"),
        ({**MANIFEST, "files": ["a"]}, "lists no files"),
        ({**MANIFEST, "schema_version": 3}, "schema version 3 is newer"),
    ],
)
def test_a_manifest_that_does_not_fit_its_tag_is_a_problem(manifest, problem):
    store, tag = explained(manifest)
    assert problem in check_explainer(store, CARD, tag).problem


def test_a_broken_tag_is_a_problem_and_nothing_is_read():
    store, _ = explained()
    assert check_explainer(store, CARD, ExplainerTag("parts", problem="no tag")).problem == "no tag"
    assert not store.asked


def test_a_refusal_is_passed_on_not_shown_as_tampering():
    store, tag = explained(**{"manifest.json": Refused(403, "no")})
    with pytest.raises(Refused):
        check_explainer(store, CARD, tag)
    with pytest.raises(Refused):
        read_audit(Store({"audits/0123/audit.json": Refused(401, "log in")}), audited())


def test_the_audit_is_read_only_with_its_digest():
    store = Store({"audits/0123/audit.json": AUDIT})
    assert read_audit(store, audited()).measures["model/accuracy"].value == 0.75
    spoilt = Store({"audits/0123/audit.json": AUDIT.replace(b"0.75", b"0.95")})
    assert "audit.json of models:/m/3 is not what was stored" in read_audit(spoilt, audited()).problem
    assert read_audit(spoilt, audited()).measures == {}
    assert read_audit(store, CARD).problem == ""
    assert "not what an audit writes" in read_audit(store, audited(digest="x")).problem


def test_the_report_is_shown_only_with_its_digest():
    assert read_report(Store({"audits/0123/report.html": REPORT}), audited()) == REPORT
    with pytest.raises(TamperError, match=r"report\.html of models:/m/3 is not what was stored"):
        read_report(Store({"audits/0123/report.html": REPORT + b" "}), audited())
    with pytest.raises(TamperError, match="holds no digest of its report"):
        read_report(Store({}), audited(files={}))
    with pytest.raises(TamperError, match="not below the model"):
        read_report(Store({}), audited(location="../x"))
    with pytest.raises(Refused, match="has not been audited"):
        read_report(Store({}), CARD)


def test_answers_are_cached_for_a_minute_and_refusals_never():
    now, requested = [0.0], []
    cache = AnswerCache(60, clock=lambda: now[0])

    def ask():
        requested.append(now[0])
        return len(requested)

    assert [cache.get(("k",), ask), cache.get(("k",), ask), cache.get(("other",), ask)] == [1, 1, 2]
    now[0] = 59.9
    assert cache.get(("k",), ask) == 1
    now[0] = 60.0
    assert cache.get(("k",), ask) == 3

    def refuse():
        raise RuntimeError

    for _ in range(2):
        with pytest.raises(RuntimeError):
            cache.get(("refused",), refuse)


def test_the_cache_does_not_grow_without_end(monkeypatch):
    monkeypatch.setattr(verified_files, "MOST_ANSWERS", 3)
    cache = AnswerCache(60, clock=lambda: 0.0)
    for i in range(10):
        cache.get((str(i),), lambda: 0)
        assert len(cache._answers) <= 3


@pytest.mark.parametrize("odd", [None, [], "x", {"status": "measured", "findings": 3}, {"status": "measured"}])
def test_odd_findings_are_left_out(odd):
    read = of_document({"metrics": {}, "reliance": odd})
    assert read.relied == ()
    assert bool(read.not_measured) == (not isinstance(odd, dict))


def test_findings_to_look_at_are_shown_and_others_are_not():
    entries = [{"verdict": v, "sentence": f"about {v}"} for v in ("found", "look", "nothing", "skipped", 7)]
    read = of_document({"metrics": {}, "reliance": {"status": "measured", "findings": [*entries, "odd", None]}})
    assert read.relied == (("found", "about found"), ("look", "about look"))
    assert read.not_measured == ""
    skipped = of_document({"reliance": {"status": "skipped", "reason": "too small"}})
    assert (skipped.not_measured, skipped.relied) == ("too small", ())


def judged_by(path):
    """A card with a verdict that was signed by a private key, and the store that holds both."""
    from auditor.plugins.registry.attestations import judged_subjects, signature_path, verification_summary
    from auditor.plugins.registry.verdicts import StoredVerdict
    from auditor.signing.keys import read_signing_key
    from auditor.signing.statements import SUMMARY, make_statement, sign

    document = {
        "model": "models:/m/3", "verdict": "pass", "audit_digest": "a" * 64, "model_digest": "b" * 64, "files": {},
        "explainers": {}, "onnx": "", "data_digest": "c" * 64, "policy": "p.toml", "policy_digest": "d" * 64,
        "baseline_digest": "", "time": "2026-11-18T00:00:00+00:00",
    }  # fmt: skip
    content = seal(document)
    verdict = StoredVerdict(document, sha256(content))
    key = read_signing_key(path)
    envelope = sign(make_statement(judged_subjects(verdict), SUMMARY, verification_summary(verdict)), key)
    where = signature_path(verdict.digest, key.keyid)
    tag = GateTag("pass", audit_digest="a" * 64, digest=verdict.digest, location="auditor/verdicts/1", signature=where)
    card = version_card({"name": "m", "version": "3", "tags": [{"key": GATE, "value": tag.encode()}]})
    return card, Store({"auditor/verdicts/1/verdict.json": content, where: envelope})


def test_a_verdict_signed_with_a_certificate_counts_while_its_authority_vouches_for_it(tmp_path):
    pytest.importorskip("securesystemslib")
    acme = Issuer("acme")
    path, certificate = person(acme, "gatekeeper", tmp_path / "secret")
    folder = tmp_path / "trusted"
    folder.mkdir()
    (folder / "acme.crt").write_bytes(acme.pem())
    card, store = judged_by(path)
    checked = check_verdict(store, card, read_trusted(folder))
    assert (checked.signer, checked.unverified) == ("acme/gatekeeper", "")
    (folder / "acme.crl").write_bytes(acme.revoked(certificate))
    checked = check_verdict(store, card, read_trusted(folder))
    assert checked.signer == ""
    assert "does not count for acme" in checked.unverified


def test_a_damaged_signature_beside_a_good_one_changes_nothing(tmp_path):
    pytest.importorskip("securesystemslib")
    names = ("anna", "gatekeeper")
    keys = {name: new_key(name, tmp_path)[0] for name in names}
    card, store = judged_by(keys["gatekeeper"])
    trusted = read_trusted(tmp_path)
    anna = next(key for key in trusted.keys if key.name == "anna")
    store.files[signature_path(card.gate.digest, anna.keyid)] = b"{}"
    assert check_verdict(store, card, trusted).signer == "gatekeeper"
    revoke("gatekeeper", tmp_path)
    checked = check_verdict(store, card, read_trusted(tmp_path))
    assert checked.signer == ""
    assert checked.unverified
