"""Fitting explanation heads to examples: blocks of classes, early stop, the best epoch of every class.

Classes are trained in blocks, so that weights, gradients and moments of a block only are in memory. Each class keeps
the epoch with the lowest objective on the trial images; once that has not fallen for ``patience`` epochs the class is
done and leaves the block, and the others go on without it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor

from auditor.errors import DataError, NumericsError
from auditor.explainers.xnn.examples import Examples
from auditor.explainers.xnn.head_objective import (
    Problem,
    SraeConfig,
    TrainingState,
    examples_at_once,
    fit_predictor,
    normalise,
    objective,
    start_state,
    train,
    weights_of,
)
from auditor.explainers.xnn.head_start import start_at_slopes
from auditor.explainers.xnn.heads import XHeads
from auditor.explainers.xnn.training_checkpoint import read_checkpoint, write_checkpoint
from auditor.kernels.networks.reconstruction_losses import live_pull_away, pull_away
from auditor.progress import Progress, silent
from auditor.runners.runner import as_many_threads, current

log = logging.getLogger(__name__)
CHECKPOINT_EVERY_S = 5.0
BLOCK_NUMBERS = 40_000_000  # weights, gradients, moments and best weights of a block: 160 MB
MOST_BLOCKS, LEAST_CLASSES = 8, 5  # blocks, so that as many workers can train, each of so many classes or more
GAIN = 5e-3  # the part of its objective that a class must gain to go on


@dataclass(frozen=True)
class Trained:
    """Heads of the best epoch of every class, and how the training went."""

    heads: XHeads
    epochs: Tensor  # (classes,) until each was done
    dead: Tensor  # (classes, features)
    reseeded: Tensor
    pull_away: Tensor  # (classes,)
    live_pull_away: Tensor
    diverged: str  # what ended the training of some classes early, or ""


def check_classes(examples: Examples, classes: Sequence[int], n_features: int, names: Sequence[str]) -> None:
    """Refuse a class that has no positive or no negative example, and a set smaller than the embedding."""
    positive = examples.positives(classes)
    for k, row in zip(classes, positive, strict=True):
        n = int(row.sum())
        if n == 0 or n == len(row):
            which = "positive" if n == 0 else "negative"
            raise DataError(
                f"xnn: class {names[k]!r} has no {which} example among {len(row)} images, and a head needs both. "
                f"Give data with images of this class and of others, or name another target."
            )
    check_size(examples, n_features)


def check_size(examples: Examples, n_features: int) -> None:
    """Refuse a set smaller than the embedding."""
    n_train = examples.parts.counts["learn"]
    if n_train < n_features:
        raise DataError(
            f"xnn: {n_train} training images are fewer than {n_features} x-features. Give more images, or lower n."
        )


@dataclass
class Block:
    """Classes that are trained together, and the best of each so far.

    ``rows`` are those still in training, by their numbers in the whole stack; ``best``, ``loss`` and ``since`` (epochs
    without gain) are of these.
    """

    rows: Tensor
    state: TrainingState
    judge: Problem
    best: XHeads
    loss: Tensor
    since: Tensor

    @classmethod
    def start(cls, rows: Tensor, state: TrainingState, judge: Problem, config: SraeConfig) -> Block:
        """Begin with the start itself as the best."""
        heads = state.heads.select(range(len(rows)))
        loss = objective(heads, judge, config).nan_to_num(torch.inf)
        return cls(rows, state, judge, heads, loss, torch.zeros(len(rows), dtype=torch.long))

    def train(self, config: SraeConfig) -> None:
        """Train for one epoch and note which classes are better than ever."""
        next(train(self.state, config))
        loss = objective(self.state.heads, self.judge, config).nan_to_num(torch.inf)
        self.since = torch.where(loss < self.loss * (1 - GAIN), 0, self.since + 1)
        better = (loss < self.loss).nonzero().flatten()
        self.loss = torch.minimum(loss, self.loss)
        self.best.replace(better, self.state.heads.select(better))

    def keep(self, some: Tensor) -> None:
        """Go on with some of the classes only."""
        self.state.keep(some)
        self.rows, self.judge, self.best = self.rows[some], self.judge.only(some), self.best.select(some)
        self.loss, self.since = self.loss[some], self.since[some]


@dataclass
class Run:
    """All classes of a training: heads that are done, and how that went."""

    heads: XHeads
    classes: Tensor  # (classes,) their numbers in the model
    epochs: Tensor  # (classes,)
    reseeded: Tensor  # (classes, features)
    finished: int = 0  # classes whose block is done
    diverged: int = 0  # classes whose loss became infinite

    @classmethod
    def of(cls, heads: XHeads, classes: Sequence[int]) -> Run:
        """Begin with nothing done."""
        n = len(classes)
        shape = (n, heads.n_features)
        return cls(heads, torch.tensor(list(classes)), torch.zeros(n).long(), torch.zeros(shape).long())

    def take(self, block: Block, max_epochs: int, patience: int) -> None:
        """Take over the classes of a block that are done; the block goes on without them."""
        state = block.state
        done = (block.since >= patience) | state.broken | (state.epoch >= max_epochs)
        if not bool(done.any()):
            return
        rows = block.rows[done]
        if bool((block.loss[done] == torch.inf).any()):
            raise NumericsError(
                f"xnn: the explanation heads have no finite loss in epoch {state.epoch}. Lower lr or look for extreme "
                "activations. There is no good state yet, so nothing is kept."
            )
        self.heads.replace(rows, block.best.select(done.nonzero().flatten()))
        self.epochs[rows], self.reseeded[rows] = state.epoch, state.reseeded[done]
        self.diverged += int(state.broken[done].sum())
        block.keep((~done).nonzero().flatten())


def fit_heads(
    heads: XHeads,
    examples: Examples,
    classes: Sequence[int],
    config: SraeConfig,
    *,
    max_epochs: int,
    patience: int,
    slope: Tensor | None = None,
    block: int | None = None,
    checkpoint: Path | None = None,
    stamp: str = "",
    progress: Progress = silent,
) -> Trained:
    """Train every class until it has not gained for ``patience`` epochs on trial images; each keeps its best epoch.

    ``slope`` (classes, dims) is where heads without hidden layers start; else they start as they are. ``block`` is how
    many classes are trained together. Which features are dead and how far apart they are is measured on the images to
    report on, unused till then.
    """
    config = config.model_copy(update={"epochs": max_epochs})
    units = _units(examples, classes)
    problem = _problem(examples, classes, examples.parts.learn, units)
    judge = _problem(examples, classes, examples.trial_rows, units)
    run = Run.of(heads, classes)
    resumed = checkpoint is not None and checkpoint.exists()
    if checkpoint is not None and resumed:
        read_checkpoint(checkpoint, stamp, run)
    blocks = torch.split(torch.arange(len(classes)), block or block_size(heads))
    if checkpoint is None and len(blocks) > 1:
        _train_apart(
            run, blocks, problem, judge, slope, BlockTraining(examples.Z, config, max_epochs, patience), progress
        )
        blocks = ()
    for rows in blocks:
        if int(rows[-1]) < run.finished:
            continue
        chosen_heads = heads.select(rows)
        state = start_state(chosen_heads, problem.only(rows), config, run.classes[rows])
        if slope is not None and not resumed:
            start_at_slopes(chosen_heads, state.problem, slope[rows], config.seed)
        now = Block.start(rows, state, judge.only(rows), config)
        if checkpoint is not None and resumed:
            read_checkpoint(checkpoint, stamp, run, now)
            log.info("xnn: training goes on from epoch %d of %s", state.epoch, checkpoint.name)
            resumed = False
        _train_block(run, now, config, max_epochs, patience, checkpoint, stamp, progress)
        run.finished = int(rows[-1]) + 1
    if config.variant == "cae":
        fit_predictor(heads, problem)
    normalise(heads, problem)
    with torch.no_grad():
        heads.v.mul_(units[1].view(-1, 1, 1))
        heads.c.mul_(units[1]).add_(units[0])
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    return _summary(run, examples)


def block_size(heads: XHeads) -> int:
    """Return how many classes are trained together: as many as `BLOCK_NUMBERS` allow, in up to `MOST_BLOCKS` blocks.

    It follows from the heads alone and not from where they are trained: so the sums are the same everywhere.
    """
    per_class = sum(p[0].numel() for p in heads.parameters())
    even = max(LEAST_CLASSES, -(-len(heads.v) // MOST_BLOCKS))
    return max(1, min(even, BLOCK_NUMBERS // (5 * per_class)))


@dataclass(frozen=True, eq=False)
class ClassBlock:
    """Some classes to train: their heads, numbers, targets to learn and to judge by, and slopes to start at."""

    heads: XHeads
    classes: Tensor
    problem: Problem  # without the activations, which all blocks share
    judge: Problem
    slope: Tensor | None


@dataclass(frozen=True, eq=False)
class BlockTraining:
    """Trains a block of classes wherever a runner has room; all blocks read the same activations Z."""

    Z: Tensor
    config: SraeConfig
    max_epochs: int
    patience: int
    threads: int = field(default_factory=torch.get_num_threads)

    def __call__(self, block: ClassBlock) -> Run:
        """Return the block's heads, trained."""
        with as_many_threads(self.threads):
            problem, judge = replace(block.problem, Z=self.Z), replace(block.judge, Z=self.Z)
            run = Run.of(block.heads, block.classes.tolist())
            chosen_heads = block.heads.select(range(len(block.classes)))
            state = start_state(chosen_heads, problem, self.config, run.classes)
            if block.slope is not None:
                start_at_slopes(chosen_heads, problem, block.slope, self.config.seed)
            now = Block.start(torch.arange(len(block.classes)), state, judge, self.config)
            _train_block(run, now, self.config, self.max_epochs, self.patience, None, "", silent)
            return run


