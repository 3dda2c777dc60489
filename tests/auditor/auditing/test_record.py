"""An audit as it is kept: sealed, restored unchanged, told apart from what is damaged, edited or newer."""

import json
import subprocess
import sys

import pytest

from auditor.auditing.record import SCHEMA_VERSION, Audit
from auditor.errors import TamperError
from auditor.explainers.manifest import seal
from auditor.metrics.measure import Measure

FINDING = {"name": "a", "sentence": "Class <a> hangs on one spot.", "verdict": "found"}


def made(**changes) -> Audit:
    values = {
        "model": {"name": "m", "version": "3", "digest": "d", "classes": ["a", "b"]},
        "data": {"spec": "folder:x", "digest": "e", "n": 9},
        "seed": 4,
        "metrics": {
            "model/accuracy": Measure(0.75, n=9),
            "model/reliance/a/necessity": Measure(0.5),
            "explainer/c/f_cls": Measure(0.9),
            "explainer/c/concept/0/leak": Measure(0.1),
        },
        "explainers": {"c": {"kind": "nmf", "digest": "f"}},
        "time": "2026-11-19T06:00:00Z",
        "seconds": 1.5,
        "command": "auditor audit",
    }
    return Audit(**{**values, **changes})


def document(**changes):
    return {**made().to_json(), **changes}


@pytest.mark.parametrize(
    "audit",
    [
        made(),
        made(reliance={"verdict": "found", "findings": [FINDING]}),
        made(cost=[{"check": "a", "passes": 3}], not_measured={"ablation of c": "too long"}),
        made(model={}, metrics={}, explainers={}),
    ],
)
def test_what_was_sealed_comes_back(audit):
    for content in (audit.sealed(), audit.sealed().decode(), audit.to_json()):
        again = Audit.from_json(content)
        assert again == audit
        assert again.digest == audit.digest


def test_what_an_earlier_release_did_not_measure_is_not_written():
    assert not {"reliance", "cost", "not_measured"} & made().to_json().keys()
    assert Audit.from_json({k: v for k, v in document().items() if k != "schema_version"}) == made()


def test_pictures_are_for_the_page_only():
    with_picture = made(pictures={"c": b"png"}, finding_pictures={"a": []})
    assert with_picture == made()
    assert with_picture.digest == made().digest


@pytest.mark.parametrize(
    "edit", [(b'"seed"', b'"Seed"'), (b"0.75", b"0.95"), (b'"n": 9', b'"n": 8'), (b"0.75", b".75")]
)
def test_any_edit_is_an_error(edit):
    content = made().sealed()
    edited = content.replace(*edit)
    if edited == content:
        edited = content.replace(b'"n":9', b'"n":8')
    assert edited != content
    with pytest.raises(TamperError, match="not what was written"):
        Audit.from_json(edited, "audit.json")


@pytest.mark.parametrize(
    "wrong",
    [
        {"metrics": []},
        {"metrics": {"a": 1}},
        {"metrics": None},
        {"cost": 3},
        {"not_measured": 3},
        {"schema_version": "9"},
        {"schema_version": None},
        {"schema_version": []},
    ],
    ids=str,
)
def test_a_sealed_file_that_is_no_audit_is_refused_or_read_but_never_a_traceback(wrong):
    try:
        Audit.from_json(seal(document(**wrong)), "audit.json")
    except TamperError as error:
        assert str(error).startswith("audit.json")  # noqa: PT017 - a version that is no number is not looked at


@pytest.mark.parametrize("missing", ["model", "data", "seed", "metrics", "explainers", "config", "versions", "time"])
def test_what_is_missing_is_named(missing):
    with pytest.raises(TamperError, match=f"^audit.json is not an audit of mlflow-auditor .'{missing}' is missing"):
        Audit.from_json({k: v for k, v in document().items() if k != missing}, "audit.json")


def test_one_of_a_newer_release_is_refused():
    with pytest.raises(TamperError, match="of a newer version; upgrade"):
        Audit.from_json(document(schema_version=SCHEMA_VERSION + 1))


def test_it_says_what_it_is_of():
    found = made(reliance={"verdict": "found", "findings": [FINDING]})
    assert repr(found) == "Audit(m/3: 4 metrics on 9 images, c, reliance found)"
    assert repr(made(model={}, explainers={})) == "Audit(a model in memory: 4 metrics on 9 images, no explainers)"
    page = found._repr_html_()
    assert "Class &lt;a&gt; hangs on one spot." in page
    assert "model/accuracy" in page
    assert "explainer/c/f_cls" in page
    assert "leak" not in page
    assert "model/reliance/a" not in page


def test_a_frame_has_a_row_per_metric():
    frame = made().to_pandas()
    assert list(frame.index) == list(made().metrics)
    assert frame.loc["model/accuracy", "value"] == 0.75
    assert made(metrics={}).to_pandas().empty


def test_a_stored_audit_is_read_without_torch(tmp_path):
    path = tmp_path / "audit.json"
    path.write_bytes(made().sealed())
    code = (
        "import sys; from pathlib import Path; from auditor.auditing.record import Audit; "
        f"print(Audit.from_json(Path({str(path)!r}).read_bytes()).seed, 'torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == [str(json.loads(made().sealed())["seed"]), "False"]
