"""What the package exports: everything that README and the pages teach, and a class for each kind."""

import ast
import re
from pathlib import Path

import pytest

import auditor
from auditor import Explainer, plugins
from auditor.explainers.kinds import BUILT_IN

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def taught(text: str, package: str) -> set[str]:
    """Return the names of a package that the Python blocks of a page use or import."""
    names = set()
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        for node in ast.walk(ast.parse(block.replace("…", "..."))):
            if isinstance(node, ast.ImportFrom) and node.module == package:
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                names |= {node.attr} if node.value.id == package.rpartition(".")[2] else set()
    return names - {"plugins", "service"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_teaches_is_exported(page):
    text = page.read_text(encoding="utf-8")
    assert taught(text, "auditor") <= set(auditor.__all__)
    assert taught(text, "auditor.plugins") <= set(plugins.__all__)


def test_readme_teaches_something():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert taught(text, "auditor") >= {"fit", "open_data"}
    assert taught(text, "auditor.plugins") >= {"attach", "load", "load_subject"}


def test_the_class_of_every_kind_is_exported():
    exported = [getattr(auditor, name) for name in auditor.__all__]
    classes = {c.kind: c for c in exported if isinstance(c, type) and issubclass(c, Explainer) and c is not Explainer}
    assert set(classes) == set(BUILT_IN)
    for kind, where in BUILT_IN.items():
        assert f"{classes[kind].__module__}:{classes[kind].__name__}" == where


def test_names_are_sorted_and_unique():
    assert auditor.__all__ == sorted(set(auditor.__all__))
