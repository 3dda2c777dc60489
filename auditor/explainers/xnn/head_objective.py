"""Training of explanation heads: a generator of states that can be stopped, kept and taken up again.

    minimise  L_FS + beta L_SR + eta L_PT       over encoder, decoder, v and c, for all classes in one batched pass

Choices where [XNN] is silent: Adam; every dimension of Z divided by its root mean square; L_SR through the slope of
the log at a running error (no mini-batch bias); positives and negatives weigh the same in total; a dead x-feature (zero
on a whole epoch, twice in a row) is sown again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from auditor.errors import NumericsError
from auditor.explainers.xnn.heads import XHeads
from auditor.kernels.networks.reconstruction_losses import (
    dimension_errors,
    faithfulness,
    pull_away,
    running_reconstruction,
)

Variant = Literal["srae", "nn", "sae", "cae"]


class SraeConfig(BaseModel):
    """Weights of the losses and settings of the optimiser."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    variant: Variant = Field(default="srae", description="srae, or a baseline: nn (faithfulness only), sae, cae.")
    beta: float = Field(default=1.0, ge=0, description="Weight of the sparse reconstruction.")
    eta: float = Field(default=1.0, ge=0, description="Weight of the pull-away term.")
    q: float = Field(default=10.0, gt=0, description="Steepness of the log penalty.")
    lr: float = Field(default=2e-3, gt=0, description="Step size of Adam.")
    weight_decay: float = Field(default=1e-5, ge=0, description="Fixes the scale between E and v.")
    batch: int = Field(default=256, ge=1, description="Examples per step.")
    seed: int = Field(default=0, ge=0, description="Seed of weights and order.")


@dataclass(frozen=True)
class Problem:
    """What all heads are trained on: activations, the logits to explain, and the weight of every example.

    ``Z`` is (examples, dims) or (examples, channels, height, width); ``y`` and ``w`` are (classes, examples).
    """

    Z: Tensor
    y: Tensor
    w: Tensor

    @property
    def spread(self) -> Tensor:
        """Standard deviation of every logit, (classes,)."""
        return self.y.std(-1).clamp(min=1e-6)


@dataclass
class TrainingState:
    """State after an epoch: everything needed to go on from here."""

    heads: XHeads
    adam: torch.optim.Adam
    generator: torch.Generator
    Q: Tensor  # running error per class and dimension
    epoch: int = 0
    losses: dict[str, Tensor] = field(default_factory=dict)  # per class, of the last epoch
    silent: Tensor | None = None  # (classes, features): epochs in a row without a spark
    reseeded: Tensor | None = None  # (classes, features): how often sown again


def weights_of(positive: Tensor) -> Tensor:
    """Return weights with mean 1 that give positives and negatives (classes, examples) the same total.

    >>> weights_of(torch.tensor([[True, False, False, False]])).tolist()
    [[2.0, 0.6666666865348816, 0.6666666865348816, 0.6666666865348816]]
    """
    m, plus = positive.shape[-1], positive.sum(-1, keepdim=True)
    return torch.where(positive, m / (2 * plus.clamp(min=1)), m / (2 * (m - plus).clamp(min=1)))


def start_state(heads: XHeads, problem: Problem, config: SraeConfig) -> TrainingState:
    """Prepare heads for a problem: scale of Z, intercept at the mean logit, optimiser."""
    channels = problem.Z.transpose(0, 1).flatten(1)
    rms = channels.square().mean(1).sqrt()
    with torch.no_grad():
        heads.scale.copy_(torch.where(rms > 1e-8, rms, 1.0))
        heads.c.copy_(problem.y.mean(-1))
        heads.v.mul_(problem.spread.view(-1, 1, 1))
    shape = (len(problem.y), heads.n_features)
    return TrainingState(
        heads,
        torch.optim.Adam(heads.parameters(), lr=config.lr, weight_decay=config.weight_decay),
        torch.Generator().manual_seed(config.seed + 1),
        torch.ones(len(problem.y), problem.Z.shape[1]),
        silent=torch.zeros(shape, dtype=torch.long),
        reseeded=torch.zeros(shape, dtype=torch.long),
    )


