"""Training of a network with a non-negative factorization after one layer, by stochastic Block-ADMM.

The updates are those of ``kernels/deepfacto.py``; the general solver for chains of modules (``block_admm.py``) has no
place for a factorization, whose scores are themselves a solution. One cycle on a mini-batch:

1. f = the layer's activation, S = its projection on M: each visit starts from the chained forward pass.
2. L: gradient steps on the objective J of the logits, held near h(S).
3. S: one prox-linear step towards what L asks; no image's scores are asked to change by more than ``trust``.
4. Z: closed form between f - U, M S - V and, with weight ``anchor``, the activation the model had before training:
   without it f and S shrink together, which is the cheapest way to a small reconstruction error.
5. The layers below: one Adam step towards Z + U. This is the only way the objective reaches them.
6. M: HALS on running sums of f S^T and S S^T with S as a new image would get it.
7. U += dual_step (Z - f), V += dual_step (Z - M S), where duals are on.

After every pass over the images the head is fitted anew to the scores (it is convex, so it is simply solved, and needs
no dual), and dead factors are re-seeded from the worst-fitted position, with no weight in the head.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as nf

from auditor.block_variables import GIB, room
from auditor.cut import Cut
from auditor.errors import NumericsError, OptionError
from auditor.kernels.deepfacto import LinearHead, basis_step, decoupled, logit_steps, projected, score_step
from auditor.training import Watch

log = logging.getLogger(__name__)
FORGET = 0.9  # of the running sums behind M
HEAD_STEPS = 20  # L-BFGS steps on the head after every pass; the warm start and the end take FULL_STEPS
FULL_STEPS = 200
RIDGE = 1e-4  # on the head's weights for scores of unit variance
WHERE = "deepfacto"


@dataclass(frozen=True, slots=True)
class Task:
    """What is learned: images, their labels (-1 unknown), the model's logits and the share these have in the head."""

    images: Tensor
    labels: Tensor
    teacher: Tensor
    fidelity: float = 0.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Penalties and step sizes; beta, gamma and anchor weigh means over the layer's entries."""

    beta: float = 1.0
    gamma: float = 1.0
    anchor: float = 0.1
    trust: float = 0.3
    supervision: float = 1.0
    l1: float = 0.0
    dual_step: float = 0.0
    lr: float = 1e-3
    batch: int = 64
    epochs: int = 12
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


@dataclass(frozen=True, slots=True)
class Trained:
    """The last good state and why the training ended."""

    state: State
    status: str
    history: list[tuple[float, float, float]]  # loss and residuals per epoch


