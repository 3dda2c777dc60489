"""The two forms of a deepfacto fit, by what reads the scores: the network's own blocks, or a linear head.

``blocks``  equation 4.13 of [Khorram2020] (`block_training`): the blocks above the layer stay, a lift leads to them.
``linear``  the network above the layer is left out, a linear head on a grid of means stands for it (`factor_admm`):
            contributions are exact sums, and it is fitted in a fraction of the time.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as nf

from auditor.errors import AuditError
from auditor.explainers.deepfacto.block_training import BlockFit, SplitNetwork, lift_of, make_task
from auditor.explainers.deepfacto.examples import DeepFactoConfig, FactorExamples
from auditor.explainers.deepfacto.factor_admm import FULL_STEPS, HEAD_STEPS, State, Task, fit_head, train
from auditor.explainers.deepfacto.score_heads import BlocksHead, LinearScoreHead, ScoreHead, axis_of
from auditor.kernels.factorization.deepfacto import LinearHead, projected
from auditor.network.below_layer import BelowLayer
from auditor.network.network_blocks import set_block_weights, split
from auditor.subject.layers import Layout
from auditor.subject.operations import operations
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)
SIDES = (1, 2, 4)  # of the linear head's grid, tried in this order
TRIAL_IMAGES = 2000  # at most, for that choice
ABOVE = "above."  # before the names of weights above the layer


@dataclass(frozen=True, slots=True)
class FactorFit:
    """What a fit learned, and how it went."""

    M: Tensor
    head: dict[str, Tensor]  # of the head, see `score_head`
    weights: dict[str, Tensor]  # fine-tuned parameters below the layer, by their names in the model
    warm_logits: Tensor  # of the held-out images before anything below the layer was trained
    epoch: int  # the pass that was kept; 0: the warm start
    status: str
    revived: int
    history: list[tuple[float, ...]] = field(default_factory=list)


class Form(ABC):
    """One way to fit. ``Z`` are the layer's activations of all images in units of ``scale``."""

    name: ClassVar[str]

    def __init__(
        self, subject: Subject, layer: str, cfg: DeepFactoConfig, examples: FactorExamples, Z: Tensor, scale: float
    ) -> None:
        self.subject, self.layer, self.cfg, self.examples = subject, layer, cfg, examples
        self.Z, self.scale, self.layout = Z, scale, subject.layout(layer)

    @abstractmethod
    def passes(self) -> int:
        """Return the passes over the images, at most."""

    @abstractmethod
    def fit(self, M: Tensor, seed: int, on_pass: Callable[[int], None]) -> FactorFit:
        """Fit from the basis of a warm start."""


class LinearForm(Form):
    """A linear head stands for the network above the layer."""

    name = "linear"

    def passes(self) -> int:
        """Return the passes over the images."""
        image = self.examples.batch.images[:1]
        return self.cfg.passes(operations(self.subject, image), int((~self.examples.held).sum()))

    def fit(self, M: Tensor, seed: int, on_pass: Callable[[int], None]) -> FactorFit:
        """Fit the head to the scores, then all of it."""
        cfg, held = self.cfg, self.examples.held
        fidelity = cfg.of_form("fidelity", self.name)
        task, S = self.examples.task(fidelity), projected(self.Z[~held], M)
        side = cfg.cells if cfg.cells is not None else chosen_side(S, task, self.layout)
        empty = empty_head(task.teacher.shape[1], M.shape[1], pool_matrix(self.layout, side))
        head = fit_head(empty.pooled(S), task, empty, FULL_STEPS, fidelity)
        warm = head.logits(projected(self.Z[held], M))

        def report(state: State) -> None:
            on_pass(state.epoch)

        cut = BelowLayer(self.subject, self.layer)
        done = train(cut, M, head, task, cfg.settings(seed, self.passes()), self.scale, report)
        state = done.state
        return FactorFit(
            state.M, head_tensors(state.head), state.weights, warm, state.epoch, done.status, state.reseeded,
            [tuple(row) for row in done.history],
        )  # fmt: skip


