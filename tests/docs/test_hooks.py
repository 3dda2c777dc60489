"""Pages that are made from the code: every command, every route, every option; and the notebooks can be read."""

import importlib.util
import json
from pathlib import Path

import pytest
import yaml

from auditor.cli import auditor
from auditor.explainers.kinds import BUILT_IN
from auditor.service.routes import TABLE

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
hooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hooks)


def test_the_reference_of_the_terminal_has_every_command():
    page = hooks.cli_page()
    for name in auditor.commands:
        assert f"\n## {name}" in page
    assert "## log verify" in page
    assert "--attach-anyway" in page


def test_the_reference_of_rest_has_every_route_with_its_fields():
    page = hooks.rest_page()
    for entry in TABLE:
        assert (f"## {entry.method} {entry.path}\n" in page) == entry.in_document, entry.path
    assert "| `heatmaps` |" in page


@pytest.mark.parametrize("kind", BUILT_IN)
def test_the_page_of_a_kind_has_its_options_and_its_own_picture(kind):
    page = hooks.on_page_markdown((ROOT / "docs" / "kinds" / f"{kind}.md").read_text(), None, None, None)
    assert "| `seed` | `0` |" in page
    assert "<!--" not in page
    for heading in ("What it costs", "When it fails", "Paper", "Measured", "Options"):
        assert f"## {heading}" in page
    pictures = {p.stem: p.read_bytes() for p in (ROOT / "docs" / "pictures").glob("*.png")}
    assert set(pictures) == set(BUILT_IN)
    assert len(set(pictures.values())) == len(pictures)


def test_every_page_of_the_site_is_there():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def pages(entries):
        for entry in entries:
            if isinstance(entry, str):
                yield entry
            else:
                for below in entry.values():
                    yield from pages([below] if isinstance(below, str) else below)

    made = {"reference/cli.md", "reference/rest.md"}
    for page in pages(site["nav"]):
        assert page in made or (ROOT / "docs" / page).is_file(), page


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")), ids=lambda p: p.stem)
def test_a_notebook_is_stored_without_its_outputs(path):
    cells = json.loads(path.read_text())["cells"]
    assert cells[0]["cell_type"] == "markdown"
    for cell in cells:
        assert not cell.get("outputs")
        if cell["cell_type"] == "code":
            compile("".join(cell["source"]), path.name, "exec")
