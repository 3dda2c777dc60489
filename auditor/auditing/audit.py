"""Audit: all metrics of a subject and its explainers on given data, with intervals, null models and reasons.

``audit(subject, data, {"concepts": explainer})`` measures; the result is sealed JSON (any edit is found) and one page
(see `auditor.reports.audit_report`). Parts that are finished are kept in a cache folder until the whole is.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from auditor.auditing.cache import AuditCache
from auditor.auditing.case import Case, Effort
from auditor.auditing.data_quality import data_quality
from auditor.auditing.explanation_quality import GROUPS, take
from auditor.auditing.images import Answers, AuditImages, HeldOut, answers, choose, class_counts, held_out, shared
from auditor.auditing.model_quality import model_metrics
from auditor.auditing.model_reliance import not_measured, reliance
from auditor.auditing.performance import performance
from auditor.auditing.pictures import finding_pictures, pictures
from auditor.data.source import Data
from auditor.errors import TamperError
from auditor.explainers.base import Explainer, _versions
from auditor.explainers.manifest import seal, unseal
from auditor.metrics.measure import Measure
from auditor.progress import Progress, silent
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
RELIANCE = "model: reliance"
Part = Callable[[], dict[str, Measure]]  # takes some of the measures


class AuditConfig(BaseModel):
    """How much work an audit does. The images are a fixed choice; the seed moves only what is sampled."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = Field(default=0, ge=0, description="Seed of noise, shuffled weights and bootstrap.")
    images: int = Field(default=100, ge=20, description="Images on which explanations are measured.")
    slow_images: int = Field(default=4, ge=2, description="The same for kinds that search per image (rde).")
    refits: int = Field(default=0, ge=0, le=10, description="Re-fits per explainer for basis_stability; 0: the fit's.")
    batch_size: int = Field(default=64, ge=1, description="Images per forward pass.")
    layers: bool = Field(default=True, description="Measure the model's layers too.")
    reliance: bool = Field(default=True, description="Measure what each class hangs on, by interventions.")
    reliance_images: int = Field(default=400, ge=20, description="Images on which reliance is measured, at most.")
    regions: Path | None = Field(default=None, description="Masks, a COCO file or VOC files of the images' objects.")


@dataclass(frozen=True)
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
    pictures: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    finding_pictures: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

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
            **({} if self.reliance is None else {"reliance": self.reliance}),  # old audits keep their digest
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
        """Take back an audit; bytes or text must be sealed as written, any edit is an error."""
        if isinstance(content, Mapping):
            document = dict(content)
        else:
            raw = content.encode() if isinstance(content, str) else content
            document = unseal(raw, where, "run the audit again")
        if document.get("schema_version", 0) > SCHEMA_VERSION:
            raise TamperError(f"{where} is of a newer version; upgrade mlflow-auditor.")
        try:
            parts = {k: document[k] for k in ("model", "data", "seed", "explainers", "config", "versions", "card")}
            metrics = {name: Measure.from_json(entry) for name, entry in document["metrics"].items()}
            rest = {k: document[k] for k in ("time", "seconds", "command")} | {"reliance": document.get("reliance")}
        except (KeyError, TypeError, AttributeError) as error:
            raise TamperError(f"{where} is not an audit of mlflow-auditor ({error} is missing or odd).") from None
        return cls(metrics=metrics, **parts, **rest)


def audit(
    subject: Subject,
    data: Data,
    explainers: Mapping[str, Explainer] | None = None,
    config: AuditConfig | None = None,
    *,
    broken: Mapping[str, str] | None = None,
    cache: Path | None = None,
    progress: Progress = silent,
    command: str = "",
) -> Audit:
    """Measure a subject and its explainers on data: ``audit(subject, data, {"concepts": concepts}).metrics``.

    ``broken`` names explainers that did not verify, with the reason: they count as failed. ``cache`` is a folder in
    which finished parts wait for an interrupted audit to be run again.
    """
    explainers, config, broken = dict(explainers or {}), config or AuditConfig(), dict(broken or {})
    began = time.monotonic()
    said = answers(subject, data, batch_size=config.batch_size, progress=progress)
    held = {name: held_out(e, data, len(said.ids)) for name, e in sorted(explainers.items())}
    chosen = choose(subject, data, said, held, config.images, config.batch_size)
    parts: list[tuple[str, Part]] = []
    if config.layers:
        parts.append(("model: layers", lambda: _layers(subject, chosen, config, progress)))
    # after the layers: what is measured on all of the data replaces what was measured on the chosen images
    parts.append(("model: performance", lambda: _prefixed("model", performance(subject, said, seed=config.seed))))
    for name, explainer in sorted(explainers.items()):
        effort = Effort.of(explainer, config.images, config.refits, config.slow_images)
        case = Case(subject, explainer, chosen, data, effort, config.seed, _named(name, progress))
        parts += [(f"{name}: {group}", _part(name, group, case)) for group in GROUPS]
    store = _cache(cache, subject, data, explainers, config)
    metrics = _measured(parts, store, progress)
    relied, about = _reliance(subject, data, said, explainers, config, store, progress)
    store.clear()
    metrics |= relied
    for name in explainers:
        metrics[f"explainer/{name}/verified"] = Measure(1.0, direction="up")
    for name, reason in broken.items():
        metrics[f"explainer/{name}/verified"] = Measure(0.0, direction="up", status="failed", reason=reason)
    return Audit(
        model=_about_model(subject),
        data=_about_data(subject, data, said, explainers, held, chosen),
        seed=config.seed,
        metrics=metrics,
        explainers={name: _about(e, held[name]) for name, e in sorted(explainers.items())}
        | {name: {"problem": reason} for name, reason in broken.items()},
        config=config.model_dump(mode="json"),
        versions=_versions(),
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - began, 1),
        command=command,
        reliance=about,
        pictures=pictures(subject, explainers, chosen, config.slow_images),
        finding_pictures=finding_pictures(subject, data, about["findings"]),
    )


