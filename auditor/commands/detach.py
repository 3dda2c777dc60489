"""``auditor detach``: an explainer taken from a version."""

from __future__ import annotations

import click

from auditor.commands.group import JSON, SIGN_KEY, auditor, example, now_holds, reports_errors


@auditor.command(epilog=example("auditor detach models:/digits/1 concepts"))
@click.argument("model")
@click.argument("name")
@SIGN_KEY
@JSON
@reports_errors("the explainer is attached as before")
def detach(model: str, name: str, as_json: bool) -> None:
    """Remove the explainer NAME from MODEL; its files stay in the artifact store, unseen."""
    from auditor.commands.terminal import as_text, say
    from auditor.plugins import detach as detach_explainer

    detach_explainer(model, name)
    now_holds(f"{name!r} is detached")
    say(as_text({"detached": name}) if as_json else f"Detached {name} from {model}.")
