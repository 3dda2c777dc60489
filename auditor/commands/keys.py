"""``auditor keys``: keys to sign with, the folder of keys that are trusted, and hashes of the service's keys."""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
from datetime import datetime, timezone
from pathlib import Path

import click

from auditor.commands.group import JSON, auditor, example, reports_errors

SHORTEST = 16  # characters: a hash of a short key can be undone by trying
FOLDER = click.option("--dir", "folder", default="keys", show_default=True, type=click.Path(path_type=Path))
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")


@auditor.group(
    epilog=example("auditor keys new alice --dir keys", "auditor keys list --dir keys", "auditor keys hash --new")
)
def keys() -> None:
    """Keys to sign with, keys that are trusted, and what is stored of the service's keys."""


@keys.command("new", epilog=example("auditor keys new alice --dir keys --expires 2027-12-31 --passphrase"))
@click.argument("name")
@FOLDER
@click.option("--expires", help="Day from which its signatures no longer count, such as 2027-12-31.")
@click.option(
    "--passphrase", "locked", is_flag=True, help="Ask for a passphrase (or take AUDITOR_SIGN_PASSPHRASE) to lock it."
)
@JSON
@reports_errors("no key was made")
def new(name: str, folder: Path, expires: str | None, locked: bool, as_json: bool) -> None:
    """Make the key pair NAME.pem (secret, to sign with) and NAME.pub (for those who should trust you)."""
    from auditor.commands.terminal import as_text, say
    from auditor.errors import OptionError
    from auditor.signing.keys import PASSPHRASE, new_key, read_trusted

    if NAME.fullmatch(name) is None:
        raise OptionError(
            f"key name {name!r}: want 1 to 64 letters, digits, '_', '-', '.' or '@', a letter or digit first."
        )
    passphrase = None
    if locked:
        passphrase = os.environ.get(PASSPHRASE) or click.prompt(
            "passphrase", hide_input=True, confirmation_prompt=True, err=True
        )
    private, public = new_key(name, folder, expires=_day(expires), passphrase=passphrase)
    keyid = next(key.keyid for key in read_trusted(folder).keys if key.name == name)
    if as_json:
        say(as_text({"name": name, "keyid": keyid, "private": str(private), "public": str(public)}))
        return
    say(f"secret key in {private}: keep it away from the model store, and sign with --sign-key {private}")
    say(f"public key in {public} ({keyid[:12]}): put it into the folder that --trusted names")


@keys.command("list", epilog=example("auditor keys list --dir keys"))
@FOLDER
@JSON
@reports_errors("nothing was changed")
def list_(folder: Path, as_json: bool) -> None:
    """List the keys that a folder trusts, and whether they count now."""
    from auditor.commands.terminal import as_text, say, table
    from auditor.signing.keys import read_trusted

    trusted = read_trusted(folder).everybody
    if as_json:
        say(as_text([{"name": k.name, "keyid": k.keyid, "problem": k.problem()} for k in trusted]))
        return
    table(["name", "key", ""], [[k.name, k.keyid[:12], k.problem() or "counts"] for k in trusted])


@keys.command("revoke", epilog=example("auditor keys revoke alice --dir keys"))
@click.argument("name")
@FOLDER
@JSON
@reports_errors("the key counts as before")
def revoke(name: str, folder: Path, as_json: bool) -> None:
    """Note in the trusted folder that the key NAME no longer counts, whatever it has signed."""
    from auditor.commands.terminal import as_text, say
    from auditor.signing.keys import revoke as revoke_key

    key = revoke_key(name, folder)
    say(as_text({"name": name, "keyid": key.keyid, "problem": key.problem()}) if as_json else f"{key.problem()}.")


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


def _day(text: str | None) -> datetime | None:
    from auditor.errors import OptionError

    if text is None:
        return None
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=timezone.utc)
    except ValueError:
        raise OptionError(f"--expires wants a day such as 2027-12-31, got {text!r}.") from None
