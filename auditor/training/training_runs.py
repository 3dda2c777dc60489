"""Training from the outside: one optimizer on one network, several seeds, curves, and a constraint on the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from auditor.data.source import open_data
from auditor.errors import OptionError
from auditor.progress import Progress, silent
from auditor.subject.preprocessing import Preprocessing
from auditor.training.learning_curves import Curve, follow
from auditor.training.optimizers import METHODS, cycles

Arrays = tuple[Tensor, Tensor]
CONSTRAINED = "dladmm"  # the optimizer that holds constraints exactly


def training_settings(optimizer: str, settings: dict[str, Any], constraint: str | None, n: int) -> dict[str, Any]:
    """Return the optimizer's settings with the constraint among them, and a mini-batch that suits few images."""
    if optimizer not in METHODS:
        raise OptionError(f"train: optimizer {optimizer!r} is not known; choose from {', '.join(METHODS)}.")
    fields = METHODS[optimizer][1].model_fields
    merged = dict(settings)
    if "batch" in fields and "batch" not in merged:
        merged["batch"] = max(16, min(128, n // 50))
    if constraint is not None and constraint != "none":
        if optimizer != CONSTRAINED:
            raise OptionError(
                f"train: a constraint on the weights is held by optimizer {CONSTRAINED}, got {optimizer}; take that."
            )
        merged["constraint"] = constraint.replace("-", "_")
    return merged


def train_seeds(
    make_blocks: Callable[[int], list[nn.Module]],
    train: Arrays,
    held: Arrays,
    optimizer: str,
    epochs: int,
    seeds: Sequence[int],
    settings: dict[str, Any],
    progress: Progress = silent,
) -> tuple[list[nn.Module], list[Curve]]:
    """Train once per seed; return the blocks of the first and all curves."""
    curves, networks = [], []
    for seed in seeds:
        networks.append(make_blocks(seed))
        curves.append(Curve(optimizer))
        run = cycles(optimizer, networks[-1], *train, epochs=epochs, seed=seed, **settings)
        follow(run, curves[-1], networks[-1], held, epochs, progress)
    return networks[0], curves


def open_pixels(
    spec: str, test: str | None, limit: int | None, pre: Preprocessing, check: Callable[[Any], None] = lambda _: None
) -> tuple[Arrays, Arrays, tuple[str, ...]]:
    """Return training and test images as a model takes them, with labels, and the names of the classes.

    Without ``test`` a named data set gives its own test split, any other source its last fifth.
    """

    def read(source: str, most: int | None) -> tuple[Arrays, tuple[str, ...]]:
        data = open_data(source, limit=most)
        check(data)
        batches = list(data.batches(pre, 256))
        labels = torch.cat([b.labels for b in batches])
        if bool((labels < 0).any()):
            raise OptionError(
                f"train: {int((labels < 0).sum())} images of {source} have no label; give a labelled set."
            )
        return (torch.cat([b.images for b in batches]), labels), tuple(data.class_names or ())

    named = spec.startswith(("sklearn:", "torchvision:")) and "split=" not in spec
    if test is None and named:
        join = "&" if "?" in spec else "?"
        spec, test = f"{spec}{join}split=train", f"{spec}{join}split=test"
    (x, y), names = read(spec, limit)
    names = names or tuple(str(i) for i in range(int(y.max()) + 1))
    if test is not None:
        return (x, y), read(test, None)[0], names
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))  # folders come class by class
    x, y, cut = x[order], y[order], len(x) - max(1, len(x) // 5)
    return (x[:cut], y[:cut]), (x[cut:], y[cut:]), names
