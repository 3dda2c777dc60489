"""The page's files: nothing inline, nothing from elsewhere, every element the scripts ask for is there."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib.resources import files

import pytest

PAGE = files("auditor.service") / "page"
SCRIPTS = sorted(p.name for p in PAGE.iterdir() if p.name.endswith(".js"))


class Reader(HTMLParser):
    """Collects ids, references and what a strict content security policy refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.inline: list[str] = []
        self.labels: set[str] = set()

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if "id" in attributes:
            self.ids.append(attributes["id"])
        self.references += [
            attributes[a] for a in ("src", "href") if attributes.get(a) and not attributes[a].startswith("#")
        ]
        self.labels |= {attributes[a] for a in ("for", "aria-labelledby", "aria-controls") if a in attributes}
        if "style" in attributes or tag == "style" or (tag == "script" and "src" not in attributes):
            self.inline.append(tag)
        self.inline += [a for a in attributes if a.startswith("on")]


@pytest.fixture(scope="module")
def page() -> Reader:
    reader = Reader()
    reader.feed((PAGE / "index.html").read_text("utf-8"))
    return reader


def test_a_strict_policy_lets_the_page_work(page):
    assert page.inline == []
    for reference in page.references:
        assert (PAGE / reference).is_file(), reference


def test_ids_are_unique_and_what_refers_to_them_exists(page):
    assert len(page.ids) == len(set(page.ids))
    assert page.labels <= set(page.ids)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_ask_for_what_is_there_and_load_nothing_from_elsewhere(page, name):
    text = (PAGE / name).read_text("utf-8")
    assert set(re.findall(r'byId\("([^"]+)"\)', text)) <= set(page.ids)
    for imported in re.findall(r'from "([^"]+)"', text):
        assert imported.startswith("./"), imported
        assert (PAGE / imported).is_file(), imported
    assert not re.search(r"\b(eval|innerHTML|outerHTML|insertAdjacentHTML|document\.write)\b", text)
    addresses = set(re.findall(r"https?://[^\"'` ]+", text)) - {"http://www.w3.org/2000/svg"}
    assert not addresses


def test_the_style_sheet_loads_nothing():
    text = (PAGE / "style.css").read_text("utf-8")
    assert "url(" not in text
    assert "@import" not in text
