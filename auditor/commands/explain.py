"""Commands that show: one image explained, a concept basis as a page."""

from __future__ import annotations

from pathlib import Path

import click

from auditor.commands.group import JSON, PICKLE, SEED, auditor, example, tells


@auditor.command(epilog=example("auditor explain models:/digits/1 seven.png --out explained"))
@click.argument("model")
@click.argument("image", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Folder for heatmaps, a contact sheet, a tree's page.")
@click.option("--explainer", "chosen", multiple=True, help="Only this attached explainer; may be repeated.")
@click.option("--target", help="Class to explain, by name or index; default: the prediction.")
@click.option(
    "--samples", default=8, show_default=True, type=click.IntRange(min=1), help="Noise samples for stability."
)
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), help="Seconds for explainers that search (rde)."
)
@SEED
@PICKLE
@JSON
@tells
def explain(
    model: str,
    image: Path,
    out: Path | None,
    chosen: tuple[str, ...],
    target: str | None,
    samples: int,
    timeout: float | None,
    seed: int,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Explain one IMAGE by every explainer attached to MODEL, at the terminal or as PNGs."""
    from auditor.plugins.registry.explain_image import explain_image
    from auditor.commands.terminal import as_text, say, table, waiting

    with waiting(f"explaining {image.name}"):
        answer = explain_image(
            model,
            image,
            names=chosen,
            target=target,
            samples=samples,
            seed=seed,
            out=out,
            allow_pickle=allow_pickle or None,
            timeout_s=timeout,
        )
    if as_json:
        say(as_text(answer))
        return
    p, t = answer["prediction"], answer["target"]
    say(f"{image.name}: {p['label']} with probability {p['probability']:.1%}; logit of {t['label']}: {t['logit']:.3f}")
    for e in answer["explanations"]:
        say("", f"{e['name']} ({e['kind']})")
        ranked = sorted(e["concepts"], key=lambda c: -abs(c["contribution"] or c["activation"]))[:8]
        body = [
            [c["label"], f"{c['activation']:.4g}", "" if c["contribution"] is None else f"{c['contribution']:+.3f}"]
            for c in ranked
        ]
        if e["bias"] is not None:
            rest = sum(c["contribution"] for c in e["concepts"]) - sum(c["contribution"] for c in ranked)
            if len(e["concepts"]) > len(ranked):
                body.append([f"{len(e['concepts']) - len(ranked)} more", "", f"{rest:+.3f}"])
            body += [["bias", "", f"{e['bias']:+.3f}"], ["residual", "", f"{e['residual']:+.3f}"]]
            body.append(["= target value", "", f"{e['target_value']:+.3f}"])
        table(["concept", "activation", "contribution"], body)
        extra = e.get("extra", {})
        if "summary" in extra:
            say(extra["summary"])
        if "path" in extra:
            say(f"path to leaf {extra['leaf']}, which says {extra['tree_class']} ({extra['tree_probability']:.0%}):")
            say(*(f"  {step['rule']}  {step['contribution']:+.3f}" for step in extra["path"]))
        for other in extra.get("alternatives", []):
            changes = ", ".join(f"{c['label']} from {c['code']} to {c['wanted']}" for c in other["changes"])
            say(f"{other['class']} ({other['probability']:.0%}) with {changes}")
    s = answer["stability"]
    say(
        "",
        f"stability {s['score']:.2f} (c1 {s['c1']:.3g}, c2 {s['c2']:.3g}, radius {s['radius']}, n {s['samples']})",
    )
    if out is not None:
        say(f"pictures in {out}")


@auditor.command(epilog=example("auditor concepts models:/digits/1 concepts --out concepts.html"))
@click.argument("model")
@click.argument("name")
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="Page to write: .html or .png; for a tree .html or .svg.",
)
@PICKLE
@JSON
@tells
def concepts(model: str, name: str, out: Path, allow_pickle: bool, as_json: bool) -> None:
    """Draw the concepts of the explainer NAME: top images, heatmaps, classes, and the latent space if it has one."""
    from auditor.explainers.concept_page import write_page
    from auditor.plugins import load, load_subject
    from auditor.commands.terminal import as_text, say, waiting

    with waiting(f"drawing {name}"):
        subject = load_subject(model, allow_pickle=allow_pickle or None)
        path = write_page(load(model, name, subject=subject), subject, out)
    say(as_text({"name": name, "page": str(path)}) if as_json else f"page in {path}")
