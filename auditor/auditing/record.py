"""An audit as it is kept: what was measured, of what, how, as one sealed object. Nothing here loads torch.

``audit`` makes one; a gate, a policy, a report and the registry read it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from auditor.errors import TamperError
from auditor.explainers.manifest import seal, unseal
from auditor.metrics.measure import Measure

SCHEMA_VERSION = 1


@dataclass(frozen=True, repr=False)
class Audit:
    """What was measured, of what, how. ``pictures`` are for the page and not part of the JSON."""

    model: dict[str, Any]
    data: dict[str, Any]
    seed: int
    metrics: dict[str, Measure]
    explainers: dict[str, dict[str, Any]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    card: dict[str, Any] = field(default_factory=dict)
    time: str = ""
    seconds: float = 0.0
    command: str = ""
    reliance: dict[str, Any] | None = None  # None: made by a release that did not measure it
    cost: list[dict[str, Any]] = field(default_factory=list)  # of every check: passes per image, seconds
    not_measured: dict[str, str] = field(default_factory=dict)  # a check, or "check of explainer" -> why
    pictures: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    finding_pictures: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __repr__(self) -> str:
        label = (
            f"{self.model.get('name')}/{self.model.get('version')}" if self.model.get("name") else "a model in memory"
        )
        names = ", ".join(self.explainers) or "no explainers"
        found_by = (self.reliance or {}).get("verdict")
        verdict = f", reliance {found_by}" if found_by else ""
        return f"Audit({label}: {len(self.metrics)} metrics on {self.data.get('n')} images, {names}{verdict})"

    def _repr_html_(self) -> str:
        from auditor.explainers.notebook import cell, table

        parts = [f"<p><b>{cell(repr(self))}</b></p>"]
        for finding in (self.reliance or {}).get("findings", ()):
            parts.append(f"<p>{cell(finding['sentence'])}</p>")
            for entry in self.finding_pictures.get(finding["name"], ()):
                parts.append(f"<img src='{cell(entry['whole'])}' alt='{cell(entry['id'])}' style='height:96px'>")
        rows = [(n, m.value, m.status, m.reason) for n, m in self.metrics.items() if _is_headline(n)]
        return "".join([*parts, table(["metric", "value", "status", ""], rows)])

    def to_pandas(self) -> Any:
        """Return the metrics as a pandas frame, a row each: value, interval, null, status and reason."""
        import pandas as pd

        rows = [{"metric": name, **m.to_json()} for name, m in self.metrics.items()]
        return pd.DataFrame(rows).set_index("metric") if rows else pd.DataFrame(columns=["value"])

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``auditor audit --json`` prints."""
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "data": self.data,
            "seed": self.seed,
            "metrics": {name: m.to_json() for name, m in self.metrics.items()},
            "explainers": self.explainers,
            "config": self.config,
            "versions": self.versions,
            "card": self.card,
            "time": self.time,
            "seconds": self.seconds,
            "command": self.command,
            # audits of earlier releases keep their digest
            **({} if self.reliance is None else {"reliance": self.reliance}),
            **({"cost": self.cost} if self.cost else {}),
            **({"not_measured": self.not_measured} if self.not_measured else {}),
        }

    def sealed(self) -> bytes:
        """Return the JSON with its own checksum; this is what is stored."""
        return seal(self.to_json())

    @property
    def digest(self) -> str:
        """Sha256 of the sealed JSON."""
        return hashlib.sha256(self.sealed()).hexdigest()

    @classmethod
    def from_json(cls, content: bytes | str | Mapping[str, Any], where: str = "the audit") -> Audit:
        """Restore an audit; bytes or text must be sealed as written, any edit is an error."""
        if isinstance(content, Mapping):
            document = dict(content)
        else:
            raw = content.encode() if isinstance(content, str) else content
            document = unseal(raw, where, "run the audit again")
        version = document.get("schema_version", 0)
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise TamperError(f"{where} is of a newer version; upgrade mlflow-auditor.")
        try:
            parts = {k: document[k] for k in ("model", "data", "seed", "explainers", "config", "versions", "card")}
            metrics = {name: Measure.from_json(entry) for name, entry in document["metrics"].items()}
            rest = {k: document[k] for k in ("time", "seconds", "command")} | {"reliance": document.get("reliance")}
            rest |= {"cost": list(document.get("cost", ())), "not_measured": dict(document.get("not_measured", {}))}
        except (KeyError, TypeError, AttributeError) as error:
            raise TamperError(f"{where} is not an audit of mlflow-auditor ({error} is missing or odd).") from None
        return cls(metrics=metrics, **parts, **rest)


def _is_headline(name: str) -> bool:
    """Whether a metric is of the model or an explainer as a whole, and not of a layer, a class or a concept."""
    return name.count("/") == 1 if name.startswith("model/") else name.count("/") == 2
