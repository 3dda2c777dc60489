"""Texts: what the owner of a study says and asks, read from a TOML file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from auditor.errors import OptionError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FIELDS = ("title", "welcome", "consent", "questions")


def read_texts(path: Path) -> dict[str, Any]:
    """Return title, welcome, consent and questions as far as the file has them."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise OptionError(f"--texts {path}: it cannot be read as TOML ({error}).") from None
    odd = sorted(set(document) - set(FIELDS))
    if odd:
        raise OptionError(f"--texts {path}: {odd[0]!r} is not known here; known are {', '.join(FIELDS)}.")
    return document
