"""Served version: one model version with its explainers, all verified, never changed once loaded.

A worker asks the registry now and then; when the alias has moved or something else is attached, it loads anew beside
the old one and swaps a reference. Requests keep the version they began with.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from torch import Tensor

from auditor.errors import AuditError, OptionError, SignatureError
from auditor.explainers.answer import ExplainedModel, Question
from auditor.explainers.answer_options import AnswerOptions
from auditor.explainers.base import Explainer
from auditor.explainers.forward_pass import ForwardPass
from auditor.plugins.registry.location import ModelVersion, mlflow_errors, resolve
from auditor.plugins.registry.tags import GATE, what_is_served
from auditor.service.answer_pictures import picture, tinted
from auditor.service.forward_pass import choose_pass
from auditor.service.settings import Settings
from auditor.signing.keys import read_trusted
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)

N_SAMPLES = 12


@dataclass(frozen=True)
class ServedVersion:
    """One version of a model, ready to answer."""

    uri: str
    name: str
    version: str
    fingerprint: str
    explained: ExplainedModel
    time: str
    samples: list[dict[str, str]] = field(default_factory=list)

    @property
    def subject(self) -> Subject:
        """The model itself."""
        return self.explained.subject

    @property
    def explainers(self) -> Mapping[str, Explainer]:
        """The attached explainers by name."""
        return self.explained.explainers

    @property
    def forward(self) -> ForwardPass:
        """What runs the forward pass."""
        return self.explained.forward

    @property
    def is_expired(self) -> bool:
        """Whether the certificate of whoever said that it passed has expired since."""
        expires = (self.explained.attestation or {}).get("expires")
        return bool(expires) and datetime.now(timezone.utc) >= datetime.fromisoformat(str(expires))

    @property
    def label(self) -> str:
        """Return how logs name it."""
        return f"models:/{self.name}/{self.version}" if self.name else self.uri

    def question(self, x: Tensor, options: AnswerOptions, settings: Settings) -> Question:
        """Check what is asked of an image against the model; the server's time to search stands in for none given."""
        if options.timeout_s is None and settings.search_timeout_s is not None:
            options = options.model_copy(update={"timeout_s": settings.search_timeout_s})
        return Question.of(self.explained, x, options)

    def describe(self) -> list[dict[str, Any]]:
        """Return what ``GET /explainers`` answers."""
        from auditor.explainers.manifest import finite

        return [
            {
                "name": name,
                "kind": e.kind,
                "digest": e.digest_ or "",
                "layer": e.layer_,
                "labels": {k: e.label(k) for k in range(e.n_concepts)},
                "n_concepts": e.n_concepts,
                "metrics": finite(e.metrics),
                "per_request": sorted(e.per_request),
                "default": name in self.explained.default_names,
                "searches": e.searches,
                "groups": e.groups,
                "gallery": e.gallery is not None,
                "gallery_of_concepts": _shows_concepts(e),
                "target_value_of": e.target_value_of,
                "classes": e.explainable_classes(),
            }
            for name, e in self.explainers.items()
        ]

    def gallery(self, name: str, concept: int = 0) -> dict[str, Any]:
        """Return what ``GET /gallery/{name}`` answers: the pictures the artifact keeps of each concept.

        Of an explainer with concepts per class they are those of the class that ``concept`` belongs to.
        """
        e = self.explainers[name]
        sections = e.sections
        section = next((i for i, (_, some) in enumerate(sections) if concept in some), 0)
        chosen = sections[section][1] if len(sections) > 1 else None
        concepts = []
        for k, shots in enumerate(e.gallery.shots if e.gallery is not None else []):
            assert e.gallery is not None
            if chosen is not None and k not in chosen:
                continue
            pictures = [
                {
                    "id": shot.id,
                    "label": e.gallery.label_of(shot, self.subject.class_names),
                    "score": float(shot.score),
                    "box": [float(v) for v in shot.box],
                    "image": picture(shot.crop),
                    "heat": picture(tinted(shot.crop, shot.heat) if shot.heat.numel() > 1 else shot.crop),
                }
                for shot in shots
            ]
            concepts.append({"index": k, "label": e.gallery_label(k), "pictures": pictures})
        listed = [{"title": title, "first": some.start} for title, some in sections] if chosen is not None else []
        return {"explainer": name, "kind": e.kind, "concepts": concepts, "sections": listed, "section": section}


