"""Fitting a basis per class from stored activations: class by class, in as many threads as torch may use.

Channels are weighed by how much the logit of the class depends on them,  d = |gradient|^(1/2),  rms over images and
positions, so that what the head does not read takes no concept:  min |D (X - W S)|,  S >= 0. A new image is projected
in the same metric. (Measured by tests/benchmarks/bench_photo_concepts.py, row `unweighted`.)

A class with few images may borrow what it lacks from the classes that the model finds nearest to them. That is off by
default: up to four images borrowed, f_cls fell from .88 to .80 (SqueezeNet) and .96 to .93 (EfficientNet-Lite0), and on
the images of these classes from .90 to .42 and from 1 to .33.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from auditor.errors import NumericsError
from auditor.explainers.activation_store import ActivationStore
from auditor.explainers.layer_activations import as_columns
from auditor.kernels.factorization.nmf import factorize
from auditor.metrics.concept_matching import match_columns
from auditor.network.above_layer import above_layer_of, values_from
from auditor.runners.runner import as_many_threads, current
from auditor.subject.layers import Layout
from auditor.subject.subject import Subject

MAX_ITER, TOL = 60, 1e-3  # of a class: few columns, and many classes
SENSED = 16  # images on which the head's sensitivity is measured
POWER, LEAST = 0.5, 0.1  # of the weight; a channel that the head does not read keeps a tenth of the mean weight
COLUMNS = 12_000  # positions of a class that are factorized at most
STABLE = 8  # classes on which re-fits from other starts are tried


@dataclass(frozen=True)
class FittedBasis:
    """The basis of one class: unit columns W (channels, concepts), channel weights, how well it was reached."""

    W: Tensor
    weights: Tensor
    kkt: float
    relative_error: float
    stability: float | None  # mean matched cosine with re-fits; None where none were made
    borrowed: tuple[int, ...] = ()  # classes that lent images


@dataclass(frozen=True)
class ClassImages:
    """The activations of a class's images, how channels count, and how the class is fitted."""

    index: int
    z: Tensor
    weights: Tensor
    rank: int
    refits: int
    lenders: tuple[int, ...]


@dataclass(frozen=True)
class BasisOfClass:
    """Factorizes the activations of one class."""

    layer: str
    layout: Layout
    options: Mapping[str, Any]  # of `factorize`
    threads: int = field(default_factory=torch.get_num_threads)

    def __call__(self, images: ClassImages) -> tuple[int, FittedBasis]:
        """Return the class and its basis."""
        with as_many_threads(self.threads):
            return images.index, self._basis(images)

    def _basis(self, images: ClassImages) -> FittedBasis:
        weights = images.weights
        X = as_columns(self.layout, images.z).float()
        if X.shape[1] > COLUMNS:  # evenly over images and positions
            X = X[:, torch.linspace(0, X.shape[1] - 1, COLUMNS).long()]
        X = (X * weights[:, None]).contiguous()
        if not float(X.abs().max()) > 0:  # the class shows nothing at this layer: one empty concept, all is residual
            return FittedBasis(torch.zeros(len(X), 1), weights, 0.0, 0.0, None)
        rank = min(images.rank, *X.shape)
        try:
            best = factorize(X, rank, max_iter=MAX_ITER, tol=TOL, **self.options)
            again = [
                factorize(X, rank, max_iter=MAX_ITER, tol=TOL, **{**self.options, "init": "random", "seed": 1 + i}).W
                for i in range(images.refits)
            ]
        except ValueError as error:
            raise NumericsError(f"layer {self.layer!r}: {error}") from error
        W = best.W / weights[:, None]
        W = W / W.norm(dim=0).clamp_min(1e-30)
        cosines = [float(match_columns(best.W, other).cosine.mean()) for other in again]
        stability = sum(cosines) / len(cosines) if cosines else None
        return FittedBasis(W, weights, best.kkt, best.relative_error, stability, images.lenders)


