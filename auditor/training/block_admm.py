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
from auditor.kernels.admm.subproblems import majorant_inverse
from auditor.training.block_calculus import Around, Calculus, calculus_of
from auditor.training.block_variables import Variables, check_room, names_of, variables_bytes
from auditor.training.cycle import Cycle, Snapshot, Watch, check_blocks, check_labels
from auditor.training.losses import LossName, loss_of

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
    optimizer: Literal["adam", "sgd"] = Field(default="adam", description="For the blocks.")
    lr: float = Field(default=1e-3, gt=0, description="Step size of the blocks (eta).")
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
        self, blocks: Sequence[nn.Module], x: Tensor, y: Tensor, config: BlockAdmmConfig | None = None
    ) -> None:
        self.config = config = config or BlockAdmmConfig()
        self.blocks, self.x, self.y = list(blocks), x, y
        self.loss = loss_of(config.loss)
        if config.parallel == "processes" and x.device.type != "cpu":
            raise OptionError(f"{WHERE}: processes share memory of the CPU, the data is on {x.device}; use threads.")
        self.shapes = shapes = check_blocks(self.blocks, x, WHERE)  # of one sample, per block
        if len(shapes[-1]) != 1:
            raise ShapeError(f"{WHERE}: the last block must give a vector per sample, got {tuple(shapes[-1])}.")
        check_labels(y, len(x), None if config.loss == "triplet" else shapes[-1][0], WHERE)
        _check_steps(config)
        stored = names_of("Z", shapes) if config.start == "kept" else {}
        stored |= names_of("U", shapes) if config.dual_step else {}
        if config.z_moments == "kept":
            stepped = shapes if config.top == "step" else shapes[:-1]
            stored |= names_of("A", stepped) | names_of("B", stepped)  # Adam's means of gradient and square
        self.bytes_needed = variables_bytes(len(x), stored, x.element_size())
        check_room(self.bytes_needed, x, config.variables, config.memory_limit, WHERE)
        self.variables = Variables(len(x), stored, x, config.variables)
        self.maps: list[Calculus] = [calculus_of(block) for block in self.blocks]
        self.optimizers = [optimizer_of(block, config) for block in self.blocks]
        self.beta = [config.beta * config.beta_ratio**t for t in reversed(range(len(self.blocks)))]
        self.watch = Watch(WHERE, config.dual_step, halves=config.dual_halving)
        self.last_good = Snapshot(self.blocks)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.epoch, self.batches = 0, 0
        self.steps = [_StepRule(config, calculus) for calculus in self.maps]
        self.mean_weights = [p.detach().clone() for p in self._parameters()] if config.average else []
        self.filled = False  # whether the stored Z hold a forward pass, and U its draw
        self._workers: BlockWorkers | None = None

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
        order = torch.randperm(n, generator=self.generator)
        for rows in torch.tensor_split(order, max(1, round(n / self.config.batch))):
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
        # kept Z start on the forward pass, so that every residual grows from zero at first
        sizes = (size / counts).sqrt().tolist() if self.config.start == "kept" else ()
        self.watch.judge(epoch, mean_loss, residuals, sizes)
        cycle = Cycle(epoch, mean_loss, residuals, tuple(self.beta), self.watch.dual_step)
        self._adapt_penalty(epoch, relative)
        return cycle

    def visit(self, rows: Tensor, each: Callable[..., Any] = map) -> tuple[Tensor, Tensor, Tensor]:
        """Run one mini-batch; return the chained loss, and per block the sums of squares of residual and variable."""
        cfg, maps, beta, T = self.config, self.maps, self.beta, len(self.maps)
        x, y = self.x[rows], self.y[rows]
        U = [self.variables.read(f"U{t}", rows) if f"U{t}" in self.variables else None for t in range(1, T + 1)]
        linearised: list[Around] = []  # block t about where its input starts
        Z, near, gap = [x], [x], [x]  # near: f_t(Z_{t-1}) - U_t, what the lower term pulls Z_t to; gap: Z_t - near
        for t, (f, u) in enumerate(zip(maps, U, strict=True), 1):
            linearised.append(f.around(Z[-1]))
            near.append(linearised[-1].out if u is None else linearised[-1].out - u)
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
            moments = self._moments(t, rows)
            pulls = linearised[t], gap[t], gap[t + 1], beta[t - 1], beta[t]
            moves[t] = self.steps[t].descend(*pulls, self.batches, moments)
            self._keep(t, rows, moments)
            Z[t], gap[t] = Z[t] + moves[t], gap[t] + moves[t]
        changed = [torch.zeros_like(linearised[0].out)]  # what the moves change of block t's output; X does not move
        for t in range(1, T):
            changed.append(linearised[t].change(moves[t]))
            if cfg.carry:
                Z[t + 1] = Z[t + 1] + changed[t]
                moves[t + 1] = moves[t + 1] + changed[t] if t + 1 < T else changed[t]
        outs = [at.out + c for at, c in zip(linearised, changed, strict=True)]
        errors = [-g if cfg.carry else c - g for g, c in zip(gap[1:], changed, strict=True)]  # f_t(Z_{t-1}) - Z_t - U_t
        made = list(each(self._learn, range(T), Z[:-1], outs, errors))
        if cfg.dual_step:
            made = [f.out(z) for f, z in zip(maps, Z[:-1], strict=True)]  # with the fresh parameters
        exact = not cfg.dual_step and cfg.theta_steps == 1
        residual = [-e if exact else z - m for e, z, m in zip(errors, Z[1:], made, strict=True)]
        for t, (u, r) in enumerate(zip(U, residual, strict=True), 1):
            if u is not None:
                limit = cfg.dual_clip * Z[t].square().mean().sqrt()
                u = u.mul_(1 - cfg.dual_decay).add_(r, alpha=self.watch.dual_step).clamp_(-limit, limit)
                self.variables.write(f"U{t}", rows, u)
            if f"Z{t}" in self.variables:
                self.variables.write(f"Z{t}", rows, Z[t])
        squares = torch.stack([r.double().square().sum() for r in residual])
        return loss, squares, torch.stack([z.square().sum() for z in Z[1:]]).double()

    def _printed_top(self, z: Tensor, gap: Tensor, rows: Tensor, y: Tensor) -> Tensor:
        """Return the move of Z_T by steps on  J(y, z) + beta/2 |gap + m|^2."""
        T = len(self.maps)
        moments = self._moments(T, rows)
        move = torch.zeros_like(z)
        for _ in range(self.config.z_steps):
            grad = self.loss.gradient(z + move, y) + self.beta[-1] * (gap + move)
            move = move - _stepped(grad, moments, self.config.z_lr)
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
        for optimizer in self.optimizers:
            if optimizer is not None:
                for group in optimizer.param_groups:
                    group["lr"] = cfg.lr * factor

    def _adapt_penalty(self, epoch: int, relative: float) -> None:
        cfg = self.config
        if cfg.penalty_factor is None:
            return
        bound = cfg.penalty_bound * cfg.penalty_decay ** (epoch - 1)
        grown = min(1 / cfg.penalty_factor, cfg.penalty_max / self.beta[-1])
        if relative > bound and grown > 1:
            self.beta = [beta * grown for beta in self.beta]
            for name in self.variables:
                if name.startswith("U"):
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
            for t, f in enumerate(self.maps, 1) if "Z1" in self.variables else ():
                z = f.out(z)
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