class BlocksForm(Form):
    """The network's own blocks read the scores."""

    name = "blocks"

    def network(self) -> SplitNetwork:
        """Return the network, cut anew: a fit trains what it gets."""
        return SplitNetwork.of(self.subject, self.layer, self.cfg.trained_from)

    def passes(self) -> int:
        """Return the passes over the images and their copies."""
        start, image = self.network().start, self.examples.batch.images[:1]
        stays = operations(self.subject, image, up_to=start) if start is not None else 0
        n = int((~self.examples.held).sum())
        copies = self.cfg.copies or 4
        return self.cfg.passes(operations(self.subject, image) - stays, n * copies)

    def fit(self, M: Tensor, seed: int, on_pass: Callable[[int], None]) -> FactorFit:
        """Fit the blocks above to the scores, then all of it."""
        cfg, examples, network = self.cfg, self.examples, self.network()
        settings, fit = cfg.block_settings(seed, self.passes()), ~examples.held
        images, labels, logits = examples.batch.images[fit], examples.labels[fit], examples.logits[fit]
        task = make_task(self.subject, network, images, labels, logits, cfg.copies, cfg.mirror, settings)
        run = BlockFit(network, M, self.scale, task, settings)
        S_warm, warm = projected(self.Z[examples.held], M), torch.empty(0)

        def started() -> None:
            nonlocal warm
            warm = run.head.logits(S_warm)

        best = run.train(on_pass, started)
        head = {"lift.weight": best.lift[0], "lift.bias": best.lift[1], **{ABOVE + k: v for k, v in best.above.items()}}
        return FactorFit(best.M, head, best.weights, warm, best.epoch, best.status, best.revived, best.history)


def head_tensors(head: LinearHead) -> dict[str, Tensor]:
    """Return what an artifact stores of a linear head."""
    return {"head.weight": head.weight, "head.bias": head.bias, "head.pool": head.pool}


def form_for(name: str, subject: Subject, layer: str, start: str | None) -> tuple[type[Form], str]:
    """Return the form of an option, and why it is not the blocks where these were open."""
    if name == "linear":
        return LinearForm, ""
    try:
        SplitNetwork.of(subject, layer, start)
    except AuditError as error:
        if name == "blocks" or start is not None:
            raise
        log.info("deepfacto: a linear head, since the network has no blocks at %s: %s", layer, error)
        return LinearForm, f"a linear head stands for the network above the layer, which cannot be cut: {error}"
    return BlocksForm, ""


def score_head(tensors: Mapping[str, Tensor], subject: Subject, layer: str) -> ScoreHead:
    """Return the head of stored tensors: a linear one, or the model's own blocks with the trained weights in them."""
    if "head.weight" in tensors:
        return LinearScoreHead(LinearHead(tensors["head.weight"], tensors["head.bias"], tensors["head.pool"]))
    layout = subject.layout(layer)
    above = split(subject, layer)[-1]
    set_block_weights(above, {k.removeprefix(ABOVE): v for k, v in tensors.items() if k.startswith(ABOVE)})
    lift = lift_of(tensors["lift.weight"], tensors["lift.bias"], axis_of(layout)).to(subject.device)
    return BlocksHead(lift, above, layout)


def reordered(tensors: Mapping[str, Tensor], order: Sequence[int]) -> dict[str, Tensor]:
    """Return the tensors of a head for factors in another order."""
    reads_factors = ("lift.weight", "head.weight")
    return {k: v[:, list(order)].contiguous() if k in reads_factors else v for k, v in tensors.items()}


def pool_matrix(layout: Layout, side: int) -> Tensor:
    """Return (positions, cells): each column averages the positions of one cell of a grid, ``side`` cells wide.

    >>> pool_matrix(Layout("map", 3, (1, 4)), 2)
    tensor([[0.5000, 0.0000],
            [0.5000, 0.0000],
            [0.0000, 0.5000],
            [0.0000, 0.5000]])
    """
    h, w = layout.grid
    each = torch.eye(h * w).reshape(h * w, 1, h, w)
    return nf.adaptive_avg_pool2d(each, (min(side, h), min(side, w))).flatten(1)


def empty_head(classes: int, rank: int, pool: Tensor) -> LinearHead:
    """Return a head that says nothing."""
    return LinearHead(torch.zeros(classes, rank, pool.shape[1]), torch.zeros(classes), pool)


def chosen_side(S: Tensor, task: Task, layout: Layout) -> int:
    """Return the side of `SIDES` whose head classifies most of some other images right, the smallest of equals.

    What a head on mean scores can know is bounded: parts of a digit are where they are, and their amounts say little.
    """
    some = torch.arange(len(S)) % max(1, math.ceil(len(S) / TRIAL_IMAGES)) == 0
    S, task = S[some], task.part(some)
    held = torch.arange(len(S)) % 4 == 3
    learned, judged = task.part(~held), held & (task.labels >= 0)
    sides = [side for side in SIDES if side <= max(layout.grid)]
    if len(sides) < 2 or not bool(judged.any()):
        return sides[0]
    right = []
    for side in sides:
        empty = empty_head(task.teacher.shape[1], S.shape[1], pool_matrix(layout, side))
        head = fit_head(empty.pooled(S[~held]), learned, empty, HEAD_STEPS, fidelity=0.0)
        right.append(float((head.logits(S[judged]).argmax(1) == task.labels[judged]).double().mean()))
    log.info("deepfacto: right on trial images by side of the head's grid: %s", dict(zip(sides, right, strict=True)))
    return sides[right.index(max(right))]
