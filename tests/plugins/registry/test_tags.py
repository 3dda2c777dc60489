"""Tags: what is written is what is read, and hostile values become problems, never errors."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.errors import ModelError, TamperError
from auditor.plugins.registry import tags

ROOT = Path(__file__).parents[3]
DIGEST = "0123456789abcdef" * 4
WRITTEN = [
    (tags.EXPLAINER + "parts", tags.ExplainerTag("parts", "nmf", DIGEST, "explainers/parts/0123", "2026-11-18")),
    (
        tags.AUDIT,
        tags.AuditTag(
            DIGEST, "audits/0123", "2026-11-18", "sklearn:digits", "d" * 64, "7", 12, {"parts": DIGEST, "bad": None},
            {"report.html": DIGEST},
        ),
    ),
    (tags.GATE, tags.GateTag("fail", "2026-11-18", "p.toml", DIGEST, "models:/m/1", 3, ("model/accuracy",), DIGEST)),
    (tags.ONNX, tags.OnnxTag(DIGEST, "auditor/exports/0123", "2026-11-18", ("features.6",), (DIGEST,))),
]  # fmt: skip
READ = {
    tags.EXPLAINER + "parts": lambda t: tags.explainer_tag(t, "parts"),
    tags.AUDIT: tags.audit_tag,
    tags.GATE: tags.gate_tag,
    tags.ONNX: tags.onnx_tag,
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize(("key", "tag"), WRITTEN, ids=[key for key, _ in WRITTEN])
def test_what_is_written_is_what_is_read(key, tag):
    value = tag.encode()
    assert READ[key]({key: value}) == tag
    assert READ[key]({key: value}).usable().problem == ""
    assert READ[key]({}) is None
    assert list(json.loads(value)) == sorted(json.loads(value))  # one JSON for one content
    assert not {"problem", "name"} & set(json.loads(value))


@pytest.mark.parametrize(("key", "tag"), WRITTEN, ids=[key for key, _ in WRITTEN])
@settings(max_examples=60, deadline=None)
@given(junk=JSON, field=st.integers(0, 20))
def test_hostile_values_are_problems_and_never_errors(key, tag, junk, field):
    value = json.loads(tag.encode())
    names = sorted(value)
    value[names[field % len(names)]] = junk
    for text in (json.dumps(value), json.dumps(junk), tag.encode()[: -field or None], "[" * 5000):
        entry = READ[key]({key: text})
        if entry.problem:
            assert key in entry.problem
            with pytest.raises(TamperError, match=re.escape(entry.problem)):
                entry.usable()
        else:
            repr(entry).encode()  # can be written: no half of a surrogate pair


@pytest.mark.parametrize(
    ("digest", "location", "problem"),
    [
        (DIGEST[:-1], "audits/x", "not what an audit writes"),
        (DIGEST + "0", "audits/x", "not what an audit writes"),
        (DIGEST.upper(), "audits/x", "not what an audit writes"),
        (DIGEST + "\n", "audits/x", "not what an audit writes"),
        (DIGEST, "", "not what an audit writes"),
        (None, "audits/x", "not what an audit writes"),
        (DIGEST, "../up", "not below the model"),
        (DIGEST, "..", "not below the model"),
        (DIGEST, ".", "not below the model"),
        (DIGEST, "/etc", "not below the model"),
        (DIGEST, "a/../b", "not below the model"),
        (DIGEST, "a//b", "not below the model"),
        (DIGEST, "a\\b", "not below the model"),
        (DIGEST, "a\nb", "not below the model"),
        (DIGEST, "..a/b", ""),
        (DIGEST, "audits/x", ""),
    ],
)
def test_a_tag_points_below_the_models_folder_by_a_whole_digest(digest, location, problem):
    entry = tags.audit_tag({tags.AUDIT: json.dumps({"digest": digest, "location": location})})
    assert bool(entry.problem) == bool(problem)
    assert problem in entry.problem


def test_paths_that_leave_the_folder_are_refused():
    assert tags.safe_path("audits/1/report.html") == "audits/1/report.html"
    for path in ("../x", "/x", "a/../../x", "a\\x", "", "a\x00b", "a/"):
        with pytest.raises(TamperError, match="not below the model"):
            tags.safe_path(path)


def test_an_explainer_without_a_kind_is_a_problem():
    value = {"digest": DIGEST, "location": "explainers/a/0", "time": ""}
    assert "not what was attached" in tags.explainer_tag({tags.EXPLAINER + "a": json.dumps(value)}, "a").problem


def test_explainers_come_in_the_order_of_their_names():
    both = {tags.EXPLAINER + "b": "{}", "owner": "me", tags.EXPLAINER + "a": "{}", "auditor.gate": "{}"}
    assert tags.explainer_names(both) == ["a", "b"] == [t.name for t in tags.explainer_tags(both)]
    assert tags.explainer_tag(both, "c") is None


def test_a_verdict_is_pass_or_fail_and_counts_are_counts():
    assert tags.gate_tag({tags.GATE: json.dumps({"verdict": "PASS"})}).verdict == "unknown"
    counts = {5: 5, -5: 0, 0: 0, True: 0, "5": 0, None: 0, 2.5: 0}
    for given_, counted in counts.items():
        assert tags.gate_tag({tags.GATE: json.dumps({"verdict": "pass", "checks": given_})}).checks == counted
    assert tags.gate_tag({tags.GATE: json.dumps({"verdict": "pass", "checks": [1, 2]})}).checks == 2


def test_an_explainer_that_did_not_verify_has_no_digest_in_the_audit():
    value = {"digest": DIGEST, "location": "audits/x", "explainers": {"a": None, "b": DIGEST}}
    assert tags.audit_tag({tags.AUDIT: json.dumps(value)}).explainers == {"a": None, "b": DIGEST}


def test_how_to_use_the_model_is_checked_once():
    notes = {"schema_version": 1, "class_names": ["a", "b"]}
    assert tags.decode_subject(tags.encode_subject(notes), "x") == notes
    assert tags.decode_subject(b'{"class_names": []}', "x") == {"class_names": []}
    for bad in ("", "[]", "{", "{}", '{"schema_version": "1"}', "[" * 5000):
        with pytest.raises(TamperError, match=r"^here .*run auditor describe again"):
            tags.decode_subject(bad, "here")
    with pytest.raises(ModelError, match="here is of a newer version; upgrade"):
        tags.decode_subject('{"schema_version": 2}', "here")


def test_the_lineage_is_written_with_all_its_fields():
    tag = tags.LineageTag(source="models:/m/1", source_digest=DIGEST, explainer="f", kind="deepfacto", time="now")
    assert {k: v for k, v in json.loads(tag.encode()).items() if k != "checksum"} == {
        "source": "models:/m/1", "source_digest": DIGEST, "explainer": "f", "explainer_digest": "", "kind": "deepfacto",
        "layer": None, "time": "now", "change": "",
    }  # fmt: skip


def test_the_card_takes_its_fields_and_no_others():
    given_ = {"card.license": "MIT", "card.owner": "", "card.other": "x", "license": "no"}
    assert tags.card_fields(given_, ["license", "owner", "name"]) == {"license": "MIT"}


def test_a_verdict_does_not_change_what_is_served():
    before = {tags.EXPLAINER + "a": "1", tags.SUBJECT: "2", tags.ONNX: "3", "owner": "me"}
    served = tags.what_is_served(before)
    assert [key for key, _ in served] == sorted([tags.EXPLAINER + "a", tags.SUBJECT, tags.ONNX])
    assert tags.what_is_served({**before, tags.GATE: "x", "owner": "you"}) == served
    for key in (tags.EXPLAINER + "a", tags.EXPLAINER + "b", tags.SUBJECT, tags.ONNX):
        assert tags.what_is_served({**before, key: "changed"}) != served


def test_no_tag_is_spelled_out_anywhere_else():
    literal = re.compile(r"""["'](auditor\.(explainer|audit|gate|onnx|subject|lineage|audit_digest)\.?|card\.)["'{]""")
    for folder in ("auditor", "kernels", "plugins", "service"):
        for path in (ROOT / folder).rglob("*.py"):
            if path != ROOT / "plugins" / "registry" / "tags.py":
                lines = [line for line in path.read_text().splitlines() if literal.search(line)]
                assert not [line for line in lines if "_HOME" not in line and "import" not in line], path


@pytest.mark.parametrize("tag", [
    tags.AuditTag("1" * 64, "audits/1", "2026", "x", "2" * 64, 0, 3, {"a": "3" * 64}, {"r": "4" * 64}),
    tags.GateTag("fail", "2026", failed=("a", "b"), digest="1" * 64, location="auditor/verdicts/1"),
    tags.OnnxTag("1" * 64, "auditor/exports/1", "2026", ("relu",), ()),
    tags.ModelTag("1" * 64, {"MLmodel": "2" * 64}, "2026"),
])  # fmt: skip
def test_every_flipped_bit_of_a_tag_is_noticed(tag):
    value = tag.encode()
    assert tags.altered({tags.AUDIT: value}) == []
    for position in range(len(value)):
        for bit in (1, 2, 4):
            flipped = value[:position] + chr(ord(value[position]) ^ bit) + value[position + 1 :]
            assert tags.altered({tags.AUDIT: flipped}) == [tags.AUDIT], flipped


def test_tags_of_a_release_before_and_of_others_are_left_alone():
    old = json.dumps({"kind": "nmf", "digest": "1" * 64, "location": "explainers/a", "time": ""})
    assert tags.altered({"auditor.explainer.a": old, "owner": "me", "auditor.subject": "{}"}) == []
    assert tags.altered({"auditor.explainer.a": "{}", "auditor.gate": "["}) == ["auditor.explainer.a", "auditor.gate"]
