"""Repair: a model without what it should not rely on, made of the model, an explainer's concepts and labelled images.

(a) The directions of the unwanted concepts are projected out of their layer, with the mean of positions without them
put back (`auditor.network.projected_layer`). (b) On request the weights above the layer are refitted: on images whose
deciding region is inpainted, by their labels, and on all others by the old logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from auditor.data.source import Data
from auditor.errors import DataError, OptionError
from auditor.explainers.base import Explainer
from auditor.network.below_layer import BelowLayer
from auditor.network.projected_layer import ProjectedLayer, ProjectedNetwork
from auditor.progress import Progress, silent
from auditor.reliance import Finding, RelianceConfig, judge, measure
from auditor.reliance.fills import filled
from auditor.reliance.heat import plain_heat
from auditor.reliance.regions import hottest
from auditor.subject.layer_calls import on_call
from auditor.subject.subject import Subject

MOST_IMAGES = 400
PER_CLASS = 15  # images of a class on which its reliance is measured
ABSENT = 0.02  # of the largest score: below it a position is without the unwanted concepts
HIDDEN = 0.1  # share of an image that is inpainted for the refit
EPOCHS, RATE, DECAY, BATCH = 60, 1e-3, 1e-3, 32
LOST_CLASS = 0.05  # share of a class's images still right, below which the removal has removed the class
WAS_THERE = 0.5  # share that was right before, for that to be a loss


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
    refit_head: bool = False,
    seed: int = 0,
    progress: Progress = silent,
) -> Repair:
    """Take concepts of an explainer out of the model: ``repair(subject, nmf, [0, 2], data)``."""
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
    weights: dict[str, Tensor] = {}
    if refit_head:
        weights = _refit(subject, layer, projected, images, unwanted.amax(1), seed, progress)
    done = Repair(layer, tuple(concepts), projected, weights)
    with done.network(subject) as repaired:
        check_classes_left(subject.class_names, images.labels, images.logits, _logits(repaired, images.pixels))
    return done


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


def _refit(
    subject: Subject,
    layer: str,
    projected: ProjectedLayer,
    images: Images,
    strength: Tensor,
    seed: int,
    progress: Progress,
) -> dict[str, Tensor]:
    """Return weights above the layer, fitted to inpainted images by label and to all others by the old logits."""
    below = BelowLayer(subject, layer).weights
    weights = {
        k: p.detach().clone().requires_grad_(True)
        for k, p in subject.module.named_parameters()
        if k not in below and p.is_floating_point()
    }
    if not weights:
        raise OptionError(f"revise: there are no weights above layer {layer!r} to refit; leave --refit-head out.")
    carries = (strength > ABSENT * strength.max()) & (images.labels >= 0)
    z, labels = images.z.clone(), images.labels
    rows = carries.nonzero()[:, 0]
    for some in torch.split(rows, BATCH):
        x, y = images.pixels[some], labels[some]
        hidden = filled(x, hottest(plain_heat(subject, x, y).maps, HIDDEN), "inpaint")
        with torch.no_grad():
            z[some] = subject.activations(hidden, [layer])[layer].cpu()
        progress("inpainting the deciding regions", int(some[-1]) + 1, len(images.labels))
    with torch.no_grad():
        z = torch.cat([projected(part) for part in torch.split(z, BATCH)])
    n_blank = _blank_images(subject, layer, z[:BATCH], weights)
    teacher = images.logits.log_softmax(1)
    optimizer = torch.optim.AdamW(list(weights.values()), lr=RATE, weight_decay=DECAY)
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(EPOCHS):
        for part in torch.split(torch.randperm(len(z), generator=generator), BATCH):
            logits = _from_layer(subject, layer, z[part], weights, n_blank or len(part))
            by_label = F.cross_entropy(logits, labels[part].clamp_min(0), reduction="none")
            by_teacher = F.kl_div(logits.log_softmax(1), teacher[part], reduction="none", log_target=True).sum(1)
            loss = torch.where(carries[part], by_label, by_teacher).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        progress("refitting the head", epoch + 1, EPOCHS)
    return {k: w.detach() for k, w in weights.items()}


def _blank_images(subject: Subject, layer: str, z: Tensor, weights: dict[str, Tensor]) -> int:
    """Return 1 where one blank image below the layer serves a whole batch above it, 0 where each needs its own."""
    try:
        one, each = (_from_layer(subject, layer, z, weights, n).detach() for n in (1, len(z)))
    except (RuntimeError, ValueError):  # a graph that kept the size of its batch
        return 0
    return int(one.shape == each.shape and torch.allclose(one, each, rtol=1e-4, atol=1e-5))


def _from_layer(subject: Subject, layer: str, z: Tensor, weights: dict[str, Tensor], n_blank: int) -> Tensor:
    """Return logits (differentiable in ``weights``) when the layer puts out ``z``, from ``n_blank`` blank images."""

    def swap(output: Any) -> Any:
        new = z.clone()
        return new if isinstance(output, Tensor) else type(output)([new, *output[1:]])

    with subject.at_rest():
        handle = on_call(subject.module, layer, swap)
        try:
            blank = subject.normalise(subject.blank(n_blank))
            with torch.enable_grad():
                return subject.output.logits(lambda: functional_call(subject.module, weights, (blank,)))
        finally:
            handle.remove()


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
