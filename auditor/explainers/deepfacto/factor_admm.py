"""Training of a network with a non-negative factorization after one layer, by stochastic Block-ADMM.

The updates are those of ``kernels/factorization/deepfacto.py``; the general solver for chains of modules
(``block_admm.py``) has no place for a factorization, whose scores are themselves a solution. One cycle on a mini-batch:

1. f = the layer's activation, S = its projection on M: each visit starts from the chained forward pass.
2. L: gradient steps on the objective J of the logits, held near h(S).
3. S: one prox-linear step towards what L asks, the batch as a whole moving by at most ``trust``: an image that is
   classified right asks for little, a wrong one for much. To first order this is the derivative of J through the
   projection.
4. Z: closed form between f - U, what the new scores ask for and, with a small weight, the activation the model had
   before training: without it f and S shrink together, which is the cheapest way to a small reconstruction error. Most
   of what M S misses may stay: pulling f into the span of M in full throws away what the head reads.
5. The layers below: one Adam step towards Z + U. This is the only way the objective reaches them.
6. M: HALS on running sums of f S^T and S S^T with S as a new image would get it; slow, since the head waits a pass.
7. U += dual_step (Z - f), V += dual_step (Z - what was asked), where duals are on.

After every pass over the images the head is fitted anew to the scores (it is convex, so it is simply solved, and needs
no dual), and dead factors are re-seeded from the worst-fitted position, with no weight in the head. A head on a grid of
cells solves the task from where factors are; a second one on the mean scores, used in training only, makes the amount
of each factor matter too. Some images validate: the state kept is the best on them, the start included.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as nf

from auditor.errors import NumericsError, OptionError
from auditor.kernels.factorization.deepfacto import (
    LinearHead,
    basis_step,
    decoupled,
    logit_steps,
    projected,
    score_step,
)
from auditor.network.below_layer import BelowLayer
from auditor.training.block_variables import GIB, room, size_text
from auditor.training.cycle import Watch

log = logging.getLogger(__name__)
FORGET = 0.99  # of the running sums behind M
HEAD_STEPS = 50  # L-BFGS steps on the head after every pass; the warm start and the end take FULL_STEPS
FULL_STEPS = 200
RIDGE = 1e-4  # on the head's weights for scores of unit variance, times the cells it reads
FADE = 0.999  # of the largest request so far, per batch: requests become small as the training comes to its end
VALIDATE_EVERY = 8  # each n-th image of the training chooses the pass that is kept
WHERE = "deepfacto"


@dataclass(frozen=True, slots=True)
class Task:
    """What is learned: images, their labels (-1 unknown), the model's logits and the share these have in the head."""

    images: Tensor
    labels: Tensor
    teacher: Tensor
    fidelity: float = 0.0

    def part(self, mask: Tensor) -> Task:
        """Return the images of ``mask`` only."""
        return Task(self.images[mask], self.labels[mask], self.teacher[mask], self.fidelity)


@dataclass(frozen=True, slots=True)
class FactorSettings:
    """Penalties and step sizes; reconstruction and anchor are in units of what the head asks for."""

    beta: float = 1.0
    gamma: float = 1.0
    reconstruction: float = 0.03
    anchor: float = 0.01
    trust: float = 0.1
    supervision: float = 1.0
    pooled: float = 1.0
    l1: float = 0.0
    dual_step: float = 0.0
    lr: float = 1e-3
    batch: int = 32
    epochs: int = 12
    patience: int = 3  # passes without a better state on the validation images, after which the training ends
    seed: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """Everything after one pass over the images; epoch 0 is the warm start."""

    epoch: int
    M: Tensor
    head: LinearHead
    weights: dict[str, Tensor]
    loss: float = math.nan  # mean J on the chained pass, as the images were visited
    residuals: tuple[float, float] = (math.nan, math.nan)  # root mean square of Z - f and of Z - M S
    reseeded: int = 0  # dead factors so far
    pooled_head: LinearHead | None = None  # the one on mean scores, of the training only


@dataclass(frozen=True, slots=True)
class TrainedFactors:
    """The state that was best on validation images, why the training ended, and what there was to see."""

    state: State
    status: str
    history: list[tuple[float, float, float]]  # loss and residuals per epoch
    valid: list[tuple[float, float]]  # accuracy and J on the validation images, the warm start first


