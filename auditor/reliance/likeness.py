"""Likeness: how alike the deciding boxes of a class look, where they lie, and what else gives the class away.

A plate, a watermark or a ruler looks the same in every image and often lies at the same place; a face does not.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.metrics import roc_auc_score
from torch import Tensor

from auditor.reliance.regions import Boxes

SIDE = 16  # of a box brought to a common size
SHIFT = 2  # of these 16, by which two boxes may be out of step
MARGIN = 0.15  # of a box's sides that is looked at around it: a spot of one colour has an edge
RING = 0.7  # of a box's sides: how far around it its context reaches
NEAREST = 3  # an image is compared with the third of the others that is most like it
FOLDS = 4
POINTS = 6  # along a box's side, at which a layer is read


def crops(images: Tensor, boxes: Boxes, margin: float = MARGIN, side: int = SIDE) -> Tensor:
    """Return the boxes' contents (images, channels, side, side) with a margin around them, mirrored at the frame."""
    height, width = images.shape[2:]
    parts = []
    for i in range(len(boxes)):
        h, w = int(boxes.height[i]), int(boxes.width[i])
        my, mx = max(1, round(margin * h)), max(1, round(margin * w))
        rows = torch.arange(int(boxes.top[i]) - my, int(boxes.top[i]) + h + my).abs()
        columns = torch.arange(int(boxes.left[i]) - mx, int(boxes.left[i]) + w + mx).abs()
        rows, columns = (height - 1 - (height - 1 - rows).abs()).abs(), (width - 1 - (width - 1 - columns).abs()).abs()
        parts.append(F.interpolate(images[i][:, rows][:, :, columns][None].float(), (side, side), mode="area")[0])
    return torch.stack(parts)


def likenesses(images: Tensor, boxes: Boxes) -> Tensor:
    """Return how alike two boxes look (images, images): the best correlation over small shifts of one of them.

    Means of the channels are taken out, so it is the drawing that counts and not the colour.
    """
    parts = crops(images, boxes)
    inner = SIDE - 2 * SHIFT

    def unit(x: Tensor) -> Tensor:
        x = x - x.mean((2, 3), keepdim=True)
        return F.normalize(x.flatten(1), dim=1)

    middle = unit(parts[:, :, SHIFT : SHIFT + inner, SHIFT : SHIFT + inner])
    best = torch.full((len(parts), len(parts)), -1.0)
    for dy in range(2 * SHIFT + 1):
        for dx in range(2 * SHIFT + 1):
            best = torch.maximum(best, middle @ unit(parts[:, :, dy : dy + inner, dx : dx + inner]).T)
    return torch.maximum(best, best.T)


def context_likenesses(images: Tensor, boxes: Boxes) -> Tensor:
    """Return how alike the rings around two boxes are drawn (images, images): where edges run, either way round.

    What is part of an object has the object around it: an eye lies in a head. What was put into the picture does not.
    """
    side = 2 * SIDE
    grey = crops(images, boxes, RING, side + 1).mean(1)
    steps = (grey[:, 1:, :-1] - grey[:, :-1, :-1]).abs() + (grey[:, :-1, 1:] - grey[:, :-1, :-1]).abs()
    edges = F.avg_pool2d(steps[:, None], 3, stride=1, padding=1)[:, 0]
    inner = round(side * (0.5 - 0.5 * (1 + 2 * MARGIN) / (1 + 2 * RING)))
    ring = torch.ones(side, side, dtype=torch.bool)
    ring[inner : side - inner, inner : side - inner] = False

    def unit(maps: Tensor) -> Tensor:
        rows = maps[:, ring]
        return F.normalize(rows - rows.mean(1, keepdim=True), dim=1)

    rows = unit(edges)
    return torch.maximum(rows @ rows.T, rows @ unit(edges.flip(2)).T)


def context_sameness(images: Tensor, boxes: Boxes) -> Tensor:
    """Return per image the mean likeness of its box's context with the third of the others that is most like it."""
    return _nearest(context_likenesses(images, boxes))


def sameness(images: Tensor, boxes: Boxes) -> Tensor:
    """Return per image the mean likeness of its box with the third of the other boxes that is most like it."""
    return _nearest(likenesses(images, boxes))


