"""Training of explanation heads: a generator of states that can be stopped, kept and taken up again.

    minimise  L_FS + beta L_SR + eta L_PT       over encoder, decoder, v and c, for all classes in one batched pass

Choices where [XNN] is silent: the logits are standardised, so that beta and eta weigh against a faithfulness in units
of the logit's variance, whatever the scale of a network's logits is; Adam, its steps falling to a fiftieth along a
cosine, and shorter for encoder weights with many inputs, which all move an x-feature at once; every dimension of Z
divided by its root mean square; L_SR through the slope of the log at a running error (no mini-batch bias), and on a
layer with positions of a random part of them in each step; positives and negatives weigh the same in total; a dead
x-feature (zero on a whole epoch, twice in a row) is sown again. Classes share nothing but the order of the examples:
a class trained among others is the class trained alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from auditor.explainers.xnn.heads import XHeads
from auditor.kernels.networks.reconstruction_losses import (
    faithfulness,
    pull_away,
    running_reconstruction,
    sparse_reconstruction,
)

Variant = Literal["srae", "nn", "sae", "cae"]
RECONSTRUCTED = 1024  # rows (positions of images) that a step reconstructs at most
FALL = 0.02  # the last step size over the first
FEW_INPUTS = 64  # up to which encoder weights take whole steps; beyond that a step falls as one over the inputs


class SraeConfig(BaseModel):
    """Weights of the losses and settings of the optimiser."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    variant: Variant = Field(default="srae", description="srae, or a baseline: nn (faithfulness only), sae, cae.")
    beta: float = Field(default=0.05, ge=0, description="Weight of the sparse reconstruction.")
    eta: float = Field(default=0.05, ge=0, description="Weight of the pull-away term.")
    q: float = Field(default=10.0, gt=0, description="Steepness of the log penalty.")
    lr: float = Field(default=5e-3, gt=0, description="First step size of Adam.")
    weight_decay: float = Field(default=1e-5, ge=0, description="Fixes the scale between E and v.")
    batch: int = Field(default=256, ge=1, description="Examples per step.")
    epochs: int = Field(default=60, ge=1, description="Epochs over which the step size falls.")
    seed: int = Field(default=0, ge=0, description="Seed of weights and order.")

    def step_size(self, epoch: int) -> float:
        """Return the step size of an epoch, counted from 1."""
        along = min(1.0, (epoch - 1) / max(1, self.epochs - 1))
        return self.lr * (FALL + (1 - FALL) * (1 + math.cos(math.pi * along)) / 2)


@dataclass(frozen=True)
class Problem:
    """What all heads are trained on: activations, the logits to explain, and the weight of every example.

    ``Z`` is (all examples, dims) or (all examples, channels, height, width), in any precision; ``rows`` are the
    examples that count, ``y`` and ``w`` (classes, rows) are of these.
    """

    Z: Tensor
    y: Tensor
    w: Tensor
    rows: Tensor

    @classmethod
    def of(cls, Z: Tensor, y: Tensor, w: Tensor) -> Problem:
        """Return the problem in which all examples count."""
        return cls(Z, y, w, torch.arange(len(Z)))

    def activations(self, rows: Tensor) -> Tensor:
        """Return the activations of some of the examples that count, in float32."""
        return self.Z[self.rows[rows]].float()

    def only(self, classes: Tensor) -> Problem:
        """Return the problem of some classes."""
        return replace(self, y=self.y[classes], w=self.w[classes])

    def sample(self, n: int) -> Tensor:
        """Return at most ``n`` of the examples that count, spread over them."""
        m = len(self.rows)
        return torch.arange(m) if m <= n else torch.linspace(0, m - 1, n).long()

    @property
    def spread(self) -> Tensor:
        """Standard deviation of every logit, (classes,)."""
        return self.y.std(-1).clamp(min=1e-6)


@dataclass
class TrainingState:
    """State after an epoch: everything needed to go on from here."""

    problem: Problem
    heads: XHeads
    classes: Tensor  # (classes,) their numbers: what is random for a class depends on its own number only
    adam: torch.optim.Adam
    generator: torch.Generator
    Q: Tensor  # running error per class and dimension
    silent: Tensor  # (classes, features): epochs in a row without a spark
    reseeded: Tensor  # (classes, features): how often sown again
    broken: Tensor  # (classes,) whose loss was once not finite: nothing good comes from them any more
    epoch: int = 0
    losses: dict[str, Tensor] = field(default_factory=dict)  # per class, of the last epoch

    def keep(self, rows: Tensor) -> None:
        """Go on with some of the classes only."""
        self.problem, self.classes = self.problem.only(rows), self.classes[rows]
        self.Q, self.silent, self.reseeded = self.Q[rows], self.silent[rows], self.reseeded[rows]
        self.broken = self.broken[rows]
        self.losses = {name: loss[rows] for name, loss in self.losses.items()}
        for p in self.heads.parameters():
            slots = self.adam.state[p]
            p.data, p.grad = p.data[rows], None
            slots.update({k: s[rows] for k, s in slots.items() if s.dim() > 0})