def train(problem: Problem, state: TrainingState, config: SraeConfig) -> Iterator[TrainingState]:
    """Yield the state after every epoch, without end: the caller stops. NaN losses are an error."""
    m, heads = len(problem.Z), state.heads
    spread = problem.spread
    for epoch in itertools.count(state.epoch + 1):
        state.epoch = epoch
        order = torch.randperm(m, generator=state.generator)
        sums = torch.zeros(3, len(problem.y))
        awake = torch.zeros(len(problem.y), heads.n_features, dtype=torch.bool)
        n_steps = max(1, round(m / config.batch))
        for rows in torch.tensor_split(order, n_steps):
            fs, sr, pt, fired = _losses(problem, state, config, rows)
            loss = (fs + sr + pt).sum()  # the classes share nothing, so their sum trains each alone
            if not bool(torch.isfinite(loss)):
                raise NumericsError(
                    f"training of the explanation heads gave a loss of {loss.item()} in epoch {state.epoch}. Lower lr "
                    f"(now {config.lr}) or look for extreme activations."
                )
            state.adam.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            state.adam.step()
            sums += torch.stack([fs, sr, pt]).detach() / n_steps
            awake |= fired
        state.losses = dict(zip(("faithfulness", "reconstruction", "pull_away"), sums, strict=True))
        _resow(state, awake, spread)
        yield state


def _losses(
    problem: Problem, state: TrainingState, config: SraeConfig, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    heads, Z = state.heads, problem.Z[rows]
    scaled = heads.rows(Z)
    embedded = heads.embed(scaled)
    E = heads.pool(embedded, Z)
    zero = E.sum((1, 2, 3)) * 0
    fs = sr = pt = zero
    if config.variant != "cae":
        ybar = heads.predict(E)
        fs = faithfulness(ybar, problem.y[:, rows], problem.w[:, rows])
    if config.variant != "nn":
        Q = dimension_errors(heads.decode(embedded), scaled)
        if config.variant == "srae":
            with torch.no_grad():
                keep = 0.9 if state.epoch > 1 else 0.5
                state.Q.mul_(keep).add_(Q, alpha=1 - keep)
            sr = config.beta * running_reconstruction(Q, state.Q, config.q)
        else:
            sr = config.beta * Q.mean(-1)
    if config.variant == "srae":
        pt = config.eta * pull_away(embedded)
    return fs, sr, pt, (embedded != 0).any(1).detach()


def _resow(state: TrainingState, awake: Tensor, spread: Tensor) -> None:
    """Give x-features that slept two epochs new incoming weights and a small outgoing one."""
    assert state.silent is not None
    assert state.reseeded is not None
    state.silent = torch.where(awake, 0, state.silent + 1)
    dead = (state.silent >= 2).nonzero()
    heads = state.heads
    with torch.no_grad():
        for k, i in dead.tolist():
            w, b = heads.encoder_w[-1], heads.encoder_b[-1]
            w[k, i] = torch.randn(w.shape[2], generator=state.generator).abs() / w.shape[2] ** 0.5
            b[k, 0, i] = 0.1
            heads.v[k, i] = 0.1 * spread[k] * torch.randn(heads.cells, generator=state.generator)
            state.silent[k, i] = 0
            state.reseeded[k, i] += 1


def fit_predictor(heads: XHeads, problem: Problem) -> None:
    """Set v and c by least squares on a fixed embedding (what CAE needs after training)."""
    with torch.no_grad():
        E = heads.encode(problem.Z).flatten(2)
        A = torch.cat([E, torch.ones_like(E[..., :1])], -1).double()
        root = problem.w.double().sqrt().unsqueeze(-1)
        ridge = 1e-8 * torch.eye(A.shape[-1], dtype=torch.float64)
        AtA = (A * root).transpose(1, 2) @ (A * root)
        Aty = (A * root).transpose(1, 2) @ (problem.y.double().unsqueeze(-1) * root)
        mean_diag = torch.diagonal(AtA, dim1=1, dim2=2).mean(-1).view(-1, 1, 1)
        solution = torch.linalg.solve(AtA + ridge * mean_diag, Aty)[..., 0].float()
        heads.v.copy_(solution[:, :-1].view_as(heads.v))
        heads.c.copy_(solution[:, -1])


def normalise(heads: XHeads, Z: Tensor) -> None:
    """Scale every x-feature to a root mean square of 1 on ``Z``, and v the other way: E and v become comparable."""
    if heads.activation == "tanh":
        return  # a bounded x-feature has its scale already
    with torch.no_grad():
        rms = heads.embed(heads.rows(Z)).square().mean(1).sqrt()  # (classes, features)
        rms = torch.where(rms > 1e-8, rms, 1.0)
        heads.encoder_w[-1].div_(rms.unsqueeze(-1))
        heads.encoder_b[-1].div_(rms.unsqueeze(1))
        heads.decoder_w[0].mul_(rms.unsqueeze(1))
        heads.v.mul_(rms.unsqueeze(-1))