@dataclass(frozen=True)
class ClassFit:
    """What all classes share: where the activations come from and how they are factorized."""

    subject: Subject
    layer: str
    layout: Layout
    store: ActivationStore
    options: Mapping[str, Any]  # of `factorize`
    refits: int
    nearest: Callable[[int], Sequence[int]]  # classes that may lend images, the nearest first
    enough: int = 0  # images of a class from which on it borrows none
    weighted: bool = True

    def bases(self, rank: int, on_class: Callable[[int, int], None]) -> dict[int, FittedBasis]:
        """Return the basis of every class with an image; memory holds the classes that are worked on."""
        classes, runner = self.store.classes, current()
        work, fitted = BasisOfClass(self.layer, self.layout, self.options), dict[int, FittedBasis]()
        results = runner.map(work, self._images(rank)) if runner.is_remote else _in_threads(work, self._images(rank))
        for index, basis in results:
            fitted[index] = basis
            on_class(len(fitted), len(classes))
        return fitted

    def _images(self, rank: int) -> Iterator[ClassImages]:
        """Read class after class."""
        classes = self.store.classes
        large = set(sorted(classes, key=lambda k: -len(self.store.rows_of(k)))[:STABLE])
        for index in classes:
            rows, lenders = self.rows_of(index)
            z = self.store.read(rows)
            refits = self.refits if index in large else 0
            yield ClassImages(index, z, self.sensitivity(z[:SENSED], index), rank, refits, lenders)

    def sensitivity(self, z: Tensor, index: int) -> Tensor:
        """Return the weights (channels,) of a class from some of its activations; mean 1 before the root."""
        if not self.weighted:
            return torch.ones(self.layout.channels)
        above = above_layer_of(self.subject, self.layer)
        if above is not None and above.head is not None and self.layout.name == "map":
            g = above.head.weight[index].abs().cpu()
        else:
            logits_from = values_from(self.subject, self.layer)
            with torch.enable_grad():
                at = z.to(self.subject.device).detach().requires_grad_(True)
                (gradient,) = torch.autograd.grad(logits_from(at)[:, index].sum(), at)
            g = self.layout.gradient_to_positions(gradient).square().mean((0, 2)).sqrt().cpu()
        mean = float(g.mean())
        if not mean > 0:
            return torch.ones(self.layout.channels)
        return (g / mean).clamp_min(LEAST**2).float() ** POWER

    def rows_of(self, index: int) -> tuple[list[int], tuple[int, ...]]:
        """Return the images a class is fitted to, its own first, and the classes that lent what it has too few of."""
        rows, lenders = self.store.rows_of(index), []
        for other in self.nearest(index) if len(rows) < self.enough else ():
            lent = self.store.rows_of(other)[: self.enough - len(rows)]
            if lent:
                rows = rows + lent
                lenders.append(other)
            if len(rows) == self.enough:
                break
        return rows, tuple(lenders)


def _in_threads(work: BasisOfClass, classes: Iterator[ClassImages]) -> Iterator[tuple[int, FittedBasis]]:
    """Yield the basis of every class in order; as many are worked on as torch may use threads."""
    n_threads = max(1, torch.get_num_threads())
    with ThreadPoolExecutor(n_threads) as pool:
        waiting: deque[Future[tuple[int, FittedBasis]]] = deque()
        for images in classes:
            waiting.append(pool.submit(work, images))
            while len(waiting) > n_threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def sizes_of(
    fitted: Mapping[int, FittedBasis], subject: Subject, n_images: Mapping[int, int]
) -> dict[int, tuple[str, int, int, tuple[str, ...]]]:
    """Return name, numbers of concepts and of images, and names of the lenders of every class."""
    names = subject.class_names
    return {
        k: (names[k], basis.W.shape[1], n_images[k], tuple(names[i] for i in basis.borrowed))
        for k, basis in fitted.items()
    }