def _train_apart(
    run: Run,
    blocks: Sequence[Tensor],
    problem: Problem,
    judge: Problem,
    slope: Tensor | None,
    work: BlockTraining,
    progress: Progress,
) -> None:
    """Train all blocks by the current runner and take them over in their order."""
    nothing = problem.Z[:0]

    def items() -> Iterator[ClassBlock]:
        for rows in blocks:
            learn, choose = (replace(p.only(rows), Z=nothing) for p in (problem, judge))
            slopes = None if slope is None else slope[rows]
            yield ClassBlock(run.heads.select(rows), run.classes[rows], learn, choose, slopes)

    for rows, trained in zip(blocks, current().map(work, items()), strict=True):
        run.heads.replace(rows, trained.heads)
        run.epochs[rows], run.reseeded[rows] = trained.epochs, trained.reseeded
        run.diverged += trained.diverged
        run.finished = int(rows[-1]) + 1
        progress("training heads", run.finished, len(run.classes))


def _train_block(
    run: Run,
    block: Block,
    config: SraeConfig,
    max_epochs: int,
    patience: int,
    checkpoint: Path | None,
    stamp: str,
    progress: Progress,
) -> None:
    """Train until all classes of the block are done."""
    written, n_mine, n_before = monotonic(), len(block.rows), run.finished * max_epochs
    run.take(block, max_epochs, patience)
    try:
        while len(block.rows):
            block.train(config)
            progress("training heads", n_before + block.state.epoch * n_mine, max_epochs * len(run.classes))
            if checkpoint is not None and monotonic() - written > CHECKPOINT_EVERY_S:
                write_checkpoint(checkpoint, stamp, run, block)
                written = monotonic()
            run.take(block, max_epochs, patience)
    except KeyboardInterrupt:
        if checkpoint is not None:
            write_checkpoint(checkpoint, stamp, run, block)
            log.warning(
                "xnn: stopped in epoch %d; the same command goes on from %s", block.state.epoch, checkpoint.name
            )
        raise


