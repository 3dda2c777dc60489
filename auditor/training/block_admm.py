"""Stochastic Block-ADMM: train any list of modules block by block, tied by per-sample variables and duals.

    min  J(Y, Z_T) + sum_t beta_t/2 |Z_t - f_t(Z_{t-1}) + U_t|^2,      Z_0 = X

One mini-batch: Z_T by the prox of J, then Z_{T-1} … Z_1 by ``z_steps`` descent steps each (in reverse, with the new
Z_{t+1}); one or more optimizer steps on every block towards Z_t + U_t (independent, so they may run in parallel);
then U_t += dual_step (Z_t - f_t(Z_{t-1})). [Khorram2020], algorithm 2, with these choices where the printed recipe is
unstable:

* each visit starts from the chained forward pass less the duals, Z_t = f_t(Z_{t-1}) - U_t (``start="forward"``), where
  every coupling term is zero: duals at full step are stable there, while from the plain forward pass even a tenth of
  it diverged on MNIST; ``"kept"`` takes Z from the last visit;
* lower couplings may be stiffer (``beta_ratio``), or Z_{T-1} absorbs the error that Theta_T should see, and each block
  passes on a part of it only;
* variables are kept as start and move: what reaches the first of twenty blocks is 1e-10 of the size of Z, and the
  difference of two outputs in single precision would be rounding (one-layer blocks stood still at 10% on MNIST);
* steps on Z follow the next block's weights: (beta_t I + beta_{t+1} W'W)^-1 times the gradient for affine blocks
  ("newton"), 1 / (beta_t + beta_{t+1} |W|^2) ("gradient"), backtracking for any other module; or as printed, "adam"
  and "sgd";
* the dual is damped, halved when a residual grows for three epochs, and clipped at ten times the size of Z;
* equation 4.7: when the relative residual of all blocks exceeds a shrinking bound, the penalty grows.

With one gradient step from a forward pass, no dual and a large beta this is back-propagation with a scale per layer.

``PRINTED`` are the settings that undo these choices: Z and Adam's moments on Z kept per sample, Z_T moved by steps like
the others, U drawn uniformly, the dual at full step. Two readings remain: a visit moves the Z of its mini-batch, not of
all samples, and Z_t sees the new Z_{t+1}, since the printed loop runs downwards.
`bench_like_with_like.py` has both in one table.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from auditor.errors import AuditError, OptionError, ShapeError
from auditor.training.block_calculus import Around, Calculus
from auditor.training.block_variables import Variables, check_room, names_of, variables_bytes
from auditor.training.cycle import Cycle, Snapshot, Watch, check_blocks
from auditor.training.factorization import calculus_with_factors, check_factorizations
from auditor.training.losses import Loss, LossName, loss_of
from auditor.training.variable_steps import Moments, StepRule, stepped

if TYPE_CHECKING:
    from auditor.training.block_processes import BlockWorkers

WHERE = "block-admm"


class BlockAdmmConfig(BaseModel):
    """Settings of Stochastic Block-ADMM."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    loss: LossName = "squared"
    beta: float = Field(default=1.0, gt=0, description="Penalty of every coupling.")
    beta_ratio: float = Field(
        default=1.0, gt=0, description="beta_t / beta_{t+1}: stiffer couplings below keep Z_t from absorbing the error."
    )
    batch: int = Field(default=128, ge=1, description="Samples per mini-batch.")
    gamma: float = Field(default=1.0, gt=0, description="Penalty |Z - M S + V|^2 of factorizations among the blocks.")
    reconstruction: float = Field(
        default=1.0, ge=0, le=1, description="Share of what M S misses that Z is asked to give up; as printed: 1."
    )
    basis_steps: int = Field(default=1, ge=0, description="HALS passes over M per visit; 0 leaves M as it is.")
    optimizer: Literal["adam", "sgd"] = Field(default="adam", description="For the blocks.")
    lr: float = Field(default=1e-3, gt=0, description="Step size of the blocks (eta).")
    lr_factors: tuple[float, ...] | None = Field(default=None, description="Of each block's lr; default: 1 for all.")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="Of sgd.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled, as in AdamW.")
    theta_steps: int = Field(default=1, ge=1, description="Optimizer steps per block and visit.")
    warm_up: int = Field(default=0, ge=0, description="Mini-batches over which lr rises linearly.")
    decay_epochs: int | None = Field(default=None, ge=1, description="Cosine decay of lr to zero over so many epochs.")
    z_optimizer: Literal["newton", "gradient", "adam", "sgd"] = "newton"
    z_lr: float = Field(
        default=1.0, gt=0, description="Step on Z (zeta): a factor of the safe step; lr of adam or sgd."
    )
    z_steps: int = Field(default=5, ge=1, description="Steps on every Z_t per visit.")
    start: Literal["forward", "kept"] = Field(default="forward", description="Where Z starts at each visit.")
    carry: bool = Field(default=False, description="Carry what Z_{t-1} moved up through f_t: the residual of t stays.")
    dual_step: float = Field(default=0.1, ge=0, le=1.9, description="Damping of the dual; 0: penalty only, no duals.")
    dual_decay: float = Field(default=0.0, ge=0, le=1, description="Share of U forgotten at each visit; 0: none.")
    dual_clip: float = Field(default=10.0, gt=0, description="Largest |U| in units of the root mean square of Z.")
    penalty_factor: float | None = Field(default=None, gt=0, lt=1, description="c of eq. 4.7: beta grows by 1/c.")
    penalty_bound: float = Field(default=0.5, gt=0, description="First bound on the relative residual.")
    penalty_decay: float = Field(default=0.95, gt=0, le=1, description="The bound shrinks by this every epoch.")
    penalty_max: float = Field(default=100.0, gt=0, description="The last beta never grows beyond this.")
    average: float = Field(default=0.0, ge=0, lt=1, description="Decay of a running average of the weights; 0: none.")
    workers: int = Field(default=1, ge=1, description="Blocks updated at the same time.")
    parallel: Literal["threads", "processes"] = Field(
        default="threads", description="What the workers are; threads use a stream each on a GPU."
    )
    variables: Path | None = Field(default=None, description="Folder for the variables, as mapped files.")
    memory_limit: int | None = Field(
        default=None, ge=1, description="Bytes the variables may take; default: what is free."
    )
    refresh: int = Field(default=8, ge=1, description="Mini-batches between two curvature estimates.")
    top: Literal["prox", "step"] = Field(default="prox", description="Z_T by the prox of J, or by steps as the others.")
    z_moments: Literal["visit", "kept"] = Field(
        default="visit", description="Adam's moments on Z: begun at each visit, or kept per sample."
    )
    dual_start: float = Field(default=0.0, ge=0, description="U is drawn uniformly from 0 to this; 0: zeros.")
    dual_halving: bool = Field(default=True, description="Halve the dual step when a residual grows for three epochs.")
    seed: int = Field(default=0, ge=0)