def fingerprint(version: ModelVersion, settings: Settings | None = None) -> str:
    """Return what changes when the version, or anything attached to it, changes.

    Where a verdict is required, that is also the verdict, and whether each trusted key counts now.
    """
    parts: list[Any] = [version.name, version.version, version.root, what_is_served(version.tags)]
    if settings is not None and settings.require_verdict is not None:
        parts += [version.tags.get(GATE), read_trusted(settings.require_verdict).state()]
    return hashlib.sha256(repr(tuple(parts)).encode()).hexdigest()


def load_version(settings: Settings, version: ModelVersion | None = None) -> ServedVersion:
    """Load the model with everything attached; anything that does not verify is an error, and nothing is served."""
    from auditor.plugins.registry.attachments import load, names
    from auditor.plugins.registry.subjects import check_notes, load_subject

    version = version or resolve(settings.model)  # once: the alias may move while we load
    with mlflow_errors(f"verify {version.label}"):
        check_notes(version)
    subject = load_subject(version, allow_pickle=settings.allow_pickle or None)
    attestation = _attestation(settings, version, subject)
    move_subject(subject, settings)
    explainers = {name: load(version, name, subject=subject) for name in (names(version) if version.name else [])}
    for explainer in explainers.values():
        explainer.prepare(subject)
    return ServedVersion(
        uri=settings.model,
        name=version.name,
        version=version.version,
        fingerprint=fingerprint(version, settings),
        explained=ExplainedModel.of(
            subject,
            explainers,
            forward=choose_pass(settings, version, subject, explainers),
            search_limit_s=settings.max_search_timeout_s,
            attestation=attestation,
        ),
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        samples=_samples(settings, subject),
    )


def _attestation(settings: Settings, version: ModelVersion, subject: Subject) -> dict[str, str] | None:
    """Return who says that this version passed its gate; an error where it is required and nobody trusted does."""
    if settings.require_verdict is None:
        return None
    from auditor.plugins.registry.attestations import passed_by

    if not version.name:
        raise SignatureError(f"{version.label}: --require-verdict is for versions of registered models.")
    attestation = passed_by(version, subject, read_trusted(settings.require_verdict))
    return {k: getattr(attestation, k) for k in ("digest", "signer", "keyid", "time", "says", "expires")}


def move_subject(subject: Subject, settings: Settings) -> None:
    """Put the model where the settings want it: by default on a GPU when there is one, in single precision."""
    import torch

    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise OptionError(f"device {device}: torch finds no GPU here; take --device cpu.")
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[settings.precision]
    if device != "cpu" or dtype != torch.float32:
        try:
            subject.to(device, dtype)
        except (RuntimeError, AssertionError) as error:
            raise OptionError(f"device {device}: {' '.join(str(error).split())[:160]}") from error


def _samples(settings: Settings, subject: Subject) -> list[dict[str, str]]:
    """Return a few images of the configured data source, one per class first."""
    if not settings.sample_images:
        return []
    from auditor.data.source import open_data

    try:
        batch = next(iter(open_data(settings.sample_images, limit=200).batches(subject, 200)))
    except (AuditError, StopIteration) as error:
        log.warning("no sample images: %s", error)
        return []
    labels: list[int] = batch.labels.tolist()
    first = [labels.index(k) for k in dict.fromkeys(labels)]
    rows = (first + [i for i in range(len(labels)) if i not in first])[:N_SAMPLES]
    names = subject.class_names
    return [
        {
            "name": batch.ids[i],
            "label": names[labels[i]] if 0 <= labels[i] < len(names) else "",
            "image": picture(batch.images[i]),
        }
        for i in sorted(rows, key=lambda i: labels[i])
    ]


def _shows_concepts(e: Explainer) -> bool:
    """Whether the pictures at an index of the gallery are of the concept with this index."""
    return e.gallery is not None and all(e.gallery_label(k) == e.label(k) for k in range(len(e.gallery.shots)))
