"""Explanation table: a row holds the whole answer of an image, in the same columns whatever the kinds are."""

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from auditor.explainers.answer import answer_images
from auditor.explainers.explanation_table import SCHEMA, read_about, row_of, table_of


@pytest.fixture
def answers(digits, concepts, images):
    def ask(**options):
        return answer_images(digits, {"concepts": concepts}, images[:3], **options)

    return ask


def read_back(rows, about=None):
    """What a reader of the written Parquet file has."""
    stream = io.BytesIO()
    pq.write_table(table_of(rows, about or {}), stream)
    return pq.read_table(pa.BufferReader(stream.getvalue())).to_pylist()


@pytest.mark.parametrize("heatmaps", ["none", "array", "png"])
def test_a_row_adds_up_as_the_answer_does(answers, heatmaps):
    asked = answers(stability="fast", heatmaps=heatmaps, top_k=2)
    rows = read_back([row_of(answer, f"{i}.png", i, (i, "seven")) for i, answer in enumerate(asked)])
    for i, (row, answer) in enumerate(zip(rows, asked, strict=True)):
        said = answer.to_json()
        assert (row["image"], row["position"], row["label"], row["label_index"]) == (f"{i}.png", i, "seven", i)
        assert row["target_logit"] == said["target"]["logit"]
        assert row["probability"] == said["prediction"]["probability"]
        assert row["stability"] == {name: said["stability"].get(name) for name in row["stability"]}
        (e,), (theirs,) = row["explanations"], said["explanations"]
        parts = sum(c["contribution"] for c in e["concepts"]) + e["others"] + e["bias"] + e["residual"]
        assert parts == pytest.approx(e["target_value"], rel=1e-6)
        assert (e["target"], e["target_index"]) == (theirs["target"]["label"], theirs["target"]["index"])
        for c, concept in zip(e["concepts"], theirs["concepts"], strict=True):
            assert (c["heatmap"] is None) == (heatmaps != "array")
            assert (c["heatmap_png"] is None) == (heatmaps != "png")
            if heatmaps == "array":
                torch.testing.assert_close(torch.tensor(c["heatmap"]), torch.tensor(concept["heatmap"]["values"]))
            if heatmaps == "png":
                assert c["heatmap_png"] == concept["heatmap"]


@pytest.mark.parametrize(("label", "index"), [(None, None), ((-1, "no class of the model"), None), ((0, "zero"), 0)])
def test_a_label_that_is_no_class_has_no_index(answers, label, index):
    (answer, *_) = answers(stability="off", heatmaps="none")
    row = row_of(answer, "a.png", 0, label)
    assert row["label_index"] == index
    assert row["label"] == (label and label[1])
    assert row["stability"] is None


def test_columns_are_the_same_whatever_is_in_them(answers):
    empty = table_of([], {"model": {"digest": "ab"}})
    assert empty.schema.equals(SCHEMA)
    (answer, *_) = answers(stability="off", heatmaps="none")
    assert table_of([row_of(answer, "a.png", 0, None)], {}).schema.equals(SCHEMA)


def test_metadata_says_what_a_file_is_about_and_others_entries_are_left_out():
    about = {"model": {"digest": "ab"}, "data": "photos"}
    metadata = table_of([], about).schema.metadata
    assert read_about(metadata) == {**about, "schema_version": 1}
    assert all(json.loads(value) is not None for value in metadata.values())
    assert read_about({b"auditor.x": b"{", b"other": b"1", b"\xff": b"2"}) == {}
    assert read_about(None) == {}
