"""Drift: whether the concepts of a model changed between two versions, beyond what re-fitting one of them changes.

Both versions are factorized several times from other random starts on the same images. The similarity of two fits is
the mean correlation of their concepts' activation profiles over the images, matched one to one (Hungarian). Were both
versions the same, it would not matter which fits are called A and which B: so the mean similarity between A and B is
held against its value under all ways to call them so (a permutation test over re-fits, exact for any refitting noise).
``null_low`` is the value below which fewer than 1 in 100 of these lie; drift means to be below it.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import mannwhitneyu
from torch import Tensor

from auditor.explainers.contributions import contributions
from auditor.data.source import Data
from auditor.errors import NumericsError, OptionError, ShapeError
from auditor.explainers.base import Progress, silent
from auditor.explainers.layer_activations import Reservoir, as_columns, harvest
from auditor.kernels.factorization.nmf import Factorization, factorize
from auditor.kernels.factorization.projection import prepare, project_images
from auditor.kernels.networks.linear_cka import linear_cka
from auditor.metrics.concept_matching import Match, match_columns
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)
LEVEL = 0.01  # chance of a false alarm
ALIKE = 0.5  # a concept whose matches on the other side correlate less than this on average has no counterpart
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Drift:
    """What changed from version A to version B; indices are concepts of the best fit of each."""

    similarity: float
    null_low: float
    null_high: float
    p_value: float
    drift: bool
    matched: list[tuple[int, int, float]]
    born: list[int]
    died: list[int]
    basis: list[tuple[int, int, float]] | None  # matched by cosine of basis vectors, where the widths agree
    within: tuple[float, float]  # mean similarity among re-fits of A and of B
    cka: dict[str, float]
    classes: list[str]
    change: Array  # (matched, classes): mean contribution in B minus in A
    layers: tuple[str, str]
    n_images: int

    def metrics(self) -> dict[str, float]:
        """Return the numbers a policy can set limits on."""
        found = {"drift/similarity": self.similarity, "drift/null_low": self.null_low, "drift/alarm": float(self.drift)}
        found |= {"drift/born": float(len(self.born)), "drift/died": float(len(self.died))}
        return found | {f"drift/cka/{name}": value for name, value in self.cka.items()}

    def to_json(self) -> dict[str, Any]:
        """Return plain Python for JSON."""
        return {
            "similarity": self.similarity,
            "null_low": self.null_low,
            "null_high": self.null_high,
            "p_value": self.p_value,
            "drift": self.drift,
            "matched": [list(row) for row in self.matched],
            "born": self.born,
            "died": self.died,
            "basis_matched": None if self.basis is None else [list(row) for row in self.basis],
            "within": {"a": self.within[0], "b": self.within[1]},
            "cka": self.cka,
            "contributions": {
                name: [[i, j, float(self.change[row, c])] for row, (i, j, _) in enumerate(self.matched)]
                for c, name in enumerate(self.classes)
            },
            "layers": {"a": self.layers[0], "b": self.layers[1]},
            "n_images": self.n_images,
            "metrics": self.metrics(),
        }


def check_comparable(a: Subject, b: Subject) -> None:
    """Raise one sentence when two versions do not answer the same question about the same images."""
    if a.input_shape != b.input_shape:
        raise ShapeError(
            f"compare: the versions take images of different sizes, {a.input_shape} and {b.input_shape}; compare "
            "versions with one input size."
        )
    if a.class_names != b.class_names:
        only = sorted(set(a.class_names) ^ set(b.class_names))
        what = (
            f"only one of them has {', '.join(only[:5])}{'…' if len(only) > 5 else ''}" if only else "the order differs"
        )
        raise OptionError(
            f"compare: the versions have different class lists ({a.n_classes} and {b.n_classes} classes, {what}); "
            "compare versions with the same classes."
        )


def compare(
    a: Subject,
    b: Subject,
    data: Data,
    *,
    layer: str | None = None,
    rank: int = 10,
    refits: int = 8,
    max_positions: int = 6000,
    max_eval: int = 200,
    batch_size: int = 64,
    seed: int = 0,
    progress: Progress = silent,
) -> Drift:
    """Compare the concepts of two versions on the same images; see the module's docstring for the test."""
    check_comparable(a, b)
    if refits < 5:
        raise OptionError(f"compare: refits must be at least 5 for a test at the 1% level, got {refits}.")
    if rank < 1:
        raise OptionError(f"compare: rank must be at least 1, got {rank}.")
    name = a.layer(layer).name
    in_b = {item.name for item in b.layers() if item.explainable}
    sides = [(a, name, seed), (b, name if layer is not None or name in in_b else b.layer(None).name, seed + refits)]
    fits = [_refits(s, data, at, rank, refits, max_positions, batch_size, first, progress) for s, at, first in sides]
    best = [min(range(refits), key=lambda i, f=found: f[i].relative_error) for found in fits]  # type: ignore[misc]
    profiles, contribution = [], []
    for (subject, at, _), found, i in zip(sides, fits, best, strict=True):
        p, c = _profiles(subject, data, at, [fit.W for fit in found], i, max_eval, batch_size, a, progress)
        profiles.append(p)
        contribution.append(c)
    pooled = [p for side in profiles for p in side]
    M = _similarities(pooled)
    similarity, null = _null(M, refits)
    p_value = float((null <= similarity + 1e-12).mean())
    null_low = float(np.sort(null)[int(LEVEL * len(null))])
    drift = similarity < null_low
    left, right = profiles[0][best[0]], profiles[1][best[1]]
    match = _match(left, right)
    matched = _rows(match)
    died = _without_counterpart(left, best[0], profiles[0], profiles[1]) if drift else []
    born = _without_counterpart(right, best[1], profiles[1], profiles[0]) if drift else []
    Wa, Wb = fits[0][best[0]].W, fits[1][best[1]].W
    basis = _rows(match_columns(Wa, Wb)) if Wa.shape == Wb.shape else None
    change = (contribution[1][match.right] - contribution[0][match.left]).numpy()
    log.info("compare: similarity %.3f, null band from %.3f, drift %s", similarity, null_low, drift)
    return Drift(
        similarity=similarity,
        null_low=null_low,
        null_high=float(null.max()),
        p_value=p_value,
        drift=drift,
        matched=matched,
        born=born,
        died=died,
        basis=basis,
        within=(_within(M, range(refits)), _within(M, range(refits, 2 * refits))),
        cka=layer_cka(a, b, data, batch_size, progress),
        classes=list(a.class_names),
        change=change,
        layers=(sides[0][1], sides[1][1]),
        n_images=left.shape[0],
    )


