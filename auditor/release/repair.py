"""Repair: a model without what it should not rely on, made of the model, an explainer's concepts and labelled images.

(a) The directions of the unwanted concepts are projected out of their layer, with the mean of positions without them
put back (`auditor.network.projected_layer`). (b) The weights above the layer are refitted
(`auditor.release.head_refit`), with the directions taken out or left. What does best on held-out images is taken,
of what loses at most 3% of those without a spot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from auditor.data.source import Data
from auditor.errors import DataError, OptionError
from auditor.explainers.base import Explainer
from auditor.network.projected_layer import ProjectedLayer, ProjectedNetwork
from auditor.progress import Progress, silent
from auditor.release.head_refit import BATCH, CLEAN_LOSS, Examples, examples, has_weights_above, refit, right
from auditor.reliance import Finding, RelianceConfig, judge, measure
from auditor.subject.subject import Subject

MOST_IMAGES = 400
PER_CLASS = 30  # images of a class on which its reliance is measured, as in an audit
ABSENT = 0.02  # of the largest score: below it a position is without the unwanted concepts
LOST_CLASS = 0.05  # share of a class's images still right, below which the removal has removed the class
WAS_THERE = 0.5  # share that was right before, for that to be a loss
HELPS = 0.05  # by how much more held-out images must be right for a repair to help


@dataclass(frozen=True)
class Images:
    """Labelled images that a repair looks at: pixels, labels, the model's logits and the layer's native output."""

    pixels: Tensor
    labels: Tensor
    logits: Tensor
    z: Tensor


@dataclass(frozen=True)
class Repair:
    """What is taken out of which layer, and new weights above it, if any."""

    layer: str
    concepts: tuple[int, ...]
    projected: ProjectedLayer
    weights: dict[str, Tensor]
    is_projected: bool = True  # False: only the head is new
    held_out: tuple[float, float] | None = None  # share of these right before and after; None: not tried

    @property
    def words(self) -> str:
        """Return what was done."""
        concepts = ", ".join(map(str, self.concepts))
        if not self.is_projected:
            return f"what is above the layer refitted on images without the spots of concepts {concepts}"
        return f"concepts {concepts} taken out" + ("; what is above the layer refitted" if self.weights else "")

    @property
    def helps(self) -> str:
        """Return how much it helps on held-out images without their spot, or with that of another class."""
        if self.held_out is None:
            return ""
        before, after = self.held_out
        text = (
            f"of held-out images without their spot, or with that of another class, {before:.0%} were right before"
            f" and {after:.0%} are now"
        )
        if after >= before + HELPS:
            return text
        return f"{text}: this does not help; train the model again on images without the spot"

    @contextmanager
    def network(self, subject: Subject) -> Iterator[Subject]:
        """Give the repaired network as a subject, ready to be exported, while the context lasts."""
        module, pre = subject.module, subject.preprocessing
        with subject.at_rest(), _weights(module, self.weights):
            yield Subject(
                ProjectedNetwork(module, self.layer, self.projected).eval(),
                input_shape=subject.input_shape,
                class_names=subject.class_names,
                mean=pre.mean,
                std=pre.std,
                resize=pre.resize,
                output=subject.output.name,
            )


def repair(
    subject: Subject,
    explainer: Explainer,
    concepts: Sequence[int],
    data: Data,
    *,
    refit_head: bool | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> Repair:
    """Take concepts of an explainer out of the model: ``repair(subject, nmf, [0, 2], data)``.

    ``refit_head``: whether what is above the layer is refitted; None: whichever does better on held-out images whose
    spot is inpainted, or that have the spot of another class.
    """
    explainer.check_subject(subject)
    W = explainer.concept_directions()
    if W is None or explainer.layer_ is None:
        raise OptionError(
            f"revise: concepts of kind {explainer.kind} are no directions of a layer, so they cannot be projected out; "
            "take an explainer whose concepts are."
        )
    concepts = _checked(concepts, W.shape[1])
    layer = explainer.layer_
    layout = subject.layout(layer)
    images = _images(subject, data, layer, seed, progress)
    S = torch.cat([explainer.score_maps(subject, part, concepts) for part in torch.split(images.z, BATCH)])
    unwanted = S.sum(1)  # (images, positions)
    faint = unwanted.flatten().kthvalue(max(1, unwanted.numel() // 20)).values  # where they are seen everywhere
    absent = unwanted <= torch.maximum(ABSENT * unwanted.max(), faint)
    mean = layout.to_positions(images.z).transpose(1, 2)[absent].double().mean(0)
    projected = ProjectedLayer(W[:, concepts].to(images.z), mean.to(images.z), layout)
    done = Repair(layer, tuple(concepts), projected, {})
    if refit_head is not False:
        strength = unwanted.amax(1)
        shows = strength > ABSENT * strength.max()
        given = examples(subject, layer, images.pixels, images.labels, images.logits, shows, seed, progress)
        nothing = ProjectedLayer(torch.zeros_like(W[:, :1]).to(images.z), mean.to(images.z), layout)
        done = _with_new_head(subject, done, nothing, given, images, refit_head, seed, progress)
        change = done.projected if done.is_projected else nothing
        shares = right(subject, layer, nothing, given), right(subject, layer, change, given, done.weights)
        done = replace(done, held_out=shares)
    _check(subject, done, images)
    return done


def _with_new_head(
    subject: Subject,
    done: Repair,
    nothing: ProjectedLayer,
    given: Examples,
    images: Images,
    refit_head: bool | None,
    seed: int,
    progress: Progress,
) -> Repair:
    """Return the repair with a new head where that does better on held-out images, or where it was asked for.

    The directions stay (``nothing`` is taken out) where a new head does better with them. Not so where the projection
    alone would lose a class: then the head must do without them, and well, or the removal is not a repair.
    """
    layer = done.layer
    if refit_head is None and not has_weights_above(subject, layer):
        return done
    changes = [done.projected, nothing]
    try:
        _check(subject, done, images)
    except OptionError:
        changes = changes if refit_head else changes[:1]
    ways = [(change, *refit(subject, layer, change, given, seed, progress)) for change in changes]
    clean = right(subject, layer, nothing, given, only=given.bare) - CLEAN_LOSS
    keeps = [right(subject, layer, way[0], given, way[1], given.bare) >= clean for way in ways]
    _, (best, weights, share) = max(zip(keeps, ways, strict=True), key=lambda kept_way: (kept_way[0], kept_way[1][2]))
    least = (1 + 1 / subject.n_classes) / 2 if len(changes) == 1 else right(subject, layer, done.projected, given)
    if refit_head is None and share <= least:
        return done
    return replace(done, projected=best, weights=weights, is_projected=best is done.projected)


def _check(subject: Subject, done: Repair, images: Images) -> None:
    with done.network(subject) as repaired:
        check_classes_left(subject.class_names, images.labels, images.logits, _logits(repaired, images.pixels))


def compared(
    subject: Subject, done: Repair, data: Data, *, seed: int = 0, progress: Progress = silent
) -> list[dict[str, Any]]:
    """Return, per class, accuracy and what it relies on before and after a repair."""
    images = _images(subject, data, done.layer, seed, progress)
    with done.network(subject) as repaired:
        logits = _logits(repaired, images.pixels)
        sides = [(images.logits, _judged(subject, images, seed)), (logits, _judged(repaired, images, seed))]
    rows = []
    for k, name in enumerate(subject.class_names):
        of_class = images.labels == k
        row: dict[str, Any] = {"class": name, "images": int(of_class.sum())}
        for when, (side_logits, findings) in zip(("before", "after"), sides, strict=True):
            right = (
                float((side_logits[of_class].argmax(1) == k).double().mean()) if bool(of_class.any()) else float("nan")
            )
            finding = findings.get(k)
            row |= {
                f"accuracy {when}": right,
                f"reliance {when}": float("nan") if finding is None else finding.score,
                f"verdict {when}": "skipped" if finding is None else finding.verdict,
            }
        rows.append(row)
    return rows


def _judged(subject: Subject, images: Images, seed: int) -> dict[int, Finding]:
    """Return what is found of every class; nothing where the model is right on no image."""
    try:
        reliance = measure(subject, images.pixels, images.labels, RelianceConfig(images_per_class=PER_CLASS, seed=seed))
    except DataError:
        return {}
    return {finding.label: finding for finding in judge(reliance, subject.class_names)}


def check_classes_left(names: Sequence[str], labels: Tensor, before: Tensor, after: Tensor) -> None:
    """Raise when a class that the model knew is gone: it says hardly one of its images any more."""
    for k, name in enumerate(names):
        of_class = labels == k
        if not bool(of_class.any()):
            continue
        was, left = (float((logits[of_class].argmax(1) == k).double().mean()) for logits in (before, after))
        if was >= WAS_THERE and left < LOST_CLASS:
            raise OptionError(
                f"revise: this would remove class {name!r} altogether: right on {was:.0%} of its images now, "
                f"{left:.0%} without these concepts; remove fewer of them, or refit the head (--refit-head)."
            )


def _checked(concepts: Sequence[int], n: int) -> list[int]:
    indices = sorted(set(concepts))
    if not indices or indices[0] < 0 or indices[-1] >= n:
        raise OptionError(f"revise: concepts must be 0 to {n - 1}, at least one of them, got {list(concepts)}.")
    return indices


def _images(subject: Subject, data: Data, layer: str, seed: int, progress: Progress) -> Images:
    data.check_labels(subject)
    pixels, labels, logits, z = [], [], [], []
    for batch in data.only(data.draw(MOST_IMAGES, seed)).batches(subject, BATCH):
        with torch.no_grad():
            y, outputs = subject.run(batch.images, [layer])
        pixels.append(batch.images)
        labels.append(batch.labels)
        logits.append(y.cpu())
        z.append(outputs[layer].cpu())
        progress("reading activations", sum(map(len, pixels)), min(len(data), MOST_IMAGES))
    images = Images(torch.cat(pixels), torch.cat(labels), torch.cat(logits), torch.cat(z))
    if not bool((images.labels >= 0).any()):
        raise DataError(
            f"revise: data {data.spec} has no labels of the model's classes, and a repair is judged by them."
        )
    return images


def _logits(subject: Subject, pixels: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([subject.logits(part).cpu() for part in torch.split(pixels, BATCH)])


@contextmanager
def _weights(module: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """Hold other weights in a module, and put its own back."""
    before = {k: module.get_parameter(k).detach().clone() for k in weights}
    try:
        with torch.no_grad():
            for k, w in weights.items():
                module.get_parameter(k).copy_(w)
        yield
    finally:
        with torch.no_grad():
            for k, w in before.items():
                module.get_parameter(k).copy_(w)
