"""Deciding regions: the hottest share of an image as a mask, the box that holds most heat, and other places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SHARES = (0.01, 0.03, 0.05, 0.10)
BOX_SHARES = (0.008, 0.015, 0.03, 0.06)
ASPECTS = (1 / 7, 1 / 2.2, 1.0, 2.2, 7.0)  # width by height: a plate, a spot, a sign, a ruler
MOST_OVERLAP = 0.1
TRIES = 40


@dataclass(frozen=True)
class Boxes:
    """One box per image: top, left, height, width (images,) in pixels, and its share of the image's heat."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor
    heat: Tensor

    def __len__(self) -> int:
        return len(self.top)

    def rows(self, rows: Tensor) -> Boxes:
        """Return the boxes of some images."""
        return Boxes(self.top[rows], self.left[rows], self.height[rows], self.width[rows], self.heat[rows])

    def where(self, condition: Tensor, other: Boxes) -> Boxes:
        """Return these boxes where ``condition`` (images,) holds, and those of ``other`` elsewhere."""
        pairs = (
            (self.top, other.top),
            (self.left, other.left),
            (self.height, other.height),
            (self.width, other.width),
            (self.heat, other.heat),
        )
        return Boxes(*(torch.where(condition, one, two) for one, two in pairs))

    @classmethod
    def cat(cls, parts: Sequence[Boxes]) -> Boxes:
        """Return the boxes of several parts, one after the other."""
        columns = [[b.top, b.left, b.height, b.width, b.heat] for b in parts]
        return cls(*(torch.cat(list(column)) for column in zip(*columns, strict=True)))

    def at(self, top: Tensor, left: Tensor) -> Boxes:
        """Return boxes of the same size at other places."""
        return Boxes(top, left, self.height, self.width, torch.zeros_like(self.heat))

    def grown(self, margin: float, size: tuple[int, int]) -> Boxes:
        """Return boxes with a margin around them, a share of their sides, cut at the frame."""
        dy, dx = (margin * self.height).round().long(), (margin * self.width).round().long()
        top, left = (self.top - dy).clamp_min(0), (self.left - dx).clamp_min(0)
        bottom = (self.top + self.height + dy).clamp_max(size[0])
        right = (self.left + self.width + dx).clamp_max(size[1])
        return Boxes(top, left, bottom - top, right - left, self.heat)

    def masks(self, size: tuple[int, int]) -> Tensor:
        """Return masks (boxes, 1, height, width) that are 1 inside."""
        y, x = (torch.arange(n) for n in size)
        tall = (y >= self.top[:, None]) & (y < (self.top + self.height)[:, None])
        wide = (x >= self.left[:, None]) & (x < (self.left + self.width)[:, None])
        return (tall[:, :, None] & wide[:, None]).float()[:, None]

    def joined_with(self, other: Boxes) -> Boxes:
        """Return the smallest boxes around each box and the one box of ``other``, where the two touch."""
        bottom, right = self.top + self.height, self.left + self.width
        bottom_other, right_other = other.top + other.height, other.left + other.width
        apart = (bottom < other.top) | (bottom_other < self.top) | (right < other.left) | (right_other < self.left)
        top, left = torch.minimum(self.top, other.top), torch.minimum(self.left, other.left)
        height, width = torch.maximum(bottom, bottom_other) - top, torch.maximum(right, right_other) - left
        return self.where(apart, Boxes(top, left, height, width, self.heat))

    def to_json(self) -> list[list[float]]:
        """Return a row [top, left, height, width, share of heat] per box."""
        columns = (self.top, self.left, self.height, self.width, self.heat)
        rows: list[list[float]] = torch.stack([c.double() for c in columns], 1).tolist()
        return rows

    @classmethod
    def from_json(cls, rows: Sequence[Sequence[float]]) -> Boxes:
        """Restore what ``to_json`` gave."""
        table = torch.tensor([list(row) for row in rows], dtype=torch.float64).reshape(-1, 5)
        top, left, height, width = (table[:, k].long() for k in range(4))
        return cls(top, left, height, width, table[:, 4].float())

    def crop(self, images: Tensor, i: int) -> Tensor:
        """Return the pixels (channels, height, width) inside box ``i``."""
        top, left = int(self.top[i]), int(self.left[i])
        return images[i, :, top : top + int(self.height[i]), left : left + int(self.width[i])]


def hottest(maps: Tensor, share: float) -> Tensor:
    """Return masks (images, 1, height, width) of the pixels with most heat; at least one pixel each."""
    flat = maps.flatten(1)
    k = max(1, round(share * flat.shape[1]))
    masks = torch.zeros_like(flat).scatter_(1, flat.topk(k, dim=1).indices, 1.0)
    return masks.view(len(maps), 1, *maps.shape[1:])


