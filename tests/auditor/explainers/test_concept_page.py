import copy
import re

import pytest
import torch
from PIL import Image
from torch import nn

import auditor
from auditor.errors import OptionError
from auditor.explainers.base import Explainer
from auditor.explainers.concept_page import ConceptPage
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
    fitted.rename(1, "upper <loop>")
    text = fitted.write_page(subject, tmp_path / "page.html").read_text()
    assert all(f'id="concept-{k}"' in text for k in range(3))
    assert "upper &lt;loop&gt;" in text
    assert "<loop>" not in text
    assert 'src="data:image/png;base64,' in text
    assert not re.search(r"(src|href)=['\"]?http", text)
    assert ("Neighbours in the latent space" in text) == (kind == "coupled")
    with Image.open(fitted.write_page(subject, tmp_path / "page.png")) as picture:
        assert picture.width > 500
        assert len(picture.getcolors(2**24)) > 50
    fitted.save(tmp_path / "artifact")
    loaded = Explainer.load(tmp_path / "artifact", subject)
    assert loaded.label(1) == "upper <loop>"
    assert loaded.explain(subject, torch.rand(1, 1, 8, 8))[0].concepts[1].label == "upper <loop>"
    loaded.write_page(subject, tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text() == text


def test_bad_names_and_numbers_are_one_sentence(subject, data, tmp_path):
    fitted = auditor.fit("nmf", subject, data, layer="1", rank=3, max_iter=5)
    with pytest.raises(OptionError, match="has concepts 0 to 2, got 3"):
        fitted.rename(3, "stripes")
    with pytest.raises(OptionError, match="1 to 80 printable"):
        fitted.rename(0, "   ")
    with pytest.raises(OptionError, match=r"ends in \.html or \.png"):
        fitted.write_page(subject, tmp_path / "page.pdf")
    assert fitted.labels == {}


def test_concepts_of_a_group_stand_under_one_heading(concepts, trained, tmp_path):
    explainer = copy.copy(concepts)
    explainer.groups_ = [[0, 3], [1], [2], [4], [5]]
    page = ConceptPage(explainer, trained[0]).html()
    assert page.count('<h2 class="group">') == 1
    at = [page.index(f'id="concept-{k}"') for k in (0, 3, 1, 2, 4, 5)]
    assert page.index("Group 0: concepts 0, 3 fire together in the same places") < at[0]
    assert at == sorted(at)
    ConceptPage(explainer, trained[0]).sheet()
