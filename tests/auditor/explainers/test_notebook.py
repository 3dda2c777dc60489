"""Notebooks: short texts, a picture of an explanation, the gallery, tables, bars."""

import base64
import io
import re

import numpy as np
import pytest
import torch
from PIL import Image

from auditor import AuditConfig, audit, compare, fit
from auditor.explainers.notebook import SIDE, shown, table
from auditor.release.gate import Check, Gate

IMAGES = np.random.default_rng(0).random((40, 1, 13, 17)).astype("float32")
LABELS = np.arange(40) % 3


@pytest.fixture(scope="module")
def shown_off():
    """A subject with concepts, and the explanation of one image."""
    from auditor import Subject
    from tests.conftest import Tiny

    with torch.random.fork_rng():
        torch.manual_seed(0)
        subject = Subject(Tiny(), input_shape=(1, 13, 17), class_names=["a", "b", "c"])
    concepts = fit("nmf", subject, (IMAGES, LABELS), layer="relu", rank=3, refits=1, max_eval=10)
    return subject, concepts, concepts.explain(subject, IMAGES[:1])[0]


def pictures(html):
    return [Image.open(io.BytesIO(base64.b64decode(x))) for x in re.findall(r"data:image/png;base64,([^']+)'", html)]


def test_an_explanation_is_a_line_and_a_row_of_a_contact_sheet(shown_off):
    _, _, explanation = shown_off
    text = repr(explanation)
    assert text.startswith("Explanation(nmf: ")
    assert "tensor(" not in text
    assert len(text) < 200
    assert explanation.image.dtype is torch.uint8
    assert explanation.image.shape == (1, 13, 17)
    (sheet,) = pictures(explanation._repr_html_())
    assert sheet.width > sheet.height
    assert len(sheet.getcolors(1 << 20)) > 50
    without = type(explanation)(
        **{f: getattr(explanation, f) for f in explanation.__dataclass_fields__ if f != "image"}
    )
    assert without == explanation  # what is only shown is no part of what it says
    assert len(pictures(without._repr_html_())) == 1


def test_an_explanation_as_a_table_adds_up(shown_off):
    _, _, explanation = shown_off
    frame = explanation.to_pandas()
    assert list(frame.concept)[-2:] == ["bias", "residual"]
    assert frame.contribution.sum() == pytest.approx(explanation.target_value, abs=1e-4)
    strengths = frame.contribution.abs()[:-2].tolist()
    assert strengths == sorted(strengths, reverse=True)


def test_an_explainer_shows_its_gallery(shown_off):
    _, concepts, _ = shown_off
    assert repr(concepts) == "NmfExplainer(layer 'relu', 3 concepts)"
    assert repr(type(concepts)()) == "NmfExplainer(not fitted)"
    html = concepts._repr_html_()
    assert len(pictures(html)) == 3
    assert "f_cls" in html
    assert "<script" not in html


def test_an_audit_and_a_gate_are_tables(shown_off):
    subject, concepts, _ = shown_off
    stages = []
    result = audit(
        subject, (1 - IMAGES, LABELS), {"concepts": concepts}, AuditConfig(images=20, reliance=False, layers=False),
        progress=lambda stage, done, total: stages.append(stage),
    )  # fmt: skip
    assert stages
    assert repr(result).startswith(f"Audit(a model in memory: {len(result.metrics)} metrics on 40 images, concepts")
    frame = result.to_pandas()
    assert len(frame) == len(result.metrics)
    assert frame.loc["model/accuracy", "value"] == result.metrics["model/accuracy"].value
    html = result._repr_html_()
    assert "model/accuracy" in html
    gate = Gate(
        (Check("a", 1.0, "min 0", "pass"), Check("<b>", 0.0, "min 1", "fail", "too low")), model="m/1", policy="p"
    )
    assert repr(gate) == "Gate(m/1: FAIL, 1 of 2 checks hold)"
    assert gate._repr_html_().index("&lt;b&gt;") < gate._repr_html_().index("<td style='text-align:left'>a</td>")
    assert list(gate.to_pandas().verdict) == ["pass", "fail"]


def test_drift_is_a_table_of_matched_concepts(shown_off):
    subject, _, _ = shown_off
    drift = compare(subject, subject, (IMAGES, LABELS), layer="relu", rank=2, refits=5, max_eval=10)
    frame = drift.to_pandas()
    assert [
        tuple(row) for row in frame[["concept_a", "concept_b", "similarity"]].itertuples(index=False)
    ] == drift.matched
    assert list(frame.columns)[3:] == ["a", "b", "c"]
    assert repr(drift).startswith("Drift(")


def test_large_images_are_kept_small():
    large = torch.rand(3, 400, 300)
    assert shown(large).shape == (3, SIDE, SIDE * 3 // 4)
    assert shown(large[:, :20, :30]).shape == (3, 20, 30)


def test_cells_of_a_table_are_escaped_and_pictures_stand():
    html = table(["<h>"], [["<img src='x'>"], ["<script>"]])
    assert "<img src='x'>" in html
    assert "<script>" not in html
    assert "&lt;h&gt;" in html