def weights_of(positive: Tensor) -> Tensor:
    """Return weights with mean 1 that give positives and negatives (classes, examples) the same total.

    A class without positives or without negatives weighs all examples alike.

    >>> weights_of(torch.tensor([[True, False, False, False]])).tolist()
    [[2.0, 0.6666666865348816, 0.6666666865348816, 0.6666666865348816]]
    """
    m, plus = positive.shape[-1], positive.sum(-1, keepdim=True)
    both = torch.where(positive, m / (2 * plus.clamp(min=1)), m / (2 * (m - plus).clamp(min=1)))
    return torch.where((plus > 0) & (plus < m), both, 1.0)


def start_state(heads: XHeads, problem: Problem, config: SraeConfig, classes: Tensor | None = None) -> TrainingState:
    """Prepare heads for a problem: scale of Z, intercept at the mean logit, optimiser."""
    with torch.no_grad():
        heads.scale.copy_(scale_of(problem))
        heads.c.copy_(problem.y.mean(-1))
        heads.v.mul_(problem.spread.view(-1, 1, 1))
    shape = (len(problem.y), heads.n_features)
    return TrainingState(
        problem,
        heads,
        torch.arange(len(problem.y)) if classes is None else classes,
        _adam(heads, config),
        torch.Generator().manual_seed(config.seed + 1),
        torch.ones(len(problem.y), problem.Z.shape[1]),
        silent=torch.zeros(shape, dtype=torch.long),
        reseeded=torch.zeros(shape, dtype=torch.long),
        broken=torch.zeros(len(problem.y), dtype=torch.bool),
    )


def _adam(heads: XHeads, config: SraeConfig) -> torch.optim.Adam:
    shares = {p: min(1.0, FEW_INPUTS / p.shape[2]) for p in heads.encoder_w}
    groups = [{"params": [p], "share": shares.get(p, 1.0)} for p in heads.parameters()]
    return torch.optim.Adam(groups, lr=config.lr, weight_decay=config.weight_decay, fused=True)


def scale_of(problem: Problem) -> Tensor:
    """Return the root mean square of every dimension over the examples, (dims,); 1 where it is nothing."""
    total = torch.zeros(problem.Z.shape[1], dtype=torch.float64)
    for rows in torch.split(torch.arange(len(problem.rows)), 1024):
        Z = problem.activations(rows)
        total += Z.transpose(0, 1).flatten(1).square().mean(1).double() * len(rows)
    rms = (total / len(problem.rows)).sqrt().float()
    return torch.where(rms > 1e-8, rms, 1.0)


def train(state: TrainingState, config: SraeConfig) -> Iterator[TrainingState]:
    """Yield the state after every epoch, without end: the caller stops, and drops the classes that broke."""
    for epoch in itertools.count(state.epoch + 1):
        state.epoch = epoch
        for group in state.adam.param_groups:
            group["lr"] = config.step_size(epoch) * group["share"]
        order = torch.randperm(len(state.problem.rows), generator=state.generator)
        sums = torch.zeros(3, len(state.classes))
        awake = torch.zeros(len(state.classes), state.heads.n_features, dtype=torch.bool)
        n_steps = max(1, round(len(order) / config.batch))
        for rows in torch.tensor_split(order, n_steps):
            fs, sr, pt, fired = _losses(state, config, rows)
            losses = fs + sr + pt
            state.broken |= ~torch.isfinite(losses.detach())
            state.adam.zero_grad(set_to_none=True)
            losses.sum().backward()  # type: ignore[no-untyped-call]  # classes share nothing: each is trained alone
            state.adam.step()
            sums += torch.stack([fs, sr, pt]).detach() / n_steps
            awake |= fired
        state.losses = dict(zip(("faithfulness", "reconstruction", "pull_away"), sums, strict=True))
        _resow(state, awake, config)
        yield state


