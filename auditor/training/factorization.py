"""A non-negative factorization  Z ~ M S  as one more block of Block-ADMM: DeepFacto, equation 4.13 of [Khorram2020].

Between block t, which gives Z, and block t+1, which reads S alone, stand

    beta_t/2 |Z - f_t(Z_{t-1}) + U_t|^2 + gamma/2 |Z - M S + V|^2
        + beta_{t+1}/2 |Z_{t+1} - f_{t+1}(S) + U_{t+1}|^2,      M, S >= 0.

The page says "alternating least squares" and no more. What one visit does, in this order:

* Z_{t+1} as every variable of Block-ADMM.
* S: steps of  argmin_{S >= 0} gamma/2 |Z - M S + V|^2 + <g, S> + c/2 |S - S_now|^2,  g the gradient of the block above
  and c its curvature, which backtracking finds: an exact least-squares problem per position where the block above is
  linear, a descent for every other.
* Z: the closed form  (beta_t (f_t - U_t) + gamma (M S - V)) / (beta_t + gamma).
* M: one HALS pass on sums over about an epoch; columns of norm at most 1, so that (M a, S/a) cannot drift.
* V += dual_step (Z - M S), damped and clipped as U is.

Choices that the page does not name are options; `bench_deepfacto.py ingredients` says what each brings:

* ``reconstruction``: the share of what M S misses at the start of a visit that Z is asked to give up (printed: 1).
  Every least-squares step asks for all of it, hundreds of times what the loss asks for, and the block below forgets
  what the block above reads; a small share keeps both.
* a start from the chained forward pass, with S as a new image would get it (see `block_admm`).
* a factor that no sample shows any more starts anew from the worst-fitted position, with no weight in the lift.

At test time the block is the projection  argmin_{S >= 0} |Z - M S|^2,  by the same solver as in training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as nf

from auditor.errors import LayerError, NumericsError, OptionError, ShapeError
from auditor.kernels.factorization.coordinate_descent import sweep
from auditor.kernels.factorization.deepfacto import basis_step, decoupled, projected
from auditor.kernels.factorization.nmf import factorize
from auditor.training.block_calculus import Around, Calculus, calculus_of

SWEEPS = 6  # coordinate passes over S per step
TRIALS = 12  # of the curvature per step
N_CHECKED = 64  # samples whose sign is looked at before the work starts


class Factorization(nn.Module):
    """Scores  argmin_{S >= 0} |Z - M S|^2  of every sample; only they go on to the next block.

    ``basis`` is M (channels, rank), ``axis`` the dimension of the channels in a batch: 1 for maps and vectors, -1 for
    tokens. M is trained by `BlockAdmm`, never by a gradient.

    >>> block = Factorization(torch.eye(3)[:, :2])
    >>> block(torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([[1., 2.]])
    """

    def __init__(self, basis: Tensor, axis: int = 1) -> None:
        super().__init__()
        if basis.ndim != 2 or not bool((basis >= 0).all()):
            raise OptionError(
                f"factorization: the basis must be (channels, rank) and not negative, got {tuple(basis.shape)} with "
                f"{float(basis.min()) if basis.numel() else 0:.3g} as least entry; start from an NMF of the layer."
            )
        self.axis = axis
        self.register_buffer("basis", basis.detach().clone())
        self.basis: Tensor

    @classmethod
    def of(cls, z: Tensor, rank: int, *, axis: int = 1, seed: int = 0, max_positions: int = 40_000) -> Factorization:
        """Return the block whose basis is an NMF of activations ``z``, columns of unit norm."""
        check_nonnegative(z)
        columns = _positions(z, axis).permute(1, 0, 2).flatten(1)
        if rank > min(columns.shape):
            raise OptionError(
                f"factorization: rank {rank} needs as many channels and positions, and there are {columns.shape[0]} "
                f"and {columns.shape[1]}; take a smaller rank or more samples."
            )
        if columns.shape[1] > max_positions:
            chosen = torch.randperm(columns.shape[1], generator=torch.Generator().manual_seed(seed))[:max_positions]
            columns = columns[:, chosen.sort().values]
        return cls(factorize(columns, rank, seed=seed, init="random" if seed else "auto").W, axis)

    @property
    def rank(self) -> int:
        """Number of factors."""
        return int(self.basis.shape[1])

    def forward(self, z: Tensor) -> Tensor:
        """Return the scores, in the shape of ``z`` with factors for channels."""
        self.check(z)
        return self.native(self.scores(self.positions(z.detach()).contiguous()), z)

    def scores(self, X: Tensor) -> Tensor:
        """Return (samples, factors, positions) of (samples, channels, positions)."""
        if not bool(torch.isfinite(X).all()):
            raise NumericsError(
                "factorization: the block below gives values that are not finite; lower the learning rate or raise "
                "beta."
            )
        return projected(X, self.basis)

    def check(self, z: Tensor) -> None:
        """Refuse an input whose channels are not those of the basis."""
        channels = z.shape[self.axis] if z.ndim >= 2 else 0
        if channels != len(self.basis):
            raise ShapeError(
                f"factorization: the basis has {len(self.basis)} channels, the block below gives {channels} "
                f"({tuple(z.shape[1:])} per sample); fit the basis to this layer."
            )

    def positions(self, z: Tensor) -> Tensor:
        """Return (samples, channels or factors, positions)."""
        return _positions(z, self.axis)

    def native(self, p: Tensor, like: Tensor) -> Tensor:
        """Put (samples, channels or factors, positions) back into the shape of ``like``, but for the channels."""
        shape = list(like.movedim(self.axis, 1).shape)
        shape[1] = p.shape[1]
        return p.reshape(shape).movedim(1, self.axis).contiguous()


def _positions(z: Tensor, axis: int) -> Tensor:
    return z.movedim(axis, 1).reshape(len(z), z.shape[axis], -1)


def check_nonnegative(z: Tensor) -> None:
    """Refuse what a non-negative factorization cannot show."""
    lowest = float(z.min())
    if not math.isfinite(lowest) or lowest < 0:
        got = "values that are not finite" if not math.isfinite(lowest) else f"values down to {lowest:.3g}"
        raise LayerError(
            f"factorization: the block below gives {got}, and M S with M, S >= 0 cannot show them; cut after a ReLU."
        )


class Lift(nn.Module):
    """An affine map from scores to the old width, the first thing the block above does. It starts as M: then  M S.

    >>> lift = Lift(torch.eye(3)[:, :2])
    >>> lift(torch.tensor([[1.0, 2.0]])).detach()
    tensor([[1., 2., 0.]])
    """

    def __init__(self, basis: Tensor, axis: int = 1) -> None:
        super().__init__()
        self.axis = axis
        self.weight = nn.Parameter(basis.detach().clone())
        self.bias = nn.Parameter(torch.zeros(len(basis)).to(basis))

    def forward(self, S: Tensor) -> Tensor:
        """Return (…, old width, …)."""
        if self.axis == 1 and S.ndim == 4:
            return nf.conv2d(S, self.weight[:, :, None, None], self.bias)
        return nf.linear(S.movedim(self.axis, -1), self.weight, self.bias).movedim(-1, self.axis)


class FactorCalculus(Calculus):
    """The factorization as Block-ADMM asks a block."""

    block: Factorization

    def __init__(self, block: Factorization, reconstruction: float = 1.0, basis_steps: int = 1) -> None:
        super().__init__(block)
        self.reconstruction, self.basis_steps = reconstruction, basis_steps
        self.curvature = 1.0  # of the block above, in units of its penalty
        M = block.basis
        self.XS, self.SS = torch.zeros_like(M), M.new_zeros(block.rank, block.rank)
        self.activity = M.new_zeros(block.rank)  # largest score of each factor in this epoch
        self.worst: tuple[float, Tensor] | None = None

    dual = "V"
    has_scores = True

    def dual_shape(self, inner: torch.Size, outer: torch.Size) -> torch.Size:
        """Return the shape of V: that of Z."""
        return inner

    def out(self, z: Tensor) -> Tensor:
        """Return the scores."""
        with torch.no_grad():
            out: Tensor = self.block(z)
        return out

    def around(self, z: Tensor, dual: Tensor | None = None) -> FactorAround:
        """Return the factorization of Z + V as seen from its scores."""
        return FactorAround(self, z, dual)

    def pull(self, z: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Never asked for: the variable below has a closed form."""
        raise NotImplementedError

    def learn(
        self, z: Tensor, target: Tensor, scale: float, out: Tensor | None = None, error: Tensor | None = None
    ) -> Tensor:
        """Never asked for: M is fitted by `fit_basis`."""
        raise NotImplementedError

    def gather(self, z: Tensor, memory: float) -> None:
        """Start the running sums with samples as they come, ``memory`` times over in the end."""
        X = self.block.positions(z)
        self._add(X, self.block.scores(X.contiguous()), 1.0, memory)

    def fit_basis(self, z: Tensor, dual: Tensor | None, out: Tensor, forget: float) -> None:
        """Take a mini-batch of Z + V and S into the sums and make a HALS pass over M."""
        X, S = self.block.positions(z if dual is None else z + dual), self.block.positions(out)
        self._add(X, S, forget, 1.0)
        if self.basis_steps:
            self.block.basis.copy_(basis_step(self.block.basis, self.XS, self.SS, self.basis_steps))
        missed = (X - self.block.basis @ S).clamp_min(0)
        by_sample = missed.square().sum(1)
        where = int(by_sample.argmax())
        n, p = divmod(where, by_sample.shape[1])
        if self.worst is None or float(by_sample[n, p]) > self.worst[0]:
            self.worst = float(by_sample[n, p]), missed[n, :, p]

    def _add(self, X: Tensor, S: Tensor, forget: float, weight: float) -> None:
        XS, SS = torch.einsum("ncp,nkp->ck", X, S), torch.einsum("nkp,njp->kj", S, S)
        self.XS, self.SS = forget * self.XS + weight * XS, forget * self.SS + weight * SS
        self.activity = torch.maximum(self.activity, S.amax((0, 2)))

    def tensors(self) -> dict[str, Tensor]:
        """Return the running sums and the curvature."""
        return {"XS": self.XS, "SS": self.SS, "curvature": torch.tensor(self.curvature)}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take over what ``tensors`` gave."""
        self.XS, self.SS, self.curvature = tensors["XS"], tensors["SS"], float(tensors["curvature"])

    def fresh(self, z: Tensor, made: Tensor) -> Tensor:
        """Return the scores as they are: they are variables."""
        return made

    def residual(self, z: Tensor, out: Tensor, made: Tensor) -> Tensor:
        """Return  Z - M S."""
        return z - self.block.native(self.block.basis @ self.block.positions(out), z)

    def revive(self, above: nn.Module) -> int:
        """Start a factor that was silent for the epoch anew, from the worst-fitted position."""
        M = self.block.basis
        dead = ((self.activity <= 0) | (M.amax(0) <= 0)).nonzero()[:1, 0]  # one per epoch: they would be the same
        is_needed = bool(dead.numel()) and self.worst is not None and self.worst[0] > 0
        if is_needed and self.worst is not None:
            M[:, dead] = (self.worst[1] / self.worst[1].norm())[:, None]
            self.XS[:, dead] = self.SS[:, dead] = self.SS[dead] = 0
            for lift in (m for m in above.modules() if isinstance(m, Lift)):
                with torch.no_grad():
                    lift.weight[:, dead] = 0
                break
        self.activity, self.worst = torch.zeros_like(self.activity), None
        return int(is_needed)


class FactorAround(Around):
    """A factorization about a Z: scores S of  Z + V,  and what moving them asks of Z."""

    calculus: FactorCalculus

    def __init__(self, calculus: FactorCalculus, z: Tensor, dual: Tensor | None) -> None:
        block = calculus.block
        self.X = block.positions(z if dual is None else z + dual).contiguous()  # (samples, channels, positions)
        self.S = block.scores(self.X)
        super().__init__(calculus, z, block.native(self.S, z))

    def goal(self, gap: Tensor) -> Tensor:
        """Return where Z is asked to go when the scores moved by ``gap``: towards M S - V, from where it is."""
        M, share = self.calculus.block.basis, self.calculus.reconstruction
        move = M @ self.calculus.block.positions(gap) - share * (self.X - M @ self.S)
        return self.calculus.block.native(move, self.z)

    def change(self, move: Tensor) -> Tensor:
        """Return what a move of Z changes in the coupling: itself."""
        return move

    def pull(self, move: Tensor | None, goal: Tensor) -> tuple[Tensor, Tensor]:
        """Return the change and the gradient."""
        changed = torch.zeros_like(goal) if move is None else move
        return changed, changed - goal

    def follows(self, move: Tensor) -> Tensor:
        """Return what the scores change by when Z has moved: nothing, they are variables."""
        return torch.zeros_like(self.out)

    def solved(self, gap: Tensor, goal: Tensor, beta: float, above: float) -> Tensor:
        """Return the move of Z below it in closed form."""
        return decoupled((beta, -gap), (above, goal))

    def own_move(self, upper: Around, gap: Tensor, goal: Tensor, gamma: float, above: float, steps: int) -> Tensor:
        """Return the move of the scores: steps on  gamma/2 |X - M S|^2 + above/2 |f(S) - f(S_0) - goal|^2,  S >= 0.

        ``gap`` is how far the scores stand from those of Z + V already.
        """
        block, M = self.calculus.block, self.calculus.block.basis
        # what of X the scores may not explain away is no concern of theirs
        B, G, eye = gamma * (M.T @ self.X), gamma * (M.T @ M), torch.eye(M.shape[1]).to(M)
        start = block.native(self.S, self.z) + gap
        S, move = block.positions(start), torch.zeros_like(start)
        for _ in range(steps):
            changed, pulled = upper.pull(move, goal)
            g = above * block.positions(pulled)
            now = 0.5 * above * float((changed - goal).square().sum())
            for _ in range(TRIALS):
                c = above * self.calculus.curvature
                new = _columns(sweep(_rows(S), _rows(B + c * S - g), G + c * eye, SWEEPS), len(S))
                d = new - S
                tried = block.native(new, self.z) - start
                then = 0.5 * above * float((upper.change(tried) - goal).square().sum())
                if then <= now + float((g * d).sum()) + 0.5 * c * float(d.square().sum()) + 1e-6 * abs(now):
                    S, move = new, tried
                    self.calculus.curvature *= 0.7
                    break
                self.calculus.curvature *= 3
        return move


def calculus_with_factors(block: nn.Module, reconstruction: float, basis_steps: int) -> Calculus:
    """Return the calculus of any block, a factorization or not."""
    if isinstance(block, Factorization):
        return FactorCalculus(block, reconstruction, basis_steps)
    return calculus_of(block)


def check_factorizations(blocks: Sequence[nn.Module], x: Tensor, where: str) -> None:
    """Refuse a factorization that nothing reads, or of a block that gives negative values."""
    if isinstance(blocks[-1], Factorization):
        raise ShapeError(f"{where}: the last block is a factorization; give a block after it that reads its scores.")
    if not any(isinstance(block, Factorization) for block in blocks):
        return
    z = x[:N_CHECKED]
    with torch.no_grad():
        for block in blocks:
            if isinstance(block, Factorization):
                check_nonnegative(z)
            z = block(z)


def _rows(S: Tensor) -> Tensor:
    return S.permute(1, 0, 2).reshape(S.shape[1], -1).contiguous()


def _columns(F: Tensor, n: int) -> Tensor:
    return F.reshape(len(F), n, -1).permute(1, 0, 2).contiguous()
