"""Training as all optimizers here do it: blocks, examples, and a state per cycle that callers log, plot and stop on.

Every optimizer is a function ``(blocks, x, y, config) -> Iterator[Cycle]``. It changes the blocks in place, one pass
over the samples per cycle, and never stops by itself: the caller stops iterating.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from auditor.errors import DataError, NumericsError, ShapeError

GROWTH = 10.0  # a residual this many times what it was in the first cycles has diverged
PATIENCE = 3  # cycles in a row that a residual may grow before the dual step is halved


@dataclass(frozen=True)
class Cycle:
    """State after one pass over the samples."""

    epoch: int
    loss: float  # mean over samples of J at the chained outputs, as the samples were visited
    residuals: tuple[float, ...] = ()  # root mean square of Z_t - f_t(Z_{t-1}) per block
    beta: tuple[float, ...] = ()
    dual_step: float = 0.0
    objective: float = math.nan  # what the method itself minimises, where that is one number
    extra: dict[str, float] = field(default_factory=dict)


def check_blocks(blocks: Sequence[nn.Module], x: Tensor, where: str) -> list[torch.Size]:
    """Return the shape of every block's output for one sample; the error names the two blocks that do not compose."""
    if not blocks:
        raise ShapeError(f"{where}: the list of blocks is empty; give at least one module.")
    shapes: list[torch.Size] = []
    z = x[:2]
    with torch.no_grad():
        for t, block in enumerate(blocks, 1):
            was = block.training
            block.eval()
            try:
                out = block(z)
            except (RuntimeError, ValueError, TypeError, IndexError) as err:
                source = "the input" if t == 1 else f"block {t - 1}"
                raise ShapeError(
                    f"{where}: block {t} ({type(block).__name__}) does not take what {source} gives, "
                    f"{tuple(z.shape[1:])} per sample: {' '.join(str(err).split())[:120]}. Check the list of blocks."
                ) from err
            finally:
                block.train(was)
            if not isinstance(out, Tensor) or len(out) != len(z):
                raise ShapeError(
                    f"{where}: block {t} ({type(block).__name__}) must return one tensor with a row per sample."
                )
            shapes.append(out.shape[1:])
            z = out
    return shapes


def check_labels(y: Tensor, n: int, width: int | None, where: str) -> None:
    """Refuse labels that do not fit: another number than samples, one class only, a class beyond the last layer."""
    if y.ndim != 1 or len(y) != n or y.is_floating_point():
        raise DataError(f"{where}: labels must be {n} whole numbers, one per sample, got {y.dtype} {tuple(y.shape)}.")
    classes = sorted(set(y.tolist()))
    if len(classes) < 2:
        only = f"only class {classes[0]}" if classes else "no class"
        raise DataError(f"{where}: the data set has {only}, and training needs two or more; give data with others.")
    if classes[0] < 0:
        raise DataError(f"{where}: some samples have no label (-1); leave them out.")
    if width is not None and classes[-1] >= width:
        raise DataError(
            f"{where}: class {classes[-1]} is beyond the {width} outputs of the last block; give it one per class."
        )


def forward(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Return the chained forward pass."""
    for block in blocks:
        x = block(x)
    return x


def accuracy(blocks: Sequence[nn.Module], x: Tensor, y: Tensor, batch: int = 2000) -> float:
    """Return the share of samples whose largest output is their label, on the chained forward pass in eval mode."""
    modes = [block.training for block in blocks]
    for block in blocks:
        block.eval()
    try:
        with torch.no_grad():
            hits = sum(
                int((forward(blocks, x[i : i + batch]).argmax(1) == y[i : i + batch]).sum())
                for i in range(0, len(x), batch)
            )
    finally:
        for block, mode in zip(blocks, modes, strict=True):
            block.train(mode)
    return hits / len(x)


class Snapshot:
    """A copy of the blocks' weights: taken after every good cycle, restored when a run goes wrong."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = list(blocks)
        self._weights = [{k: v.detach().clone() for k, v in b.state_dict().items()} for b in blocks]

    def take(self) -> None:
        """Copy the weights as they are now."""
        for block, weights in zip(self._blocks, self._weights, strict=True):
            for k, v in block.state_dict().items():
                weights[k].copy_(v)

    def restore(self) -> None:
        """Give the blocks the copied weights."""
        for block, weights in zip(self._blocks, self._weights, strict=True):
            block.load_state_dict(weights)

    @contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """Give the blocks the copied weights when what is done inside ends in a NumericsError."""
        try:
            yield
        except NumericsError:
            self.restore()
            raise


class Watch:
    """Watches loss and residuals: halves the dual step when a residual keeps growing, ends a run that has diverged."""

    def __init__(self, where: str, dual_step: float = 0.0, halves: bool = True) -> None:
        self.where, self.dual_step, self.halves = where, dual_step, halves
        self._least = dual_step / 8  # with a dual that stands still the gap would never close
        self._early: list[float] = []  # the largest of the first cycles
        self._n_cycles = 0
        self._before: list[float] = []
        self._grown: list[int] = []

    def judge(self, epoch: int, loss: float, residuals: Sequence[float], sizes: Sequence[float] = ()) -> None:
        """Look at a cycle; a number that is not finite or a residual that diverged is an error with one sentence.

        Where all variables start near zero and grow with their residuals, ``sizes`` gives theirs: a residual below the
        size of its variable has not diverged.
        """
        if not math.isfinite(loss) or not all(math.isfinite(r) for r in residuals):
            what = "loss" if not math.isfinite(loss) else "consensus residual"
            first = "Look for samples that are not finite, l" if self._n_cycles == 0 else "L"
            raise NumericsError(
                f"{self.where}: the {what} was not finite in epoch {epoch}; the blocks hold the last good state. "
                f"{first}ower the learning rate or raise beta."
            )
        self._n_cycles += 1
        if not self._before:
            self._early, self._before, self._grown = list(residuals), list(residuals), [0] * len(residuals)
        for t, r in enumerate(residuals):
            if self._n_cycles <= PATIENCE:
                self._early[t] = max(self._early[t], r)
            self._grown[t] = self._grown[t] + 1 if r > self._before[t] * 1.001 else 0
            self._before[t] = r
            if self._grown[t] and r > max(GROWTH * max(self._early[t], 1e-6), sizes[t] if sizes else 0.0):
                raise NumericsError(
                    f"{self.where}: the residual of block {t + 1} grew from {self._early[t]:.3g} to {r:.3g} by epoch "
                    f"{epoch}; the blocks hold the last good state. Lower the dual step or the learning rate."
                )
        if self.halves and self._grown and max(self._grown) >= PATIENCE:
            self.dual_step = max(self.dual_step / 2, self._least)
            self._grown = [0] * len(residuals)

    def to_json(self) -> dict[str, Any]:
        """Return the state as a checkpoint stores it."""
        state = {"dual_step": self.dual_step, "early": self._early, "before": self._before, "grown": self._grown}
        return {**state, "seen": self._n_cycles}

    def from_json(self, state: dict[str, Any]) -> None:
        """Take over the state that ``to_json`` returned."""
        self.dual_step, self._n_cycles = float(state["dual_step"]), int(state["seen"])
        self._early, self._before, self._grown = list(state["early"]), list(state["before"]), list(state["grown"])
