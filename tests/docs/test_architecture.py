"""docs/architecture.md names files, functions and rooms: all of them exist, and every room is on the picture."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
STEPS = re.findall(r"^\|[^|]*\| `([\w/]+\.py)` \|([^|]*)\|$", PAGE, re.M)
MENTIONS = re.findall(r"`([\w/]+\.py)`, `([\w.]+)`", PAGE)


def defined(path: str) -> set[str]:
    """Functions, classes, methods as Class.method, and variables that a module defines at its top."""
    names = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (ast.FunctionDef, ast.AsyncFunctionDef)
            names |= {f"{node.name}.{method.name}" for method in node.body if isinstance(method, methods)}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_the_three_lives_have_their_steps():
    assert len(STEPS) > 35


@pytest.mark.parametrize(("path", "functions"), STEPS + MENTIONS)
def test_a_step_names_what_is_there(path, functions):
    assert (ROOT / path).exists(), path
    named = set(re.findall(r"[A-Za-z_][\w.]*", functions))
    assert named <= defined(path), f"{path} has no {sorted(named - defined(path))}"


def test_every_room_is_in_the_picture_and_only_rooms():
    picture = (ROOT / "docs" / "rooms.svg").read_text(encoding="utf-8")
    drawn = {part.strip() for text in re.findall(r'class="name"[^>]*>([^<]+)<', picture) for part in text.split(",")}
    folders = [p.parent.relative_to(ROOT) for p in ROOT.glob("*/**/__init__.py") if p.parts[len(ROOT.parts)] in LAYERS]
    rooms = {short_name(folder.as_posix()) for folder in folders} - {"auditor", "kernels"}
    assert drawn - {"cli", "errors", "progress"} == rooms


LAYERS = ("auditor", "kernels", "plugins", "service")


def short_name(folder: str) -> str:
    """How the picture names a folder: rooms of the library and of the kernels, and kinds, by their last part."""
    if folder.startswith(("auditor/", "kernels/")):
        return folder.rpartition("/")[2]
    return folder


def test_folders_that_the_page_names_are_rooms():
    for folder in set(re.findall(r"`((?:auditor|kernels|plugins)/[\w/]+)`", PAGE)):
        assert (ROOT / folder / "__init__.py").exists(), folder


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_a_newcomer_finds_the_map_and_how_to_add_to_it(page):
    links = set(re.findall(r"\]\(([\w/.-]+)\)", (ROOT / page).read_text(encoding="utf-8")))
    assert {f"docs/{name}.md" for name in ("architecture", "glossary", "adding-a-kind", "adding-a-metric")} <= links
    assert not [link for link in links if not (ROOT / link).exists()]
