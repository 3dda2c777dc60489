"""Staleness: whether a stored audit, or a verdict, is still about the version as it is now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from auditor.plugins.registry.tags import AuditTag, GateTag

if TYPE_CHECKING:
    from auditor.auditing.record import Audit
    from auditor.data.source import Data
    from auditor.plugins.registry.model_record import ModelRecord


@dataclass(frozen=True, slots=True)
class ExplainerChanges:
    """The names of the explainers that are not what they were, in alphabetical order."""

    attached: tuple[str, ...]
    replaced: tuple[str, ...]
    detached: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """Return all of them."""
        return sorted((*self.attached, *self.replaced, *self.detached))

    def sentences(self) -> list[str]:
        """Return one sentence per sort of change.

        >>> explainer_changes({"a": "1", "b": "2"}, {"b": "3", "c": "4"}).sentences()
        ['c was attached after the audit.', 'b was replaced after the audit.', 'a was detached after the audit.']
        """
        sorts = ((self.attached, "attached"), (self.replaced, "replaced"), (self.detached, "detached"))
        return [
            f"{', '.join(names)} {'was' if len(names) == 1 else 'were'} {what} after the audit."
            for names, what in sorts
            if names
        ]


def explainer_changes(
    then: Mapping[str, str | None], now: Mapping[str, str | None], *, verified: bool = True
) -> ExplainerChanges:
    """Compare the digests of explainers at the time of an audit with those of now; None is one that did not verify.

    Where the digests of now are only read off the tags (``verified=False``), it is unknown whether one that did not
    verify then does so now, so it is not called replaced.
    """
    common = [name for name in then if name in now and (verified or then[name] is not None)]
    return ExplainerChanges(
        attached=tuple(sorted(set(now) - set(then))),
        replaced=tuple(sorted(name for name in common if then[name] != now[name])),
        detached=tuple(sorted(set(then) - set(now))),
    )


def stale_reason(
    audit: Audit, model: ModelRecord, attached: Mapping[str, str | None], data: Data | None, graph: str | None = None
) -> str:
    """Return why an audit is not about the version as it is now; empty when it is.

    ``attached`` maps each explainer to its digest, or to None when it does not verify; ``data`` are the images wanted;
    ``graph`` is the digest of the ONNX graph, empty without one, and None where nobody asks.
    """
    reason = _other_model(audit, model)
    if reason:
        return reason
    if list(model.class_names) != audit.model["classes"]:
        return "the class names have changed since"
    if audit.model.get("output", model.output) != model.output:
        return f"the model's outputs were read as {audit.model['output']}, now as {model.output}"
    changed = explainer_changes({name: info.get("digest") for name, info in audit.explainers.items()}, attached).names
    if changed:
        return f"what is attached has changed since ({', '.join(changed)})"
    if graph is not None and audit.model.get("onnx", graph) != graph:
        return "the ONNX graph has changed since"
    if data is not None and audit.data["digest"] != data.digest:
        return f"it was made on other data ({audit.data['spec']})"
    if data is not None and audit.data.get("labels_digest", "") != data.labels_digest:
        return "it was made with other --labels"
    return ""


def _other_model(audit: Audit, model: ModelRecord) -> str:
    """Return how the model differs from the one that was audited, by its parts and its files."""
    from auditor.subject.identity import Identity

    identity = Identity.from_json(audit.model.get("identity"))
    if identity is None and audit.model["digest"] == model.identity.weights:
        return "its digest is of version 1, which covers the weights but neither graph nor preprocessing"
    if identity is None or identity.digest != audit.model["digest"]:
        return f"it is of a model with digest {audit.model['digest'][:12]}, this one has {model.digest[:12]}"
    parts = identity.differences(model.identity)
    if parts:
        return f"the model has other {' and '.join(parts)} now"
    files = audit.model.get("files") or model.files  # an audit of a module in memory names none
    changed = sorted(name for name in {*files, *model.files} if files.get(name) != model.files.get(name))
    return f"files of the model have changed since ({', '.join(changed[:5])})" if changed else ""


def outdated(explainers: Mapping[str, str | None], audit: AuditTag | None, gate: GateTag | None) -> list[str]:
    """Return what the tags alone say of an audit and a verdict that are no longer about the version, in sentences."""
    sentences = []
    if audit is not None and not audit.problem:
        sentences += explainer_changes(audit.explainers, explainers, verified=False).sentences()
    if gate is not None and not gate.problem:
        if audit is None:
            sentences.append("The gate's verdict refers to an audit that is no longer here.")
        elif gate.audit_digest != audit.digest:
            sentences.append("The gate's verdict is about an earlier audit.")
    return sentences
