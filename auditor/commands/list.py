"""``auditor list``: what is attached to a version."""

from __future__ import annotations

import click

from auditor.commands.group import JSON, PICKLE, auditor, example, reports_errors


@auditor.command("list", epilog=example("auditor list models:/digits/1"))
@click.argument("model")
@PICKLE
@JSON
@reports_errors("nothing was changed")
def list_(model: str, allow_pickle: bool, as_json: bool) -> None:
    """List the explainers attached to MODEL, their metrics, and whether they verify."""
    from auditor.commands.terminal import as_text, say, table, waiting
    from auditor.plugins import list_attached
    from auditor.plugins.registry.location import resolve

    with waiting(f"looking at {model}"):
        version = resolve(model, registered=True)
        explainers = list_attached(version, allow_pickle=allow_pickle or None)
    if as_json:
        say(as_text([x.to_json() for x in explainers]))
        return
    if not explainers:
        say(f"Nothing is attached to {model}; try: auditor fit nmf {model} --data …")
        return
    body = [
        [
            x.name,
            x.kind,
            x.digest[:12],
            x.layer or "",
            "yes" if x.verified else f"NO: {x.problem}",
            "  ".join(f"{k} {x.metrics[k]:.3f}" for k in x.headline or _headline(x.kind) if k in x.metrics),
        ]
        for x in explainers
    ]
    table(["name", "kind", "digest", "layer", "verified", "metrics"], body)
    say(*(f"{x.name}: {x.needs}" for x in explainers if x.needs))


def _headline(kind: str) -> tuple[str, ...]:
    """Return the metrics that sum up a fit, for an artifact of an earlier release, which does not name them."""
    from auditor.errors import AuditError
    from auditor.explainers.base import explainer_class

    try:
        return explainer_class(kind).headline
    except AuditError:  # its package is missing; a line below the table says what to install
        return ()