class FactorAdmm:
    """One run: ``for state in FactorAdmm(cut, M, head, task, settings, scale): …`` gives a `State` per pass.

    ``cut``'s weights are trained in place, M and the head are replaced. Whoever iterates stops; numbers that are not
    finite, or a residual that runs away, are an error.
    """

    def __init__(self, cut: Cut, M: Tensor, head: LinearHead, task: Task, settings: Settings, scale: float) -> None:
        self.cut, self.M, self.head, self.task, self.settings, self.scale = cut, M, head, task, settings, scale
        n, (channels, rank) = len(task.images), M.shape
        self.Z0 = activations_of(cut, task.images) / scale
        self.U: Tensor | None = torch.zeros_like(self.Z0) if settings.dual_step else None
        self.V: Tensor | None = torch.zeros_like(self.Z0) if settings.dual_step else None
        self.pooled = torch.zeros(n, rank, head.pool.shape[1])
        self.XS, self.SS = torch.zeros(channels, rank), torch.zeros(rank, rank)
        self.watch = Watch(WHERE, settings.dual_step)
        self.reseeded = 0

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
                weights = {k: w.detach().clone() for k, w in self.cut.weights.items()}
                yield State(
                    epoch, self.M, self.head, weights, float(sums[0]) / n, (residuals[0], residuals[1]), self.reseeded
                )

    def _visit(self, rows: Tensor, adam: torch.optim.Optimizer | None) -> Tensor:
        """Run one mini-batch; return the sums of J, |Z - f|^2 and |Z - M S|^2."""
        s, task, head = self.settings, self.task, self.head
        with torch.enable_grad():
            live = self.cut(task.images[rows]) / self.scale
        with torch.no_grad():
            f = live.detach()
            u, v = (
                (f.new_zeros(()), f.new_zeros(())) if self.U is None or self.V is None else (self.U[rows], self.V[rows])
            )
            S_new = projected(f, self.M)  # as a new image would get them
            h = head.logits(S_new)
            L = logit_steps(h, task.labels[rows])
            asked = s.supervision * f[0].numel() / s.gamma * head.pulled_back(L - h) - s.l1
            limit = s.trust * (self.M.T @ self.Z0[rows]).flatten(1).norm(dim=1)
            S = score_step(S_new, f - u + v, self.M, asked, limit)
            Z = decoupled((s.beta, f - u), (s.gamma, self.M @ S - v), (s.anchor, self.Z0[rows]))
            self._learn_basis(f, S_new)
            self.pooled[rows] = head.pooled(S_new)
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
                fresh = self.cut(task.images[rows]) / self.scale
                self.U[rows] = (u + self.watch.dual_step * (Z - fresh)).clamp(-top, top)
                self.V[rows] = (v + self.watch.dual_step * miss).clamp(-top, top)
            loss = nf.cross_entropy(h, task.labels[rows], ignore_index=-1, reduction="sum")
            return torch.stack([loss, (Z - f).square().sum(), miss.square().sum()]).double()

    def _learn_basis(self, f: Tensor, S: Tensor) -> None:
        self.XS = FORGET * self.XS + torch.einsum("ncp,nkp->ck", f, S) / len(f)
        self.SS = FORGET * self.SS + torch.einsum("nkp,njp->kj", S, S) / len(f)
        self.M = basis_step(self.M, self.XS, self.SS)

    def _end_of_pass(self) -> None:
        """Re-seed dead factors and fit the head to the scores of this pass."""
        f, S = self._last
        self.M, dead = reseeded(self.M, self.pooled.amax((0, 2)) <= 0, f, S)
        weight = self.head.weight.clone()
        if dead.numel():
            self.reseeded += dead.numel()
            weight[:, dead] = 0
            self.XS[:, dead] = self.SS[:, dead] = self.SS[dead] = 0
            log.info("deepfacto: %d dead factors re-seeded", dead.numel())
        start = LinearHead(weight, self.head.bias, self.head.pool)
        self.head = fit_head(self.pooled, self.task, start, HEAD_STEPS, fidelity=0.0)


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
    cut: Cut,
    M: Tensor,
    head: LinearHead,
    task: Task,
    settings: Settings,
    scale: float,
    on_state: Callable[[State], None],
) -> Trained:
    """Run all passes and return the last good state; a run that breaks keeps it, and says why it broke."""
    state = State(0, M, head, {k: w.detach().clone() for k, w in cut.weights.items()})
    history, status = [], "finished"
    try:
        for state in FactorAdmm(cut, M, head, task, settings, scale):
            history.append((state.loss, *state.residuals))
            on_state(state)
    except (NumericsError, ValueError) as error:
        status = f"stopped after epoch {state.epoch}: {error}"
        log.warning("deepfacto: %s; the state of epoch %d is kept", error, state.epoch)
    with torch.no_grad():
        for k, w in cut.weights.items():
            w.copy_(state.weights[k])
    S = torch.cat([head.pooled(projected(cut(part) / scale, state.M)) for part in torch.split(task.images, 256)])
    return Trained(replace(state, head=fit_head(S, task, state.head, FULL_STEPS, task.fidelity)), status, history)


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

    def closure() -> Tensor:
        solver.zero_grad()
        out = X @ w.T + b
        value = objective(out, labels, teacher, fidelity).mean() + RIDGE * w.square().sum()
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


def activations_of(cut: Cut, images: Tensor, batch: int = 256) -> Tensor:
    """Return the layer's activations of all images, (images, channels, positions)."""
    with torch.no_grad():
        return torch.cat([cut(part).cpu() for part in torch.split(images, batch)])


def check_memory(n: int, cut: Cut, rank: int, with_duals: bool, limit_gib: float | None) -> int:
    """Return the bytes that the images, variables and duals of ``n`` images take, or refuse before anything is made."""
    layout = cut.layout
    entries = layout.channels * layout.n_positions
    kept = math.prod(cut.subject.input_shape) + entries * (3 + 2 * with_duals) + 2 * rank * layout.n_positions
    needed = 4 * n * kept
    have = int(limit_gib * GIB) if limit_gib is not None else room(torch.zeros(()), None)
    if needed > have:
        raise OptionError(
            f"deepfacto: images, variables and duals of {n} images at layer {cut.layer!r} ({layout.channels} x "
            f"{layout.n_positions} numbers each) need {needed / GIB:.2f} GiB and {have / GIB:.2f} GiB are free; lower "
            "max_images, or take a later or smaller layer."
        )
    return needed