class Moments:
    """Adam's running means of a gradient and of its square, for the samples of one visit."""

    def __init__(self, mean: Tensor | float = 0.0, square: Tensor | float = 0.0, counted: int = 0) -> None:
        self.mean, self.square, self.counted = mean, square, counted

    def step(self, grad: Tensor) -> Tensor:
        """Take the gradient in; return the step for a learning rate of 1."""
        self.counted += 1
        self.mean = 0.9 * self.mean + 0.1 * grad
        self.square = 0.999 * self.square + 0.001 * grad.square()
        mean, square = self.mean / (1 - 0.9**self.counted), self.square / (1 - 0.999**self.counted)
        return mean / (square.sqrt() + 1e-8)


def _stepped(grad: Tensor, moments: Moments | None, lr: float) -> Tensor:
    return lr * (grad if moments is None else moments.step(grad))


def _check_steps(config: BlockAdmmConfig) -> None:
    """Refuse settings of Z that contradict each other."""
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


class _StepRule:
    """Descent on Z_t through the block above it; carries what it knows of that block's curvature."""

    def __init__(self, config: BlockAdmmConfig, above: Calculus) -> None:
        self.config, self.above = config, above
        self.matrix: Tensor | None = None
        self.norm: Tensor | None = None  # |W|^2
        self.vector: Tensor | None = None  # of the power iteration
        self.length = 1.0  # of the backtracking, in units of 1 / beta
        self.key: tuple[float, float, int] | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint stores."""
        state = {"matrix": self.matrix, "norm": self.norm, "vector": self.vector}
        return {k: v for k, v in state.items() if v is not None}

    def restore(self, tensors: dict[str, Tensor], length: float, key: Sequence[Any] | None) -> None:
        """Take the state over from a checkpoint."""
        self.matrix, self.norm, self.vector = (tensors.get(k) for k in ("matrix", "norm", "vector"))
        self.length = length
        self.key = None if key is None else (float(key[0]), float(key[1]), int(key[2]))

    def descend(
        self,
        around: Around,
        gap: Tensor,
        goal: Tensor,
        beta: float,
        above: float,
        batch: int,
        moments: Moments | None = None,
    ) -> Tensor:
        """Return the move m of Z_t: steps on  beta/2 |gap + m|^2 + above/2 |f(z + m) - f(z) - goal|^2.

        ``gap`` is Z_t - near_t at the start, ``goal`` that of the variable above after its steps.
        """
        cfg = self.config
        if cfg.z_optimizer in ("adam", "sgd"):
            return self._printed(around, gap, goal, beta, above, moments)
        key = (beta, above, batch // cfg.refresh)
        if key != self.key:
            self.key, self.matrix = key, None
            gram = self.above.gram()
            if gram is not None:
                self._measure(gram, beta, above)
        if self.matrix is None and self.norm is None:
            return self._backtrack(around, gap, goal, beta, above)
        move: Tensor | None = None
        for _ in range(cfg.z_steps):
            _, pulled = around.pull(move, goal)
            grad = pulled.mul_(above).add_(gap if move is None else gap + move, alpha=beta)
            if self.matrix is not None:
                step = cfg.z_lr * (grad.flatten(1) @ self.matrix).view(grad.shape)
            else:
                assert self.norm is not None
                step = cfg.z_lr / (beta + above * self.norm) * grad
            move = -step if move is None else move - step
        assert move is not None
        return move

    def _measure(self, gram: Tensor, beta: float, above: float) -> None:
        if self.config.z_optimizer == "newton":
            self.matrix = majorant_inverse(gram, beta, above)
            return
        if self.vector is None:
            self.vector = torch.ones(len(gram), dtype=gram.dtype, device=gram.device)
        for _ in range(3):
            v = gram @ self.vector
            self.norm = v.norm()
            self.vector = v / self.norm.clamp(min=1e-30)
        assert self.norm is not None
        self.norm = self.norm * 1.05  # power iteration comes from below

    def _printed(
        self, around: Around, gap: Tensor, goal: Tensor, beta: float, above: float, moments: Moments | None
    ) -> Tensor:
        move = torch.zeros_like(gap)
        for _ in range(self.config.z_steps):
            _, pulled = around.pull(move, goal)
            move = move - _stepped(above * pulled + beta * (gap + move), moments, self.config.z_lr)
        return move

    def _backtrack(self, around: Around, gap: Tensor, goal: Tensor, beta: float, above: float) -> Tensor:
        def value(point: Tensor, changed: Tensor) -> Tensor:
            return 0.5 * beta * (gap + point).square().sum() + 0.5 * above * (changed - goal).square().sum()

        move = torch.zeros_like(gap)
        for _ in range(self.config.z_steps):
            changed, pulled = around.pull(move, goal)
            grad = above * pulled + beta * (gap + move)
            now = value(move, changed)
            for _ in range(20):
                tried = move - self.config.z_lr * self.length / beta * grad
                if bool(value(tried, around.change(tried)) <= now):
                    move, self.length = tried, min(1.0, self.length * 1.2)
                    break
                self.length /= 2
        return move


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
