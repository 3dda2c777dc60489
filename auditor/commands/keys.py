"""``auditor keys``: keys, and what is stored of them."""

from __future__ import annotations

import json
import secrets
import sys

import click

from auditor.commands.group import JSON, auditor, example, reports_errors

SHORTEST = 16  # characters: a hash of a short key can be undone by trying


@auditor.group(epilog=example("auditor keys hash --new", "auditor keys hash < key.txt"))
def keys() -> None:
    """Keys, and what is stored of them."""


@keys.command("hash", epilog=example("auditor keys hash --new", "auditor keys hash < key.txt >> keys.txt"))
@click.option("--new", is_flag=True, help="Make a new key; it is printed once and stored nowhere.")
@JSON
@reports_errors("no hash was made")
def hash_key(new: bool, as_json: bool) -> None:
    """Hash an API key of the service, read from standard input, for the file of ``serve --api-keys``.

    The file then holds nothing that lets anybody in. At a terminal the key is asked for and not shown.
    """
    from auditor.commands.terminal import say
    from auditor.errors import OptionError
    from auditor.service.keys import hashed

    if new:
        key = secrets.token_urlsafe(32)
    elif sys.stdin.isatty():
        key = click.prompt("key", hide_input=True, err=True).strip()
    else:
        key = sys.stdin.read(4096).strip()
    if len(key) < SHORTEST or len(key.split()) != 1:
        raise OptionError(f"want one key of at least {SHORTEST} characters; auditor keys hash --new makes one.")
    if as_json:
        say(json.dumps({"hash": hashed(key), **({"key": key} if new else {})}))
        return
    if new:
        say(f"key   {key}")
        say(f"hash  {hashed(key)}")
        return
    say(hashed(key))
