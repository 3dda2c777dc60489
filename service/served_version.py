"""What a worker serves: one model version with its explainers, all verified, never changed once loaded.

A worker asks the registry now and then; when the alias has moved or something else is attached, it loads anew beside
the old one and swaps a reference. Requests keep the version they began with.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from typing import Any

from auditor.errors import AuditError, OptionError
from auditor.explainers.base import Explainer
from auditor.plugins.registry.location import Place, mlflow_errors, resolve
from auditor.service.answer_pictures import picture
from auditor.service.forward_pass import Runner, choose_runner
from auditor.service.settings import Settings
from auditor.subject.subject import Subject
from auditor.network.above_layer import prepare_tail

log = logging.getLogger(__name__)

SEARCHING = frozenset({"rde"})  # kinds that search per image: seconds, not one pass
N_SAMPLES = 12


@dataclass(frozen=True)
class Loaded:
    """One version of a model, ready to answer."""

    uri: str
    name: str
    version: str
    fingerprint: str
    subject: Subject
    explainers: dict[str, Explainer]
    runner: Runner
    time: str
    samples: list[dict[str, str]] = field(default_factory=list)

    @property
    def label(self) -> str:
        """Return how logs name it."""
        return f"models:/{self.name}/{self.version}" if self.name else self.uri

    @cached_property
    def model(self) -> dict[str, str]:
        """Return what every answer says of the model."""
        return {"name": self.name, "version": self.version, "digest": self.subject.digest}

    @cached_property
    def default_names(self) -> list[str]:
        """Return the explainers that answer when none is named: all that do not search, or else all."""
        quick = [name for name, e in self.explainers.items() if e.kind not in SEARCHING]
        return quick or list(self.explainers)

    @cached_property
    def stability_layer(self) -> str:
        """Return the layer whose movement the stability measures: the explained one."""
        found = next((e.layer_ for e in self.explainers.values() if e.layer_), None)
        return found or self.subject.default_layer()

    def describe(self) -> list[dict[str, Any]]:
        """Return what ``GET /explainers`` answers."""
        from auditor.explainers.artifact import finite

        return [
            {
                "name": name,
                "kind": e.kind,
                "digest": e.digest_ or "",
                "layer": e.layer_,
                "labels": {k: e.label(k) for k in range(n_concepts(e))},
                "n_concepts": n_concepts(e),
                "metrics": finite(e.metrics),
                "per_request": sorted(e.per_request),
                "default": name in self.default_names,
                "gallery": hasattr(e, "gallery_"),
                "classes": getattr(e, "classes_", None),
            }
            for name, e in self.explainers.items()
        ]

    def gallery(self, name: str) -> dict[str, Any]:
        """Return what ``GET /gallery/{name}`` answers: the pictures the artifact keeps of each concept."""
        e = self.explainers[name]
        kept = getattr(e, "gallery_", None)
        names = self.subject.class_names
        concepts = []
        for k, shots in enumerate(kept.shots if kept is not None else []):
            pictures = [
                {
                    "id": shot.id,
                    "label": names[shot.label] if 0 <= shot.label < len(names) else "",
                    "score": float(shot.score),
                    "box": [float(v) for v in shot.box],
                    "image": picture(shot.crop),
                    "heat": picture(_tinted(shot.crop, shot.heat) if shot.heat.numel() > 1 else shot.crop),
                }
                for shot in shots
            ]
            label = getattr(e, "gallery_label", e.label)(k)  # a tree keeps pictures of its leaves, not of its features
            concepts.append({"index": k, "label": label, "pictures": pictures})
        return {"explainer": name, "kind": e.kind, "concepts": concepts}


def n_concepts(e: Explainer) -> int:
    """Return how many concepts an explainer speaks of; 0 where it has none of its own."""
    for attribute, axis in (("W_", 1), ("F_", 0), ("importance_", 0)):
        value = getattr(e, attribute, None)
        if value is not None:
            return int(value.shape[axis])
    heads = getattr(e, "heads_", None)
    if heads is not None:
        return int(heads.n_features)
    return int(getattr(e.config, "n_features", 0) or 0)


def fingerprint(place: Place) -> str:
    """Return what changes when the version, or anything attached to it, changes."""
    own = sorted((k, v) for k, v in place.tags.items() if k.startswith("auditor.") and not k.startswith("auditor.release.gate"))
    return hashlib.sha256(repr((place.name, place.version, place.root, own)).encode()).hexdigest()


def load_model(settings: Settings) -> Loaded:
    """Load the model with everything attached; anything that does not verify is an error, and nothing is served."""
    from auditor.plugins.registry.subjects import check_notes, load_subject
    from auditor.plugins.registry.attachments import load, names

    place = resolve(settings.model)
    mark = fingerprint(place)
    uri = place.label  # pinned: the alias may move while we load
    with mlflow_errors(f"verify {uri}"):
        check_notes(place)
    subject = load_subject(uri, allow_pickle=settings.allow_pickle or None)
    move_subject(subject, settings)
    explainers = {name: load(uri, name, subject=subject) for name in (names(uri) if place.name else [])}
    for layer in {e.layer_ for e in explainers.values() if e.layer_ and e.kind in ("nmf", "coupled")}:
        prepare_tail(subject, layer)
    runner = choose_runner(settings, place, subject, explainers)
    stamp = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Loaded(
        uri=settings.model,
        name=place.name,
        version=place.version,
        fingerprint=mark,
        subject=subject,
        explainers=explainers,
        runner=runner,
        time=stamp,
        samples=_samples(settings, subject),
    )


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
            subject.move(device, dtype)
        except (RuntimeError, AssertionError) as error:
            raise OptionError(f"device {device}: {' '.join(str(error).split())[:160]}") from error


def _samples(settings: Settings, subject: Subject) -> list[dict[str, str]]:
    """Return a few images of the configured data source, one per class first."""
    if not settings.samples:
        return []
    from auditor.data.source import open_data

    try:
        batch = next(iter(open_data(settings.samples, limit=200).batches(subject, 200)))
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


def _tinted(crop: Any, heat: Any) -> Any:
    """Return a crop with the concept laid over it in red; as it is where the kind does not tell where it is seen."""
    import torch

    from auditor.attribution.heatmap import RED

    if bool((heat == heat.flatten()[0]).all()):
        return crop
    rgb = crop.float().expand(3, -1, -1) if crop.shape[0] != 3 else crop.float()
    share = heat.float()[None] / 255 * 0.75
    return ((rgb * 0.6 + 60) * (1 - share) + torch.tensor(RED).float()[:, None, None] * share).clamp(0, 255).byte()
