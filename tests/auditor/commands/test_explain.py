"""``auditor explain``."""

import pytest

from auditor import fit
from auditor.plugins import attach, load_subject


def test_the_answer_adds_up_and_is_drawn(cli, shown, seven, tmp_path):
    answer = cli.json("explain", shown, seven, "--out", tmp_path / "out")
    assert answer["prediction"]["label"] == "7"
    assert {e["name"] for e in answer["explanations"]} == {"concepts", "heads"}
    for explanation in answer["explanations"]:
        total = explanation["bias"] + explanation["residual"] + sum(c["contribution"] for c in explanation["concepts"])
        assert total == pytest.approx(answer["target"]["logit"], rel=1e-4)
    (concepts,) = [e for e in answer["explanations"] if e["name"] == "concepts"]
    assert concepts["concepts"][0]["heatmap"].startswith("data:image/png;base64,")
    assert 0 <= answer["stability"]["score"] <= 1
    assert answer["model"]["digest"] == load_subject(shown).digest
    drawn = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"concepts.png", "heads.png", *(f"concepts-{k:02d}.png" for k in range(6))} <= drawn


def test_at_the_terminal_the_table_ends_with_the_target_value(cli, shown, seven):
    lines = cli("explain", shown, seven, "--target", "1").stdout.splitlines()
    assert lines[0].startswith("seven.png: 7 with probability")
    assert "logit of 1:" in lines[0]
    assert sum(line.startswith("= target value") for line in lines) == 2
    assert lines[-1].startswith("stability ")


def test_a_tree_is_explained_by_its_rules_and_drawn_with_the_path(cli, scratch, digits_data, seven, tmp_path):
    subject = load_subject(scratch)
    tree = fit("tree", subject, digits_data, n_features=16, epochs=2, depth=4)
    attach(tree, scratch, "branches", subject=subject, attach_anyway=True)
    answer = cli.json("explain", scratch, seven, "--explainers", "branches", "--out", tmp_path / "out")
    (explanation,) = answer["explanations"]
    extra = explanation["extra"]
    page = (tmp_path / "out" / "branches.html").read_text()
    assert page.count('class="node on"') == len(extra["path"]) >= 1
    assert page.count('class="leaf on"') == 1
    shown = cli("explain", scratch, seven, "--explainers", "branches").output
    assert f"path to leaf {extra['leaf']}, which says {extra['tree_class']}" in shown
    assert all(step["rule"] in shown for step in extra["path"])
    assert cli.json("concepts", scratch, "branches", "--out", tmp_path / "tree.svg")["page"].endswith("tree.svg")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("/no/such.png",), "no such file"),
        (("{seven}", "--target", "12"), "class index must be 0 to 9"),
        (("{text}",), "not a readable image"),
        (("{seven}", "--out", "{text}/x"), "Not a directory"),
    ],
)
def test_bad_input_is_one_line(cli, shown, seven, tmp_path, options, sentence):
    (tmp_path / "text.png").write_text("hello")
    filled = [option.format(seven=seven, text=tmp_path / "text.png") for option in options]
    assert sentence in cli.fails("explain", shown, *filled)


def test_names_that_are_not_attached(cli, shown, tiny, seven):
    from auditor.plugins import log_subject

    assert "absent" in cli.fails("explain", shown, seven, "--explainers", "absent")
    bare = log_subject(tiny, "bare", experiment="tests")
    assert f"nothing is attached to {bare}; fit something first" in cli.fails("explain", bare, seven)


def test_a_contribution_of_exactly_zero_comes_last(cli, shown, seven, monkeypatch):
    """It was ranked by its activation: the concept with the largest one came first, adding nothing."""
    from dataclasses import replace

    from auditor.explainers.nmf.explainer import NmfExplainer

    plain = NmfExplainer.explain_from

    def with_a_zero(self, *args, **options):
        explanations = plain(self, *args, **options)
        return [
            replace(e, concepts=(replace(e.concepts[0], activation=1e9, contribution=0.0), *e.concepts[1:]))
            for e in explanations
        ]

    monkeypatch.setattr(NmfExplainer, "explain_from", with_a_zero)
    lines = cli("explain", shown, seven, "--explainers", "concepts").stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("concept "))
    assert "1e+09" not in lines[start + 1]
    assert "+0.000" in next(line for line in lines if "1e+09" in line)
    short = cli.json("explain", shown, seven, "--explainers", "concepts", "--top-k", "2", "--heatmaps", "none")
    assert all(c["activation"] < 1e9 for c in short["explanations"][0]["concepts"])


def test_options_are_those_of_rest_and_python(cli):
    from auditor.explainers.answer_options import AnswerOptions

    text = cli("explain", "--help").output
    for name in AnswerOptions.model_fields:
        assert f"--{name.replace('_', '-')}" in text
    assert "[default: fast]" in text
    assert "--samples" not in text
