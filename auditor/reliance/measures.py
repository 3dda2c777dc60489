"""Reliance of every class: all interventions on one sample of images, under a budget of forward passes per image.

``measure(subject, images, labels)`` samples at most so many images per class, finds the deciding regions, hides, keeps
and transplants them, and returns one `ClassReliance` per class with its numbers, nulls and pictures. Classes with too
few images are skipped with that reason. Without labels the model's own predictions are used
instead, and the result says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from sklearn.metrics import roc_auc_score
from torch import Tensor

from auditor.errors import DataError
from auditor.progress import Progress, silent
from auditor.reliance.fills import FILLS
from auditor.reliance.heat import Heat, margins, plain_heat
from auditor.reliance.hiding import FULLY_HIDDEN, Survival, hide, keep_only
from auditor.reliance.likeness import (
    centres,
    colour_statistics,
    context_sameness,
    edge_distance,
    feature_sameness,
    leak,
    place_entropy,
    sameness,
    spectrum_statistics,
)
from auditor.reliance.logits import logits_of
from auditor.reliance.patterns import pattern_of, shuffled_pattern
from auditor.reliance.regions import SHARES, Boxes, boxes, random_places
from auditor.reliance.transplant import Followed, Pairs, has_plain_edges, joined, spots, transplants
from auditor.reliance.trials import Trial, tried
from auditor.subject.layers import Layout
from auditor.subject.subject import Subject

MIN_IMAGES = 10
EARLY = 4  # of the layers with positions, the last of the first quarter is an early one
HeatOf = Callable[[Tensor, Tensor], Heat]  # images, targets -> heat


class RelianceConfig(BaseModel):
    """How much work goes into reliance."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = Field(default=0, ge=0, description="Seed of every random choice.")
    images_per_class: int = Field(default=30, ge=MIN_IMAGES, description="Images per class, drawn at random.")
    hidden_images: int = Field(default=15, ge=MIN_IMAGES, description="Of these, hidden and kept alone at most.")
    receivers: int = Field(default=2, ge=1, description="Images of other classes per donor in transplants.")
    batch_size: int = Field(default=32, ge=1, description="Images per forward pass.")


@dataclass(frozen=True)
class ClassReliance:
    """What one class hangs on; ``skipped`` is the reason where it was not measured."""

    label: int
    name: str
    n: int
    accuracy: float = float("nan")
    hidden: tuple[Survival, ...] = ()
    alone: tuple[Survival, ...] = ()
    followed: dict[str, Followed] = field(default_factory=dict)
    sameness: Tensor | None = None
    sameness_null: Tensor | None = None
    sameness_early: Tensor | None = None  # in a layer that knows nothing of classes
    sameness_early_null: Tensor | None = None
    context: Tensor | None = None  # the sameness of what is around the boxes
    context_null: Tensor | None = None
    place_entropy: float = float("nan")
    place_entropy_null: float = float("nan")
    edge_distance: float = float("nan")
    edge_distance_null: float = float("nan")
    colour_leak: float = 0.5
    spectrum_leak: float = 0.5
    pattern_leak: float = 0.5
    divergence: Tensor | None = None  # (height, width): where the class's pixels differ from the others' in all images
    rows: tuple[int, ...] = ()  # of the images given, those in which the class is predicted rightly
    boxes: Boxes | None = None  # of these rows
    way: float = 1.0  # by how much the margin of the class is larger in its images than in those of others
    trial: Trial | None = None
    skipped: str = ""


