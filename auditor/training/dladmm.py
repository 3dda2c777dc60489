"""dlADMM on an affine stack [Wang2019], extended with hard constraints G_l(W_l) = 0.

    min  R(z_L; y) + sum_l Omega(W_l) + nu/2 sum_{l<L} (|z_l - W_l a_{l-1} - b_l|^2 + |a_l - relu(z_l)|^2)
    s.t. z_L = W_L a_{L-1} + b_L   (scaled dual d, penalty rho)   and   G_l(W_l) = 0

A weight step solves the isotropic quadratic model *with* the constraint, which is gradient step and projection, and
doubles theta until the model lies above:  phi(new) <= model(new) <= model(old) = phi(old).  So every sub-update of the
primal variables lowers the objective, and weights are feasible from the first projection on. (Enlarging theta alone,
as the interpretability paper prints it, can only stop at the old weights.) One cycle is a backward and a forward sweep
over all samples, then the dual.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from auditor.errors import OptionError
from auditor.kernels.admm.subproblems import (
    cross_entropy_prox,
    relu_coupling,
    soft,
    solve_activations,
    spd_solve,
    squared_prox,
)
from auditor.kernels.admm.weight_constraints import ORTHONORMAL, Constraint, violation
from auditor.kernels.admm.weight_constraints import project as project_on
from auditor.training.affine_stack import AffineStack
from auditor.training.cycle import Cycle, Snapshot, Watch
from auditor.training.losses import loss_of

MAX_DOUBLINGS = 60
Projection = Callable[[Tensor], Tensor]  # the nearest matrix of a set to W


class DlAdmmConfig(BaseModel):
    """Settings of dlADMM."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    loss: Literal["cross_entropy", "squared"] = "cross_entropy"
    nu: float = Field(default=1e-6, gt=0, description="Penalty of the soft couplings.")
    rho: float = Field(default=1e-6, gt=0, description="Penalty of the last layer's constraint.")
    penalty: Literal["none", "l1", "l2"] = "none"
    strength: float = Field(default=1e-5, ge=0, description="lambda of the penalty.")
    constraint: Constraint = Field(default="none", description="Held exactly by every weight matrix but the last.")
    constrain_last: bool = Field(default=False, description="Hold it in the last layer too.")
    solver: Literal["model", "exact"] = Field(
        default="model", description="exact: least squares where neither constraint nor l1 forbids, and for every a."
    )
    theta: float = Field(default=1.0, gt=0, description="Where the first backtracking starts; later ones a step below.")
    w_steps: int = Field(default=1, ge=1, description="Weight steps per sub-update.")
    z_steps: int = Field(default=60, ge=1, description="FISTA steps on the logits.")
    rho_max: float | None = Field(default=None, gt=0, description="Raise rho tenfold up to this when the loss rises.")
    init: float | None = Field(default=None, gt=0, description="Deviation of normal weights; default: as they are.")
    seed: int = Field(default=0, ge=0)


