"""Whether one shared basis is enough: it must keep the model's classes, and say more than their names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from auditor.errors import NumericsError
from auditor.kernels.factorization.nmf import factorize
from auditor.kernels.factorization.projection import project

STANDS_IN = 0.9  # share of images whose class one shared basis must keep, else every class gets its own
RESTATES = 0.8  # mean share of a concept's scores that its class has: above it concepts are classes by other names
TRIED = 64  # images on which that is tried
POSITIONS = 10_000  # of all images, from which the shared basis is made where it is tried or stands beside others


def objection(keeps: float, activations: Tensor, classes: Tensor) -> str:
    """Return what speaks against one shared basis; empty where nothing does.

    ``keeps`` is the share of images whose class survives, ``activations`` (images, concepts) are mean scores and
    ``classes`` (images,) what the model predicts.
    """
    n, rank = activations.shape
    if keeps < STANDS_IN:
        return (
            f"one shared basis of {rank} concepts keeps the model's class on {keeps:.0%} of {n} images "
            f"({STANDS_IN:.0%} wanted)"
        )
    if restates_classes(activations, classes):
        return f"the {rank} shared concepts are the {rank} classes under other names, which explains nothing"
    return ""


def basis_of_some(layer: str, X: Tensor, rank: int, signed: bool, seed: int, init: Any) -> Tensor:
    """Return a shared basis (channels, concepts) from some columns of a layer, in few sweeps."""
    X = some_columns(X)
    try:
        fit = factorize(X, min(rank, *X.shape), max_iter=60, tol=1e-3, signed=signed, seed=seed, init=init)
    except ValueError as error:
        raise NumericsError(f"layer {layer!r}: {error}") from error
    return fit.W


def some_columns(X: Tensor, most: int = POSITIONS) -> Tensor:
    """Return at most so many columns, spread evenly."""
    if X.shape[1] <= most:
        return X
    return X[:, torch.linspace(0, X.shape[1] - 1, most).long()].contiguous()


def relative_error(X: Tensor, W: Tensor) -> float:
    """Return |X - W S| / |X| with S the projection of X on W."""
    return float((X - W @ project(X, W)).norm() / X.norm().clamp_min(1e-30))


def restating(activations: Tensor, classes: Tensor) -> list[str]:
    """Return what must be said of a shared basis whose concepts are the classes; nothing where they are not.

    >>> restating(torch.eye(3).repeat(4, 1), torch.arange(3).repeat(4))[0][:62]
    'the 3 concepts are the 3 classes under other names, which expl'
    """
    if not restates_classes(activations, classes):
        return []
    n = activations.shape[1]
    return [
        f"the {n} concepts are the {n} classes under other names, which explains nothing; go deeper: --set bases=class "
        f"for concepts of every class, another rank (--set rank={3 * n}), or an earlier layer (auditor layers)"
    ]


def restates_classes(activations: Tensor, classes: Tensor) -> bool:
    """Whether concepts are the classes: one of each, and each seen in images of its class alone.

    ``activations`` (images, concepts) are mean scores, ``classes`` (images,) what is predicted.

    >>> restates_classes(torch.eye(3).repeat(4, 1), torch.arange(3).repeat(4))
    True
    >>> restates_classes(torch.ones(12, 3), torch.arange(3).repeat(4))
    False
    """
    present = sorted(set(classes.tolist()))
    if len(present) != activations.shape[1]:
        return False
    by_class = torch.stack([activations[classes == k].double().mean(0) for k in present])  # (classes, concepts)
    share, best = (by_class / by_class.sum(0).clamp_min(1e-30)).max(0)
    return len(set(best.tolist())) == len(present) and float(share.mean()) >= RESTATES