@dataclass(frozen=True)
class Reliance:
    """Reliance of all classes, where the heat came from, and what it cost in forward passes per image."""

    classes: tuple[ClassReliance, ...]
    source: str
    passes_per_image: float
    by_prediction: bool
    accuracy: float = float("nan")  # mean over classes
    n_images: int = 0
    n_present: int = 0  # classes that have images; 0: those of ``classes``
    heat: Tensor = field(repr=False, default_factory=lambda: torch.zeros(0))
    rows: Tensor = field(repr=False, default_factory=lambda: torch.zeros(0, dtype=torch.long))  # of the heat's images

    @property
    def image_passes(self) -> float:
        """What it cost in all: forward passes of one image."""
        return self.passes_per_image * len(self.rows)

    @property
    def chance(self) -> float:
        """Accuracy of a model that guesses: one by the number of classes that have images."""
        return 1 / max(1, self.n_present or sum(math.isfinite(c.accuracy) for c in self.classes))

    @property
    def is_right_by_chance(self) -> bool:
        """Whether the accuracy is within two standard errors of chance; never so against its own predictions."""
        if self.by_prediction or not math.isfinite(self.accuracy):
            return False
        error = math.sqrt(self.chance * (1 - self.chance) / max(1, self.n_images))
        return self.accuracy <= self.chance + 2 * error


class _Model:
    """The subject's logits in batches, counting images."""

    def __init__(self, subject: Subject, batch_size: int) -> None:
        self.subject, self.batch_size, self.images = subject, batch_size, 0

    def __call__(self, images: Tensor) -> Tensor:
        self.images += len(images)
        with torch.no_grad():
            return torch.cat(
                [logits_of(self.subject, part).float().cpu() for part in torch.split(images, self.batch_size)]
            )

    def positions(self, images: Tensor, layer: str, layout: Layout) -> Tensor:
        """Return a layer as (images, channels, positions), counted as a whole pass."""
        self.images += len(images)
        with torch.no_grad():
            return layout.to_positions(self.subject.activations(images, [layer])[layer]).float().cpu()


def sample_rows(labels: Tensor, n_classes: int, per_class: int, seed: int) -> Tensor:
    """Return at most ``per_class`` rows of every class, drawn at random, in order."""
    rng = np.random.default_rng(seed)
    rows: list[int] = []
    for k in range(n_classes):
        of_class = (labels == k).nonzero()[:, 0].numpy()
        rows += sorted(rng.permutation(of_class)[:per_class].tolist())
    return torch.tensor(sorted(rows), dtype=torch.long)


def measure(
    subject: Subject,
    images: Tensor,
    labels: Tensor | None,
    config: RelianceConfig | None = None,
    *,
    heat_of: HeatOf | None = None,
    progress: Progress = silent,
) -> Reliance:
    """Measure what every class hangs on, from pixels (n, channels, height, width) and labels (-1: unknown)."""
    config = config or RelianceConfig()
    model = _Model(subject, config.batch_size)
    logits = model(images)
    predicted = logits.argmax(1)
    by_prediction = labels is None or bool((labels < 0).all())
    truth = predicted if by_prediction or labels is None else labels
    right = predicted == truth
    usable = right.nonzero()[:, 0]
    if len(usable) == 0:
        raise DataError("reliance: the model is right on none of the images; give images of its task.")
    n_classes = max(2, subject.n_classes)
    rows = usable[sample_rows(truth[usable], n_classes, config.images_per_class, config.seed)]
    x, y = images[rows], truth[rows]
    progress("reliance: heat", 0, None)
    heat = (heat_of or (lambda a, b: plain_heat(subject, a, b, config.batch_size)))(x, y)
    classes: list[ClassReliance] = []
    labelled = truth >= 0
    for k in range(subject.n_classes):
        progress("reliance", k, subject.n_classes)
        of_class = labelled & (truth == k)
        accuracy = float(right[of_class].double().mean()) if bool(of_class.any()) else float("nan")
        classes.append(_class(model, subject, k, x, y, logits[rows], heat.maps, accuracy, rows, config))
    progress("reliance", subject.n_classes, subject.n_classes)
    passes = 1 + (model.images - len(images)) / max(1, len(rows)) + heat.passes
    shares = [c.accuracy for c in classes if math.isfinite(c.accuracy)]
    accuracy = sum(shares) / len(shares)
    n_images = int((truth >= 0).sum())
    return Reliance(
        tuple(classes), heat.source, passes, by_prediction, accuracy, n_images, len(shares), heat.maps, rows
    )


