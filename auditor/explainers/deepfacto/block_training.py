"""DeepFacto by equation 4.13: the network in blocks, a factorization between two of them, trained by Block-ADMM.

    image -> [ stays as it is ] -> block below -> Z ~ M S -> lift, blocks above -> logits

Warm start, as in [Khorram2020]: M is an NMF of the layer as it is, the lift starts as M, so that the network first
computes what it did from M S, and lift and blocks above learn from the scores alone. Then all blocks learn together by
`BlockAdmm`, with `Factorization` as one of them. What is added to the paper, each an option:

* copies of every image, moved (and mirrored where the model takes mirrored images for the same): the network was
  trained on more images than the factorization gets;
* the model's own logits beside the labels (``fidelity``), of the copies too;
* half of the weights below the layer stay as they are (``trained_from``): few images would only spoil them;
* of the passes that classify no fewer right than the warm start, to a standard error of the difference, on images that
  nothing else saw, that of the lowest J + gamma/2 |Z - M S|^2 is kept; what is above learns once more from its scores.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from auditor.errors import LayerError, NumericsError
from auditor.explainers.deepfacto.block_settings import BlockSettings
from auditor.explainers.deepfacto.copies import copies_of
from auditor.explainers.deepfacto.factor_admm import validated
from auditor.explainers.deepfacto.score_heads import ROWS, BlocksHead, axis_of
from auditor.network.aten_graph import graph_of
from auditor.network.network_blocks import block_weights, set_block_weights, split
from auditor.subject.layers import Layout
from auditor.subject.subject import Subject
from auditor.training.block_admm import BlockAdmm
from auditor.training.factorization import Factorization, Lift
from auditor.training.losses import LabelsAndLogits

log = logging.getLogger(__name__)

MIRRORED_ALIKE = 0.8  # share of images whose mirror image the model takes for the same: then mirrored copies are made
MOST_ROWS, MOST_COPIES = 4000, 8  # copies are made up to so many rows in all, and of each image
LEAST_BELOW = 0.5  # of the weights below the layer: so many are trained, those next to it
DECAY = 1e-2  # of the weights above, while they learn alone


class Scaled(nn.Module):
    """A block whose output is divided by a number: scores and penalties then mean the same in every network."""

    def __init__(self, block: nn.Module, scale: float) -> None:
        super().__init__()
        self.block, self.scale = block, scale

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output in units of the scale."""
        out: Tensor = self.block(x) / self.scale
        return out


@dataclass(frozen=True, slots=True)
class SplitNetwork:
    """A network in three parts around a layer; nothing below ``start`` is trained."""

    layer: str
    layout: Layout
    stem: nn.Module | None
    below: nn.Module
    above: nn.Module
    start: str | None

    @classmethod
    def of(cls, subject: Subject, layer: str, start: str | None = None) -> SplitNetwork:
        """Cut the network; ``start`` None leaves the choice to the weights."""
        layout = subject.layout(layer)
        if layout.name == "tokens" and layout.prefix:
            raise LayerError(
                f"deepfacto: layer {layer!r} has class or register tokens beside its patches, which the blocks above "
                "need; take head=linear, or another layer."
            )
        start = start if start is not None else start_of_training(subject, layer)
        cuts = [layer] if start is None else [start, layer]
        *stem, below, above = split(subject, cuts)
        # what is trained is on the CPU, wherever the subject is: the images and their copies stay there
        return cls(layer, layout, stem[0] if stem else None, below.cpu(), above.cpu(), start)

    def entered(self, pixels: Tensor) -> Tensor:
        """Return what the trained part reads of pixels."""
        stem = self.stem
        if stem is None:
            return pixels
        device = next((t.device for t in (*stem.parameters(), *stem.buffers())), pixels.device)
        return in_rows(lambda part: stem(part.to(device)), pixels)


def start_of_training(subject: Subject, layer: str) -> str | None:
    """Return the layer from which half of the weights below ``layer`` are trained; None: all of them are.

    None as well where storing that layer's output takes more than twice the room of the image.
    """
    graph = graph_of(subject)
    end, names = graph.layer(layer), set(dict(subject.module.named_parameters()))

    def counted(given: set[object]) -> int:
        needed = graph.before(end, given=given)  # type: ignore[arg-type]
        return sum(
            v.numel() for node, v in graph.constants.items() if node in needed and graph.names.get(node) in names
        )

    whole, most = counted({graph.input}), 2 * math.prod(subject.input_shape)
    before = list(itertools.takewhile(lambda item: item.name != layer, subject.layers()))
    for item in reversed([item for item in before if item.explainable]):
        node = graph.layer(item.name)
        is_between = node is not end and node in graph.before(end)
        if is_between and counted({node}) >= LEAST_BELOW * whole:
            return item.name if math.prod(item.shape) <= most else None
    return None