def layer_cka(a: Subject, b: Subject, data: Data, batch_size: int, progress: Progress = silent) -> dict[str, float]:
    """Return the linear CKA of every layer that both versions have, on activations averaged over positions."""
    others = {item.name for item in b.layers() if item.explainable}
    names = [item.name for item in a.layers() if item.explainable and item.name in others]
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in names}
    done = 0
    with torch.no_grad():
        for batch in data.batches(a, batch_size):
            both = [s.activations(batch.images, names) for s in (a, b)]
            for name in names:
                pair = [s.layout(name).to_positions(z[name]).mean(-1) for s, z in zip((a, b), both, strict=True)]
                seen[name].append((pair[0].T.cpu(), pair[1].T.cpu()))
            done += len(batch)
            progress("comparing layers", done, len(data))
    return {
        name: linear_cka(torch.cat([p for p, _ in pairs], 1), torch.cat([q for _, q in pairs], 1))
        for name, pairs in seen.items()
    }


def _refits(
    subject: Subject,
    data: Data,
    layer: str,
    rank: int,
    refits: int,
    max_positions: int,
    batch_size: int,
    first: int,
    progress: Progress,
) -> list[Factorization]:
    layout = subject.layout(layer)
    kept = Reservoir(max_positions, 0)  # one sample of positions for all fits: only the starts differ
    for _, _, _, z in harvest(subject, data, layer, batch_size=batch_size, every=2, progress=progress):
        kept.put(as_columns(layout, z))
    X = kept.columns()
    if rank > min(X.shape):
        raise OptionError(
            f"compare: rank must be at most {min(X.shape)} for layer {layer!r}, {X.shape[0]} channels and "
            f"{X.shape[1]} positions, got {rank}; choose a smaller rank or give more images."
        )
    signed = float(X.min()) < 0
    found = []
    for i in range(refits):
        try:
            found.append(factorize(X, rank, seed=first + i, init="random", max_iter=300, signed=signed))
        except ValueError as error:
            raise NumericsError(f"compare: layer {layer!r}: {error}") from error
        progress("re-fitting", i + 1, refits)
    return found