def _reliance(
    subject: Subject,
    data: Data,
    said: Answers,
    explainers: Mapping[str, Explainer],
    config: AuditConfig,
    cache: AuditCache,
    progress: Progress,
) -> tuple[dict[str, Measure], dict[str, Any]]:
    """Return metrics and findings of reliance, from the cache where an interrupted audit had finished them."""
    if not config.reliance:
        return not_measured("the audit was asked to leave it out (--no-reliance)")
    finished = cache.get(RELIANCE), cache.record(RELIANCE)
    if finished[0] is not None and finished[1] is not None:
        return finished[0], finished[1]
    metrics, about = reliance(
        subject,
        data,
        said,
        explainers,
        n_images=config.reliance_images,
        seed=config.seed,
        batch_size=config.batch_size,
        regions=config.regions,
        progress=progress,
    )
    cache.put(RELIANCE, metrics, about)
    return metrics, about


def _cache(
    folder: Path | None, subject: Subject, data: Data, explainers: Mapping[str, Explainer], config: AuditConfig
) -> AuditCache:
    """Return the cache of this very audit; without a folder where an explainer was never saved and has no digest."""
    return AuditCache(
        folder if all(e.digest_ for e in explainers.values()) else None,
        {
            "model": subject.digest,
            "data": data.digest + data.labels_digest,
            "explainers": {name: e.digest_ for name, e in sorted(explainers.items())},
            "config": config.model_dump(mode="json"),
            "versions": _versions(),
        },
    )


def _measured(parts: list[tuple[str, Part]], cache: AuditCache, progress: Progress) -> dict[str, Measure]:
    """Take every part that is not in the cache; of metrics that two parts give the later counts."""
    metrics: dict[str, Measure] = {}
    progress("audit", 0, len(parts))
    for k, (name, take_part) in enumerate(parts):
        values = cache.get(name)
        if values is None:
            started = time.monotonic()
            values = take_part()
            cache.put(name, values)
            log.info("%s: %d metrics in %.1f s", name, len(values), time.monotonic() - started)
        metrics |= values
        progress("audit", k + 1, len(parts))
    return metrics


def _about_data(
    subject: Subject,
    data: Data,
    said: Answers,
    explainers: Mapping[str, Explainer],
    held: Mapping[str, HeldOut],
    chosen: AuditImages,
) -> dict[str, Any]:
    n_held_out = int(shared(held, len(said.ids)).sum())
    return {
        "spec": data.spec,
        "digest": data.digest,
        **({"labels_digest": data.labels_digest} if data.labels_digest else {}),
        "n": len(said.ids),
        "n_held_out": n_held_out,
        "n_explained": len(chosen),
        "explained": chosen.words(n_held_out),
        **({} if data.limit is None else {"limit": data.limit, "seed": data.seed, "sample": data.sample.words}),
        "unreadable": len(data.skipped),
        **(class_counts(said, subject) | data_quality(subject, said, explainers, held)),
    }


def _about_model(subject: Subject) -> dict[str, Any]:
    return {
        "name": subject.name,
        "version": subject.version,
        "digest": subject.digest,
        "input_shape": list(subject.input_shape),
        "classes": list(subject.class_names),
        "output": subject.output.name,
        "parameters": sum(p.numel() for p in subject.module.parameters()),
    }


def _part(name: str, group: str, case: Case) -> Part:
    return lambda: _prefixed(f"explainer/{name}", take(group, case))


def _prefixed(prefix: str, metrics: Mapping[str, Measure]) -> dict[str, Measure]:
    return {f"{prefix}/{name}": measure for name, measure in metrics.items()}


def _named(name: str, progress: Progress) -> Progress:
    def report(stage: str, done: int, total: int | None) -> None:
        progress(f"{name}: {stage}", done, total)

    return report


def _layers(subject: Subject, chosen: AuditImages, config: AuditConfig, progress: Progress) -> dict[str, Measure]:
    """Return what `auditor.auditing.model_quality` says of the model and its layers."""
    labels = chosen.labels if bool((chosen.labels >= 0).all()) else None
    return dict(model_metrics(subject, chosen.images, labels, seed=config.seed, progress=progress))


def _about(explainer: Explainer, held: HeldOut) -> dict[str, Any]:
    return {
        "kind": explainer.kind,
        "digest": explainer.digest_,
        "layer": explainer.layer_,
        "target": explainer.config.target,
        "fitted_on": explainer.data_digest_,
        "held_out": held.to_json(),
        "metrics": {k: float(v) for k, v in explainer.metrics.items()},
    }