def moved(masks: Tensor, generator: torch.Generator) -> Tensor:
    """Return each mask shifted (around the edges) to a random other place that it overlaps by at most a tenth.

    A mask that covers too much for that goes where it overlaps least among the tries.
    """
    height, width = masks.shape[2:]
    out = torch.empty_like(masks)
    for i, mask in enumerate(masks):
        best, least = mask, torch.inf
        for _ in range(TRIES):
            dy = int(torch.randint(height, (1,), generator=generator))
            dx = int(torch.randint(width, (1,), generator=generator))
            shifted = torch.roll(mask, (dy, dx), (1, 2))
            overlap = float((shifted * mask).sum() / mask.sum().clamp_min(1))
            if overlap < least:
                best, least = shifted, overlap
            if overlap <= MOST_OVERLAP:
                break
        out[i] = best
    return out


def scattered(masks: Tensor, cell: int, generator: torch.Generator) -> Tensor:
    """Return masks of as many pixels, in random whole cells of ``cell`` x ``cell`` pixels."""
    height, width = masks.shape[2:]
    rows, columns = -(-height // cell), -(-width // cell)
    out = torch.zeros_like(masks)
    for i, mask in enumerate(masks):
        want, got = float(mask.sum()), 0.0
        for k in torch.randperm(rows * columns, generator=generator).tolist():
            top, left = k // columns * cell, k % columns * cell
            out[i, 0, top : top + cell, left : left + cell] = 1
            got = float(out[i].sum())
            if got >= want:
                break
    return out


def boxes(maps: Tensor) -> Boxes:
    """Return for each map the box of most heat per square root of its area, over sizes and shapes.

    Heat per area would always choose the smallest box, heat alone the largest; the square root is the choice at which
    a box of even heat that is half as large holds less, and one that leaves cold margins out holds more.
    """
    n, height, width = maps.shape
    total = maps.sum((1, 2)).clamp_min(1e-12)
    integral = F.pad(maps.double().cumsum(1).cumsum(2), (1, 0, 1, 0))
    best = torch.full((n,), -torch.inf)
    chosen = torch.zeros(5, n)
    for share in BOX_SHARES:
        for aspect in ASPECTS:
            h = min(height, max(3, round((share * height * width / aspect) ** 0.5)))
            w = min(width, max(3, round((share * height * width * aspect) ** 0.5)))
            heat = integral[:, h:, w:] - integral[:, :-h, w:] - integral[:, h:, :-w] + integral[:, :-h, :-w]
            heat = heat.float()
            value, at = heat.flatten(1).max(1)
            score = value / (h * w) ** 0.5
            row = torch.stack(
                [at // heat.shape[2], at % heat.shape[2], torch.full_like(at, h), torch.full_like(at, w), at]
            )
            row = row.float()
            row[4] = value / total
            better = score > best
            chosen = torch.where(better, row, chosen)
            best = torch.where(better, score, best)
    top, left, h, w = (c.long() for c in chosen[:4])
    return Boxes(top, left, h, w, chosen[4])


def random_places(b: Boxes, size: tuple[int, int], generator: torch.Generator, away: bool = False) -> Boxes:
    """Return boxes of the same sizes at uniform places; ``away``: that overlap the old ones as little as can be had."""
    top, left = torch.empty_like(b.top), torch.empty_like(b.left)
    for i in range(len(b)):
        h, w = int(b.height[i]), int(b.width[i])
        least = torch.inf
        for _ in range(TRIES if away else 1):
            y = int(torch.randint(size[0] - h + 1, (1,), generator=generator))
            x = int(torch.randint(size[1] - w + 1, (1,), generator=generator))
            overlap = max(0, h - abs(y - int(b.top[i]))) * max(0, w - abs(x - int(b.left[i]))) / (h * w)
            if overlap < least:
                top[i], left[i], least = y, x, overlap
            if overlap <= MOST_OVERLAP:
                break
    return b.at(top, left)


def pasted(receivers: Tensor, donors: Tensor, source: Boxes, target: Boxes) -> Tensor:
    """Return the receivers with the donors' pixels of ``source`` at ``target``; row i of each belongs together."""
    out = receivers.clone()
    for i in range(len(out)):
        top, left = int(target.top[i]), int(target.left[i])
        out[i, :, top : top + int(target.height[i]), left : left + int(target.width[i])] = source.crop(donors, i)
    return out