def _losses(state: TrainingState, config: SraeConfig, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    heads, problem = state.heads, state.problem
    Z = problem.activations(rows)
    scaled = heads.rows(Z)
    embedded = heads.embed(scaled)
    E = heads.pool(embedded, Z)
    fs = sr = pt = E.sum((1, 2, 3)) * 0
    if config.variant != "cae":
        fs = faithfulness(heads.predict(E), problem.y[:, rows], problem.w[:, rows])
    if config.variant != "nn":
        if len(scaled) > RECONSTRUCTED:
            some = torch.randint(len(scaled), (RECONSTRUCTED,), generator=state.generator)
            Q = heads.dimension_errors(embedded[:, some], scaled[some])
        else:
            Q = heads.dimension_errors(embedded, scaled)
        if config.variant == "srae":
            with torch.no_grad():
                keep = 0.9 if state.epoch > 1 else 0.5
                state.Q.mul_(keep).add_(Q, alpha=1 - keep)
            sr = config.beta * running_reconstruction(Q, state.Q, config.q)
        else:
            sr = config.beta * Q.mean(-1)
    if config.variant == "srae":
        pt = config.eta * pull_away(embedded)
    return fs, sr, pt, (embedded.detach() != 0).any(1)


def objective(heads: XHeads, problem: Problem, config: SraeConfig, some: int = 512) -> Tensor:
    """Return the objective of every class on all examples of a problem, (classes,), as it is defined.

    Reconstruction and pull-away are taken on at most ``some`` examples.
    """
    with torch.no_grad():
        ybar = predictions(heads, problem)
        loss = faithfulness(ybar, problem.y, problem.w) if config.variant != "cae" else torch.zeros(len(ybar))
        if config.variant == "nn":
            return loss
        scaled = heads.rows(problem.activations(problem.sample(some)))
        scaled = scaled[torch.linspace(0, len(scaled) - 1, min(len(scaled), 4 * RECONSTRUCTED)).long()]
        E = heads.embed(scaled)
        Q = heads.dimension_errors(E, scaled)
        if config.variant != "srae":
            return loss + config.beta * Q.mean(-1)
        return loss + config.beta * sparse_reconstruction(Q, config.q) + config.eta * pull_away(E)


def predictions(heads: XHeads, problem: Problem) -> Tensor:
    """Return what the heads say of every example that counts, (classes, rows)."""
    with torch.no_grad():
        parts = torch.split(torch.arange(len(problem.rows)), examples_at_once(problem.Z))
        return torch.cat([heads.predict(heads.encode(problem.activations(rows))) for rows in parts], 1)


def examples_at_once(Z: Tensor) -> int:
    """Return how many examples make about 16 MB of float32 activations."""
    return max(1, 2**22 // max(1, Z[0].numel()))


def _resow(state: TrainingState, awake: Tensor, config: SraeConfig) -> None:
    """Give x-features that slept two epochs new incoming weights and a small outgoing one."""
    state.silent = torch.where(awake, 0, state.silent + 1)
    heads, spread = state.heads, state.problem.spread
    with torch.no_grad():
        for k, i in (state.silent >= 2).nonzero().tolist():
            generator = class_generator(config.seed, int(state.classes[k]), 1 + i + 1000 * int(state.reseeded[k, i]))
            w, b = heads.encoder_w[-1], heads.encoder_b[-1]
            w[k, i] = torch.randn(w.shape[2], generator=generator).abs() / w.shape[2] ** 0.5
            b[k, 0, i] = 0.1
            heads.v[k, i] = 0.1 * spread[k] * torch.randn(heads.cells, generator=generator)
            state.silent[k, i] = 0
            state.reseeded[k, i] += 1


def class_generator(seed: int, k: int, use: int = 0) -> torch.Generator:
    """Return the randomness of one class, the same in whatever block it is trained."""
    return torch.Generator().manual_seed((seed * 1_000_003 + k) * 10_007 + use)


def fit_predictor(heads: XHeads, problem: Problem, ridge: float = 1e-8) -> None:
    """Set v and c by weighted least squares on a fixed embedding: only L_FS depends on them, so this is its minimum."""
    d = heads.n_features * heads.cells + 1
    AtA, Aty = torch.zeros(len(heads.c), d, d, dtype=torch.float64), torch.zeros(len(heads.c), d, dtype=torch.float64)
    with torch.no_grad():
        for rows in torch.split(torch.arange(len(problem.rows)), examples_at_once(problem.Z)):
            E = heads.encode(problem.activations(rows)).flatten(2)
            A = torch.cat([E, torch.ones_like(E[..., :1])], -1).double()
            wA = A * problem.w[:, rows].double().unsqueeze(-1)
            AtA += wA.transpose(1, 2) @ A
            Aty += (wA * problem.y[:, rows].double().unsqueeze(-1)).sum(1)
        size = torch.diagonal(AtA, dim1=1, dim2=2)
        AtA += torch.diag_embed(ridge * size + 1e-9 * size.mean(-1, keepdim=True))
        solution = torch.linalg.solve(AtA, Aty).float()
        heads.v.copy_(solution[:, :-1].view_as(heads.v))
        heads.c.copy_(solution[:, -1])


def normalise(heads: XHeads, problem: Problem) -> None:
    """Scale every x-feature to a root mean square of 1, and v the other way: E and v become comparable."""
    if heads.activation == "tanh":
        return  # a bounded x-feature has its scale already
    with torch.no_grad():
        total = torch.zeros(heads.v.shape[:2])
        for rows in torch.split(torch.arange(len(problem.rows)), examples_at_once(problem.Z)):
            scaled = heads.rows(problem.activations(rows))
            total += heads.embed(scaled).square().mean(1) * len(rows) / len(problem.rows)
        rescale(heads, total.sqrt())


def rescale(heads: XHeads, rms: Tensor) -> None:
    """Divide every x-feature (classes, features) by ``rms``, where that is above zero, without any other change."""
    rms = torch.where(rms > 1e-8, rms, 1.0)
    heads.encoder_w[-1].div_(rms.unsqueeze(-1))
    heads.encoder_b[-1].div_(rms.unsqueeze(1))
    heads.decoder_w[0].mul_(rms.unsqueeze(1))
    heads.v.mul_(rms.unsqueeze(-1))