class FactorAdmm:
    """One run: ``for state in FactorAdmm(cut, M, head, task, settings, scale): …`` gives a `State` per pass.

    ``cut``'s weights are trained in place, M and the head are replaced. The caller decides when to stop; numbers that
    are not finite, or a residual that runs away, are an error.
    """

    def __init__(
        self, cut: BelowLayer, M: Tensor, head: LinearHead, task: Task, settings: FactorSettings, scale: float
    ) -> None:
        self.cut, self.M, self.head, self.task, self.settings, self.scale = cut, M, head, task, settings, scale
        channels, rank = M.shape
        self.Z0 = activations_of(cut, task.images) / scale
        self.U: Tensor | None = torch.zeros_like(self.Z0) if settings.dual_step else None
        self.V: Tensor | None = torch.zeros_like(self.Z0) if settings.dual_step else None
        self.watch = Watch(WHERE, settings.dual_step)
        self.largest_pull, self.reseeded = 0.0, 0
        self.XS, self.SS = torch.zeros(channels, rank), torch.zeros(rank, rank)
        cells, means = [], []
        for f in torch.split(self.Z0, 256):  # the sums start as if the images had been visited without end
            S = projected(f, M)
            self.XS += torch.einsum("ncp,nkp->ck", f, S) / (len(self.Z0) * (1 - FORGET))
            self.SS += torch.einsum("nkp,njp->kj", S, S) / (len(self.Z0) * (1 - FORGET))
            cells.append(head.pooled(S))
            means.append(S.mean(-1, keepdim=True))
        self.head = fit_head(torch.cat(cells), task, head, HEAD_STEPS, fidelity=0.0)
        self.pooled_head: LinearHead | None = None
        if settings.pooled > 0 and head.pool.shape[1] > 1:
            positions = head.pool.shape[0]
            flat = LinearHead(
                torch.zeros(len(head.bias), rank, 1),
                torch.zeros_like(head.bias),
                torch.full((positions, 1), 1 / positions),
            )
            self.pooled_head = fit_head(torch.cat(means), task, flat, HEAD_STEPS, fidelity=0.0)

    def state(self) -> State:
        """Return everything as it is now."""
        weights = {k: w.detach().clone() for k, w in self.cut.weights.items()}
        return State(0, self.M, self.head, weights, reseeded=self.reseeded, pooled_head=self.pooled_head)

    def __iter__(self) -> Iterator[State]:
        s, n = self.settings, len(self.task.images)
        generator = torch.Generator().manual_seed(s.seed)
        with self.cut.trainable() as theta:
            adam = torch.optim.Adam(theta, lr=s.lr, betas=(0.9, 0.99)) if theta else None
            total = max(1, s.epochs * math.ceil(n / s.batch))
            for epoch in range(1, s.epochs + 1):
                sums = torch.zeros(3, dtype=torch.float64)
                for i, rows in enumerate(torch.split(torch.randperm(n, generator=generator), s.batch)):
                    if adam is not None:
                        done = ((epoch - 1) * math.ceil(n / s.batch) + i) / total
                        adam.param_groups[0]["lr"] = s.lr * 0.5 * (1 + math.cos(math.pi * done))
                    sums += self._visit(rows, adam)
                residuals = (sums[1:] / self.Z0.numel()).sqrt().tolist()
                self.watch.judge(epoch, float(sums[0]) / n, residuals)
                self._end_of_pass()
                measured = float(sums[0]) / n, (residuals[0], residuals[1])
                yield replace(self.state(), epoch=epoch, loss=measured[0], residuals=measured[1])

    def _visit(self, rows: Tensor, adam: torch.optim.Optimizer | None) -> Tensor:
        """Run one mini-batch; return the sums of J, |Z - f|^2 and |Z - M S|^2."""
        s, task, head = self.settings, self.task, self.head
        with torch.enable_grad():
            live = self.cut(task.images[rows]).cpu() / self.scale
        with torch.no_grad():
            f = live.detach()
            u, v = (
                (f.new_zeros(()), f.new_zeros(())) if self.U is None or self.V is None else (self.U[rows], self.V[rows])
            )
            S_new = projected(f, self.M)  # as a new image would get them
            h = head.logits(S_new)
            pull = s.supervision * self._pull(S_new, h, rows)
            S = score_step(S_new, f - u + v, self.M, pull - s.l1)
            missed = f - self.M @ S_new
            goal = f + self.M @ (S - S_new) - s.trust * s.reconstruction * missed
            Z = decoupled((s.beta, f - u), (s.gamma, goal - v), (s.trust * s.anchor, self.Z0[rows]))
            self._learn_basis(f, S_new)
            self._last = f, S_new
            miss = Z - self.M @ S
        if adam is not None and live.requires_grad:
            adam.zero_grad()
            with torch.enable_grad():
                (0.5 * (Z + u - live).square().sum() / len(rows)).backward()  # type: ignore[no-untyped-call]
            adam.step()
        with torch.no_grad():
            if self.U is not None and self.V is not None:
                top = 10 * float(Z.square().mean().sqrt())
                fresh = self.cut(task.images[rows]).cpu() / self.scale
                self.U[rows] = (u + self.watch.dual_step * (Z - fresh)).clamp(-top, top)
                self.V[rows] = (v + self.watch.dual_step * (Z - goal)).clamp(-top, top)
            loss = nf.cross_entropy(h, task.labels[rows], ignore_index=-1, reduction="sum")
            return torch.stack([loss, (Z - f).square().sum(), miss.square().sum()]).double()

    def _pull(self, S: Tensor, h: Tensor, rows: Tensor) -> Tensor:
        """Return what the heads ask of the scores, as long in the mean as ``trust`` times the largest so far allows."""
        labels = self.task.labels[rows]
        pull = self.head.pulled_back(logit_steps(h, labels) - h)
        if self.pooled_head is not None:
            flat = self.pooled_head.logits(S)
            pull = pull + self.settings.pooled * self.pooled_head.pulled_back(logit_steps(flat, labels) - flat)
        self.largest_pull = max(FADE * self.largest_pull, per_image(pull))
        return pull * (self.settings.trust * per_image(self.M.T @ self.Z0[rows]) / max(self.largest_pull, 1e-30))

    def _learn_basis(self, f: Tensor, S: Tensor) -> None:
        self.XS = FORGET * self.XS + torch.einsum("ncp,nkp->ck", f, S) / len(f)
        self.SS = FORGET * self.SS + torch.einsum("nkp,njp->kj", S, S) / len(f)
        self.M = basis_step(self.M, self.XS, self.SS)

    def _end_of_pass(self) -> None:
        """Re-seed dead factors and fit the heads to the scores as they are now."""
        cells, means = pooled_scores(self.cut, self.task.images, self.M, self.scale, self.head)
        self.M, dead = reseeded(self.M, means.amax((0, 2)) <= 0, *self._last)
        if dead.numel():
            self.reseeded += dead.numel()
            self.XS[:, dead] = self.SS[:, dead] = self.SS[dead] = 0
            cells, means = cells.clone(), means.clone()
            cells[:, dead] = means[:, dead] = 0  # no weight in the heads until the next pass
            log.info("deepfacto: %d dead factors re-seeded", dead.numel())
        self.head = fit_head(cells, self.task, self.head, HEAD_STEPS, fidelity=0.0)
        if self.pooled_head is not None:
            self.pooled_head = fit_head(means, self.task, self.pooled_head, HEAD_STEPS, fidelity=0.0)


