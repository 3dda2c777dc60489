"""Transplants: give images of other classes what images of a class have, and see whether the prediction follows.

Every transplant has a null on the same receivers: as much of the same kind from where it should not matter. What is
transplanted says what a class hangs on:

    box          the deciding box, pasted at another random place         a sticker, a plate
    spot         the deciding box, pasted at the same place               a plate, a watermark
    region       the hottest tenth of the image, pasted at the same place a ruler, several spots
    frame        the outer ring                                           a border
    surroundings everything but the middle of the image                   a background texture
    pattern      what the class has at the same place in all its images   a watermark, an odd pixel
    colour       the share of each channel in the brightness              a tint
    spectrum     fine detail, shuffled, without the deciding region       compression, grain, a grid, stripes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from auditor.reliance.fills import combined, filled
from auditor.reliance.heat import margins
from auditor.reliance.patterns import Pattern
from auditor.reliance.regions import Boxes, hottest, moved, pasted, random_places

Predict = Callable[[Tensor], Tensor]  # images -> logits

REGION_SHARE = 0.10
FRAME_SHARE = 0.05  # of the side
PLAIN = 0.06  # by which pixels of a plain edge differ at most
MIDDLE_RADIUS = 0.34  # of the side: a disc of 36% of a square
BLOCK = 16
LOCAL = ("box", "spot", "region")


@dataclass(frozen=True)
class Followed:
    """Per receiver: 1 where the prediction became the donor's class; ``null`` the same with the null transplant.

    ``erased``: the same where the receiver's pixels are only filled at that place. A class that images fall back to
    when something is taken from them does not follow what was given to them. ``carried``: how much further the
    transplant moves the margin of the class than the null does, as a share of the way from the receivers to the class.
    """

    hits: Tensor
    null: Tensor
    erased: Tensor | None = None
    carried: Tensor | None = None

    @property
    def stronger_null(self) -> Tensor:
        """The null or the erased receivers, whichever became the class more often."""
        if self.erased is None or self.erased.mean() <= self.null.mean():
            return self.null
        return self.erased

    @property
    def gain(self) -> float:
        """Share that followed less the share that followed the stronger null."""
        return float(self.hits.mean() - self.stronger_null.mean())


def joined(parts: Sequence[Followed]) -> Followed:
    """Return the receivers of several transplants together."""
    erased = [p.erased for p in parts if p.erased is not None]
    carried = [p.carried for p in parts if p.carried is not None]
    return Followed(
        torch.cat([p.hits for p in parts]),
        torch.cat([p.null for p in parts]),
        torch.cat(erased) if len(erased) == len(parts) else None,
        torch.cat(carried) if len(carried) == len(parts) else None,
    )


@dataclass(frozen=True)
class Pairs:
    """Donors of one class with receivers of other classes, row by row; ``others`` are further images of receivers.

    ``way``: how far the margin of the class is from the receivers to the class's own images, in the mean.
    """

    label: int
    donors: Tensor
    donor_boxes: Boxes
    receivers: Tensor
    donor_heat: Tensor
    others: Tensor
    other_heat: Tensor
    way: float = 1.0


def transplants(
    predict: Predict, pairs: Pairs, pattern: Pattern, null_pattern: Pattern, seed: int, plain_edges: bool = False
) -> dict[str, Followed]:
    """Return what followed for every kind of transplant: of spots on every row, of the rest on every other row.

    Of the region, which no verdict depends on, on every sixth.

    ``pattern`` is measured on images that are not among the receivers; ``null_pattern`` the same of shuffled classes.
    Images with plain edges have no surroundings: what differs there is the object itself.
    """
    generator = torch.Generator().manual_seed(seed)
    followed = spots(predict, pairs, generator)
    x, d, o = pairs.receivers[::2], pairs.donors[::2], pairs.others[::2]
    size = (x.shape[2], x.shape[3])
    hot, hot_others = (hottest(heat[::2], REGION_SHARE) for heat in (pairs.donor_heat, pairs.other_heat))
    masks = (frame_mask(size), 1 - middle_mask(size), pattern.mask)
    ring, outside, strong = (mask.expand(len(x), 1, *size) for mask in masks)
    given = {
        "region": [
            y[::3] for y in (combined(x, d, hot), combined(x, d, moved(hot, generator)), filled(x, hot, "blur"))
        ],
        "frame": (combined(x, d, ring), combined(x, o, ring), filled(x, ring, "blur")),
        "pattern": (pattern.given_to(x), null_pattern.given_to(x), filled(x, strong, "blur")),
        "colour": (with_colours(x, d), with_colours(x, o)),
        "spectrum": (with_texture(x, d, hot, generator), with_texture(x, o, hot_others, generator)),
    }
    if not plain_edges:
        given["surroundings"] = (combined(x, d, outside), combined(x, o, outside), filled(x, outside, "blur"))
    return followed | {name: _followed(predict, pairs, *images) for name, images in given.items()}


def spots(predict: Predict, pairs: Pairs, generator: torch.Generator) -> dict[str, Followed]:
    """Return what followed the deciding boxes, pasted at another place and at the same place: five passes per row."""
    x, d, at = pairs.receivers, pairs.donors, pairs.donor_boxes
    size = (x.shape[2], x.shape[3])
    target = random_places(at, size, generator)
    elsewhere = random_places(at, size, generator, away=True)
    given = {
        "box": (pasted(x, d, at, target), pasted(x, d, elsewhere, target)),
        "spot": (pasted(x, d, at, at), pasted(x, d, elsewhere, at), filled(x, at.masks(size), "blur")),
    }
    return {name: _followed(predict, pairs, *images) for name, images in given.items()}


def _followed(predict: Predict, pairs: Pairs, *images: Tensor) -> Followed:
    """Return which of the receivers with the transplant, the null and (if given) the fill alone become the class."""
    logits = [predict(x).cpu() for x in images]
    hits = [(rows.argmax(1) == pairs.label).double() for rows in logits]
    target = torch.full((len(hits[0]),), pairs.label)
    carried = (margins(logits[0], target) - margins(logits[1], target)).double() / pairs.way
    return Followed(hits[0], hits[1], hits[2] if len(hits) > 2 else None, carried)


def frame_mask(size: tuple[int, int]) -> Tensor:
    """Return (height, width): 1 in the outer ring."""
    t = max(2, round(FRAME_SHARE * min(size)))
    mask = torch.ones(size)
    mask[t:-t, t:-t] = 0
    return mask


def middle_mask(size: tuple[int, int]) -> Tensor:
    """Return (height, width): 1 in the middle of the image.

    >>> round(float(middle_mask((50, 70)).mean()), 2)
    0.37
    """
    y, x = ((torch.arange(n) + 0.5) / n - 0.5 for n in size)
    return ((y[:, None] ** 2 + x[None] ** 2) < MIDDLE_RADIUS**2).float()


def with_colours(images: Tensor, donors: Tensor) -> Tensor:
    """Return images with the donors' tint: the share of each channel in the mean brightness; brightness stays."""

    def tint(x: Tensor) -> Tensor:
        means = x.mean((2, 3), keepdim=True).clamp_min(1e-3)
        return means / means.mean(1, keepdim=True)

    return (images * tint(donors) / tint(images)).clamp(0, 1)


