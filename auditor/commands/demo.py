"""``auditor demo``: the story of a shortcut that is found; with ``--digits`` the whole product on small digits."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from auditor.commands.group import JSON, SEED, auditor, example, now_holds, reports_errors


@auditor.command(epilog=example("auditor demo --dir demo", "auditor demo --digits --kind nmf", "auditor demo --serve"))
@click.option(
    "--dir", "folder", default="demo", show_default=True, type=click.Path(path_type=Path), help="Where to work."
)
@click.option("--digits", is_flag=True, help="Without the story: one version, on scikit-learn's 8 x 8 digits.")
@click.option("--kind", "kinds", multiple=True, help="Fit only this kind of explainer; may be repeated.")
@click.option("--serve", is_flag=True, help="Then serve the model; the page is at http://127.0.0.1:3000/ui.")
@click.option("--port", default=3000, show_default=True, type=click.IntRange(1, 65535), help="Port for --serve.")
@SEED
@JSON
@reports_errors("the demo is not finished")
def demo(folder: Path, digits: bool, kinds: tuple[str, ...], serve: bool, port: int, seed: int, as_json: bool) -> None:
    """Two versions of a bird model that are right equally often: find out why one must not go out.

    Draws the pictures, trains and registers both versions, explains the first in every way, audits and gates both.
    Nothing is downloaded.
    """
    from auditor.commands.terminal import Bar, as_text, say
    from auditor.plugins import demo as on_digits
    from auditor.plugins import demo_story

    with Bar() as bar:
        run = on_digits.run_demo if digits else demo_story.run_story
        result = run(folder, seed=seed, progress=bar, kinds=kinds)
    if as_json:
        say(as_text(result))
    else:
        say(*(_digits_story(result) if digits else _story(result)))
    now_holds("the demo is finished" + (", the server stopped" if serve else ""))
    if serve:
        import os

        os.environ["MLFLOW_TRACKING_URI"] = result["tracking_uri"]
        from auditor.service.launch import run_server

        samples = "sklearn:digits?split=test" if digits else result["data"]
        run_server(result["model"], host="127.0.0.1", port=port, sample_images=samples)


def _story(result: dict[str, Any]) -> list[str]:
    first, second = result["versions"]
    fitted = ", ".join(f"{name} ({entry['kind']})" for name, entry in result["explainers"].items())
    return [
        f"Two versions of a bird model, in {result['tracking_uri']}",
        f"  {first['model']}: right on {first['accuracy']:.1%} of the test pictures",
        f"  {second['model']}: right on {second['accuracy']:.1%} of the same pictures",
        f"Fitted and attached to the first: {fitted}",
        f"Explained a picture of each bird: {result['sheet']}",
        *_verdict(first),
        *_verdict(second),
        f"The same birds without the camera's stamp: {first['accuracy_without_stamp']:.1%} and "
        f"{second['accuracy_without_stamp']:.1%} right.",
        f"The picture of why: {result['picture']}",
        "",
        *_next(result, f"{shlex.quote(result['data'])}"),
    ]


def _verdict(version: dict[str, Any]) -> list[str]:
    gate = version["gate"]
    lines = [f"Audited {version['model']}, {version['n_metrics']} metrics: {version['report']}"]
    lines += [f"  {f['verdict']}: {f['sentence']}" for f in version["found"]]
    if gate["verdict"] == "pass":
        moved = f"; the alias {gate['promoted']} now points to it" if gate["promoted"] else ""
        return [*lines, f"  the gate passes it: {gate['checks']} checks hold{moved}"]
    failed = ", ".join(f"{c['metric']} is {c['value']:.3g} ({c['limit']})" for c in gate["failed"])
    return [*lines, f"  the gate stops it: {failed}"]


def _digits_story(result: dict[str, Any]) -> list[str]:
    model, gate = result["model"], result["gate"]
    fitted = ", ".join(f"{name} ({entry['kind']})" for name, entry in result["explainers"].items())
    promoted = f"; the alias {gate['promoted']} now points to it" if gate["promoted"] else ""
    return [
        f"Trained a CNN on the digits: {result['accuracy']:.1%} of the test images right.",
        f"Registered it as {model} in {result['tracking_uri']}",
        f"Fitted and attached: {fitted}",
        f"Explained five test images: {result['sheet']}",
        f"Audited it, {result['n_metrics']} metrics: {result['report']}",
        f"Drafted a policy, {result['policy']}, and gated: {gate['verdict']}, {gate['checks']} checks{promoted}",
        "",
        *_next(result, "sklearn:digits"),
    ]


def _next(result: dict[str, Any], samples: str) -> list[str]:
    model, first = result["model"], next(iter(result["explainers"]))
    judged = result.get("stopped", model)
    return [
        "What to type next:",
        f"  export MLFLOW_TRACKING_URI={result['tracking_uri']}",
        f"  auditor list     {model}",
        f"  auditor explain  {model} {result['image']} --out explained",
        f"  auditor concepts {model} {first} --out concepts.html",
        f"  auditor gate     {judged} --policy {result['policy']} --junit gate.xml",
        f"  auditor serve    {model} --sample-images {samples}     # then open http://127.0.0.1:3000/ui",
        "  mlflow server --backend-store-uri $MLFLOW_TRACKING_URI --app-name auditor",
    ]
