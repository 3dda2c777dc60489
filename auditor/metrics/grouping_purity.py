"""Purity of a grouping: how well groups of images agree with their classes, its chance level and its ceiling.

For groups G_1 … G_g of n images with classes c:

    purity  = 1/n sum_k max_c |{i in G_k : c_i = c}|

    chance  = E purity when every image goes to one of g groups at random
            = g/n E max_c X_c,   X_c ~ Binomial(n_c, 1/g) independent,   E max = sum_m P(max > m)

    ceiling = the most any grouping into g groups can have: the share of the g most frequent classes

An empty group adds nothing. Chance is far above 1/g for few images: ten images of four classes in four groups have
about a half, which is what people reach who see nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def purity(groups: Sequence[Hashable], classes: Sequence[Hashable]) -> float:
    """Return the purity of a grouping; both have one entry per image.

    >>> purity([0, 0, 1, 1], ["a", "a", "a", "b"])
    0.75
    """
    if len(groups) != len(classes) or not classes:
        raise ValueError(f"want a group and a class for each of at least one image, got {len(groups)}, {len(classes)}")
    best: Counter[Hashable] = Counter()
    for (group, _), n in Counter(zip(groups, classes, strict=True)).items():
        best[group] = max(best[group], n)
    return sum(best.values()) / len(classes)


def chance(classes: Sequence[Hashable], n_groups: int) -> float:
    """Return the expected purity of images put into groups at random.

    >>> chance(["a", "b"], 1), chance(["a", "b"], 2)
    (0.5, 0.75)
    """
    from scipy.stats import binom

    sizes = np.array(list(Counter(classes).values()))
    m = np.arange(sizes.max())
    below = binom.cdf(m[:, None], sizes[None, :], 1.0 / n_groups).prod(1)
    return float(n_groups * (1.0 - below).sum() / len(classes))


def ceiling(classes: Sequence[Hashable], n_groups: int) -> float:
    """Return the highest purity that so many groups can have.

    >>> ceiling(["a", "a", "b", "c"], 2)
    0.75
    """
    return sum(n for _, n in Counter(classes).most_common(n_groups)) / len(classes)


def ward_groups(features: Array, n_groups: int) -> list[int]:
    """Return the group of every row: Ward's agglomerative clustering, cut at ``n_groups``.

    >>> ward_groups(np.array([[0.0], [0.1], [5.0], [5.1]]), 2)
    [0, 0, 1, 1]
    """
    from scipy.cluster.hierarchy import fcluster, linkage

    rows = np.asarray(features, dtype=np.float64).reshape(len(features), -1)
    if len(rows) == 1:
        return [0]
    labels = fcluster(linkage(rows, "ward"), n_groups, "maxclust")
    order = {label: k for k, label in enumerate(dict.fromkeys(labels.tolist()))}
    return [order[label] for label in labels.tolist()]


def shuffled_purity(groups: Sequence[int], classes: Sequence[Hashable], rng: np.random.Generator, n: int = 50) -> float:
    """Return the mean purity of groups of the same sizes with the images shuffled among them."""
    index = np.arange(len(classes))
    return float(np.mean([purity(groups, [classes[i] for i in rng.permutation(index)]) for _ in range(n)]))


def balanced_counts(n: int, n_classes: int) -> list[int]:
    """Return how many images of each class a batch of ``n`` has: equal, the first ones one more.

    >>> balanced_counts(10, 4)
    [3, 3, 2, 2]
    """
    return [n // n_classes + (i < n % n_classes) for i in range(n_classes)]


def small_pictures(images: Array, side: int = 12) -> Array:
    """Return images (n, channels, height, width) as rows of their cells' mean colours: how they look from afar."""
    n, _, h, w = images.shape
    rows, columns = min(side, h), min(side, w)
    y, x = np.arange(h) * rows // h, np.arange(w) * columns // w
    down = np.eye(rows)[y] / np.bincount(y, minlength=rows)
    across = np.eye(columns)[x] / np.bincount(x, minlength=columns)
    cells: Array = np.einsum("nchw,hr,wk->ncrk", images, down, across, optimize=True)
    return cells.reshape(n, -1)


def masked(images: Array, heat: Array) -> Array:
    """Return images (n, channels, height, width) seen through heatmaps (n, height, width), each of maximum 1."""
    top = heat.max((1, 2), keepdims=True)
    return images * (heat / np.where(top > 0, top, 1.0))[:, None]


def drawn_batches(
    classes: Sequence[int], n_groups: int, per_batch: int, n_batches: int, seed: int
) -> tuple[list[list[int]], int]:
    """Return rows of batches as people are shown, and the number of classes in each; no batch where that is below two.

    Classes with too few rows are left out; where fewer than ``n_groups`` are left, all of these are taken.
    """
    rng = np.random.default_rng(seed)
    rows_of = {k: np.flatnonzero(np.asarray(classes) == k) for k in sorted(set(classes))}
    for n in range(min(n_groups, len(rows_of)), 1, -1):
        counts = balanced_counts(per_batch, n)
        usable = [k for k, rows in rows_of.items() if len(rows) >= counts[0]]
        if len(usable) >= n:
            break
    else:
        return [], 0
    batches = []
    for _ in range(n_batches):
        chosen = rng.permutation(usable)[:n]
        batches.append([int(r) for k, m in zip(chosen, counts, strict=True) for r in rng.permutation(rows_of[k])[:m]])
    return batches, n
