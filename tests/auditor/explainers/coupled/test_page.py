"""The page of shared concepts: latent images, cosines, TCAV, neighbours."""

import pytest
import torch

from auditor import fit, open_data
from auditor.explainers.coupled.page import CoupledPage, examples_of


@pytest.fixture(scope="module")
def fitted(trained):
    return trained[0], fit("coupled", trained[0], open_data("sklearn:digits", limit=60), rank=3, max_iter=20)


def test_each_concept_begins_with_its_latent_image(fitted):
    subject, explainer = fitted
    page = CoupledPage(explainer, subject)
    ((picture, text),) = page.figures(1)
    assert text == "latent image"
    latent = explainer.latent_image(1).mean(0)
    brightest = divmod(int(latent.argmax()), latent.shape[1])
    scale = picture.width // latent.shape[1]
    assert picture.getpixel((brightest[1] * scale + 1, brightest[0] * scale + 1))[0] > 200


def test_without_pixels_there_is_no_latent_image(trained):
    explainer = fit("coupled", trained[0], open_data("sklearn:digits", limit=40), rank=2, max_iter=5, pixels=False)
    assert CoupledPage(explainer, trained[0]).figures(0) == []
    assert explainer.picture(0, explainer.gallery.shots[0][0]).width == 96


def test_sections_and_rows_have_the_same_content(fitted):
    subject, explainer = fitted
    page = CoupledPage(explainer, subject)
    text, rows = str([section.values() for section in page.sections()]), page.rows()
    assert "Neighbours in the latent space" in text
    # labels of the concepts, scales of the penalty, and sensitivity
    assert [len(s.table) for s in page.sections() if s.table] == [3, 4, 3]
    names = [explainer.label(k) for k in range(3)]
    assert all(name in text for name in names)
    assert rows[0][0].startswith("cosines between the concepts in ")
    neighbours = rows[1:]
    assert len(neighbours) == 8
    for caption, pictures in neighbours:
        assert "and its neighbours" in caption
        assert len(pictures) == 11
    assert f"{explainer.metrics['cka_lambda/0.1']:.3f}" in text


@pytest.mark.parametrize(
    ("labels", "rows"),
    [([2, 2, 0, -1, 1], [2, 4, 0]), ([-1, -1, -1], [0, 1, 2]), ([5], [0]), (list(range(12)), list(range(8)))],
)
def test_examples_are_the_first_of_each_class(labels, rows):
    assert examples_of(torch.tensor(labels)) == rows
