"""Model card: what regulation asks to be written down of a model; what nobody gave is listed as missing.

Fields follow what technical documentation of the EU AI Act (annex IV) and model cards have in common: intended use,
data, performance, limits, oversight, versions, digests. People give theirs in a ``card.toml``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from auditor.errors import OptionError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FIELDS = {
    "name": "What the model is called.",
    "description": "What it does, in one or two sentences.",
    "owner": "Who answers for it, and how to reach them.",
    "intended_use": "What it is for, and for whom.",
    "out_of_scope": "What it must not be used for.",
    "training_data": "What it was trained on: source, time, size, licence, how it was chosen.",
    "limits": "Where it is known to fail; groups or conditions it was not tested on.",
    "risks": "What may go wrong for people, and what is done about it.",
    "human_oversight": "Who looks at its decisions, and how they can overrule it.",
    "licence": "Under which terms it may be used.",
    "contact": "Where to report problems.",
}


def read_card(path: str | Path) -> dict[str, str]:
    """Read the fields a person wrote; an unknown field is an error with the known ones."""
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"card {path}: cannot be read ({error}).") from None
    except tomllib.TOMLDecodeError as error:
        raise OptionError(f"card {path}: it is not TOML ({error}).") from None
    for key, value in document.items():
        if key not in FIELDS:
            raise OptionError(
                f"card {path}: {key!r} is not a field of a model card; the fields are {', '.join(FIELDS)}."
            )
        if not isinstance(value, str):
            raise OptionError(f"card {path}: {key} must be text in quotes, got {type(value).__name__}.")
    return {key: value.strip() for key, value in document.items() if value.strip()}


def fill(written: Mapping[str, str]) -> dict[str, Any]:
    """Return all fields, those not given as None, and the list of the missing."""
    fields = {key: written.get(key) for key in FIELDS}
    return {"fields": fields, "missing": [key for key, value in fields.items() if value is None]}


def card_json(audit: Any) -> dict[str, Any]:
    """Return the whole card: people's fields, and what the audit knows by itself."""
    card = audit.card or fill({})
    headline = {
        name: {"value": m.value, "low": m.low, "high": m.high, "n": m.n}
        for name, m in audit.metrics.items()
        if m.status == "passed" and name.startswith(("model/accuracy", "model/ece", "model/worst"))
    }
    explained = {
        name: {k: info.get(k) for k in ("kind", "layer", "digest")}
        | {
            "metrics": {
                key.split("/", 2)[2]: m.value
                for key, m in audit.metrics.items()
                if key.startswith(f"explainer/{name}/") and m.status == "passed"
            }
        }
        for name, info in audit.explainers.items()
    }
    return {
        "schema_version": 1,
        **card["fields"],
        "missing": card["missing"],
        "model": audit.model,
        "evaluation_data": audit.data,
        "performance": headline,
        "explanations": explained,
        "not_measured": {name: m.reason for name, m in audit.metrics.items() if m.status != "passed"},
        "versions": audit.versions,
        "audit": {"digest": audit.digest, "time": audit.time, "seed": audit.seed, "command": audit.command},
    }
