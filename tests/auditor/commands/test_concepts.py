"""``auditor concepts``."""

import pytest
from PIL import Image

from auditor import fit
from auditor.plugins import attach, load_subject


def test_a_page_shows_every_concept(cli, shown, tmp_path):
    assert cli.json("concepts", shown, "concepts", "--out", tmp_path / "page.html") == {
        "name": "concepts",
        "page": str(tmp_path / "page.html"),
    }
    page = (tmp_path / "page.html").read_text()
    assert all(f"concept {k}" in page for k in range(6))
    assert "data:image/png" in page
    assert "page in" in cli("concepts", shown, "concepts", "--out", tmp_path / "page.png").stdout
    with Image.open(tmp_path / "page.png") as picture:
        assert picture.size[1] > 200


def test_the_latent_space_of_a_coupled_explainer(cli, scratch, digits_data, tmp_path):
    subject = load_subject(scratch)
    options = {"rank": 4, "max_iter": 40, "lambda_table": False, "layers": ("features", "head.2"), "max_images": 200}
    shared = fit("coupled", subject, digits_data, **options)
    assert shared.layer_ == "head.2"
    shared.rename(2, "stripes")
    attach(shared, scratch, "shared", subject=subject, attach_anyway=True)
    cli.json("concepts", scratch, "shared", "--out", tmp_path / "page.html")
    assert "stripes" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("name", "file", "sentence"),
    [("concepts", "page.txt", "ends in .html or .png"), ("absent", "page.html", "no explainer called 'absent'")],
)
def test_bad_input_is_one_line(cli, shown, tmp_path, name, file, sentence):
    assert sentence in cli.fails("concepts", shown, name, "--out", tmp_path / file)
    assert not list(tmp_path.iterdir())
