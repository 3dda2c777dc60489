"""The page of an audit: self-contained, verdict first, everything that came from outside escaped."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from auditor.errors import OptionError
from auditor.release.findings import findings, verdict
from auditor.release.gate import judge
from auditor.metrics.measure import Measure, of_items
from auditor.release.model_card import card_json, fill, read_card
from auditor.release.policy import parse_policy
from auditor.reports.audit_report import report_html, write_report
from auditor.reports.style import histogram, interval, number


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
    found = Page(page)
    assert found.links
    assert all(link.startswith("data:image/png;base64,") for link in found.links)
    assert not {"script", "link", "iframe", "object"} & set(found.tags)
    assert not re.search(r"@import|url\(|https?://", page)


def test_the_verdict_comes_first_and_every_part_is_there(page):
    order = [
        "class='verdict",
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
    found = replace(
        audited,
        model=audited.model | {"name": evil, "classes": [evil] * 10},
        command=evil,
        card=fill({"intended_use": evil}),
        explainers={evil: {"kind": evil, "problem": evil}},
        pictures={},
    )
    gate = judge(audited, parse_policy('[limits."model/accuracy"]\nmin = 2', evil))
    text = report_html(found, gate)
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_a_gate_stands_on_top(audited, tmp_path):
    gate = judge(audited, parse_policy('[limits."model/accuracy"]\nmin = 2'))
    text = write_report(audited, tmp_path / "deep" / "r.html", gate).read_text()
    assert "The gate fails" in text
    assert text.index("The gate fails") < text.index("What the model looks at")


def test_findings_follow_the_numbers(audited):
    assert verdict(audited) in ("good", "warn")
    bad = {"explainer/concepts/randomisation": Measure(0.97, direction="down", status="failed", reason="same")}
    assert verdict(replace(audited, metrics=audited.metrics | bad)) == "bad"
    vague = {"explainer/concepts/flip_gain": of_items([0.3, -0.2, 0.1, -0.1], "up", null=0.0)}
    texts = [f.text for f in findings(replace(audited, metrics=audited.metrics | vague)) if f.level == "warn"]
    assert any("not shown to be better than random" in t for t in texts)
    blind = {"model/accuracy": of_items([0.0, 1.0] * 10, "up", null=0.9)}
    assert verdict(replace(audited, metrics=audited.metrics | blind)) == "bad"
    tampered = replace(audited, explainers=audited.explainers | {"x": {"problem": "bytes differ"}})
    assert verdict(tampered) == "bad"
    assert verdict(replace(audited, explainers={})) == "warn"


def test_small_drawings():
    assert "circle" in interval(Measure(0.5, 0.4, 0.6, 10, 0.1))
    assert interval(Measure(0.5)) == ""
    assert interval(Measure(1.0, 1.0, 1.0, 5)) == ""
    assert histogram([1.0, 1.0, 1.0]) == ""
    assert histogram([1.0, 1.0 + 1e-12, 1.0]) == ""
    assert histogram([0.0, 1.0, float("nan")]).count("<rect") == 2
    assert (number(0.5), number(float("nan")), number(-2e-5)) == ("0.5", "none", "-2.0e-05")


def test_the_card_says_what_is_missing(audited, tmp_path):
    path = tmp_path / "card.toml"
    path.write_text('intended_use = "Reading digits."\nowner = ""\n')
    card = fill(read_card(path))
    assert card["fields"]["intended_use"] == "Reading digits."
    assert "owner" in card["missing"]
    assert "intended_use" not in card["missing"]
    whole = card_json(replace(audited, card=card))
    assert whole["performance"]["model/accuracy"]["value"] > 0.9
    assert {"limits", "training_data", "versions", "model", "evaluation_data", "audit"} <= set(whole)


@pytest.mark.parametrize(
    ("text", "message"),
    [("purpose = 'x'", "'purpose' is not a field"), ("owner = 3", "owner must be text"), ("owner =", "it is not TOML")],
)
def test_a_card_with_mistakes(tmp_path, text, message):
    path = tmp_path / "card.toml"
    path.write_text(text)
    with pytest.raises(OptionError, match=message):
        read_card(path)