def _profiles(
    subject: Subject,
    data: Data,
    layer: str,
    bases: list[Tensor],
    best: int,
    max_eval: int,
    batch_size: int,
    reference: Subject,
    progress: Progress,
) -> tuple[list[Tensor], Tensor]:
    """Return each fit's mean scores (images, concepts), and the best fit's mean contribution (concepts, classes)."""
    layout, ready = subject.layout(layer), [prepare(W) for W in bases]
    parts: list[list[Tensor]] = [[] for _ in bases]
    total = torch.zeros(bases[0].shape[1], subject.n_classes, dtype=torch.float64)
    seen = torch.zeros(subject.n_classes, dtype=torch.float64)
    for batch, _, logits, z in harvest(subject, data, layer, batch_size=batch_size, every=2, progress=progress):
        positions = layout.to_positions(z)
        scores = [project_images(positions, basis) for basis in ready]
        for kept, S in zip(parts, scores, strict=True):
            kept.append(S.mean(-1).cpu())
        room = max_eval - int(seen.sum())
        if room > 0:
            with torch.no_grad():
                said = reference.logits(batch.images).argmax(1).cpu()
            targets = torch.where(batch.labels >= 0, batch.labels, said)[:room]
            n = len(targets)
            c = contributions(
                subject, layer, layout, z[:n], logits[:n], bases[best].to(z), scores[best][:n], targets.tolist()
            )
            total.index_add_(1, targets, c.contributions.T.cpu())
            seen += targets.bincount(minlength=subject.n_classes)
    return [torch.cat(kept) for kept in parts], total / seen.clamp_min(1)


def _match(left: Tensor, right: Tensor) -> Match:
    """Match concepts by the correlation of their profiles (images, concepts)."""
    return match_columns(left.double() - left.double().mean(0), right.double() - right.double().mean(0))


def _rows(match: Match) -> list[tuple[int, int, float]]:
    return [(int(i), int(j), float(s)) for i, j, s in zip(match.left, match.right, match.cosine, strict=True)]


def _similarities(profiles: list[Tensor]) -> Array:
    """Return the mean matched correlation of all pairs of fits."""
    M = np.eye(len(profiles))
    for i, j in itertools.combinations(range(len(profiles)), 2):
        M[i, j] = M[j, i] = float(_match(profiles[i], profiles[j]).cosine.mean())
    return M


def _without_counterpart(fit: Tensor, index: int, own: list[Tensor], others: list[Tensor]) -> list[int]:
    """Return the concepts of one fit that re-fits of its own version find again, and fits of the other version do not.

    Per concept, its matches in the other version must be weaker than those in its own (rank-sum test) and weak at all.
    """
    again = torch.stack([_match(fit, p).cosine for i, p in enumerate(own) if i != index])
    across = torch.stack([_match(fit, p).cosine for p in others])
    return [
        k
        for k in range(fit.shape[1])
        if float(across[:, k].mean()) < ALIKE
        and mannwhitneyu(across[:, k].numpy(), again[:, k].numpy(), alternative="less").pvalue < LEVEL
    ]


def _null(M: Array, refits: int) -> tuple[float, Array]:
    """Return the mean similarity between the versions, and its value for every way to split the fits in halves."""
    n = M.shape[0]
    values = []
    for rest in itertools.combinations(range(1, n), refits - 1):  # fit 0 stays on the left: each split counts once
        left = np.array([0, *rest])
        right = np.setdiff1d(np.arange(n), left)
        values.append(M[np.ix_(left, right)].mean())
    return float(values[0]), np.array(values)  # the first combination is 0..refits-1, the true split


def _within(M: Array, members: range) -> float:
    return float(np.mean([M[i, j] for i, j in itertools.combinations(members, 2)]))
