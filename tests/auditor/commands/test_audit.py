"""``auditor audit``."""

import json

import pytest

from auditor.auditing.audit import Audit
from auditor.plugins import latest_audit

DATA = "sklearn:digits?split=test"


def test_page_and_sealed_file_are_written_and_the_audit_is_stored(gated, registry):
    uri, folder = gated
    audit = Audit.from_json((folder / "a.json").read_bytes(), "the file")
    assert latest_audit(uri).digest == audit.digest
    assert audit.metrics["model/accuracy"].status == "passed"
    assert any(name.startswith("explainer/concepts/") for name in audit.metrics)
    assert "<html" in (folder / "r.html").read_text()


def test_json_is_the_audit_and_nothing_is_stored_on_request(cli, registry, trained):
    from auditor.plugins import log_subject

    bare = log_subject(trained[0], "unstored", experiment="tests")
    answer = cli.json("audit", bare, "--data", DATA, "--images", "20", "--no-store")
    assert {"model", "data", "seed", "metrics"} <= set(answer)
    assert {"value", "low", "high", "n", "null", "direction", "status", "reason"} <= set(
        answer["metrics"]["model/accuracy"]
    )
    assert latest_audit(bare) is None


def test_the_table_shows_values_beside_their_null(gated):
    shown = (gated[1] / "stdout.txt").read_text()
    assert "model/accuracy" in shown
    assert "95% interval" in shown
    assert "page in " in shown


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--data", "/no/such"), "no such file or folder"),
        (("--data", DATA, "--card", "/no/such.toml"), "cannot be read"),
        (("--data", DATA, "--regions", "/no/such"), "wanted a folder of masks, a COCO .json or a folder of VOC"),
    ],
)
def test_bad_input_is_one_line(cli, options, sentence):
    assert sentence in cli.fails("audit", "models:/digits/1", *options)


def test_labels_that_are_not_the_models_classes(cli, tmp_path):
    import numpy as np

    np.savez(tmp_path / "odd.npz", images=np.zeros((30, 8, 8), np.uint8), labels=np.full(30, 12))
    assert "labels must be 0 to 9" in cli.fails("audit", "models:/digits/1", "--data", tmp_path / "odd.npz")


def test_folders_that_are_no_classes_are_an_error_with_the_names_side_by_side(cli, shown, strokes):
    line = cli.fails("audit", shown, "--data", strokes)
    assert "3 of its 3 labels are no class of the model: 'mixed', 'round', 'straight'" in line
    assert "the model's 10 classes have no names" in line
    assert "--labels map.csv" in line


def test_a_table_of_labels_decides_and_counts_as_part_of_the_data(cli, shown, strokes, tmp_path):
    (tmp_path / "map.csv").write_text("folder,class\nround,0\nstraight,1\nmixed,-\n")
    options = ("audit", shown, "--data", strokes, "--images", "20", "--no-store")
    data = cli.json(*options, "--labels", tmp_path / "map.csv")["data"]
    n = {name: len(list((strokes / name).iterdir())) for name in ("round", "straight", "mixed")}
    assert data["classes"]["0"] == n["round"]
    assert data["classes"]["1"] == n["straight"]
    assert data["unlabelled"] == n["mixed"]
    assert len(data["labels_digest"]) == 64
    assert "cannot be read" in cli.fails(*options, "--labels", tmp_path / "none.csv")
    assert "class '12', which the model does not have" in cli.fails(*options, "--labels", _table(tmp_path, "round,12"))


def _table(folder, text):
    (folder / "other.csv").write_text(text)
    return folder / "other.csv"


def test_an_edited_file_is_not_an_audit(gated, tmp_path):
    content = json.loads((gated[1] / "a.json").read_text())
    content["seed"] += 1
    from auditor.errors import AuditError

    with pytest.raises(AuditError, match="checksum does not match"):
        Audit.from_json(json.dumps(content).encode(), "the file")


def test_some_checks_of_one_explainer_within_a_time(cli, shown):
    options = ("audit", shown, "--data", DATA, "--images", "20", "--no-store")
    result = cli(*options, "--explainers", "heads", "--checks", "faithfulness", "--budget", "10m")
    assert result.exit_code == 0
    assert "This is a partial audit, not measured: " in result.stdout
    assert "faithfulness of concepts" in result.stdout
    assert "auditor: faithfulness of heads: at most" in result.stderr
    assert "time: " in result.stdout
    audit = cli.json(*options, "--checks", "heatmaps")
    assert audit["metrics"]["explainer/heads/f_cls"]["status"] == "skipped"
    assert audit["metrics"]["explainer/heads/heatmap_spread"]["status"] == "passed"
    assert audit["verdict"]["level"] != "good"
    assert audit["not_measured"]["reliance"] == "the audit was asked for other checks (--checks)"
    assert [c["check"] for c in audit["cost"]] == ["performance", "heatmaps"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--explainers", "heads,nobody"), "there is no explainer 'nobody'; attached are: concepts, heads"),
        (("--checks", "faith"), "want some of performance, layers, reliance, faithfulness"),
        (("--budget", "soon"), "want a duration such as 5m"),
    ],
)
def test_a_part_that_does_not_exist_is_one_line(cli, shown, options, sentence):
    assert sentence in cli.fails("audit", shown, "--data", DATA, *options)


def test_an_interruption_says_how_many_parts_are_finished(cli, shown, monkeypatch):
    from auditor.auditing import audit as module

    real = module.take

    def stopping(group, case):
        if group == "flipping":
            raise KeyboardInterrupt
        return real(group, case)

    monkeypatch.setattr(module, "take", stopping)
    result = cli("audit", shown, "--data", DATA, "--images", "20", "--no-store")
    assert result.exit_code == 130
    line = "interrupted; nothing was stored; 2 of 11 parts are finished, and the same command goes on from them."
    assert line in result.stderr