def feature_sameness(features: Tensor, boxes: Boxes, size: tuple[int, int]) -> Tensor:
    """Return the same from a layer's maps (images, channels, rows, columns): an early layer knows nothing of classes.

    Each box is read at 6 x 6 points; what a channel shows on average, over all points of all images, is taken out.
    """
    step = (torch.arange(POINTS) + 0.5) / POINTS
    y = (boxes.top[:, None] + step * boxes.height[:, None]) / size[0]
    x = (boxes.left[:, None] + step * boxes.width[:, None]) / size[1]
    grid = torch.stack([x[:, None].expand(-1, POINTS, -1), y[:, :, None].expand(-1, -1, POINTS)], -1)
    features = features.float() - features.float().mean((0, 2, 3), keepdim=True)
    points = F.grid_sample(features, 2 * grid.float() - 1, align_corners=False, padding_mode="border")
    rows = F.normalize(points.flatten(1), dim=1)
    return _nearest(rows @ rows.T)


def _nearest(pairs: Tensor) -> Tensor:
    pairs = pairs.clone().fill_diagonal_(-2.0)
    return pairs.topk(max(1, (len(pairs) - 1) // NEAREST), dim=1).values.mean(1)


def centres(boxes: Boxes, size: tuple[int, int]) -> Tensor:
    """Return the boxes' centres (images, 2) as shares of height and width."""
    y = (boxes.top + boxes.height / 2) / size[0]
    x = (boxes.left + boxes.width / 2) / size[1]
    return torch.stack([y, x], 1).float()


def place_entropy(at: Tensor, cells: int = 4) -> float:
    """Return the entropy of centres over a grid of cells, as a share of its maximum: 0 is always the same cell.

    >>> place_entropy(torch.full((9, 2), 0.9))
    0.0
    """
    index = (at.clamp(0, 0.9999) * cells).long()
    share = torch.bincount(index[:, 0] * cells + index[:, 1], minlength=cells * cells).double() / len(at)
    entropy = -(share[share > 0] * share[share > 0].log()).sum()
    return abs(float(entropy / np.log(min(len(at), cells * cells))))


def edge_distance(at: Tensor) -> Tensor:
    """Return the distance of each centre from the nearest edge of the frame, 0 to .5."""
    return torch.minimum(at, 1 - at).amin(1)


def colour_statistics(images: Tensor) -> Tensor:
    """Return mean and deviation of each channel (images, 2 channels)."""
    return torch.cat([images.mean((2, 3)), images.std((2, 3))], 1)


def spectrum_statistics(images: Tensor) -> Tensor:
    """Return log energies in six frequency bands, and how much steps at every eighth pixel stand out (JPEG blocks)."""
    grey = images.float().mean(1)
    height, width = grey.shape[1:]
    energy = torch.fft.fft2(grey - grey.mean((1, 2), keepdim=True)).abs().log1p()
    fy, fx = torch.fft.fftfreq(height), torch.fft.fftfreq(width)
    radius = 2 * (fy[:, None] ** 2 + fx[None] ** 2).sqrt()
    edges = (0.01, 0.05, 0.1, 0.2, 0.4, 0.7, 2.0)
    rings = [(radius >= a) & (radius < b) for a, b in itertools.pairwise(edges)]
    bands = [energy[:, ring].mean(1) for ring in rings if bool(ring.any())]  # a small image has no low bands
    across = (grey[:, :, 1:] - grey[:, :, :-1]).abs().mean(1)
    down = (grey[:, 1:] - grey[:, :-1]).abs().mean(2)
    long = [steps for steps in (across, down) if steps.shape[1] > 7]  # an image of 8 pixels has no block border
    blocks = [steps[:, 7::8].mean(1) / steps.mean(1).clamp_min(1e-6) for steps in long]
    return torch.stack([*bands, *blocks], 1)


def leak(statistics: Tensor, is_class: Tensor, seed: int = 0) -> float:
    """Return how well few statistics of an image predict its class: cross-fitted area under the ROC curve.

    A linear discriminant with shrinkage is fitted on three quarters of the images and scores the others. .5 is chance.
    """
    x, y = statistics.double().numpy(), is_class.numpy().astype(int)
    fold = np.random.default_rng(seed).permutation(len(y)) % FOLDS
    score = np.zeros(len(y))
    for k in range(FOLDS):
        if len(set(y[fold != k])) < 2:
            return 0.5
        model = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto").fit(x[fold != k], y[fold != k])
        score[fold == k] = model.decision_function(x[fold == k])
    return float(roc_auc_score(y, score)) if 0 < y.sum() < len(y) else 0.5