def _units(examples: Examples, classes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return mean and spread of each class's logit over the examples to learn from."""
    y = examples.logits[examples.parts.learn][:, list(classes)]
    return y.mean(0), y.std(0).clamp(min=1e-6)


def _problem(examples: Examples, classes: Sequence[int], rows: Tensor, units: tuple[Tensor, Tensor]) -> Problem:
    y = (examples.logits[rows][:, list(classes)] - units[0]) / units[1]
    weights = weights_of(examples.positives(classes)[:, rows])
    return Problem(examples.Z, y.T.contiguous(), weights, rows.nonzero().flatten())


def _summary(run: Run, examples: Examples) -> Trained:
    rows = examples.report_rows.nonzero().flatten()
    heads, n, dead, apart, apart_live = run.heads, len(run.classes), [], [], []
    sentence = f"{run.diverged} of {n} heads gave an infinite loss; the best state before that is kept."
    with torch.no_grad():
        for some in torch.split(torch.arange(n), 64):
            chosen_heads = heads.select(some)
            batches = torch.split(rows, examples_at_once(examples.Z))
            parts = [chosen_heads.embed(chosen_heads.rows(examples.Z[i].float())) for i in batches]
            E = torch.cat(parts, 1)
            dead.append((E == 0).all(1))
            apart.append(pull_away(E))
            apart_live.append(live_pull_away(E, ~dead[-1]))
    if run.diverged:
        log.warning("xnn: %s", sentence)
    return Trained(
        heads, run.epochs, torch.cat(dead), run.reseeded, torch.cat(apart), torch.cat(apart_live),
        sentence if run.diverged else "",
    )  # fmt: skip