def lift_of(weight: Tensor, bias: Tensor, axis: int) -> Lift:
    """Return a lift with these weights."""
    lift = Lift(weight, axis)
    with torch.no_grad():
        lift.bias.copy_(bias)
    return lift


@dataclass(frozen=True, slots=True)
class BlockTask:
    """What is learned: the inputs of the trained part, labels and logits, and the rows that choose the pass."""

    x: Tensor
    y: Tensor  # (rows, 1 + classes)
    originals: int  # the first rows are the images, copies come after
    loss: LabelsAndLogits

    @property
    def checked(self) -> Tensor:
        """Which rows choose the pass."""
        mask = torch.zeros(len(self.x), dtype=torch.bool)
        mask[: self.originals] = validated(self.originals)
        return mask

    @property
    def learned(self) -> Tensor:
        """Which rows are trained on: no copy of an image that chooses."""
        return ~validated(self.originals).repeat(len(self.x) // self.originals)

    @property
    def labels(self) -> Tensor:
        """Class numbers, -1 where unknown."""
        return self.y[:, 0].long()


def make_task(
    subject: Subject,
    network: SplitNetwork,
    images: Tensor,
    labels: Tensor,
    logits: Tensor,
    n_copies: int | None,
    mirror: bool | None,
    settings: BlockSettings,
) -> BlockTask:
    """Return images and their copies as the trained part reads them, with labels and the model's logits."""
    n = n_copies if n_copies is not None else max(1, min(MOST_COPIES, MOST_ROWS // max(1, len(images))))
    is_mirrored = takes_mirrored(subject, images, logits) if mirror is None and n > 1 else bool(mirror)
    xs, ys = [], []
    for part, classes, of in zip(*(torch.split(t, ROWS) for t in (images, labels, logits)), strict=True):
        rows = copies_of(part, n, mirror=is_mirrored, seed=settings.seed)
        moved = rows[len(part) :]
        answers = torch.cat([of, *([in_rows(subject.logits, moved).float().cpu()] if len(moved) else [])])
        x, y = network.entered(rows).cpu(), torch.cat([classes.repeat(n)[:, None].to(answers), answers], 1)
        xs.append(x.reshape(n, len(part), *x.shape[1:]))
        ys.append(y.reshape(n, len(part), -1))
    x, y = torch.cat(xs, 1).flatten(0, 1), torch.cat(ys, 1).flatten(0, 1)
    loss = LabelsAndLogits(settings.fidelity, float(logits.std()), settings.squared)
    log.info("deepfacto: %d images, %d copies each%s", len(images), n, ", mirrored" if is_mirrored else "")
    return BlockTask(x, y, len(images), loss)


def takes_mirrored(subject: Subject, images: Tensor, logits: Tensor) -> bool:
    """Whether the model takes most images and their mirror images for the same class."""
    some = images[: 4 * ROWS]
    same = in_rows(subject.logits, some.flip(3)).cpu().argmax(1) == logits[: len(some)].argmax(1)
    return float(same.double().mean()) >= MIRRORED_ALIKE


def in_rows(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return f of all rows, a few at a time and without gradients."""
    with torch.no_grad():
        return torch.cat([f(part) for part in torch.split(x, ROWS)])


def error_of_difference(share: float, n: int) -> float:
    """Return the standard error of the difference of two shares of ``n`` images, both about ``share``.

    >>> round(error_of_difference(0.8, 60), 3), round(error_of_difference(1.0, 60), 3)
    (0.074, 0.023)
    """
    p = (share * n + 1) / (n + 2)  # a share of 1 is no certainty
    return math.sqrt(2 * p * (1 - p) / max(1, n))


@dataclass
class TrainedBlocks:
    """The state that was best, why the training ended, and what there was to see."""

    M: Tensor
    weights: dict[str, Tensor]  # below the layer, by their names in the model
    above: dict[str, Tensor]  # above it
    lift: tuple[Tensor, Tensor]  # weight and bias
    epoch: int = 0
    status: str = "finished"
    revived: int = 0
    history: list[tuple[float, ...]] = field(default_factory=list)  # loss and residuals per pass
    valid: list[tuple[float, float]] = field(default_factory=list)  # share right and objective, of `validation`


class BlockFit:
    """One fit: warm start, joint passes, the last passes of the blocks above. It trains the given network's blocks."""

    def __init__(
        self, network: SplitNetwork, M: Tensor, scale: float, task: BlockTask, settings: BlockSettings
    ) -> None:
        self.task, self.settings, self.network = task, settings, network
        self.below = Scaled(self.network.below, scale).eval()
        self.factors = Factorization(M, axis_of(network.layout)).eval()
        lift = Lift(M * scale, axis_of(network.layout)).to(task.x.device)
        self.head = BlocksHead(lift, self.network.above, network.layout)
        self.learned, self.checked = task.learned, task.checked
        if not bool(self.checked.any()):
            self.checked = ~self.checked  # too few images to leave any out

    def scores(self, rows: Tensor) -> Tensor:
        """Return the scores of some rows, native shape, as the network gives them now."""
        return in_rows(lambda x: self.factors(self.below(x)), self.task.x[rows])

    def warm_start(self, passes: int | None = None) -> TrainedBlocks:
        """Train lift and blocks above on the scores of the layer as it is."""
        self._learn_above(self.settings.warm_passes if passes is None else passes)
        return self.state(0)

    def state(self, epoch: int) -> TrainedBlocks:
        """Return a copy of everything that was learned."""
        lift = self.head.lift.weight.detach().clone(), self.head.lift.bias.detach().clone()
        weights, above = block_weights(self.network.below), block_weights(self.network.above)
        return TrainedBlocks(self.factors.basis.clone(), weights, above, lift, epoch, valid=[self.validation()])

    def validation(self) -> tuple[float, float]:
        """Return the share right and  J + gamma/2 |Z - M S|^2  per image, on the images that choose the pass."""
        Z, y = in_rows(self.below, self.task.x[self.checked]), self.task.y[self.checked]
        S = in_rows(self.factors, Z)
        logits, is_known = in_rows(self.head.top, S), y[:, 0] >= 0
        right = (logits.argmax(1) == y[:, 0])[is_known].double().mean()
        missed = self.factors.positions(Z) - self.factors.basis @ self.factors.positions(S)
        objective = float(self.task.loss.value(logits, y)) + 0.5 * self.settings.gamma * float(missed.square().sum())
        return float(right) if bool(is_known.any()) else 0.0, objective / len(y)

    def train(self, on_pass: Callable[[int], None], on_start: Callable[[], None] = lambda: None) -> TrainedBlocks:
        """Run all passes and return the best state; ``on_start`` comes after the warm start."""
        s, best = self.settings, self.warm_start()
        on_start()
        history: list[tuple[float, ...]] = []
        valid, status = list(best.valid), "finished"
        right, lowest = best.valid[0]
        enough = right - error_of_difference(right, int(self.checked.sum()))
        run = None
        try:
            if s.epochs:
                x, y = self.task.x[self.learned], self.task.y[self.learned]
                blocks = [self.below, self.factors, self.head.top]
                run = BlockAdmm(blocks, x, y, s.block_admm(), self.task.loss)
            for cycle in itertools.islice(run if run is not None else (), s.epochs):
                history.append((cycle.loss, *cycle.residuals))
                valid.append(self.validation())
                if valid[-1][0] >= enough and valid[-1][1] < lowest:
                    best, lowest = self.state(cycle.epoch), valid[-1][1]
                on_pass(cycle.epoch)
                if cycle.epoch - best.epoch >= s.patience:
                    break
        except NumericsError as error:
            status = f"stopped after epoch {len(history)}: {error}"
            log.warning("deepfacto: %s; the state of epoch %d is kept", error, best.epoch)
        best = self._finished(best, lowest)
        best.history, best.valid, best.status = history, valid, status
        best.revived = run.revived if run is not None else 0
        return best

    def _finished(self, best: TrainedBlocks, lowest: float) -> TrainedBlocks:
        """Go back to the best pass and let the blocks above learn from its scores, if that lowers the objective."""
        self._restore(best)
        if not best.epoch:
            return best
        self._learn_above(self.settings.warm_passes // 2)
        last = self.state(best.epoch)
        if last.valid[0][1] < lowest:
            return last
        self._restore(best)
        return best

    def _restore(self, state: TrainedBlocks) -> None:
        """Give the blocks what ``state`` copied of them."""
        self.factors.basis.copy_(state.M)
        set_block_weights(self.network.below, state.weights)
        set_block_weights(self.network.above, state.above)
        with torch.no_grad():
            self.head.lift.weight.copy_(state.lift[0])
            self.head.lift.bias.copy_(state.lift[1])

    def _learn_above(self, passes: int) -> None:
        if not passes:
            return
        s, S, y = self.settings, self.scores(self.learned), self.task.y[self.learned]
        generator = torch.Generator().manual_seed(s.seed)
        adam = torch.optim.AdamW(self.head.top.parameters(), s.lr_above, weight_decay=DECAY)
        fall = torch.optim.lr_scheduler.CosineAnnealingLR(adam, passes * max(1, round(len(S) / 64)))
        for _ in range(passes):
            for rows in torch.tensor_split(torch.randperm(len(S), generator=generator), max(1, round(len(S) / 64))):
                adam.zero_grad()
                with torch.enable_grad():
                    value = self.task.loss.value(self.head.top(S[rows]), y[rows]) / len(rows)
                    value.backward()  # type: ignore[no-untyped-call]
                adam.step()
                fall.step()
