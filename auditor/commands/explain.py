"""``auditor explain``: one image by every explainer attached."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from auditor.commands.answer_flags import answer_flags
from auditor.commands.device_option import DEVICE
from auditor.commands.group import JSON, PICKLE, auditor, example, reports_errors
from auditor.explainers.answer_options import EVERY, AnswerOptions

if TYPE_CHECKING:
    from auditor.explainers.answer import Answer
    from auditor.explainers.base import Explainer
    from auditor.explainers.explanation import Explanation

SHOWN = 8  # concepts per explainer, unless --top-k says otherwise


@auditor.command(epilog=example("auditor explain models:/digits/1 seven.png --out explained --stability full"))
@click.argument("model")
@click.argument("image", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Folder for heatmaps, contact sheets and pages.")
@DEVICE
@PICKLE
@JSON
@reports_errors("the explanation is not finished, and neither are pictures in --out")
@answer_flags("explain", explainers=[EVERY])
def explain(
    model: str, image: Path, out: Path | None, options: AnswerOptions, allow_pickle: bool, as_json: bool
) -> None:
    """Explain one IMAGE by the explainers attached to MODEL, at the terminal or as PNGs.

    The options and the answer are those of POST /explain; here all attached explainers answer when none is named.
    """
    from auditor.commands.terminal import as_text, say, waiting
    from auditor.plugins.registry.explain_image import answer_image, draw_answer

    with waiting(f"explaining {image.name}"):
        answer = answer_image(model, image, options, allow_pickle=allow_pickle or None)
        if out is not None:
            draw_answer(answer, out)
    if as_json:
        say(as_text(answer.to_json()))
        return
    say(f"{image.name}: {_prediction(answer)}")
    for name, explainer in answer.explainers.items():
        say("", f"{name} ({explainer.kind})")
        if name in answer.problems:
            say(answer.problems[name])
        else:
            _show(explainer, answer.explanations[name], options.top_k or SHOWN)
    if answer.stability is not None:
        say("", _stability(answer.stability))
    if out is not None:
        say(f"pictures in {out}")


def _prediction(answer: Answer) -> str:
    p, t = answer.prediction, answer.target
    text = f"{p['label']} with probability {p['probability']:.1%}"
    if p["labels"] is not None:  # several may be true
        text = ", ".join(f"{x['label']} {x['probability']:.1%}" for x in p["labels"]) or f"no label; nearest {text}"
    return f"{text}; logit of {t['label']}: {t['logit']:.3f}"


def _stability(s: dict[str, Any]) -> str:
    numbers = f"c1 {s['c1']:.3g}, c2 {s['c2']:.3g}, radius {s['radius']}, n {s['samples']}, {s['mode']}"
    return f"stability {s['score']:.2f} ({numbers})"


def _show(explainer: Explainer, explanation: Explanation, n: int) -> None:
    """Print the strongest concepts of an explanation, what the others add, and how it all adds up."""
    from auditor.commands.terminal import say, table

    strongest = explanation.ranked()[:n]
    body = [
        [c.label, f"{c.activation:.4g}", "" if c.contribution is None else f"{c.contribution:+.3f}"] for c in strongest
    ]
    if explanation.bias is not None and explanation.residual is not None:
        others = explanation.ranked()[n:]
        if others:
            body.append([f"{len(others)} more", "", f"{sum(c.contribution or 0.0 for c in others):+.3f}"])
        body += [["bias", "", f"{explanation.bias:+.3f}"], ["residual", "", f"{explanation.residual:+.3f}"]]
        body.append(["= target value", "", f"{explanation.target_value:+.3f}"])
    table(["concept", "activation", "contribution"], body)
    share = explanation.explained_share(strongest)
    if share is not None:
        n_shown = "the concept" if len(strongest) == 1 else f"the {len(strongest)} concepts"
        say(f"{n_shown} shown explain{'s' if len(strongest) == 1 else ''} {share:.0%} of what moves the value")
    say(*explainer.lines(explanation))