def has_plain_edges(images: Tensor) -> bool:
    """Whether most of the edge of the images is one colour: then there is an object and no surroundings.

    >>> has_plain_edges(torch.zeros(3, 1, 20, 20)), has_plain_edges(torch.rand(3, 1, 20, 20))
    (True, False)
    """
    edge = images[:, :, frame_mask((images.shape[2], images.shape[3])) > 0]
    middle = edge.transpose(0, 1).flatten(1).median(1).values
    near = (edge - middle[None, :, None]).abs().amax(1) < PLAIN
    return bool(near.float().mean() > 0.5)


def with_texture(images: Tensor, donors: Tensor, hot: Tensor, generator: torch.Generator) -> Tensor:
    """Return images whose fine detail is that of the donors, in blocks of 16 x 16 pixels that change places.

    Shuffled blocks keep grain, stripes and the steps of compression (whose blocks of 8 stay in step), and no shape.
    The donors' detail at ``hot`` (images, 1, height, width) is left out: a small part of the object would survive.
    """
    window = max(3, min(images.shape[2:]) // 24) | 1
    side = BLOCK if min(images.shape[2:]) >= 3 * BLOCK else BLOCK // 2
    detail = (donors - _smooth(donors, window)) * (1 - hot)
    return (_smooth(images, window) + shuffled_blocks(detail, side, generator)).clamp(0, 1)


def _smooth(images: Tensor, window: int) -> Tensor:
    for _ in range(2):
        images = F.avg_pool2d(F.pad(images, (window // 2,) * 4, mode="reflect"), window, stride=1)
    return images


def shuffled_blocks(images: Tensor, side: int, generator: torch.Generator) -> Tensor:
    """Return images whose whole blocks have changed places at random; what is left over at two edges stays.

    >>> x = torch.arange(16.0).view(1, 1, 4, 4)
    >>> torch.equal(shuffled_blocks(x, 2, torch.Generator()).sort().values.sum(), x.sum())
    True
    """
    n, channels, height, width = images.shape
    rows, columns = height // side, width // side
    out = images.clone()
    inside = images[:, :, : rows * side, : columns * side]
    blocks = inside.reshape(n, channels, rows, side, columns, side).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    order = torch.rand(n, rows * columns, generator=generator).argsort(1)
    blocks = blocks[torch.arange(n)[:, None], order].view(n, rows, columns, channels, side, side)
    out[:, :, : rows * side, : columns * side] = blocks.permute(0, 3, 1, 4, 2, 5).reshape(inside.shape)
    return out
