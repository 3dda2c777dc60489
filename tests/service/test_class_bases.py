"""Concepts per class by every way: terminal, service by torch and ONNX, gallery, page, audit and comparison."""

import base64

import pytest

pytest.importorskip("bentoml")

import numpy as np
from starlette.testclient import TestClient

from auditor import AuditConfig, audit, fit, open_data
from auditor.plugins import attach, load_subject, log_subject
from auditor.plugins.registry.onnx_exports import export
from auditor.service.settings import Settings
from tests.auditor.explainers.nmf import photo_like
from tests.service.conftest import png_of
from tests.service.test_one_answer import Served, differences

ASKED = {"target": "kind 3", "heatmaps": "none", "stability": "off"}


@pytest.mark.slow
def test_the_concepts_of_the_target_explain_it_by_every_way(registry, cli, tmp_path):
    subject = photo_like.subject()
    data = open_data(photo_like.write(tmp_path / "x.npz", 5))
    uri = log_subject(subject, "many", experiment="tests")
    subject = load_subject(uri)
    fitted = fit("nmf", subject, data, bases="class", rank=3, refits=1, top_images=2)
    attach(fitted, uri, "concepts", subject=subject, attach_anyway=True)
    export(uri, subject=subject)
    content = png_of(next(data.batches(subject, 8)).images[3])
    (tmp_path / "image.png").write_bytes(content)
    encoded = base64.b64encode(content).decode()
    flags = [text for name, value in ASKED.items() for text in (f"--{name}", value)]
    ways = {"terminal": cli.json("explain", uri, tmp_path / "image.png", *flags)["explanations"]}
    basis = fitted.bases_.for_class(3)
    for engine in ("torch", "onnx"):
        with TestClient(Served(Settings(model=uri, engine=engine, poll_s=3600)), base_url="http://localhost") as http:
            ways[engine] = http.post("/explain", json={"image": encoded, **ASKED}).json()["explanations"]
            gallery = http.get(f"/gallery/concepts?concept={basis.first}").json()
            told = http.get("/explainers").json()
        assert [c["index"] for c in gallery["concepts"]] == list(basis.concepts)
        assert len(gallery["sections"]) == 1 + photo_like.N_CLASSES
        assert all(c["pictures"] for c in gallery["concepts"])
        (about,) = told if isinstance(told, list) else told["explainers"]
        assert about["labels"][str(basis.first)] == f"kind 3: concept {basis.first}"
    for way, (explanation,) in ways.items():
        assert [c["index"] for c in explanation["concepts"]] == list(basis.concepts), way
        assert explanation["extra"]["basis"]["class"] == "kind 3", way
        parts = [c["contribution"] for c in explanation["concepts"]]
        whole = explanation["bias"] + sum(parts) + explanation["residual"]
        assert whole == pytest.approx(explanation["target_value"], abs=1e-4), way
        assert parts == pytest.approx([c["contribution"] for c in ways["torch"][0]["concepts"]], abs=1e-4), way
    assert not differences(ways["terminal"][0]["concepts"], ways["torch"][0]["concepts"])
    page = cli("concepts", uri, "concepts", "--out", tmp_path / "page.html")
    assert page.exit_code == 0, page.output
    assert "concepts of kind 3" in (tmp_path / "page.html").read_text()
    audited = audit(subject, data, {"concepts": fitted}, AuditConfig(images=24))
    measured = audited.metrics["explainer/concepts/f_cls"]
    assert np.isfinite(measured.value)
    assert measured.value > 0.5  # the textures of one class are not those of another
    assert cli.json("compare", uri, uri, "--data", tmp_path / "x.npz")["changed"] is False
