"""Explainer: fitted to a subject, explains images of it, and lives on disk as an artifact.

The class answers everything the rest of the product asks of a kind; the defaults suit a kind without concepts of its
own. Nothing outside a kind's folder asks which kind an explainer is.
"""

from __future__ import annotations

import logging
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from auditor.data.near_duplicates import MOST, fingerprints
from auditor.data.python_objects import pixels_of_any
from auditor.data.source import Data, open_data
from auditor.errors import ArtifactError, AuditError, OptionError, TamperError, WeakFitError
from auditor.explainers.artifact import Artifact, other_subject, read_artifact, write_artifact
from auditor.explainers.explanation import Explanation
from auditor.explainers.fitted_images import PREFIX, FittedImages
from auditor.explainers.kinds import find_kind, installed_kinds
from auditor.explainers.notebook import explainer_html, shown
from auditor.explainers.standing_in import shortcomings
from auditor.progress import Progress, as_callback, silent
from auditor.runners.cluster import on_cluster
from auditor.subject import travel
from auditor.subject.identity import Identity
from auditor.subject.layers import Layout
from auditor.subject.subject import Subject

if TYPE_CHECKING:
    from PIL.Image import Image

    from auditor.explainers.gallery import Gallery, Shot

log = logging.getLogger(__name__)

FINGERPRINTS = f"{PREFIX}fingerprints"  # name of a tensor of the artifact
LONGEST_LABEL = 80  # characters of a name that a person gives to a concept


class ExplainerConfig(BaseModel):
    """Options every kind has; a kind adds its own. Unknown options are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layer: str | None = Field(default=None, description="Layer to explain; default: the one `auditor layers` suggests.")
    target: int | str | None = Field(default=None, description="Class to explain; default: the model's prediction.")
    seed: int = Field(default=0, ge=0, description="Seed of everything random.")
    batch_size: int = Field(default=64, ge=1, description="Images per forward pass.")

    @property
    def n_refits(self) -> int:
        """Re-fits behind a fit's ``basis_stability``, for a kind that measures it."""
        return 1

    def with_another_start(self, k: int) -> ExplainerConfig:
        """Return the options of the k-th re-fit, which shows what a fit owes to its start."""
        return self.model_copy(update={"seed": self.seed + k})

    def guessed_held_out(self, n: int) -> Tensor | None:
        """Return which of ``n`` images a fit that kept no record of it held out, as far as its options say."""
        return None


class HoldOutConfig(ExplainerConfig):
    """Options of a kind that holds out each n-th image of its data."""

    held_out_every: int = Field(default=5, ge=2, description="Each n-th image is held out for the metrics.")

    def guessed_held_out(self, n: int) -> Tensor | None:
        """Return each n-th of the images, as fits of the first release did on data that they read as a whole."""
        every = self.held_out_every
        return torch.arange(n) % every == every - 1


@dataclass(frozen=True, slots=True)
class FurtherOutput:
    """A value that a shared pass may compute beside the layers and hand to ``explain_from`` under ``key``.

    ``module(subject)`` gives a module in evaluation mode: it takes the activation of ``layer`` (native shape; for
    ``layer`` None the model's normalised input) and returns one tensor with the batch first. It can be exported to
    ONNX. Equal keys mean equal values, so a key holds a digest of what the module was made of.
    """

    key: str
    layer: str | None
    module: Callable[[Subject], nn.Module]


