"""Head refit: new weights above a layer, from images in which the spot decides nothing.

Every image that hangs on its deciding spot has it inpainted; and every image gets the spot of an image of another
class. Images that hang on their spot count by their labels, all others by the old logits, so that the spot predicts no
class any more and the rest stays. Every fourth image is held out, and says how good the head is. A head that loses
more of the held-out images without a spot than is allowed goes back towards the old one [Wortsman2022].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from auditor.errors import OptionError
from auditor.network.below_layer import BelowLayer
from auditor.progress import Progress, silent
from auditor.reliance.fills import filled
from auditor.reliance.heat import margins, plain_heat
from auditor.reliance.regions import Boxes, boxes, pasted
from auditor.subject.layer_calls import on_call
from auditor.subject.subject import Subject

MARGIN = 0.25  # of a spot's sides that is inpainted around it
MARGIN_LEFT = 0.5  # share of the margin that an image keeps without its spot, below which it hangs on it
EPOCHS, RATE, DECAY, BATCH = 40, 1e-3, 1e-3, 32
HELD_OUT = 4
CLEAN_LOSS = 0.03  # share of held-out images without a spot that a repair may lose
STEPS = (1.0, 0.75, 0.5, 0.25)  # of the way from the old head to the new one


@dataclass(frozen=True)
class Examples:
    """What the head is fitted to: the layer's native output, labels, old log-probabilities, and what counts by label.

    ``held_out`` are rows that the fit does not use, ``bare`` those that were given no spot of another class.
    """

    z: Tensor
    labels: Tensor
    teacher: Tensor
    by_label: Tensor
    held_out: Tensor
    bare: Tensor


def examples(
    subject: Subject,
    layer: str,
    pixels: Tensor,
    labels: Tensor,
    logits: Tensor,
    shows: Tensor,
    seed: int = 0,
    progress: Progress = silent,
) -> Examples:
    """Make the images to fit to; ``shows`` (images,) are those in which the unwanted concepts are seen.

    Of these, images carry a spot whose class loses at least half of its margin without it.
    """
    bare = pixels.clone()
    size = (pixels.shape[2], pixels.shape[3])
    rows: list[Tensor] = []
    spots: list[Boxes] = []
    for some in torch.split((shows & (labels >= 0)).nonzero()[:, 0], BATCH):
        at = boxes(plain_heat(subject, pixels[some], labels[some]).maps)
        without = filled(pixels[some], at.grown(MARGIN, size).masks(size), "inpaint")
        with torch.no_grad():
            after = margins(subject.logits(without).cpu(), labels[some])
        hangs = (after < MARGIN_LEFT * margins(logits[some], labels[some])).nonzero()[:, 0]
        bare[some[hangs]] = without[hangs]
        rows.append(some[hangs])
        spots.append(at.rows(hangs))
        progress("inpainting the deciding spots", int(some[-1]) + 1, len(labels))
    carriers = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.long)
    parts, by_label, of_row = [bare], [torch.zeros(len(labels), dtype=torch.bool)], [torch.arange(len(labels))]
    by_label[0][carriers] = True
    if len(carriers):
        receivers, swapped = with_spots_of_others(bare, labels, carriers, Boxes.cat(spots), pixels, seed)
        parts.append(swapped)
        by_label.append(by_label[0][receivers])
        of_row.append(receivers)
    index = torch.cat(of_row)
    z = []
    for part in torch.split(torch.cat(parts), BATCH):
        with torch.no_grad():
            z.append(subject.activations(part, [layer])[layer].cpu())
    return Examples(
        torch.cat(z),
        labels[index],
        logits.log_softmax(1)[index],
        torch.cat(by_label),
        index % HELD_OUT == HELD_OUT - 1,
        torch.arange(len(index)) < len(labels),
    )


def with_spots_of_others(
    bare: Tensor, labels: Tensor, rows: Tensor, at: Boxes, pixels: Tensor, seed: int
) -> tuple[Tensor, Tensor]:
    """Return which images received the spot of an image of another class, and these images.

    ``rows`` are the images that carry a spot and ``at`` their boxes. An image whose class alone has spots gets none.
    """
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for i in (labels >= 0).nonzero()[:, 0].tolist():
        donors = (labels[rows] != labels[i]).nonzero()[:, 0]
        if len(donors):
            pairs.append((i, int(donors[int(torch.randint(len(donors), (1,), generator=generator))])))
    if not pairs:
        return torch.zeros(0, dtype=torch.long), bare[:0]
    receivers, donors = (torch.tensor(column) for column in zip(*pairs, strict=True))
    source = at.rows(donors)
    return receivers, pasted(bare[receivers], pixels[rows[donors]], source, source)


def refit(
    subject: Subject,
    layer: str,
    change: Callable[[Tensor], Tensor],
    given: Examples,
    seed: int = 0,
    progress: Progress = silent,
) -> tuple[dict[str, Tensor], float]:
    """Return new weights above the layer whose output ``change`` alters, and the share of held-out images right.

    They lie between the old and the new head where the new one loses too many of the images without a spot.
    """
    weights = {k: p.detach().clone().requires_grad_(True) for k, p in _above(subject, layer).items()}
    if not weights:
        raise OptionError(f"revise: there are no weights above layer {layer!r} to refit; leave --refit-head out.")
    with torch.no_grad():
        z = torch.cat([change(part) for part in torch.split(given.z, BATCH)])
    n_blank = _blank_images(subject, layer, z[:BATCH], weights)
    optimizer = torch.optim.AdamW(list(weights.values()), lr=RATE, weight_decay=DECAY)
    generator = torch.Generator().manual_seed(seed)
    used = (~given.held_out).nonzero()[:, 0]
    for epoch in range(EPOCHS):
        for part in torch.split(used[torch.randperm(len(used), generator=generator)], BATCH):
            logits = _from_layer(subject, layer, z[part], weights, n_blank or len(part))
            by_label = F.cross_entropy(logits, given.labels[part].clamp_min(0), reduction="none")
            by_teacher = F.kl_div(logits.log_softmax(1), given.teacher[part], reduction="none", log_target=True).sum(1)
            loss = torch.where(given.by_label[part], by_label, by_teacher).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        progress("refitting the head", epoch + 1, EPOCHS)
    least = right(subject, layer, lambda z: z, given, only=given.bare) - CLEAN_LOSS
    old = _above(subject, layer)
    for step in STEPS:
        between = {k: torch.lerp(old[k].detach(), w.detach(), step) for k, w in weights.items()}
        if right(subject, layer, change, given, between, given.bare) >= least:
            break
    return between, right(subject, layer, change, given, between)


def right(
    subject: Subject,
    layer: str,
    change: Callable[[Tensor], Tensor],
    given: Examples,
    weights: dict[str, Tensor] | None = None,
    only: Tensor | None = None,
) -> float:
    """Return the share of held-out images with a label that are right, by other ``weights`` or of ``only`` these."""
    weights = weights or {}
    wanted = given.held_out & (given.labels >= 0)
    rows = (wanted if only is None else wanted & only).nonzero()[:, 0]
    if len(rows) == 0:
        return 0.0
    with torch.no_grad():
        z = torch.cat([change(given.z[part]) for part in torch.split(rows, BATCH)])
    n_blank = _blank_images(subject, layer, z[:BATCH], weights)
    hits = []
    for part in torch.split(torch.arange(len(rows)), BATCH):
        logits = _from_layer(subject, layer, z[part], weights, n_blank or len(part)).detach()
        hits.append(logits.argmax(1).cpu() == given.labels[rows[part]])
    return float(torch.cat(hits).double().mean())


def has_weights_above(subject: Subject, layer: str) -> bool:
    """Whether there is anything above the layer that could be fitted."""
    return bool(_above(subject, layer))


def _above(subject: Subject, layer: str) -> dict[str, Tensor]:
    below = BelowLayer(subject, layer).weights
    return {k: p for k, p in subject.module.named_parameters() if k not in below and p.is_floating_point()}


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
