"""``auditor kinds``: the kinds of explainers that are installed."""

from __future__ import annotations

from typing import Any

import click

from auditor.commands.group import JSON, auditor, example, reports_errors


def options_of(kind: str) -> dict[str, dict[str, Any]]:
    """Return the options of a kind by name, each with its default and what it does."""
    from auditor.explainers.base import explainer_class

    return {
        name: {"default": field.default, "description": field.description or ""}
        for name, field in explainer_class(kind).Config.model_fields.items()
    }


@auditor.command(epilog=example("auditor kinds", "auditor kinds nmf"))
@click.argument("kind", required=False)
@JSON
@reports_errors("nothing was changed")
def kinds(kind: str | None, as_json: bool) -> None:
    """List the kinds of explainers, the packages they come from and their options (KIND: what each of them does)."""
    from auditor.commands.terminal import as_text, say, table
    from auditor.explainers.kinds import find_kind, installed_kinds

    entries = installed_kinds() if kind is None else [find_kind(kind)]
    answer: list[dict[str, Any]] = [
        {
            "kind": entry.name,
            "package": entry.package,
            "version": entry.version,
            "class": entry.where,
            "options": options_of(entry.name),
        }
        for entry in entries
    ]
    if as_json:
        say(as_text(answer))
    elif kind is None:
        rows = [[a["kind"], f"{a['package']} {a['version']}".strip(), ", ".join(a["options"])] for a in answer]
        table(["kind", "from", "options (--set)"], rows)
    else:
        say(f"{kind} comes from {answer[0]['package']} {answer[0]['version']}".strip())
        options = answer[0]["options"].items()
        table(["option", "default", "what it does"], [[k, str(o["default"]), o["description"]] for k, o in options])
