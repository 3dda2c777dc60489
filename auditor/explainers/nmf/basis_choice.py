"""Whether one shared basis is enough: it must keep the model's classes, and say more than their names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from auditor.errors import NumericsError
from auditor.explainers.restating import restates_classes
from auditor.kernels.factorization.nmf import factorize
from auditor.kernels.factorization.projection import project

STANDS_IN = 0.9  # share of images whose class one shared basis must keep, else every class gets its own
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
