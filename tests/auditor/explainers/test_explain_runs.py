"""Every image as rows of Parquet: the answers that one image gets, resumed file by file, for one model and its data."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from auditor.data.source import open_data
from auditor.errors import DataError, OptionError, UnknownExplainerError
from auditor.explainers import explain_runs
from auditor.explainers.answer import ExplainedModel, answer_images
from auditor.explainers.answer_options import AnswerOptions
from auditor.explainers.explain_runs import explain_all
from auditor.explainers.explanation_table import read_about
from tests.stores import picture, settle, write_folder

OPTIONS = AnswerOptions(stability="off", heatmaps="none")


@pytest.fixture(autouse=True)
def small_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("AUDITOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("auditor.data.store.SETTLED_S", -1.0)
    monkeypatch.setattr("auditor.data.folder_images.FILES", 4)
    monkeypatch.setattr("auditor.runners.image_runs.RUN", 6)
    monkeypatch.setattr(explain_runs, "RUN", 16)


@pytest.fixture
def model(digits, concepts):
    return ExplainedModel.of(digits, {"concepts": concepts})


@pytest.fixture
def photos(tmp_path):
    folder = write_folder(tmp_path / "photos", 21)
    (folder / "owl" / "005.png").write_bytes(b"broken")
    return folder


def rows(out):
    return pq.read_table(out).to_pylist()


def test_a_row_is_the_answer_of_its_image(model, digits, concepts, digits_data, tmp_path):
    options = AnswerOptions(stability="fast", heatmaps="array", top_k=3)
    some = open_data("sklearn:digits", limit=40)
    result = explain_all(model, some, str(tmp_path / "out"), options)
    assert (result.images, result.parts) == (40, 3)
    batch = next(open_data("sklearn:digits", limit=40).batches(digits, 40))
    answers = answer_images(digits, {"concepts": concepts}, batch.images, stability="fast", heatmaps="array", top_k=3)
    for row, name, label, answer in zip(rows(tmp_path / "out"), batch.ids, batch.labels.tolist(), answers, strict=True):
        said = answer.to_json()
        assert (row["image"], row["label"], row["label_index"]) == (name, str(label), label)
        assert row["prediction"] == said["prediction"]["label"]
        assert row["probability"] == pytest.approx(said["prediction"]["probability"], abs=1e-6)
        assert row["stability"]["c1"] == pytest.approx(said["stability"]["c1"], rel=1e-4)
        (ours,), (theirs,) = row["explanations"], said["explanations"]
        assert ours["digest"] == theirs["digest"]
        assert [c["index"] for c in ours["concepts"]] == [c["index"] for c in theirs["concepts"]]
        parts = sum(c["contribution"] for c in ours["concepts"]) + ours["bias"] + ours["residual"] + ours["others"]
        assert parts == pytest.approx(ours["target_value"], abs=1e-4)
        assert ours["concepts"][0]["heatmap"] == [
            pytest.approx(line, abs=1e-4) for line in theirs["concepts"][0]["heatmap"]["values"]
        ]


def test_files_say_what_they_are_of_and_broken_images_are_named(model, photos, tmp_path):
    result = explain_all(model, open_data(photos), str(tmp_path / "out"), OPTIONS)
    files = sorted((tmp_path / "out").glob("part-*.parquet"))
    assert [file.name for file in files][:2] == ["part-000000000-000000008.parquet", "part-000000008-000000016.parquet"]
    about = read_about(pq.read_schema(files[0]).metadata)
    assert about["model"]["digest"] == model.subject.digest
    assert about["explainers"] == {"concepts": model.explainers["concepts"].digest_}
    assert about["schema_version"] == 1
    summary = json.loads((tmp_path / "out" / "_explanations.json").read_text())
    assert summary["finished"]
    assert summary["broken"] == {"images": 1, "names": {"owl/005.png": "cannot identify image file"}}
    assert summary["data"]["digest"] == open_data(photos).digest
    assert result.images == len(rows(tmp_path / "out")) == 20


def test_finished_files_stay_and_what_is_missing_damaged_or_changed_is_made_again(model, photos, tmp_path):
    out = tmp_path / "out"
    explain_all(model, open_data(photos), str(out), OPTIONS)
    before = {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in out.glob("part-*")}
    names = sorted(before)
    (out / names[0]).unlink()
    (out / names[1]).write_bytes(before[names[1]][1][:-100])
    result = explain_all(model, open_data(photos), str(out), OPTIONS)
    assert result.parts_before == len(names) - 2
    assert {file.name: file.read_bytes() for file in out.glob("part-*")} == {k: v[1] for k, v in before.items()}
    assert (out / names[2]).stat().st_mtime_ns == before[names[2]][0]
    (photos / "cat" / "000.png").write_bytes(picture(1000))  # in the first file
    settle(photos / "cat" / "000.png")
    again = explain_all(model, open_data(photos), str(out), OPTIONS)
    assert again.parts_before == len(names) - 1
    assert (out / names[0]).read_bytes() != before[names[0]][1]
    assert again.about["data"]["digest"] != result.about["data"]["digest"]


def test_arrays_are_resumed_too(model, tmp_path):
    out = tmp_path / "out"
    explain_all(model, open_data("sklearn:digits", limit=50), str(out), OPTIONS)
    files = sorted(out.glob("part-*"))
    whole = pq.read_table(out)
    files[1].unlink()
    result = explain_all(model, open_data("sklearn:digits", limit=50), str(out), OPTIONS)
    assert result.parts_before == len(files) - 1
    assert pq.read_table(out).equals(whole)


def test_a_folder_of_another_model_data_or_options_is_refused(model, photos, tmp_path):
    out = str(tmp_path / "out")
    explain_all(model, open_data(photos), out, OPTIONS)
    with pytest.raises(OptionError, match=r"it holds explanations of another options \(heatmaps: \"none\" there, \"ar"):
        explain_all(model, open_data(photos), out, OPTIONS.model_copy(update={"heatmaps": "array"}))
    with pytest.raises(OptionError, match=r"it holds explanations of another data \(images: 21 there, 9 here"):
        explain_all(model, open_data(photos, limit=9), out, OPTIONS)
    (tmp_path / "strange").mkdir()
    pq.write_table(pa.table({"a": [1]}), tmp_path / "strange" / "x.parquet")
    with pytest.raises(OptionError, match=r"it holds x.parquet, which is not of auditor explain-all"):
        explain_all(model, open_data(photos), str(tmp_path / "strange"), OPTIONS)


def test_bad_input_is_said_before_anything_is_written(model, tmp_path):
    write_folder(tmp_path / "photos", 3)
    for path in (tmp_path / "photos").rglob("*.png"):
        path.write_bytes(b"broken")
    with pytest.raises(DataError, match=r"holds no readable image \(3 could not be read\)"):
        explain_all(model, open_data(tmp_path / "photos"), str(tmp_path / "out"), OPTIONS)
    nosuch = OPTIONS.model_copy(update={"explainers": ["nosuch"]})
    with pytest.raises(UnknownExplainerError, match="there is no explainer 'nosuch'"):
        explain_all(model, open_data("sklearn:digits", limit=20), str(tmp_path / "other"), nosuch)


def test_an_explanation_of_every_image_can_be_written_to_a_bucket(model, s3, photos, tmp_path):
    explain_all(model, open_data(photos), "s3://photos/out", OPTIONS)
    explain_all(model, open_data(photos), str(tmp_path / "out"), OPTIONS)
    keys = [entry["Key"] for entry in s3.list_objects_v2(Bucket="photos", Prefix="out/part-")["Contents"]]
    for key in keys:
        body = s3.get_object(Bucket="photos", Key=key)["Body"].read()
        assert pq.read_table(pa.BufferReader(body)).equals(pq.read_table(tmp_path / "out" / key.rpartition("/")[2]))
    assert explain_all(model, open_data(photos), "s3://photos/out", OPTIONS).parts_before == len(keys)