# [Khorram2020], algorithm 2 as printed; it leaves open lr, z_lr and how wide U is drawn
PRINTED: dict[str, Any] = {
    "beta": 1.0, "z_optimizer": "adam", "z_moments": "kept", "top": "step", "z_steps": 1, "start": "kept",
    "dual_step": 1.0, "dual_halving": False, "dual_clip": 1e9, "dual_start": 1e-4,
}  # fmt: skip


class BlockAdmm:
    """One run: ``for cycle in BlockAdmm(blocks, x, y, config): …`` gives a `Cycle` per epoch, without end.

    ``x`` is (samples, …), ``y`` (samples,) class numbers. The blocks are changed in place; at test time they are simply
    chained. ``save(folder)`` between two cycles, ``resume(folder)`` before the first.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        x: Tensor,
        y: Tensor,
        config: BlockAdmmConfig | None = None,
        loss: Loss | None = None,
    ) -> None:
        self.config = config = config or BlockAdmmConfig()
        self.blocks, self.x, self.y = list(blocks), x, y
        self.loss = loss if loss is not None else loss_of(config.loss)
        if config.parallel == "processes" and x.device.type != "cpu":
            raise OptionError(f"{WHERE}: processes share memory of the CPU, the data is on {x.device}; use threads.")
        self.shapes = shapes = check_blocks(self.blocks, x, WHERE)  # of one sample, per block
        if len(shapes[-1]) != 1:
            raise ShapeError(f"{WHERE}: the last block must give a vector per sample, got {tuple(shapes[-1])}.")
        self.loss.check(y, len(x), shapes[-1][0], WHERE)
        _check_steps(config, len(self.blocks))
        check_factorizations(self.blocks, x, WHERE)
        self.maps: list[Calculus] = [
            calculus_with_factors(block, config.reconstruction, config.basis_steps) for block in self.blocks
        ]
        stored = names_of("Z", shapes) if config.start == "kept" else {}
        stored |= self._names_of_duals() if config.dual_step else {}
        if config.z_moments == "kept":
            stepped = shapes if config.top == "step" else shapes[:-1]
            stored |= names_of("A", stepped) | names_of("B", stepped)  # Adam's means of gradient and square
        self.bytes_needed = variables_bytes(len(x), stored, x.element_size())
        check_room(self.bytes_needed, x, config.variables, config.memory_limit, WHERE)
        self.variables = Variables(len(x), stored, x, config.variables)
        self.optimizers = [optimizer_of(block, config) for block in self.blocks]
        rising = [config.beta * config.beta_ratio**t for t in reversed(range(len(self.blocks)))]
        self.beta = [config.gamma if f.has_scores else beta for f, beta in zip(self.maps, rising, strict=True)]
        self.watch = Watch(WHERE, config.dual_step, halves=config.dual_halving)
        self.last_good = Snapshot(self.blocks)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.epoch, self.batches = 0, 0
        self.revived = 0  # factors that no sample showed and that were started anew
        self.steps = [StepRule(config, calculus) for calculus in self.maps]
        self.mean_weights = [p.detach().clone() for p in self._parameters()] if config.average else []
        self.filled = False  # whether the stored Z hold a forward pass, and U its draw
        self._workers: BlockWorkers | None = None

    def _names_of_duals(self) -> dict[str, torch.Size]:
        """Return U_t in the shape of Z_t, and V_t of a factorization in that of the variable below it."""
        inner = [self.x.shape[1:], *self.shapes[:-1]]
        both = zip(self.maps, inner, self.shapes, strict=True)
        return {f"{f.dual}{t}": f.dual_shape(below, above) for t, (f, below, above) in enumerate(both, 1)}

    def __iter__(self) -> Iterator[Cycle]:
        """Yield the state after every pass over the samples; NaN or a residual that diverges is an error."""
        if not self.filled:
            self._fill()
        modes = [block.training for block in self.blocks]
        for block in self.blocks:
            block.eval()
        with self._pool() as each:
            try:
                for epoch in itertools.count(self.epoch + 1):
                    cycle = self._epoch(epoch, each)
                    self.epoch = epoch
                    self.last_good.take()
                    yield cycle
            except AuditError:  # not finite, diverged, or a worker that died
                self.last_good.restore()
                raise
            finally:
                for block, mode in zip(self.blocks, modes, strict=True):
                    block.train(mode)

    @contextmanager
    def _pool(self) -> Iterator[Callable[..., Any]]:
        """Give what maps ``_learn`` over the blocks: one after the other, in threads or in processes."""
        config = self.config
        if config.workers == 1:
            yield map
        elif config.parallel == "threads":
            with ThreadPoolExecutor(config.workers) as pool:
                yield pool.map
        else:
            from auditor.training.block_processes import BlockWorkers

            with BlockWorkers(self) as workers:
                self._workers = workers
                try:
                    yield workers.each
                finally:
                    self._workers = None

    def _epoch(self, epoch: int, each: Callable[..., Any]) -> Cycle:
        T, n = len(self.blocks), len(self.x)
        total = torch.zeros(T, dtype=torch.float64, device=self.x.device)
        size = torch.zeros_like(total)
        loss = torch.zeros((), dtype=torch.float64, device=self.x.device)
        for rows in self.loss.batches(self.y, self.config.batch, self.generator):
            self._set_lr(n)
            batch_loss, squares, sizes = self.visit(rows.to(self.x.device), each)
            loss += batch_loss
            total += squares
            size += sizes
            self.batches += 1
            if self.mean_weights:
                with torch.no_grad():
                    keep = min(self.config.average, self.batches / (self.batches + 10))
                    torch._foreach_lerp_(self.mean_weights, [p.detach() for p in self._parameters()], 1 - keep)
        counts = torch.tensor([n * math.prod(s) for s in self.shapes], dtype=torch.float64, device=total.device)
        residuals = tuple((total / counts).sqrt().tolist())
        relative = float((total.sum() / size.sum().clamp(min=1e-30)).sqrt())  # |h| of eq. 4.7, free of the scale of Z
        mean_loss = float(loss) / n
        self._revive()
        # kept Z start on the forward pass, so that every residual grows from zero at first
        scales = (size / counts).sqrt().tolist() if self.config.start == "kept" else ()
        self.watch.judge(epoch, mean_loss, residuals, scales)
        cycle = Cycle(epoch, mean_loss, residuals, tuple(self.beta), self.watch.dual_step)
        self._adapt_penalty(epoch, relative)
        return cycle

    def visit(self, rows: Tensor, each: Callable[..., Any] = map) -> tuple[Tensor, Tensor, Tensor]:
        """Run one mini-batch; return the chained loss, and per block the sums of squares of residual and variable."""
        cfg, maps, beta, T = self.config, self.maps, self.beta, len(self.maps)
        x, y = self.x[rows], self.y[rows]
        duals = [f"{f.dual}{t}" for t, f in enumerate(maps, 1)]
        U = [self.variables.read(name, rows) if name in self.variables else None for name in duals]
        linearised: list[Around] = []  # block t about where its input starts
        Z, near, gap = [x], [x], [x]  # near: f_t(Z_{t-1}) - U_t, what the lower term pulls Z_t to; gap: Z_t - near
        for t, (f, u) in enumerate(zip(maps, U, strict=True), 1):
            linearised.append(f.around(Z[-1], u))
            near.append(linearised[-1].near)
            # from the chained pass less the duals every coupling term is zero, and only J moves the variables
            Z.append(self.variables.read(f"Z{t}", rows) if "Z1" in self.variables else near[-1])
            gap.append(Z[-1] - near[-1])
        loss = self.loss.value(self._chained(linearised[0].out) if len(self.variables) else near[-1], y).double()
        if cfg.top == "prox":
            Z[T] = self.loss.prox(near[T], y, beta[-1])
        else:
            Z[T] = Z[T] + self._printed_top(Z[T], gap[T], rows, y)
        gap[T] = Z[T] - near[T]
        moves: dict[int, Tensor] = {}
        for t in range(T - 1, 0, -1):
            upper = linearised[t]
            pulls = upper, gap[t], upper.goal(gap[t + 1]), beta[t - 1], beta[t]
            closed = linearised[t - 1].own_move(*pulls, cfg.z_steps)
            moments = self._moments(t, rows) if closed is None else None
            moves[t] = self.steps[t].descend(*pulls, self.batches, moments) if closed is None else closed
            self._keep(t, rows, moments)
            Z[t], gap[t] = Z[t] + moves[t], gap[t] + moves[t]
        changed = [torch.zeros_like(linearised[0].out)]  # what the moves change of block t's output; X does not move
        for t in range(1, T):
            changed.append(linearised[t].follows(moves[t]))
            if cfg.carry:
                Z[t + 1] = Z[t + 1] + changed[t]
                moves[t + 1] = moves[t + 1] + changed[t] if t + 1 < T else changed[t]
        outs = [at.out + c for at, c in zip(linearised, changed, strict=True)]
        errors = [-g if cfg.carry else c - g for g, c in zip(gap[1:], changed, strict=True)]  # f_t(Z_{t-1}) - Z_t - U_t
        made = self._learned(Z, U, outs, errors, each)
        if cfg.dual_step:
            made = [f.fresh(z, m) for f, z, m in zip(maps, Z[:-1], made, strict=True)]  # with the fresh parameters
        exact = not cfg.dual_step and cfg.theta_steps == 1
        residual = [
            -e if exact and not f.has_scores else f.residual(z, out, m)
            for f, e, z, out, m in zip(maps, errors, Z[:-1], Z[1:], made, strict=True)
        ]
        for t, (name, u, r) in enumerate(zip(duals, U, residual, strict=True), 1):
            if u is not None:
                limit = cfg.dual_clip * Z[t - 1 if maps[t - 1].has_scores else t].square().mean().sqrt()
                u = u.mul_(1 - cfg.dual_decay).add_(r, alpha=self.watch.dual_step).clamp_(-limit, limit)
                self.variables.write(name, rows, u)
            if f"Z{t}" in self.variables:
                self.variables.write(f"Z{t}", rows, Z[t])
        squares = torch.stack([r.double().square().sum() for r in residual])
        return loss, squares, torch.stack([z.square().sum() for z in Z[1:]]).double()

    def _learned(
        self,
        Z: list[Tensor],
        U: list[Tensor | None],
        outs: list[Tensor],
        errors: list[Tensor],
        each: Callable[..., Any],
    ) -> list[Tensor]:
        """Let every block learn, factorizations by least squares; return the outputs before their last step."""
        made = list(outs)
        plain = [t for t, f in enumerate(self.maps) if not f.has_scores]
        inputs = ([values[t] for t in plain] for values in (Z, outs, errors))
        for t, out in zip(plain, each(self._learn, plain, *inputs), strict=True):
            made[t] = out
        forget = 1 - 1 / max(10, round(len(self.x) / self.config.batch))
        for f, z, u, S in zip(self.maps, Z[:-1], U, Z[1:], strict=True):
            f.fit_basis(z, u, S, forget)
        return made

    def _revive(self) -> None:
        """Start factors anew that no sample showed in this epoch; the block above hears nothing of them yet."""
        for f, above in zip(self.maps, [*self.blocks[1:], nn.Identity()], strict=True):
            self.revived += f.revive(above)

    def _printed_top(self, z: Tensor, gap: Tensor, rows: Tensor, y: Tensor) -> Tensor:
        """Return the move of Z_T by steps on  J(y, z) + beta/2 |gap + m|^2."""
        T = len(self.maps)
        moments = self._moments(T, rows)
        move = torch.zeros_like(z)
        for _ in range(self.config.z_steps):
            grad = self.loss.gradient(z + move, y) + self.beta[-1] * (gap + move)
            move = move - stepped(grad, moments, self.config.z_lr)
        self._keep(T, rows, moments)
        return move

    def _moments(self, t: int, rows: Tensor) -> Moments | None:
        """Return Adam's moments of Z_t for these samples: as they were left, or fresh; None for other steps."""
        if self.config.z_optimizer != "adam":
            return None
        if f"A{t}" not in self.variables:
            return Moments()
        # every sample is visited once per epoch
        counted = self.epoch * self.config.z_steps
        return Moments(self.variables.read(f"A{t}", rows), self.variables.read(f"B{t}", rows), counted)

    def _keep(self, t: int, rows: Tensor, moments: Moments | None) -> None:
        if moments is not None and f"A{t}" in self.variables:
            self.variables.write(f"A{t}", rows, torch.as_tensor(moments.mean))
            self.variables.write(f"B{t}", rows, torch.as_tensor(moments.square))

    def _chained(self, z: Tensor) -> Tensor:
        """Return the plain forward pass from the first block's output, which the reported loss is taken of."""
        for f in self.maps[1:]:
            z = f.out(z)
        return z

    def _learn(self, t: int, z: Tensor, out: Tensor, error: Tensor) -> Tensor:
        """Take block t's optimizer steps towards out - error; return its output at z before the last one."""
        stream = torch.cuda.Stream() if z.is_cuda and self.config.workers > 1 else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            made = learn_block(
                self.maps[t], self.optimizers[t], z, out, error, self.beta[t] / len(z), self.config.theta_steps
            )
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
        return made

    def _set_lr(self, n: int) -> None:
        cfg = self.config
        factor = 1.0
        if cfg.decay_epochs is not None:
            whole = cfg.decay_epochs * max(1, round(n / cfg.batch))
            factor = 0.5 * (1 + math.cos(math.pi * min(1.0, self.batches / whole)))
        if cfg.warm_up:
            factor *= min(1.0, (self.batches + 1) / cfg.warm_up)
        factors = cfg.lr_factors or (1.0,) * len(self.optimizers)
        for optimizer, of_block in zip(self.optimizers, factors, strict=True):
            if optimizer is not None:
                for group in optimizer.param_groups:
                    group["lr"] = cfg.lr * factor * of_block

    def _adapt_penalty(self, epoch: int, relative: float) -> None:
        cfg = self.config
        if cfg.penalty_factor is None:
            return
        bound = cfg.penalty_bound * cfg.penalty_decay ** (epoch - 1)
        grown = min(1 / cfg.penalty_factor, cfg.penalty_max / self.beta[-1])
        if relative > bound and grown > 1:
            self.beta = [beta * grown for beta in self.beta]
            for name in self.variables:
                if name.startswith(("U", "V")):
                    self.variables[name].mul_(1 / grown)  # the multipliers beta U stay

    def _fill(self) -> None:
        """Give the stored Z a forward pass and U its draw."""
        generator = torch.Generator().manual_seed(self.config.seed + 1)
        drawn = [name for name in self.variables if name.startswith("U")] if self.config.dual_start else []
        for rows in torch.split(torch.arange(len(self.x)), 2048):
            for name in drawn:
                shape = len(rows), *self.variables[name].shape[1:]
                uniform = torch.rand(shape, generator=generator, dtype=self.x.dtype)
                self.variables.write(name, rows, self.config.dual_start * uniform)
            z = self.x[rows.to(self.x.device)]
            is_stored = "Z1" in self.variables
            for t, f in enumerate(self.maps, 1) if is_stored or any(f.has_scores for f in self.maps) else ():
                f.gather(z, max(10, round(len(self.x) / self.config.batch)) * self.config.batch / len(self.x))
                z = f.out(z)
                if is_stored:
                    self.variables.write(f"Z{t}", rows, z)
        self.filled = True

    def _parameters(self) -> list[Tensor]:
        return [p for block in self.blocks for p in block.parameters()]

    @contextmanager
    def averaged(self) -> Iterator[list[nn.Module]]:
        """Give the blocks their averaged weights inside the context; without ``average`` they stay as they are."""
        current = [p.detach().clone() for p in self._parameters()] if self.mean_weights else []
        with torch.no_grad():
            for p, mean in zip(self._parameters(), self.mean_weights, strict=bool(current)):
                p.copy_(mean)
        try:
            yield self.blocks
        finally:
            with torch.no_grad():
                for p, local in zip(self._parameters(), current, strict=bool(current)):
                    p.copy_(local)

    def save(self, folder: str | Path) -> None:
        """Write everything needed to go on from here: safetensors and JSON."""
        from auditor.training.block_checkpoint import save

        if self._workers is not None:
            self._workers.fetch()
        save(self, Path(folder))

    def resume(self, folder: str | Path) -> BlockAdmm:
        """Take up a saved run; blocks, data and configuration must be those of the checkpoint."""
        from auditor.training.block_checkpoint import load

        load(self, Path(folder))
        return self


