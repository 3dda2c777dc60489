"""Drift: whether the concepts of a model changed between two versions, beyond what re-fitting one of them changes.

Both versions are factorized several times from other random starts on the same images. The similarity of two fits is
the mean correlation of their concepts' activation profiles over the images, matched one to one (Hungarian). Were both
versions the same, it would not matter which fits are called A and which B: so the mean similarity between A and B is
held against its value under all ways to call them so (a permutation test over re-fits, exact for any refitting noise).
``null_low`` is the value below which fewer than 1 in 100 of these lie; below it the versions have changed.

Every honest retraining changes them too. So an alarm needs a second band, that of `retraining_noise`, from versions
that are known to be honest; where it is unknown there is no alarm, only the size of the change.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import mannwhitneyu
from torch import Tensor

from auditor.data.source import Data, open_data
from auditor.errors import OptionError
from auditor.explainers.contributions import contributions
from auditor.explainers.layer_activations import Reservoir, as_columns, harvest
from auditor.explainers.refits import Refit
from auditor.kernels.factorization.nmf import Factorization
from auditor.kernels.factorization.projection import prepare, project_images
from auditor.kernels.networks.linear_cka import linear_cka
from auditor.metrics.concept_matching import Match, match_columns
from auditor.progress import Progress, as_callback, silent
from auditor.release.retraining_noise import Band, band_of
from auditor.release.same_task import check_comparable
from auditor.runners.runner import current
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)
LEVEL = 0.01  # chance of a false alarm
ALIKE = 0.5  # a concept whose matches on the other side correlate less than this on average has no counterpart
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, repr=False)
class Drift:
    """What changed from version A to version B; indices are concepts of the best fit of each."""

    similarity: float
    null_low: float
    null_high: float
    p_value: float
    changed: bool  # beyond what re-fitting one version changes
    band: Band  # what retraining changes
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

    @property
    def drift(self) -> bool | None:
        """Whether the change is more than re-fitting and retraining explain; None where the latter is unknown."""
        if not self.changed:
            return False
        return self.similarity < self.band.low if self.band.is_known else None

    def __repr__(self) -> str:
        return f"Drift({self.words()})"

    def to_pandas(self) -> Any:
        """Return the matched concepts as a pandas frame: one of A, one of B, their similarity, changes by class."""
        import pandas as pd

        rows: list[dict[str, Any]] = [{"concept_a": i, "concept_b": j, "similarity": s} for i, j, s in self.matched]
        changes = [dict(zip(self.classes, map(float, row), strict=True)) for row in self.change]
        return pd.DataFrame([row | change for row, change in zip(rows, changes, strict=True)])

    def words(self) -> str:
        """Return the verdict in a sentence; no alarm where it is unknown what retraining changes."""
        verdict = {True: "DRIFT", False: "no drift", None: "CHANGED, which may be retraining"}[self.drift]
        born, died = len(self.born), len(self.died)
        effect = f"; {born} concepts born, {died} died" if self.changed else ""
        return (
            f"{verdict}: similarity {self.similarity:.3f}; re-fitting the same version explains down to "
            f"{self.null_low:.3f} (p = {self.p_value:.3f}, {self.n_images} images, layer {self.layers[0]}); "
            f"{self.band.words()}{effect}"
        )

    def metrics(self) -> dict[str, float]:
        """Return the numbers a policy can set limits on; NaN where it is unknown what retraining changes."""
        metrics = {
            "drift/similarity": self.similarity,
            "drift/null_low": self.null_low,
            "drift/retraining_low": self.band.low if self.band.is_known else math.nan,
            "drift/alarm": math.nan if self.drift is None else float(self.drift),
        }
        metrics |= {"drift/born": float(len(self.born)), "drift/died": float(len(self.died))}
        return metrics | {f"drift/cka/{name}": value for name, value in self.cka.items()}

    def to_json(self) -> dict[str, Any]:
        """Return plain Python for JSON."""
        return {
            "similarity": self.similarity,
            "null_low": self.null_low,
            "null_high": self.null_high,
            "p_value": self.p_value,
            "drift": self.drift,
            "changed": self.changed,
            "retraining": self.band.to_json(),
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


def compare(
    a: Subject,
    b: Subject,
    data: Any,
    *,
    layer: str | None = None,
    rank: int = 10,
    refits: int = 8,
    max_positions: int = 6000,
    max_eval: int = 200,
    batch_size: int = 64,
    seed: int = 0,
    honest: Mapping[str, Subject] | None = None,
    progress: Progress | bool = silent,
) -> Drift:
    """Compare concepts of two versions on the same images; ``honest`` ones differ from ``a`` by their training only."""
    check_comparable(a, b)
    data, progress = open_data(data), as_callback(progress)
    _check_counts(rank, refits)
    name = a.layer(layer).name
    in_b = {item.name for item in b.layers() if item.explainable}
    sides = [(a, name, seed), (b, name if layer is not None or name in in_b else b.layer(None).name, seed + refits)]
    drawn = data.draw(max_eval, seed)
    fits = [_refits(s, data, at, rank, refits, max_positions, batch_size, first, progress) for s, at, first in sides]
    best = [min(range(refits), key=lambda i, f=side: f[i].relative_error) for side in fits]  # type: ignore[misc]
    measured = [
        _profiles(subject, data, at, [fit.W for fit in side], i, drawn, batch_size, a, progress)
        for (subject, at, _), side, i in zip(sides, fits, best, strict=True)
    ]
    profiles, contribution = [p for p, _ in measured], [c for _, c in measured]
    M = _similarities([p for side in profiles for p in side])
    similarity, null = _null(M, refits)
    work = {"rank": rank, "refits": refits, "max_positions": max_positions, "batch_size": batch_size}
    band = _band(profiles[0], honest or {}, data, name, seed + 2 * refits, progress, **work)
    null_low = float(np.sort(null)[int(LEVEL * len(null))])
    changed = similarity < null_low
    left, right = profiles[0][best[0]], profiles[1][best[1]]
    match = _match(left, right)
    died = _without_counterpart(left, best[0], profiles[0], profiles[1]) if changed else []
    born = _without_counterpart(right, best[1], profiles[1], profiles[0]) if changed else []
    Wa, Wb = fits[0][best[0]].W, fits[1][best[1]].W
    log.info("compare: similarity %.3f, null band from %.3f, %s", similarity, null_low, band.words())
    return Drift(
        similarity=similarity,
        null_low=null_low,
        null_high=float(null.max()),
        p_value=float((null <= similarity + 1e-12).mean()),
        changed=changed,
        band=band,
        matched=_rows(match),
        born=born,
        died=died,
        basis=_rows(match_columns(Wa, Wb)) if Wa.shape == Wb.shape else None,
        within=(_within(M, range(refits)), _within(M, range(refits, 2 * refits))),
        cka=layer_cka(a, b, data, batch_size, progress),
        classes=list(a.class_names),
        change=(contribution[1][match.right] - contribution[0][match.left]).numpy(),
        layers=(sides[0][1], sides[1][1]),
        n_images=left.shape[0],
    )


def _check_counts(rank: int, refits: int) -> None:
    if refits < 5:
        raise OptionError(f"compare: refits must be at least 5 for a test at the 1% level, got {refits}.")
    if rank < 1:
        raise OptionError(f"compare: rank must be at least 1, got {rank}.")


def _band(
    profiles: list[Tensor],
    honest: Mapping[str, Subject],
    data: Data,
    layer: str,
    first: int,
    progress: Progress,
    *,
    rank: int,
    refits: int,
    max_positions: int,
    batch_size: int,
) -> Band:
    """Return the band of retraining from the profiles of the version compared from and from fits of honest ones."""
    versions = [profiles]
    nothing = torch.zeros(len(data), dtype=torch.bool)
    for i, subject in enumerate(honest.values()):
        start = first + i * refits
        fits = _refits(subject, data, layer, rank, refits, max_positions, batch_size, start, progress)
        bases = [fit.W for fit in fits]
        versions.append(_profiles(subject, data, layer, bases, 0, nothing, batch_size, subject, progress)[0])
    M = np.eye(len(versions))
    for i, j in itertools.combinations(range(len(versions)), 2):
        M[i, j] = M[j, i] = np.mean([float(_match(p, q).cosine.mean()) for p in versions[i] for q in versions[j]])
    return band_of(M, list(honest))


def layer_cka(a: Subject, b: Subject, data: Data, batch_size: int, progress: Progress = silent) -> dict[str, float]:
    """Return the linear CKA of every layer that both versions have, on activations averaged over positions."""
    others = {item.name for item in b.layers() if item.explainable}
    names = [item.name for item in a.layers() if item.explainable and item.name in others]
    activations: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in names}
    done = 0
    with torch.no_grad():
        for batch in data.batches(a, batch_size):
            both = [s.activations(batch.images, names) for s in (a, b)]
            for name in names:
                pair = [s.layout(name).to_positions(z[name]).mean(-1) for s, z in zip((a, b), both, strict=True)]
                activations[name].append((pair[0].T.cpu(), pair[1].T.cpu()))
            done += len(batch)
            progress("comparing layers", done, len(data))
    return {
        name: linear_cka(torch.cat([p for p, _ in pairs], 1), torch.cat([q for _, q in pairs], 1))
        for name, pairs in activations.items()
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
    sample = Reservoir(max_positions, 0)  # one sample of positions for all fits: only the starts differ
    work_of_layer = harvest(subject, data, layer, batch_size=batch_size, progress=progress, with_images=False)
    for _, _, _, z in work_of_layer:
        sample.put(as_columns(layout, z))
    X = sample.columns()
    if rank > min(X.shape):
        raise OptionError(
            f"compare: rank must be at most {min(X.shape)} for layer {layer!r}, {X.shape[0]} channels and "
            f"{X.shape[1]} positions, got {rank}; choose a smaller rank or give more images."
        )
    signed = float(X.min()) < 0
    fits: list[Factorization] = []
    work = Refit(X, rank, max_iter=300, signed=signed, what=f"compare: layer {layer!r}: ")
    for fit in current().map(work, range(first, first + refits)):
        fits.append(fit)
        progress("re-fitting", len(fits), refits)
    return fits


def _profiles(
    subject: Subject,
    data: Data,
    layer: str,
    bases: list[Tensor],
    best: int,
    drawn: Tensor,
    batch_size: int,
    reference: Subject,
    progress: Progress,
) -> tuple[list[Tensor], Tensor]:
    """Return each fit's mean scores (images, concepts), and the best fit's mean contribution (concepts, classes).

    Contributions are those of the images of ``drawn``, all else is of all images.
    """
    layout, ready = subject.layout(layer), [prepare(W) for W in bases]
    parts: list[list[Tensor]] = [[] for _ in bases]
    total = torch.zeros(bases[0].shape[1], subject.n_classes, dtype=torch.float64)
    counts = torch.zeros(subject.n_classes, dtype=torch.float64)
    for batch, rows, logits, z in harvest(subject, data, layer, batch_size=batch_size, progress=progress):
        positions = layout.to_positions(z)
        scores = [project_images(positions, basis) for basis in ready]
        for part, S in zip(parts, scores, strict=True):
            part.append(S.mean(-1).cpu())
        some = drawn[rows]
        if bool(some.any()):
            with torch.no_grad():
                predicted = reference.logits(batch.images[some]).argmax(1).cpu()
            targets = torch.where(batch.labels[some] >= 0, batch.labels[some], predicted)
            c = contributions(
                subject, layer, layout, z[some], logits[some], bases[best].to(z), scores[best][some], targets.tolist()
            )
            total.index_add_(1, targets, c.contributions.T.cpu())
            counts += targets.bincount(minlength=subject.n_classes)
    return [torch.cat(part) for part in parts], total / counts.clamp_min(1)


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


def _without_counterpart(fit: Tensor, index: int, same: list[Tensor], others: list[Tensor]) -> list[int]:
    """Return the concepts of one fit that re-fits of its own version find again, and fits of the other version do not.

    Per concept, its matches in the other version must be weaker than those in its own (rank-sum test) and weak at all.
    """
    again = torch.stack([_match(fit, p).cosine for i, p in enumerate(same) if i != index])
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