def per_image(x: Tensor) -> float:
    """Return the root mean square over the batch of each image's norm."""
    return float(x.flatten(1).square().sum(1).mean().sqrt())


def pooled_scores(cut: BelowLayer, images: Tensor, M: Tensor, scale: float, head: LinearHead) -> tuple[Tensor, Tensor]:
    """Return the scores of images over the head's cells, (images, rank, cells), and their means, (images, rank, 1)."""
    cells, means = [], []
    with torch.no_grad():
        for part in torch.split(images, 256):
            S = projected(cut(part).cpu() / scale, M)
            cells.append(head.pooled(S))
            means.append(S.mean(-1, keepdim=True))
    return torch.cat(cells), torch.cat(means)


def reseeded(M: Tensor, silent: Tensor, f: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """Return M with every dead factor (silent, or a zero column) replaced, and which they were.

    Each takes the positive part of what M S misses at one badly fitted position of the activations f.
    """
    dead = (silent | (M.amax(0) <= 0)).nonzero()[:, 0]
    if not dead.numel():
        return M, dead
    missed = (f - M @ S).permute(1, 0, 2).flatten(1).clamp_min(0)
    worst = missed.norm(dim=0).topk(min(dead.numel(), missed.shape[1])).indices
    dead = dead[: worst.numel()]
    M = M.clone()
    M[:, dead] = missed[:, worst] / missed[:, worst].norm(dim=0).clamp_min(1e-12)
    return M, dead


def train(
    cut: BelowLayer,
    M: Tensor,
    head: LinearHead,
    task: Task,
    settings: FactorSettings,
    scale: float,
    on_state: Callable[[State], None],
) -> TrainedFactors:
    """Run all passes and return the state that was best on validation images, the warm start included.

    A state counts when its head classifies no fewer of them right than the warm start's, to a standard error; the
    lowest J of those wins. A run that breaks keeps what was best so far and says why it broke.
    """
    checked = validated(len(task.images))
    learned = task.part(~checked) if bool(checked.any()) else task
    tested = task.part(checked) if bool(checked.any()) else task
    run = FactorAdmm(cut, M, head, learned, settings, scale)
    best = run.state()
    valid = [validation(cut, best, tested, scale, settings.pooled)]
    right, lowest = valid[0]
    enough = right - math.sqrt(right * (1 - right) / len(tested.images))
    history, status, epoch = [], "finished", 0
    try:
        for state in run:
            epoch = state.epoch
            history.append((state.loss, *state.residuals))
            valid.append(validation(cut, state, tested, scale, settings.pooled))
            if valid[-1][0] >= enough and valid[-1][1] < lowest:
                best, lowest = state, valid[-1][1]
            on_state(state)
            if epoch - best.epoch >= settings.patience:
                log.info("deepfacto: done after epoch %d, none was better than epoch %d", epoch, best.epoch)
                break
    except (NumericsError, ValueError) as error:
        status = f"stopped after epoch {epoch}: {error}"
        log.warning("deepfacto: %s; the state of epoch %d is kept", error, best.epoch)
    with torch.no_grad():
        for k, w in cut.weights.items():
            w.copy_(best.weights[k])
    cells, _ = pooled_scores(cut, task.images, best.M, scale, best.head)
    final = fit_head(cells, task, best.head, FULL_STEPS, task.fidelity)
    return TrainedFactors(replace(best, head=final), status, history, valid)


def validated(n: int) -> Tensor:
    """Return which of the ``n`` images of a training choose the best pass; none where there are too few."""
    return torch.arange(n) % VALIDATE_EVERY == VALIDATE_EVERY - 1


def validation(cut: BelowLayer, state: State, task: Task, scale: float, weight: float) -> tuple[float, float]:
    """Return the share classified right and the mean J, with that of a head on mean scores if there is one."""
    cells, means = pooled_scores(cut, task.images, state.M, scale, state.head)
    labelled = task.labels >= 0
    y = task.labels[labelled]
    if not len(y):
        return 0.0, math.nan
    logits = state.head.of_pooled(cells[labelled])
    value = float(nf.cross_entropy(logits, y))
    if state.pooled_head is not None:
        value += weight * float(nf.cross_entropy(state.pooled_head.of_pooled(means[labelled]), y))
    return float((logits.argmax(1) == y).double().mean()), value


def fit_head(pooled: Tensor, task: Task, start: LinearHead, n_steps: int, fidelity: float) -> LinearHead:
    """Return the head that minimises `objective` on pooled scores (images, rank, cells), by L-BFGS from ``start``.

    Scores are brought to unit variance inside, so that the ridge means the same for all.
    """
    flat = pooled.flatten(1).double()
    mean, spread = flat.mean(0), flat.std(0)
    spread = torch.where(spread > 1e-9 * flat.abs().max().clamp_min(1e-30), spread, torch.inf)  # a dead score weighs 0
    X = (flat - mean) / spread
    w = (start.weight.flatten(1).double() * torch.where(spread.isinf(), 0.0, spread)).requires_grad_(True)
    b = (start.bias.double() + start.weight.flatten(1).double() @ mean).requires_grad_(True)
    solver = torch.optim.LBFGS(
        [w, b], max_iter=n_steps, history_size=20, line_search_fn="strong_wolfe", tolerance_change=1e-10
    )
    labels, teacher = task.labels, task.teacher.double()
    ridge = RIDGE * pooled.shape[2]

    def closure() -> Tensor:
        solver.zero_grad()
        out = X @ w.T + b
        value = objective(out, labels, teacher, fidelity).mean() + ridge * w.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    with torch.enable_grad():
        solver.step(closure)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        weight = w / spread
        bias = b - weight @ mean
    like = start.weight
    return LinearHead(weight.to(like).reshape(like.shape), bias.to(like), start.pool)


def objective(logits: Tensor, labels: Tensor, teacher: Tensor, fidelity: float) -> Tensor:
    """Return per image the cross-entropy to its label, mixed with the squared distance to the model's own logits."""
    value = nf.cross_entropy(logits, labels, ignore_index=-1, reduction="none")
    if fidelity == 0:
        return value
    spread = teacher.std().clamp_min(1e-6)
    return (1 - fidelity) * value + fidelity * 0.5 * ((logits - teacher) / spread).square().sum(1)


def activations_of(cut: BelowLayer, images: Tensor, batch: int = 256) -> Tensor:
    """Return the layer's activations of all images, (images, channels, positions)."""
    with torch.no_grad():
        return torch.cat([cut(part).cpu() for part in torch.split(images, batch)])


def check_memory(n: int, cut: BelowLayer, rank: int, with_duals: bool, limit_gib: float | None) -> int:
    """Return the bytes that the images, variables and duals of ``n`` images take, or refuse before anything is made."""
    layout = cut.layout
    entries = layout.channels * layout.n_positions
    per_image = math.prod(cut.subject.input_shape) + entries * (3 + 2 * with_duals) + 3 * rank * layout.n_positions
    needed = 4 * n * per_image
    have = int(limit_gib * GIB) if limit_gib is not None else room(torch.zeros(()), None)
    if needed > have:
        raise OptionError(
            f"deepfacto: images, variables and duals of {n} images at layer {cut.layer!r} ({layout.channels} x "
            f"{layout.n_positions} numbers each) need {size_text(needed)} and {size_text(have)} are free; lower "
            "max_images, or take a later or smaller layer."
        )
    return needed