def second_look(
    subject: Subject,
    images: Tensor,
    reference: Reliance,
    label: int,
    heat_of: HeatOf,
    config: RelianceConfig | None = None,
) -> tuple[ClassReliance, float]:
    """Measure one class again by another heat: only what depends on it. Return that, and its cost in image passes.

    Boxes, how alike they are and what follows them are new; what follows whole images is that of ``reference``.
    """
    config = config or RelianceConfig()
    before = reference.classes[label]
    model = _Model(subject, config.batch_size)
    generator = torch.Generator().manual_seed(config.seed + 7919 * label)
    chosen = torch.randperm(before.n, generator=generator)[: config.images_per_class].sort().values
    own_rows = torch.tensor(before.rows)[chosen]
    of_others = [torch.tensor(c.rows) for c in reference.classes if c.label != label and c.rows]
    others = torch.cat(of_others) if of_others else reference.rows[~torch.isin(reference.rows, own_rows)]
    heat = heat_of(images[own_rows], torch.full((len(own_rows),), label))
    x, at = images[own_rows], boxes(heat.maps)
    size = (x.shape[2], x.shape[3])
    elsewhere = random_places(at, size, generator, away=True)
    likeness = sameness(x, at)
    givers = torch.argsort(likeness, descending=True, stable=True)[: -(-len(own_rows) // 2)]
    donors = givers[torch.arange(len(own_rows)) % len(givers)]
    into = images[others[torch.randperm(len(own_rows), generator=generator) % len(others)]]
    none = torch.zeros(0)
    followed = spots(model, Pairs(label, x[donors], at.rows(donors), into, none, none, none, before.way), generator)
    result = replace(
        before,
        n=len(own_rows),
        hidden=(),
        alone=(),
        followed={k: f for k, f in before.followed.items() if k != "best_box"} | followed,
        trial=None,
        sameness=likeness,
        sameness_null=sameness(x, elsewhere),
        context=context_sameness(x, at),
        context_null=context_sameness(x, elsewhere),
        rows=tuple(own_rows.tolist()),
        boxes=at,
    )
    return result, model.images + heat.passes * len(own_rows)


def _too_few(n_of_class: int, n_others: int) -> str:
    """Return why a class cannot be measured, or nothing."""
    if n_of_class < MIN_IMAGES:
        return f"only {n_of_class} images that the model gets right; at least {MIN_IMAGES} are needed"
    return "" if n_others >= 4 else "too few images of other classes to compare with"


def _to_hide(n: int, config: RelianceConfig, seed: int) -> Tensor:
    """Return which of n images of a class have regions hidden: at most half of them where there are many."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    return order[: min(config.hidden_images, max(MIN_IMAGES, n // 2))].sort().values


def _class(
    model: _Model,
    subject: Subject,
    k: int,
    x: Tensor,
    y: Tensor,
    logits: Tensor,
    maps: Tensor,
    accuracy: float,
    rows: Tensor,
    config: RelianceConfig,
) -> ClassReliance:
    name = subject.class_names[k]
    of_class, others = (y == k).nonzero()[:, 0], (y != k).nonzero()[:, 0]
    if reason := _too_few(len(of_class), len(others)):
        return ClassReliance(k, name, len(of_class), accuracy, skipped=reason)
    generator = torch.Generator().manual_seed(config.seed + 7919 * k)
    size = (x.shape[2], x.shape[3])
    targets = torch.full((len(x),), k)
    at = boxes(maps[of_class])
    likeness = sameness(x[of_class], at)
    some = of_class[_to_hide(len(of_class), config, config.seed + k)]
    hidden = hide(model, x[some], targets[some], maps[some], SHARES, FILLS, config.seed + k)
    alone = keep_only(model, x[some], targets[some], maps[some], FULLY_HIDDEN, config.seed + k)
    before = margins(logits, targets)
    way = max(float(before[of_class].mean() - before[others].mean()), 1e-6)
    followed, pattern_leak, divergence = _followed(model, k, x, y, maps, at, likeness, way, generator, config)
    draws = torch.Generator().manual_seed(config.seed + 104729 * (k + 1))
    trial = tried(model, k, x[of_class], maps[of_class], at, x[others], before[others], draws)
    followed["best_box"] = trial.followed
    elsewhere = random_places(at, size, generator, away=True)
    early = _sameness_early(model, x[of_class], (at, elsewhere))
    where, anywhere = centres(at, size), centres(random_places(at, size, generator), size)
    return ClassReliance(
        k,
        name,
        len(of_class),
        accuracy,
        tuple(hidden),
        tuple(alone),
        followed,
        likeness,
        sameness(x[of_class], elsewhere),
        *early,
        context_sameness(x[of_class], at),
        context_sameness(x[of_class], elsewhere),
        place_entropy(where),
        place_entropy(anywhere),
        float(edge_distance(where).mean()),
        float(edge_distance(anywhere).mean()),
        leak(colour_statistics(x), y == k, config.seed),
        leak(spectrum_statistics(x), y == k, config.seed),
        pattern_leak,
        divergence,
        tuple(rows[of_class].tolist()),
        at,
        way,
        trial,
    )


def _sameness_early(model: _Model, x: Tensor, places: tuple[Boxes, Boxes]) -> tuple[Tensor | None, Tensor | None]:
    """Return how alike boxes, and boxes elsewhere, are in an early layer; nothing where the model has no maps."""
    spatial = [item for item in model.subject.layers() if item.explainable and item.is_spatial]
    if not spatial:
        return None, None
    name = spatial[len(spatial) // EARLY].name
    layout = model.subject.layout(name)
    z = torch.cat([model.positions(part, name, layout) for part in torch.split(x, model.batch_size)])
    maps = z.view(*z.shape[:2], *layout.grid)
    size = (x.shape[2], x.shape[3])
    at, elsewhere = (feature_sameness(maps, boxes, size) for boxes in places)
    return at, elsewhere


def _followed(
    model: _Model,
    k: int,
    x: Tensor,
    y: Tensor,
    maps: Tensor,
    at: Boxes,
    likeness: Tensor,
    way: float,
    generator: torch.Generator,
    config: RelianceConfig,
) -> tuple[dict[str, Followed], float, Tensor]:
    """Transplant from the class's images into those of others: each half receives the pattern of the other half.

    Donors are the half of the class's images whose boxes look most like each other: where only some images carry a
    mark, these do, and the choice does not depend on what the transplants will do.
    """
    is_class = y == k
    of_class, others = is_class.nonzero()[:, 0], (~is_class).nonzero()[:, 0]
    givers = torch.argsort(likeness, descending=True, stable=True)[: -(-len(of_class) // 2)]
    half = torch.zeros(len(x), dtype=torch.long)
    for part in (of_class, others):  # both halves have images of both
        half[part[torch.randperm(len(part), generator=generator)]] = torch.arange(len(part)) % 2
    results: list[dict[str, Followed]] = []
    scores, divergence = torch.zeros(len(x)), torch.zeros(maps.shape[1:])
    for side in (0, 1):
        receivers, learn = others[half[others] == side], half != side
        n = config.receivers * len(of_class) // 2
        donors = givers[torch.arange(n) % len(givers)]
        into = receivers[torch.randperm(n, generator=generator) % len(receivers)]
        null = others[torch.randint(len(others), (n,), generator=generator)]
        pattern = pattern_of(x[learn], is_class[learn])
        shuffled = shuffled_pattern(x[learn], is_class[learn], generator)
        boxes_given, warm = at.rows(donors), maps[of_class[donors]]
        pairs = Pairs(k, x[of_class[donors]], boxes_given, x[into], warm, x[null], maps[null], way)
        seed = config.seed + 31 * k + side
        results.append(transplants(model, pairs, pattern, shuffled, seed, has_plain_edges(x)))
        scores[~learn] = pattern.score(x[~learn])
        divergence += pattern.divergence / 2
    together = {name: joined([r[name] for r in results]) for name in results[0]}
    return together, float(roc_auc_score(is_class.numpy(), scores.numpy())), divergence