def _check_steps(config: BlockAdmmConfig, n_blocks: int) -> None:
    """Refuse settings that contradict each other."""
    if config.lr_factors is not None and len(config.lr_factors) != n_blocks:
        raise OptionError(
            f"{WHERE}: lr_factors must be one per block, got {len(config.lr_factors)} for {n_blocks} blocks; a "
            "factorization counts as one."
        )
    if config.z_moments == "kept" and (config.z_optimizer != "adam" or config.start != "kept"):
        raise OptionError(
            f"{WHERE}: z_moments=kept are moments of adam on kept variables, got z_optimizer={config.z_optimizer} and "
            f"start={config.start}; set z_optimizer=adam and start=kept."
        )
    if config.top == "step" and config.z_optimizer not in ("adam", "sgd"):
        raise OptionError(
            f"{WHERE}: top=step moves Z_T by adam or sgd, got z_optimizer={config.z_optimizer}; set z_optimizer=adam, "
            "or top=prox."
        )


def learn_block(
    calculus: Calculus,
    optimizer: torch.optim.Optimizer | None,
    z: Tensor,
    out: Tensor,
    error: Tensor,
    scale: float,
    steps: int,
) -> Tensor:
    """Take optimizer steps on scale/2 |f(z) - target|^2, where f(z) is ``out`` and ``error`` more than the target."""
    target = out - error
    made = out
    for k in range(steps):
        made = calculus.learn(z, target, scale, *((out, error) if k == 0 else ()))
        if optimizer is not None:
            optimizer.step()
    return made


def optimizer_of(block: nn.Module, config: BlockAdmmConfig) -> torch.optim.Optimizer | None:
    """Return the block's own optimizer; None for a block without parameters."""
    parameters = [p for p in block.parameters() if p.requires_grad]
    if not parameters:
        return None
    if config.optimizer == "adam":
        return torch.optim.AdamW(
            parameters, lr=config.lr, weight_decay=config.weight_decay, fused=_can_fuse(parameters)
        )
    return torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)


def _can_fuse(parameters: Sequence[Tensor]) -> bool:
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)


def block_admm(
    blocks: Sequence[nn.Module], x: Tensor, y: Tensor, config: BlockAdmmConfig | None = None
) -> Iterator[Cycle]:
    """Yield the cycles of a fresh run."""
    return iter(BlockAdmm(blocks, x, y, config))