@dataclass(frozen=True, slots=True)
class Reads:
    """What ``explain_from`` reads from a shared pass: layers it needs, further outputs it takes when they are there."""

    layers: tuple[str, ...] = ()
    outputs: tuple[FurtherOutput, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """Names under which the values are handed in."""
        return (*self.layers, *(output.key for output in self.outputs))


class Explainer(ABC):
    """Fitted to a subject, then explains a batch. Learned state ends in an underscore.

    A kind gives ``kind``, ``Config``, ``fit``, ``explain``, and what to store: ``tensors``, ``state`` (JSON) and, when
    it has more, ``files``; ``restore`` puts them back. It overrides the answers below where its own differ.
    Everything else (artifact, checks, table of kinds) is shared.
    """

    kind: ClassVar[str]
    Config: ClassVar[type[ExplainerConfig]] = ExplainerConfig
    per_request: ClassVar[frozenset[str]] = frozenset()  # keywords that ``explain`` takes beyond the target
    searches: ClassVar[bool] = False  # whether an image takes seconds of search instead of one pass
    quick_options: ClassVar[Mapping[str, Any]] = {}  # keywords with which ``explain`` searches less, for audits
    makes_network: ClassVar[bool] = False  # whether ``network`` gives a model that can be registered
    adds_up_by_construction: ClassVar[bool] = False  # whether the last contribution is defined as what is left
    target_value_of: ClassVar[str] = "logit"  # what the contributions add up to, in words
    page_suffixes: ClassVar[tuple[str, ...]] = (".html", ".png")  # of the files ``write_page`` can write
    page_shows_image: ClassVar[bool] = False  # whether the page can show one explained image
    remedy: ClassVar[str] = "take another layer (auditor layers) or more images"  # of a fit that does not stand in
    headline: ClassVar[tuple[str, ...]] = ()  # names of the metrics that sum up a fit, the most telling first

    def __init__(self, config: ExplainerConfig | None = None, /, **options: Any) -> None:
        if config is None:
            config = parse_config(type(self), options)
        self.config: Any = config
        self.name = ""
        self.labels: dict[int, str] = {}
        self.metrics: dict[str, float] = {}
        self.layer_: str | None = None
        self.subject_digest_: str | None = None
        self.origin: Callable[[], Explainer] | None = None  # how another process gets it, where a registry has it
        self.identity_: Identity | None = None  # of the subject; None: fitted by a release that kept the weights' only
        self.data_digest_: str | None = None
        self.content_digest_: str | None = None  # of the whole source; None: rows are counted as they were read
        self.digest_: str | None = None
        self.fingerprints_: Tensor | None = None  # (images, 256) of what was learned from or chosen on, at most MOST
        self.fitted_images: FittedImages | None = None  # None: fitted by a release or a kind that keeps no record

    @abstractmethod
    def fit(self, subject: Subject, data: Any, progress: Progress = silent) -> Any:
        """Fit to the subject on data, whatever ``open_data`` opens, and return self; call ``record_fit`` when done."""

    @abstractmethod
    def explain(self, subject: Subject, images: Any, target: int | str | None = None) -> list[Explanation]:
        """Explain each image; ``target`` is a class; default: the one fitted for, else the prediction."""

    def __repr__(self) -> str:
        label = f"{self.name!r}, " if self.name else ""
        if self.subject_digest_ is None:
            return f"{type(self).__name__}({label}not fitted)"
        layer = f"layer {self.layer_!r}, " if self.layer_ else ""
        return f"{type(self).__name__}({label}{layer}{self.n_concepts} concepts)"

    def _repr_html_(self) -> str:
        return explainer_html(self)

    # what it reads

    def reads(self) -> Reads:
        """Return what ``explain_from`` reads from a shared pass; nothing where it runs the subject itself."""
        return Reads()

    def layers(self) -> list[str]:
        """Return the layers whose activations ``explain_from`` reads."""
        return list(self.reads().layers)

    @property
    def carries_network(self) -> bool:
        """Whether it reads a network kept in the artifact instead of the model's weights."""
        return False

    def prepare(self, subject: Subject) -> None:
        """Do once, before requests come, what would make the first of them slow."""
        return  # most kinds have nothing to prepare

    def network(self, subject: Subject) -> AbstractContextManager[Subject]:
        """Give the network it carries as a subject that can be registered, while the context lasts."""
        raise OptionError(f"register: kind {self.kind} makes no network of its own.")

    # what it explains

    @property
    def search_s(self) -> float | None:
        """Seconds that it searches per image as it was fitted; None: it does not search, or without a limit."""
        return None

    def explain_from(
        self,
        subject: Subject,
        images: Tensor,
        logits: Tensor,
        activations: Mapping[str, Tensor],
        targets: Sequence[int | None],
        *,
        heatmaps: bool = True,
        **options: Any,
    ) -> list[Explanation]:
        """Explain pixels whose logits and ``layers`` a shared pass has already given; None is the default target.

        Gives what ``explain`` gives, row by row, and without ``heatmaps`` may leave those out. A kind that does not
        read layers explains the rows of each target in one call.
        """
        explanations: dict[int, Explanation] = {}
        for target in dict.fromkeys(targets):
            rows = [i for i, t in enumerate(targets) if t == target]
            explanations.update(zip(rows, self.explain(subject, images[rows], target, **options), strict=True))
        return [explanations[i] for i in range(len(targets))]

    def explain_by_passes(self, subject: Subject, images: Any, target: int | str | None) -> list[Explanation]:
        """Explain by one pass of the subject per batch and `explain_from`: what ``explain`` of most kinds does."""
        self.check_subject(subject)
        index = None if target is None else subject.class_index(target)
        explanations: list[Explanation] = []
        for part in torch.split(pixels_of_any(subject, images), self.config.batch_size):
            with torch.no_grad():
                logits, layers = subject.run(part, self.layers())
            explained = self.explain_from(subject, part, logits, layers, [index] * len(part))
            explanations.extend(replace(e, image=shown(x)) for e, x in zip(explained, part, strict=True))
        return explanations

    def explainable_classes(self) -> list[int] | None:
        """Return the classes it was fitted for, by index; None: all of them."""
        return None

    def can_explain(self, target: int) -> bool:
        """Whether there is an explanation of this class."""
        classes = self.explainable_classes()
        return classes is None or target in classes

    def stand_in(self, subject: Subject, images: Tensor) -> Tensor | None:
        """Return the logits (batch, classes) when the explanation stands in for the model; None: only the target's."""
        return None

    def remarks(self) -> list[str]:
        """Return what the fit has to say of its images and choices, a sentence each."""
        return []

    def shortcomings(self) -> list[str]:
        """Return, from the fit's metrics, why it does not stand in for the model; nothing where it does."""
        return shortcomings(self.metrics)

    def check_stands_in(self) -> None:
        """Raise what is wrong and what to try when it does not stand in for the model."""
        reasons = self.shortcomings()
        if reasons:
            raise WeakFitError(
                f"{self.kind} {self.name or self.kind!r} does not stand in for the model and is not attached: "
                f"{'; '.join(reasons)}. Try this: {self.remedy}; or attach it as it is (--attach-anyway, in Python "
                "attach_anyway=True)."
            )

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the learned tensors."""

    def state(self) -> dict[str, Any]:
        """Return learned state that is not a tensor, ready for JSON."""
        return {}

    def files(self) -> dict[str, bytes]:
        """Return further files of the artifact (``tree.json``, ``explain.onnx``)."""
        return {}

    @abstractmethod
    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any], files: dict[str, bytes]) -> None:
        """Restore from what ``tensors``, ``state`` and ``files`` gave."""

    # its concepts

    @property
    def concepts_are_of_class(self) -> bool:
        """Whether images of different classes are explained with different concepts: a head, or a basis, per class."""
        return False

    @property
    def n_concepts(self) -> int:
        """Number of concepts that can be named; 0 for a kind without a fixed list of them."""
        return 0

    @property
    def gallery(self) -> Gallery | None:
        """The images that show each concept best, when the kind keeps some."""
        return None

    @property
    def contributions_by_class(self) -> Tensor | None:
        """Mean contribution (concepts, classes) when the class is predicted, when the kind measures it."""
        return None

    @property
    def groups(self) -> list[list[int]]:
        """Concepts that fire together in the same places, as groups of their numbers; each alone where unknown."""
        return [[k] for k in range(self.n_concepts)]

    @property
    def sections(self) -> list[tuple[str, range]]:
        """Concepts that belong together, each run of them with a title; one run without a title for most kinds."""
        return [("", range(self.n_concepts))]

    def concept_directions(self) -> Tensor | None:
        """Return its concepts as directions (channels, concepts) of ``layer_``, where they are that."""
        return None

    def score_maps(self, subject: Subject, z: Tensor, concepts: Sequence[int] | None = None) -> Tensor:
        """Return how strongly concepts (default: all) are seen where, (batch, concepts, positions).

        ``z`` is the layer's output.
        """
        raise OptionError(f"concepts of kind {self.kind} have no score maps over a layer.")

    def layer_scores(self, subject: Subject, z: Tensor, concepts: Sequence[int] | None = None) -> tuple[Layout, Tensor]:
        """Return how it reads its layer, and the scores of concepts at all positions of that reading.

        They are the score maps, but where it also reads tokens that have no place in the image.
        """
        assert self.layer_ is not None
        return subject.layout(self.layer_), self.score_maps(subject, z, concepts)

    def label(self, index: int) -> str:
        """Return the name a person gave to a concept, or a plain one."""
        return self.labels.get(index, f"concept {index}")

    def gallery_label(self, index: int) -> str:
        """Return what the pictures at ``index`` of the gallery show."""
        return self.label(index)

    def rename(self, index: int, text: str) -> None:
        """Give concept ``index`` a name; save the explainer to make a new revision of the artifact."""
        n = self.n_concepts
        if n == 0:
            raise OptionError(f"label: the {self.kind} explainer {self.name!r} has no concepts that can be named.")
        if not 0 <= index < n:
            raise OptionError(
                f"label: {self.name or self.kind} has concepts 0 to {n - 1}, got {index}; name one of these."
            )
        text = " ".join(text.split())
        if not 1 <= len(text) <= LONGEST_LABEL or not text.isprintable():
            raise OptionError(f"label: want a name of 1 to {LONGEST_LABEL} printable characters, got {len(text)}.")
        self.labels[index] = text

    # as pictures and text

    def picture(self, index: int, shot: Shot, side: int = 96) -> Image:
        """Return one picture of the gallery with its heatmap."""
        from auditor.attribution.heatmap import overlay

        return overlay(shot.crop.float() / 255, shot.heat.float() / 255, side=side, top=1.0)

    def write_page(
        self, subject: Subject, path: str | Path, explanation: Explanation | None = None, image: Tensor | None = None
    ) -> Path:
        """Write the page of its concepts to ``path`` (one of ``page_suffixes``) and return it.

        Where ``page_shows_image``, an explanation and the image's pixels are drawn into it.
        """
        from auditor.explainers.concept_page import ConceptPage

        return ConceptPage(self, subject).write(path)

    def lines(self, explanation: Explanation) -> list[str]:
        """Return what an explanation says beyond its table of concepts, as lines of text."""
        return []

    def record_fit(
        self,
        subject: Subject,
        data: Data,
        layer: str | None,
        images: FittedImages | None = None,
        read: Data | None = None,
    ) -> None:
        """Note what was fitted to, and which images were used for what, in the order in which they were read.

        ``read`` is the part of ``data`` that was read (``data.only(drawn)``) where it was not all of it.
        """
        self.layer_, self.data_digest_, self.content_digest_ = layer, data.digest, data.content_digest
        self.subject_digest_, self.identity_ = subject.digest, subject.identity
        source = read or data
        self.fitted_images = None if images is None else images.within(source.readable_rows, source.sample.total)
        self.fingerprints_ = None if self.fitted_images is None else _fingerprints(subject, data, self.fitted_images)

    def check_subject(self, subject: Subject) -> None:
        """Raise when it is not fitted yet, or was fitted to another model."""
        if self.subject_digest_ is None:
            raise OptionError(f"the {self.kind} explainer is not fitted yet; call fit first.")
        problem = other_subject(self.subject_digest_, self.identity_, subject.identity)
        if problem:
            raise TamperError(f"the {self.kind} explainer {self.name!r} {problem}; fit it to this model.")

    def targets_for(
        self, subject: Subject, logits: Tensor, target: int | str | Sequence[int | None] | None
    ) -> list[int]:
        """Return the class to explain per row: the one asked for, else the one fitted for, else the prediction."""
        requested = [target] * len(logits) if target is None or isinstance(target, (int, str)) else target
        default = self.config.target
        chosen = [default if t is None else t for t in requested]
        predicted: list[int] = logits.argmax(1).tolist()
        return [p if t is None else subject.class_index(t) for t, p in zip(chosen, predicted, strict=True)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Travel to another process, which loads it by its origin where a registry has it."""
        if self.origin is None or self.digest_ is None:
            return super().__reduce_ex__(protocol)
        return arrive, (self.origin, self.digest_, self.name, self.labels)

    def save(self, folder: str | Path, subject: Subject | None = None) -> str:
        """Write the artifact and return its digest; the same seed and input give the same bytes.

        With ``subject``, the artifact names its identity: a module in memory that was fitted to has no graph to name.
        """
        if self.subject_digest_ is None:
            raise OptionError(f"the {self.kind} explainer is not fitted yet; call fit before save.")
        if subject is not None:
            self.check_subject(subject)
        identity = self.identity_ if subject is None else subject.identity
        manifest = {
            "kind": self.kind,
            "config": self.config.model_dump(mode="json"),
            "layer": self.layer_,
            "target": self.config.target,
            "seed": self.config.seed,
            "subject_digest": self.subject_digest_ if identity is None else identity.digest,
            **({} if identity is None else {"subject": identity.to_json()}),
            "data_digest": self.data_digest_,
            **({} if self.content_digest_ is None else {"content_digest": self.content_digest_}),
            "metrics": {k: float(v) for k, v in self.metrics.items()},
            "headline": list(self.headline),
            "labels": {str(k): v for k, v in self.labels.items()},
            "state": self.state(),
            "versions": _versions(),
        }
        provider = _provider(type(self))
        if provider is not None:  # where the package is missing, loading says what to install
            manifest["provider"] = provider
        tensors = self.tensors()
        if any(name.startswith(PREFIX) for name in tensors):
            raise ArtifactError(
                f"kind {self.kind}: tensor names that begin with {PREFIX!r} are kept for the base class."
            )
        if self.fitted_images is not None:
            manifest["fitted_images"] = self.fitted_images.to_json()
            tensors = tensors | self.fitted_images.tensors()
        if self.fingerprints_ is not None:
            tensors = tensors | {FINGERPRINTS: torch.from_numpy(np.packbits(self.fingerprints_.numpy(), axis=1))}
        self.digest_ = write_artifact(folder, manifest, tensors, self.files())
        return self.digest_

    @classmethod
    def load(cls, folder: str | Path, subject: Subject | None = None, digest: str | None = None) -> Explainer:
        """Read an artifact of any kind after verifying every checksum, and the subject's digest when given."""
        artifact = read_artifact(folder, digest=digest, identity=subject.identity if subject else None)
        return _restore(artifact)


def arrive(origin: Callable[[], Explainer], digest: str, name: str, labels: dict[int, str]) -> Explainer:
    """Return the explainer of an origin, loaded once in this process; one of another digest is refused."""

    def load() -> Explainer:
        explainer = origin()
        if explainer.digest_ != digest:
            raise TamperError(
                f"explainer {name!r} was loaded by a worker with digest {str(explainer.digest_)[:12]}, and the command "
                f"that asks has {digest[:12]}: it was attached again meanwhile; run the command again."
            )
        explainer.origin = origin
        return explainer

    explainer = travel.once(f"explainer {digest} {name}", load)
    explainer.name, explainer.labels = name, labels
    return explainer


def _restore(artifact: Artifact) -> Explainer:
    manifest = artifact.manifest
    cls = explainer_class(manifest["kind"], manifest.get("provider"))
    retired = sorted(manifest["config"].keys() - cls.Config.model_fields.keys())
    if retired:  # the schema is not newer than ours, so these are options of an earlier release
        log.info("%s: options of an earlier release are left out: %s", cls.kind, ", ".join(retired))
    explainer = cls(**{k: v for k, v in manifest["config"].items() if k not in retired})
    explainer.layer_ = manifest["layer"]
    explainer.subject_digest_ = manifest["subject_digest"]
    explainer.identity_ = Identity.from_json(manifest.get("subject"))
    explainer.data_digest_, explainer.content_digest_ = manifest["data_digest"], manifest.get("content_digest")
    explainer.metrics = {k: float("nan") if v is None else float(v) for k, v in manifest["metrics"].items()}
    explainer.labels = {int(k): str(v) for k, v in manifest["labels"].items()}
    explainer.digest_ = artifact.digest
    of_kind = {name: tensor for name, tensor in artifact.tensors.items() if not name.startswith(PREFIX)}
    if manifest.get("fitted_images") is not None:
        explainer.fitted_images = FittedImages.restore(artifact.tensors, manifest["fitted_images"])
    if FINGERPRINTS in artifact.tensors:
        bits = np.unpackbits(artifact.tensors[FINGERPRINTS].numpy(), axis=1)
        explainer.fingerprints_ = torch.from_numpy(bits.astype(bool))
    explainer.restore(of_kind, manifest["state"], artifact.files)
    return explainer


def _fingerprints(subject: Subject, data: Data, images: FittedImages) -> Tensor | None:
    """Return the fingerprints of the images a fit depends on; None where there are none."""
    used = images.used[torch.from_numpy(data.sample.rows)]
    return fingerprints(data, subject, data.spaced(MOST, among=used)) if bool(used.any()) else None


def explainer_class(kind: str, provider: Any = None) -> type[Explainer]:
    """Return the class of an installed kind; ``provider`` is what a manifest says of the package that brings it.

    >>> [explainer_class(kind).kind == kind for kind in available_kinds()[:2]]
    [True, True]
    """
    entry = find_kind(kind, provider)
    cls = entry.load()
    if not (isinstance(cls, type) and issubclass(cls, Explainer)) or cls.kind != kind:
        raise ArtifactError(
            f"kind {kind!r} of package {entry.package}: {entry.where} must be a subclass of auditor.Explainer whose "
            f"kind is {kind!r}; report this to its authors."
        )
    return cls


def available_kinds() -> list[str]:
    """Return the kinds that can be used here."""
    return [kind.name for kind in installed_kinds()]


def parse_config(cls: type[Explainer], options: Mapping[str, Any]) -> ExplainerConfig:
    """Check options against a kind's configuration; the first problem becomes one sentence."""
    try:
        return cls.Config(**options)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "options"
        names = ", ".join(sorted(cls.Config.model_fields))
        if first["type"] == "extra_forbidden":
            raise OptionError(f"{cls.kind}: unknown option {where!r}; the options are {names}.") from None
        raise OptionError(f"{cls.kind}: option {where!r}: {first['msg'].lower()}, got {first['input']!r}.") from None


def fit(
    kind: str,
    subject: Subject,
    data: Any,
    *,
    progress: Progress | bool = silent,
    cluster: str | None = None,
    **options: Any,
) -> Any:
    """Fit an explainer of a kind to a subject on data; options are those of the kind's configuration.

    ``fit(kind, subject, loader, layer="layer3", seed=0)``: data is whatever `open_data` opens, such as a ``DataLoader``
    or ``"images.npz"``; `auditor kinds` lists kinds and options. ``progress=True`` draws bars. ``cluster`` is a Ray
    cluster to run on: "auto", "local" or "ray://HOST:10001".
    """
    explainer = explainer_class(kind)(**options)
    with on_cluster(cluster):
        return explainer.fit(subject, open_data(data), as_callback(progress))


def _provider(cls: type[Explainer]) -> dict[str, str] | None:
    """Return the package that brings the kind; nothing for ours, and for a class that no package has announced."""
    try:
        return find_kind(cls.kind).provider()
    except AuditError:
        return None


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": platform.python_version(), "torch": torch.__version__.partition("+")[0]}
    for package in ("mlflow-auditor", "numpy", "scikit-learn"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions
