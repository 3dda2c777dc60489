"""Pages of the site that are made from the code: the terminal's reference, REST, the options of each kind.

mkdocs calls the functions named ``on_…``; `make docs` builds the site. Nothing here needs a model or the network.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
OPTIONS = re.compile(r"^<!-- options: ([a-z]+) -->$", re.M)
MOST_EXAMPLE = 2000  # characters of an example that is shown
KINDS = re.compile(r"^<!-- kinds -->$", re.M)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made from the code."""
    from mkdocs.structure.files import File

    pages = {"reference/cli.md": cli_page(), "reference/rest.md": rest_page()}
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill in the table of kinds and the tables of options."""
    return KINDS.sub(lambda _: kinds_table(), OPTIONS.sub(lambda m: options_table(m[1]), markdown))


def kinds_table() -> str:
    """Return the kinds that are installed with the package they come from."""
    from auditor.explainers.kinds import installed_kinds

    rows = [(f"[`{k.name}`]({k.name}.md)", f"{k.package}") for k in installed_kinds() if k.is_built_in]
    return _table(("kind", "from"), rows)


def options_table(kind: str) -> str:
    """Return the options of a kind with their defaults, as ``auditor fit KIND --help`` lists them."""
    from auditor.commands.kinds import options_of

    rows = [(f"`{name}`", f"`{o['default']}`", o["description"]) for name, o in options_of(kind).items()]
    return _table(("option", "default", "what it does"), rows)


def cli_page() -> str:
    """Return the help of every command."""
    import click

    from auditor.cli import auditor

    parts = ["# Commands\n\nMade from `auditor COMMAND --help`.\n"]
    context = click.Context(auditor, info_name="auditor", terminal_width=100)
    for name, command, parent in _commands(auditor, context):
        help_text = command.get_help(click.Context(command, info_name=name, parent=parent, terminal_width=100))
        parts.append(f"## {parent.command_path.removeprefix('auditor').strip()} {name}".replace("##  ", "## "))
        parts.append(f"```text\n{help_text}\n```\n")
    return "\n".join(parts)


def _commands(group: Any, context: Any) -> list[tuple[str, Any, Any]]:
    """Return every command below a group, groups themselves left out."""
    import click

    out = []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            out += _commands(command, click.Context(command, info_name=name, parent=context, terminal_width=100))
        else:
            out.append((name, command, context))
    return out


def rest_page() -> str:
    """Return the routes, with what goes in and comes out, from the OpenAPI document."""
    from auditor.service.openapi import document

    content = document()
    parts = [
        "# REST\n\nMade from the OpenAPI document, which a server gives at `/openapi.json`. "
        f"{content['info']['description']}\n"
    ]
    for path, operations in content["paths"].items():
        for method, operation in operations.items():
            parts += [f"## {method.upper()} {path}", f"{operation['summary']} {operation.get('description', '')}\n"]
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            parts += _schema("Request", body, content)
            answer = operation["responses"]["200"].get("content", {}).get("application/json", {})
            parts += _schema("Answer", answer, content)
            errors = ", ".join(status for status in operation["responses"] if status != "200")
            parts.append(f"Errors: {errors}.\n" if errors else "")
    return "\n".join(parts)


def _schema(title: str, body: dict[str, Any], content: dict[str, Any]) -> list[str]:
    name = body.get("schema", {}).get("$ref", "").rpartition("/")[2]
    schema = content["components"]["schemas"].get(name, {})
    fields = schema.get("properties", {})
    if not fields:
        return []
    required = set(schema.get("required", ()))
    rows = [
        (
            f"`{key}`",
            "yes" if key in required else "",
            f"`{field['default']}`" if "default" in field else "",
            field.get("description", ""),
        )
        for key, field in fields.items()
    ]
    example = body.get("example") or next(iter(body.get("examples", {}).values()), {}).get("value")
    text = json.dumps(example, indent=1) if example else ""
    shown = [f"```json\n{text}\n```\n"] if 0 < len(text) < MOST_EXAMPLE else []
    return [f"**{title}** (`{name}`)\n", _table(("field", "required", "default", "what it is"), rows), *shown]


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(" ".join(str(c).split()).replace("|", "\\|") for c in cells) + " |"

    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, rows)]) + "\n"
