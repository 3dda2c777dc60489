"""Templates: everything is escaped, a name that is missing is an error, one style sheet; and axe-core on every page."""

import re
from dataclasses import replace

import pytest
from jinja2 import UndefinedError

from auditor.explainers.concept_page import ConceptPage
from auditor.pages.templates import FOLDER, render, signed, stylesheet
from auditor.release.gate import judge
from auditor.release.policy import parse_policy
from auditor.reports.audit_report import report_html
from tests.auditor.reports.test_finding_picture import finding, pictures


def test_values_are_escaped_and_a_missing_one_is_an_error():
    assert "<title>&lt;b&gt;</title>" in render("document.html", title="<b>")
    with pytest.raises(UndefinedError):
        render("document.html")


def test_signs_stand_before_numbers_and_nothing_has_none_of_its_own():
    assert [signed(v) for v in (1.234, -1.236, 0.004, -0.004)] == ["+1.23", "−1.24", "+0.00", "+0.00"]  # noqa: RUF001


def test_every_class_that_a_template_uses_is_styled_or_named_by_a_script():
    """A class that no rule knows is a typing error; those that only tests and scripts look for are listed."""
    used = set()
    for path in FOLDER.glob("*.html"):
        for value in re.findall(r'class="([^"{}]+)"', path.read_text()):
            used |= set(value.split())
    rules = set(re.findall(r"\.([a-z][\w-]*)", str(stylesheet())))
    assert used - rules <= {"group"}


def test_the_style_sheet_loads_nothing():
    assert not re.search(r"@import|url\(|https?:", str(stylesheet()))


@pytest.fixture(scope="module")
def pages(audited, concepts, trained, tmp_path_factory):
    """Every page that stands alone, in the states that look different."""
    folder = tmp_path_factory.mktemp("pages")
    gate = judge(audited, parse_policy('[limits."model/accuracy"]\nmin = 2'))
    relied = {
        "status": "measured", "findings": [finding("3", "found"), finding("5", "look")], "images": "20 images",
        "source": "plain heat", "passes_per_image": 50.0,
    }  # fmt: skip
    found = replace(audited, reliance=relied, finding_pictures={"3": pictures(6)}, command="auditor audit m --data d")
    texts = {
        "report": report_html(audited),
        "report-gate": report_html(found, gate),
        "report-bare": report_html(replace(audited, explainers={}, pictures={}, metrics={}, cost=[])),
        "concepts": ConceptPage(concepts, trained[0]).html(),
    }
    paths = []
    for name, text in texts.items():
        paths.append(folder / f"{name}.html")
        paths[-1].write_text(text, encoding="utf-8")
    return paths


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_axe_finds_nothing_and_nothing_overflows(pages, dark, width):
    from tests.browser import chromium

    with chromium() as browser:
        browser.look(width, 900, dark=dark)
        for path in pages:
            browser.open(path.as_uri())
            assert browser.violations() == [], path.name
            assert browser.script("return document.documentElement.scrollWidth") <= width, path.name
        assert browser.messages() == []