class DlAdmm:
    """One run; iterate for cycles, or take ``sweep`` to watch every single sub-update.

    ``project(W)`` holds any constraint from outside: the nearest matrix, of a set of one's own, to W.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        x: Tensor,
        y: Tensor,
        config: DlAdmmConfig | None = None,
        masks: Sequence[Tensor | None] | None = None,
        project: Projection | None = None,
    ) -> None:
        self.config = cfg = config or DlAdmmConfig()
        if cfg.penalty == "l1" and (project or cfg.constraint in (*ORTHONORMAL, "unit_rows", "unit_columns")):
            what = "a projection from outside" if project else cfg.constraint
            raise OptionError(f"dladmm: l1 with {what} has no closed prox; choose one of them, or l2.")
        if project is not None and cfg.constraint != "none":
            raise OptionError(f"dladmm: constraint {cfg.constraint} and a projection from outside; give one of them.")
        self.project = project
        self.net = net = AffineStack(blocks, x, y, "dladmm", n_kept=3)
        self.y, self.blocks, self.rho = y, list(blocks), cfg.rho
        L = len(net)
        self.masks = list(masks) if masks is not None else [None] * L
        self.constraints: list[Constraint] = [cfg.constraint] * (L - 1)
        self.constraints.append(cfg.constraint if cfg.constrain_last else "none")
        self._check_constraints()
        if cfg.init is not None:
            net.draw("normal", cfg.init, torch.Generator().manual_seed(cfg.seed))
        for layer in range(L):
            net.W[layer] = self._feasible(layer, net.W[layer])
        self.z, self.a = net.run()
        self.z[-1] = torch.full_like(self.z[-1], -1.0).scatter_(1, y[:, None], 1.0)
        self.d = torch.zeros_like(self.z[-1])
        self.loss = loss_of(cfg.loss)
        self._input_gram = net.x.T @ net.x
        self._affine: dict[int, Tensor] = {}  # W a + b of a layer, until a factor changes
        self.theta_used = [cfg.theta] * L

    def _check_constraints(self) -> None:
        """Refuse what cannot hold before any work is done."""
        L = len(self.net)
        for layer, (W, constraint) in enumerate(zip(self.net.W, self.constraints, strict=True)):
            if constraint == "support" and (len(self.masks) != L or self.masks[layer] is None):
                raise OptionError(f"dladmm: a fixed support needs a mask for layer {layer + 1}; give masks=[…].")
            if constraint == "orthonormal_rows" and len(W) > W.shape[1]:
                raise OptionError(
                    f"dladmm: layer {layer + 1} has {len(W)} rows of {W.shape[1]} weights, and more rows than weights "
                    "cannot be orthonormal; make the layer narrower, or take constraint orthonormal (columns there)."
                )
            made = self._feasible(layer, W)
            if made.shape != W.shape or not bool(torch.isfinite(made).all()):
                raise OptionError(
                    f"dladmm: project(W) must give a finite matrix of W's shape {tuple(W.shape)} at layer {layer + 1}, "
                    f"got {tuple(made.shape)}."
                )
            moved = float((self._feasible(layer, made) - made).abs().max())
            if self.project is not None and moved > 1e-4 * max(1.0, float(made.abs().max())):
                raise OptionError(
                    f"dladmm: project(project(W)) differs from project(W) at layer {layer + 1} by {moved:.2g}, so it "
                    "is no projection on a set; give one that is."
                )

    def _feasible(self, layer: int, W: Tensor) -> Tensor:
        """Return the nearest weights that meet the layer's constraint."""
        if self.project is not None and (layer < len(self.net) - 1 or self.config.constrain_last):
            return self.project(W)
        return project_on(W, self.constraints[layer], self.masks[layer])

    def __iter__(self) -> Iterator[Cycle]:
        """Yield a cycle per iteration; the blocks are changed in place and feasible."""
        cfg, watch, last_good = self.config, Watch("dladmm"), Snapshot(self.blocks)
        rises, before = 0, float("inf")
        for epoch in itertools.count(1):
            for _ in self.sweep():
                pass
            self.d.add_(self.z[-1] - self._made(len(self.net) - 1))
            residuals = [float(r.square().mean().sqrt()) for r in self._residuals()]
            value = float(self.loss.value(self.net.run()[0][-1], self.y)) / len(self.y)
            objective = self.objective()
            with last_good.restored_on_error():
                watch.judge(epoch, value, ())  # soft couplings may well grow; the objective is what must not
                watch.judge(epoch, objective, ())
            self.net.write_back()
            last_good.take()
            extra = {"violation": self.violation(), "theta": max(self.theta_used)}
            yield Cycle(epoch, value, tuple(residuals), (self.rho,) * len(self.net), 1.0, objective, extra)
            rises, before = (rises + 1 if value > before else 0), value
            if cfg.rho_max is not None and rises >= 3 and self.rho < cfg.rho_max:
                new = min(10 * self.rho, cfg.rho_max)
                self.d.mul_(self.rho / new)
                self.rho, rises = new, 0

    def sweep(self) -> Iterator[tuple[str, int]]:
        """Run one backward and one forward sweep; yield the name and layer of every sub-update after it is done."""
        L = len(self.net)
        for layer in range(L - 1, -1, -1):
            if layer < L - 1:
                self._step_a(layer)
                yield "a", layer
            self._step_z(layer)
            yield "z", layer
            self._step_b(layer)
            yield "b", layer
            self._step_w(layer)
            yield "W", layer
        for layer in range(L):
            self._step_w(layer)
            yield "W", layer
            self._step_b(layer)
            yield "b", layer
            self._step_z(layer)
            yield "z", layer
            if layer < L - 1:
                self._step_a(layer)
                yield "a", layer

    def objective(self) -> float:
        """Return the augmented Lagrangian, in float64."""
        L = len(self.net)
        total = float(self.loss.value(self.z[-1].double(), self.y))
        for layer, r in enumerate(self._residuals()):
            if layer == L - 1:
                r = (r + self.d).double().square().sum() - self.d.double().square().sum()
                total += 0.5 * self.rho * float(r)
            else:
                gap = (self.a[layer + 1] - self.z[layer].relu()).double().square().sum()
                total += 0.5 * self.config.nu * float(r.double().square().sum() + gap)
        return total + sum(self._omega(W) for W in self.net.W)

    def violation(self) -> float:
        """Return the largest violation of any layer's constraint."""
        if self.project is not None:
            return max(float((self._feasible(layer, W) - W).abs().max()) for layer, W in enumerate(self.net.W))
        rows = zip(self.net.W, self.constraints, self.masks, strict=True)
        return max(violation(W, constraint, mask) for W, constraint, mask in rows)

    def _residuals(self) -> Iterator[Tensor]:
        for layer in range(len(self.net)):
            yield self.z[layer] - self._made(layer)

    def _made(self, layer: int) -> Tensor:
        """Return W a + b of a layer; three sub-updates in a row read it."""
        if layer not in self._affine:
            self._affine[layer] = self.net.affine(layer, self.a[layer])
        return self._affine[layer]

    def _omega(self, W: Tensor) -> float:
        cfg = self.config
        if cfg.penalty == "none":
            return 0.0
        return cfg.strength * float(W.double().abs().sum() if cfg.penalty == "l1" else W.double().square().sum())

    def _coupling(self, layer: int) -> tuple[float, Tensor]:
        """Return c_l and the target of W a + b: z_l, plus the dual at the last layer."""
        if layer < len(self.net) - 1:
            return self.config.nu, self.z[layer]
        return self.rho, self.z[layer] + self.d

    def _step_w(self, layer: int) -> None:
        cfg, a = self.config, self.a[layer]
        c, target = self._coupling(layer)
        self._affine.pop(layer, None)
        gram = self._input_gram if layer == 0 else a.T @ a
        cross = (target - self.net.b[layer]).T @ a
        if cfg.solver == "exact" and cfg.penalty != "l1" and self.constraints[layer] == "none" and not self.project:
            ridge = 2 * cfg.strength / c if cfg.penalty == "l2" else 0.0
            self._lower(layer, spd_solve(gram, cross.T, ridge).T, c, gram, cross)
            return
        for _ in range(cfg.w_steps):
            W = self.net.W[layer]
            g = c * (W @ gram - cross)
            theta = max(cfg.theta, self.theta_used[layer] / 4)
            for _ in range(MAX_DOUBLINGS):
                new = self._model_minimum(layer, W, g, theta)
                D = new - W
                # phi is quadratic: it lies under the model exactly when its curvature along D does. No differences
                # of large numbers, so no rounding to forgive
                if c * float((D @ gram * D).sum()) <= theta * float(D.square().sum()):
                    self.net.W[layer] = new
                    break
                theta *= 2
            self.theta_used[layer] = theta

    def _lower(self, layer: int, new: Tensor, c: float, gram: Tensor, cross: Tensor) -> None:
        """Take the solved weights unless rounding in an ill-conditioned solve made them worse than the old ones."""

        def value(W: Tensor) -> float:
            fit = (W.double() @ gram.double() * W).sum() - 2 * (W.double() * cross).sum()
            return 0.5 * c * float(fit) + self._omega(W)

        if value(new) <= value(self.net.W[layer]):
            self.net.W[layer] = new

    def _model_minimum(self, layer: int, W: Tensor, g: Tensor, theta: float) -> Tensor:
        cfg = self.config
        new = W - g / theta
        if cfg.penalty == "l1":
            new = soft(new, cfg.strength / theta)
        elif cfg.penalty == "l2":
            new = (theta * W - g) / (theta + 2 * cfg.strength)
        return self._feasible(layer, new)

    def _step_b(self, layer: int) -> None:
        _, target = self._coupling(layer)
        shift = (target - self._made(layer)).mean(0)
        self.net.b[layer] = self.net.b[layer] + shift
        self._affine[layer].add_(shift)

    def _step_z(self, layer: int) -> None:
        m = self._made(layer)
        if layer < len(self.net) - 1:
            self.z[layer] = relu_coupling(m, self.a[layer + 1], 1.0, 1.0)
        elif self.config.loss == "squared":
            onehot = torch.zeros_like(m).scatter_(1, self.y[:, None], 1.0)
            self.z[layer] = squared_prox(onehot, m - self.d, self.rho)
        else:
            self.z[layer] = cross_entropy_prox(self.y, m - self.d, self.rho, self.config.z_steps, start=self.z[layer])

    def _step_a(self, layer: int) -> None:
        """Step on a_{l+1} through the layer above, with the same doubling rule."""
        c, target = self._coupling(layer + 1)
        nu, a, W = self.config.nu, self.a[layer + 1], self.net.W[layer + 1]
        near = self.z[layer].relu()
        if self.config.solver == "exact":
            new = solve_activations(W, target - self.net.b[layer + 1], near, c, nu)
        else:
            grad = c * (self._made(layer + 1) - target) @ W + nu * (a - near)
            norm = float(grad.square().sum())
            curved = c * float((grad @ W.T).square().sum()) + nu * norm
            tau = self.config.theta
            while norm and curved > tau * norm:
                tau *= 2
            new = a - grad / tau
        self.a[layer + 1] = new
        self._affine.pop(layer + 1, None)


def dladmm(
    blocks: Sequence[nn.Module],
    x: Tensor,
    y: Tensor,
    config: DlAdmmConfig | None = None,
    project: Projection | None = None,
) -> Iterator[Cycle]:
    """Yield the cycles of a fresh run."""
    return iter(DlAdmm(blocks, x, y, config, project=project))
