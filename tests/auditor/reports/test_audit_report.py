"""The page of an audit: self-contained, verdict first, everything that came from outside escaped."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from auditor.release.findings import findings
from auditor.release.gate import judge
from auditor.release.model_card import fill
from auditor.release.policy import parse_policy
from auditor.reports.audit_report import report_html, write_report


class Page(HTMLParser):
    """Collects tags, attributes and text, and checks that tags close in order."""

    VOID = frozenset({"meta", "img", "br", "line", "rect", "circle", "i", "li", "td", "tr"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.words = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for key, value in attrs if key in ("src", "href", "srcset", "data", "action")]

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(scope="module")
def page(audited):
    return report_html(replace(audited, command="auditor audit m --data d"))


def test_the_page_needs_nothing_from_elsewhere(page):
    parsed = Page(page)
    assert parsed.links
    assert all(link.startswith("data:image/png;base64,") for link in parsed.links)
    assert not {"script", "link", "iframe", "object"} & set(parsed.tags)
    assert not re.search(r"@import|url\(|https?://", page)


def test_the_verdict_comes_first_and_every_part_is_there(page):
    order = [
        'class="verdict',
        "What the model looks at",
        "How faithful",
        "How stable",
        "The model itself",
        "Layer by layer",
        "What was not measured",
        "Model card",
        "same numbers again",
    ]
    places = [page.index(text) for text in order]
    assert places == sorted(places)
    text = " ".join(Page(page).words)
    for word in ("alike under noise", "class kept", "auditor audit m --data d", "intended use", "not given"):
        assert word in text
    assert page.count("<img") > 20
    assert "<svg" in page


def test_what_comes_from_outside_is_escaped(audited):
    evil = "<script>alert(1)</script>"
    audit = replace(
        audited,
        model=audited.model | {"name": evil, "classes": [evil] * 10},
        command=evil,
        card=fill({"intended_use": evil}),
        explainers={evil: {"kind": evil, "problem": evil}},
        pictures={},
    )
    gate = judge(audited, parse_policy('[limits."model/accuracy"]\nmin = 2', evil))
    text = report_html(audit, gate)
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_a_gate_stands_on_top(audited, tmp_path):
    gate = judge(audited, parse_policy('[limits."model/accuracy"]\nmin = 2'))
    text = write_report(audited, tmp_path / "deep" / "r.html", gate).read_text()
    assert "The gate fails" in text
    assert text.index("The gate fails") < text.index("What the model looks at")


def test_the_page_says_which_images_were_new_to_each_explainer(audited, page):
    text = report_html(audited)
    assert "30 of 359 images, 3 of each of 10 classes were explained" in text
    assert "the fit neither learned from nor chose on 359 of the 1797 images" in text
    guess = {"images": 359, "of": 1797, "known_from": "guess"}
    old = replace(audited, explainers={"concepts": audited.explainers["concepts"] | {"held_out": guess}})
    assert "is a guess from its options" in report_html(old)
    assert any("no record" in f.text and f.level == "warn" and f.about == "concepts" for f in findings(old))
    assert not any("no record" in f.text for f in findings(audited))
    older = replace(
        audited, explainers={"concepts": {k: v for k, v in old.explainers["concepts"].items() if k != "held_out"}}
    )
    assert "Which images were they measured on" not in report_html(older)  # audits of earlier releases
