"""Page text: nothing leaves its quotes, and numbers and times are short."""

import math

import jinja2
import pytest

from auditor.plugins.audits_site.page_text import day, environment, moment, number, query, sentence, signed


@pytest.fixture
def templates(tmp_path):
    (tmp_path / "a.html").write_text("<a href='?{{ q|query }}'>{{ text }}</a> {{ text|shell }}{{ n|number }}")
    (tmp_path / "b.html").write_text("{{ nosuch }}")
    return environment(tmp_path)


def test_everything_is_escaped_and_a_forgotten_value_is_an_error(templates):
    evil = "<script>'\"&$(x)"
    html = templates.get_template("a.html").render(q={"name": evil}, text=evil, n=0.5)
    assert "<script" not in html
    assert html.count("'") == 2  # those of the template
    with pytest.raises(jinja2.UndefinedError):
        templates.get_template("b.html").render()


def test_a_query_cannot_be_left():
    assert query({"a": "x&b=1#<>'\" ", "c": "é"}) == "a=x%26b%3D1%23%3C%3E%27%22+&c=%C3%A9"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (-3.0, "-3"), (0.001, "0.0010"), (0.00099, "9.90e-04"), (0.99999, "1.0000"), (1.5, "1.500"),
        (99.9994, "99.999"), (100.4, "100"), (1e9, "1.00e+09"), (999999999.0, "999999999"), (999999999.5, "1000000000"),
        (math.inf, "inf"), (math.nan, "NaN"), (None, ""), (-0.25, "-0.2500"),
    ],
)  # fmt: skip
def test_numbers_are_as_long_as_can_be_read(value, text):
    assert number(value) == text


def test_differences_have_a_sign():
    assert [signed(v) for v in (0.25, -0.25, 0.0, None)] == ["+0.2500", "\N{MINUS SIGN}0.2500", "0", ""]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("2026-11-16T17:29:01+00:00", "2026-11-16 17:29 UTC"),
        ("2026-11-16T17:29:01Z", "2026-11-16 17:29 UTC"),
        ("2026-11-16T17:29:01+02:00", "2026-11-16 15:29 UTC"),
        ("yesterday", "yesterday"),
        ("x" * 50, "x" * 40),
        ("0001-01-01T00:00:00+14:00", "0001-01-01T00:00:00+14:00"),
    ],
)
def test_times_are_in_utc_and_anything_else_is_shortened(text, shown):
    assert moment(text) == shown


def test_days():
    assert [day(v) for v in (0, -1, 1, 1_790_000_000_000, 10**30)] == ["", "", "1970-01-01", "2026-09-21", ""]


def test_sentences_begin_and_end_as_sentences():
    assert sentence("  the tag is missing ") == "The tag is missing."
    assert sentence("report.html is missing.") == "report.html is missing."  # a name stays as it is
    assert sentence("why not? ") == "Why not?"
    assert [sentence(t) for t in ("", "  ", "more …")] == ["", "", "More …"]
