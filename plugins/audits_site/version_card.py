"""Version card: what the tags of a model version say, without opening a single artifact.

A tag of the wrong shape becomes a problem on the card, never an error of the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from auditor.plugins.registry.staleness import outdated
from auditor.plugins.registry.tags import (
    PICTURE,
    AuditTag,
    ExplainerTag,
    GateTag,
    audit_tag,
    explainer_tags,
    gate_tag,
)
from auditor.plugins.registry.version_page import without_section


@dataclass(frozen=True, slots=True)
class FailedCheck:
    """A limit that did not hold, as the verdict's file says it."""

    metric: str
    value: float
    limit: str
    reason: str
    baseline: float | None


@dataclass(frozen=True, slots=True)
class VersionCard:
    """A version with what is attached to it."""

    name: str
    version: str
    created_ms: int
    description: str
    run_id: str
    aliases: tuple[str, ...]
    explainers: tuple[ExplainerTag, ...]
    audit: AuditTag | None
    gate: GateTag | None
    unverified: str = ""  # why the verdict proves nothing; set where its file was looked at
    signer: str = ""  # who signed the verdict, among the keys the server trusts
    failed: tuple[FailedCheck, ...] = ()  # from the verdict's file, once that was checked

    @property
    def uri(self) -> str:
        """Return how commands name it."""
        return f"models:/{self.name}/{self.version}"

    @property
    def picture(self) -> bool:
        """Whether the audit came with a picture of what the classes hang on."""
        return self.audit is not None and not self.audit.problem and PICTURE in self.audit.files

    @property
    def relied_on(self) -> bool:
        """Whether a limit failed that is about what the classes hang on."""
        return any(check.metric.startswith("model/reliance/") for check in self.failed)

    @property
    def outdated(self) -> list[str]:
        """Return why the audit and the verdict may no longer describe this version, one sentence each."""
        return outdated({e.name: e.digest for e in self.explainers}, self.audit, self.gate)


def version_card(entry: Mapping[str, Any]) -> VersionCard:
    """Return the card of a version as MLflow's REST interface gives it.

    >>> card = version_card({"name": "m", "version": "1", "aliases": ["new"]})
    >>> card.uri, card.aliases, card.gate
    ('models:/m/1', ('new',), None)
    """
    tags = {str(t.get("key")): str(t.get("value", "")) for t in entry.get("tags", [])}
    return VersionCard(
        name=str(entry["name"]),
        version=str(entry["version"]),
        created_ms=int(entry.get("creation_timestamp", 0)),
        description=without_section(str(entry.get("description", ""))),
        run_id=str(entry.get("run_id", "")),
        aliases=tuple(sorted(str(a) for a in entry.get("aliases", []))),
        explainers=tuple(explainer_tags(tags)),
        audit=audit_tag(tags),
        gate=gate_tag(tags),
    )
