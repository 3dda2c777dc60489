"""Trials: where only some images carry a mark, or it is not the hottest spot, the boxes to follow are found by trying.

Each image of the class has two deciding boxes, the second beside the first. Both are pasted into an image of another
class, at another place, and so is a box from elsewhere. The third of the donors whose box moves the margin of the class
most is then pasted into further images. Boxes from elsewhere are chosen the same way, so that choosing is no gain; and
what was chosen by some images is measured on others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from auditor.reliance.heat import margins
from auditor.reliance.likeness import sameness
from auditor.reliance.regions import Boxes, boxes, pasted, random_places
from auditor.reliance.transplant import Followed

Predict = Callable[[Tensor], Tensor]  # images -> logits
BESIDE = 0.3  # of the first box's sides: so much around it is no place for the second
CHOSEN = 3  # one donor in so many is chosen
LEAST = 4  # donors


@dataclass(frozen=True)
class Trial:
    """What followed the chosen boxes, of which images (rows of the class's) they are, and how alike they look."""

    followed: Followed
    rows: Tensor
    boxes: Boxes
    sameness: Tensor
    sameness_null: Tensor


def second_boxes(maps: Tensor, first: Boxes) -> Boxes:
    """Return the deciding boxes of the maps (images, height, width) beside the first ones."""
    size = (maps.shape[1], maps.shape[2])
    return boxes(maps * (1 - first.grown(BESIDE, size).masks(size)[:, 0]))


def tried(
    predict: Predict,
    label: int,
    images: Tensor,
    maps: Tensor,
    first: Boxes,
    receivers: Tensor,
    before: Tensor,
    generator: torch.Generator,
) -> Trial:
    """Try the boxes of a class's images on some receivers, measure the chosen ones on others: 4.5 passes per image.

    ``before`` (receivers,) is the margin of the class in the images of other classes.
    """
    n, size = len(images), (images.shape[2], images.shape[3])
    order = torch.randperm(len(receivers), generator=generator)
    some, others = order[torch.arange(n) % len(order)], order[(n + torch.arange(n)) % len(order)]
    elsewhere = random_places(first, size, generator, away=True)

    def moved_by(at: Boxes, rows: Tensor) -> Tensor:
        target, into = random_places(at, size, generator), some[rows]
        given = pasted(receivers[into], images[rows], at, target)
        return margins(predict(given).cpu(), torch.full((len(rows),), label)) - before[into]

    second, every = second_boxes(maps, first), torch.arange(n)
    by_first, by_second = moved_by(first, every), moved_by(second, every)
    best = first.where(by_first >= by_second, second)
    half = torch.randperm(n, generator=generator)[: -(-n // 2)]
    tried_elsewhere = moved_by(elsewhere.rows(half), half)
    sides = []
    for at, donors, moved in ((best, every, torch.maximum(by_first, by_second)), (elsewhere, half, tried_elsewhere)):
        rows = donors[torch.argsort(moved, descending=True, stable=True)[: max(LEAST, -(-len(donors) // CHOSEN))]]
        donors = rows[torch.arange(n) % len(rows)]
        target = random_places(at.rows(donors), size, generator)
        hits = predict(pasted(receivers[others], images[donors], at.rows(donors), target)).argmax(1) == label
        sides.append((rows, hits.double().cpu(), sameness(images[rows], at.rows(rows))))
    (rows, hits, alike), (_, null, alike_null) = sides
    return Trial(Followed(hits, null), rows, best.rows(rows), alike, alike_null)
