import re

import pytest
import torch
from PIL import Image
from torch import nn

import auditor
from auditor.explainers.concept_page import write_page
from auditor.errors import OptionError
from auditor.naming import name_concept
from auditor.subject.subject import Subject


@pytest.fixture(scope="module")
def subject():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 64, 10))
        return Subject(module, input_shape=(1, 8, 8), class_names=[f"<{i}>" for i in range(10)])


@pytest.fixture(scope="module")
def data():
    return auditor.open_data("sklearn:digits", limit=60)


@pytest.mark.parametrize("kind", ["nmf", "coupled"])
def test_page_shows_every_concept_by_name(kind, subject, data, tmp_path):
    fitted = auditor.fit(kind, subject, data, layer="1", rank=3, max_iter=30)
    name_concept(fitted, 1, "upper <loop>")
    text = write_page(fitted, subject, tmp_path / "page.html").read_text()
    assert all(f"id='concept-{k}'" in text for k in range(3))
    assert "upper &lt;loop&gt;" in text
    assert "<loop>" not in text
    assert "src='data:image/png;base64," in text
    assert not re.search(r"(src|href)=['\"]?http", text)
    assert ("Neighbours in the latent space" in text) == (kind == "coupled")
    with Image.open(write_page(fitted, subject, tmp_path / "page.png")) as picture:
        assert picture.width > 500
        assert len(picture.getcolors(2**24)) > 50
    fitted.save(tmp_path / "artifact")
    loaded = auditor.explainers.base.Explainer.load(tmp_path / "artifact", subject)
    assert loaded.label(1) == "upper <loop>"
    assert loaded.explain(subject, torch.rand(1, 1, 8, 8))[0].concepts[1].label == "upper <loop>"
    write_page(loaded, subject, tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text() == text


def test_bad_names_and_numbers_are_one_sentence(subject, data, tmp_path):
    fitted = auditor.fit("nmf", subject, data, layer="1", rank=3, max_iter=5)
    with pytest.raises(OptionError, match="has concepts 0 to 2, got 3"):
        name_concept(fitted, 3, "stripes")
    with pytest.raises(OptionError, match="1 to 80 printable"):
        name_concept(fitted, 0, "   ")
    with pytest.raises(OptionError, match=r"ends in \.html or \.png"):
        write_page(fitted, subject, tmp_path / "page.pdf")
    assert fitted.labels == {}
