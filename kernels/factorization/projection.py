"""Non-negative projection on a fixed basis:  argmin_{S >= 0} |X - W S|_F^2 + l2 |S|_F^2,  one column per position.

What depends on W alone is made ready once (:func:`prepare`). Positions then go through in tiles of 64: the tile's
product with the basis is formed in cache, and all its positions run coordinate passes side by side until a bound says
that they are near enough. A pass that moves s by d leaves a gradient that is optimal up to U d, U the strict upper
triangle of the Gram matrix G of unit columns, so  |s - s*| <= |U| |d| / lambda_min(G)  by strong convexity. What does
not settle, and all of an ill-conditioned basis, is finished by an active-set method in float64 (`nnls`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from auditor.kernels.factorization.coordinate_descent import DEAD, over_blocks, sweep
from auditor.kernels.factorization.nnls import finish_lanes, solve_columns
from auditor.kernels.factorization.projection_simd import (
    TILE,
    add_product_of_four,
    add_product_of_four_short,
    add_product_of_two,
    add_product_of_two_short,
    coordinate_pass,
    watched_pass,
    write_row,
)

CHUNK = 4096  # positions whose float64 copy is alive at once
WELL_CONDITIONED = 0.1  # smallest eigenvalue of G, and shortest column over the longest, from which on single precision
#                         keeps the answer to 1e-5
SETTLED = 1e-6  # bound on the error of a position, as a share of its largest score
ROUNDS = 12  # of three coordinate passes; a position that is not settled then goes to the active set
CHANNELS = 64  # per product of a tile: 64 x 64 floats stay in the first-level cache, and sums of 64 round little
TASK = 32 * TILE  # positions below which a second thread costs more than it brings


@dataclass(frozen=True, eq=False)
class Basis:
    """A basis made ready for projection: whatever depends on W and l2 alone. Columns have unit length in here."""

    channels: int
    rank: int
    left: Tensor  # (rank, channels) float64, rows are the unit columns of W
    G: Tensor  # (rank, rank) float64 Gram matrix, unit diagonal
    gram: NDArray[np.float64]  # the same on the CPU
    scale: NDArray[np.float64]  # (rank,) from unit columns back to those of W; 0 for a dead component
    packed: NDArray[np.float32]  # flat (channels, rank rounded up to even)
    others: NDArray[np.float32]  # flat G - I
    short_scale: NDArray[np.float32]
    limit: float  # largest |step|_1 / (largest score) of a settled position; 0 when single precision will not do


def prepare(W: Tensor, *, l2: float = 0.0) -> Basis:
    """Make the basis W (channels, rank), of any sign, ready for :func:`project`; keep the result as long as W stays."""
    if W.ndim != 2:
        raise ValueError(f"prepare: W must be (channels, rank), got shape {tuple(W.shape)}.")
    if l2 < 0:
        raise ValueError(f"project: l2 must not be negative, got {l2}.")
    Wd = W.detach().double()
    if not bool(torch.isfinite(Wd).all()):
        raise ValueError("project: X and W must be finite, got NaN or infinite values.")
    channels, rank = W.shape
    squares = Wd.square().sum(0)
    lengths = (squares + l2).sqrt()
    alive = squares > DEAD * float(lengths.square().amax()) if rank else squares > 0
    scale = torch.where(alive, 1 / lengths, torch.zeros_like(lengths))
    left = (Wd * scale).T.contiguous()
    G = left @ left.T
    G += torch.diag(1 - G.diagonal())
    gram, back = G.cpu().numpy(), scale.cpu().numpy()
    packed = np.zeros((channels, rank + rank % 2), np.float32)
    packed[:, :rank] = left.T.cpu().numpy()
    return Basis(
        channels=channels,
        rank=rank,
        left=left,
        G=G,
        gram=gram,
        scale=back,
        packed=packed.ravel(),
        others=(gram - np.eye(rank)).astype(np.float32).ravel(),
        short_scale=back.astype(np.float32),
        limit=_limit(gram, back[back > 0]),
    )


def _limit(gram: NDArray[Any], scale: NDArray[Any]) -> float:
    if scale.size == 0 or scale.min() < WELL_CONDITIONED * scale.max():
        return 0.0
    smallest = float(np.linalg.eigvalsh(gram)[0])
    if smallest < WELL_CONDITIONED:
        return 0.0
    return SETTLED * smallest / max(float(np.linalg.norm(np.triu(gram, 1), 2)), 1e-3)


@numba.njit(nogil=True, cache=True)
def _product_of_tile(
    X: NDArray[Any], at: int, stride: int, channels: int, W: NDArray[Any], rows: int, b: NDArray[Any], lanes: int
) -> None:
    for i in range(rows * TILE):
        b[i] = 0
    for c in range(0, channels, CHANNELS):
        n, r, x = min(CHANNELS, channels - c), 0, at + c * stride
        while r + 4 <= rows:
            if lanes == TILE:
                add_product_of_four(X, x, stride, W, c * rows + r, rows, n, b, r * TILE, lanes)
            else:
                add_product_of_four_short(X, x, stride, W, c * rows + r, rows, n, b, r * TILE, lanes)
            r += 4
        if r < rows:
            if lanes == TILE:
                add_product_of_two(X, x, stride, W, c * rows + r, rows, n, b, r * TILE, lanes)
            else:
                add_product_of_two_short(X, x, stride, W, c * rows + r, rows, n, b, r * TILE, lanes)


@numba.njit(nogil=True, cache=True)
def _settle(s: NDArray[Any], b: NDArray[Any], H: NDArray[Any], rank: int, limit: float, unsettled: NDArray[Any]) -> int:
    """Run rounds of coordinate passes from s = 0 until every lane has settled; return how many have not."""
    moved, top = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    for i in range(rank * TILE):
        s[i] = 0
    n_left = TILE
    for _ in range(ROUNDS):
        coordinate_pass(s, b, H, rank, rank)
        coordinate_pass(s, b, H, rank, rank)
        watched_pass(s, b, H, rank, rank, moved, top)
        n_left = 0
        for p in range(TILE):
            unsettled[p] = not (moved[p] <= limit * top[p])  # a NaN has not settled
            n_left += unsettled[p]
        if n_left == 0:
            break
    return n_left


@numba.njit(nogil=True, cache=True)
def _project_tiles(
    X: NDArray[Any],
    channels: int,
    positions: int,
    W: NDArray[Any],
    H: NDArray[Any],
    G: NDArray[Any],
    scale: NDArray[Any],
    limit: float,
    S: NDArray[Any],
    images: tuple[int, int],
    lo: int,
    hi: int,
) -> bool:
    """Fill columns lo..hi of the images in the range; X (images, channels, positions) and S are flat."""
    rank, rows = scale.shape[0], W.shape[0] // max(channels, 1)
    b, s = np.empty(rows * TILE, np.float32), np.empty(rows * TILE, np.float32)
    unsettled = np.empty(TILE, np.bool_)
    for i in range(images[0], images[1]):
        for p in range(lo, hi, TILE):
            lanes = min(TILE, hi - p)
            _product_of_tile(X, i * channels * positions + p, positions, channels, W, rows, b, lanes)
            if _settle(s, b, H, rank, limit, unsettled) > 0 and not finish_lanes(G, b, s, unsettled, lanes):
                return False
            for k in range(rank):
                write_row(S, (i * rank + k) * positions + p, s, k * TILE, scale[k], lanes)
    return True


def project(X: Tensor, W: Tensor | Basis, *, l2: float = 0.0) -> Tensor:
    """Return S (rank, positions) = argmin_{S >= 0} |X - W S|^2 + l2 |S|^2 for X (channels, positions).

    W (channels, rank) may have any sign, or is a basis from :func:`prepare`, which knows its l2. Where the columns of W
    are dependent the minimiser is not unique and one is returned; a zero column gets zeros.

    Example
    -------
    >>> project(torch.tensor([[2.0], [-1.0]]), torch.eye(2))
    tensor([[2.],
            [0.]])
    """
    channels = W.channels if isinstance(W, Basis) else W.shape[0]
    if X.ndim != 2 or X.shape[0] != channels or (not isinstance(W, Basis) and W.ndim != 2):
        shape = (W.channels, W.rank) if isinstance(W, Basis) else tuple(W.shape)
        raise ValueError(
            f"project: X must be (channels, positions) and W (channels, rank), got {tuple(X.shape)} and {shape}."
        )
    basis = W if isinstance(W, Basis) else prepare(W, l2=l2)
    if basis.limit > 0 and X.dtype == torch.float32 and X.device.type == "cpu":
        return _by_tiles(X.detach()[None], basis)[0]
    return _exactly(X.detach(), basis)


def project_images(X: Tensor, basis: Basis) -> Tensor:
    """Return S (images, rank, positions) for X (images, channels, positions): :func:`project` without moving axes.

    Example
    -------
    >>> project_images(torch.tensor([[[2.0], [-1.0]], [[0.0], [3.0]]]), prepare(torch.eye(2)))[:, :, 0]
    tensor([[2., 0.],
            [0., 3.]])
    """
    if X.ndim != 3 or X.shape[1] != basis.channels:
        raise ValueError(
            f"project_images: X must be (images, {basis.channels} channels, positions), got {tuple(X.shape)}."
        )
    is_single = basis.limit > 0 and X.dtype == torch.float32 and X.device.type == "cpu"
    spare = -X.shape[2] % TILE
    if is_single and (X.shape[0] == 1 or 2 * spare <= X.shape[2]):  # few lanes of the last tile stay idle
        return _by_tiles(X.detach(), basis)
    columns = X.detach().permute(1, 0, 2).reshape(basis.channels, -1)
    S = project(columns, basis).reshape(basis.rank, X.shape[0], X.shape[2])
    return S.permute(1, 0, 2).contiguous()


def _by_tiles(X: Tensor, basis: Basis) -> Tensor:
    n_images, channels, positions = X.shape
    out = torch.empty(n_images, basis.rank, positions)
    x, s = X.contiguous().view(-1).numpy(), out.view(-1).numpy()
    run = partial(
        _project_tiles, x, channels, positions, basis.packed, basis.others, basis.gram, basis.short_scale,
        basis.limit, s,
    )  # fmt: skip
    if n_images * positions <= TASK:
        is_finite = run((0, n_images), 0, positions)
    elif n_images == 1:
        is_finite = all(over_blocks(partial(run, (0, 1)), positions, block=TASK))
    else:
        per_task = max(1, TASK // max(positions, 1))
        is_finite = all(over_blocks(lambda lo, hi: run((lo, hi), 0, positions), n_images, block=per_task))
    if not is_finite:
        raise ValueError("project: X and W must be finite, got NaN or infinite values.")
    return out


def _exactly(X: Tensor, basis: Basis) -> Tensor:
    """Project in float64 by the active-set method, or by passes alone on a device without branches."""
    dtype = X.dtype if X.dtype == torch.float64 else torch.float32
    back = torch.from_numpy(basis.scale)
    if X.device.type != "cpu":
        B, G = basis.left.to(X.device) @ X.double(), basis.G.to(X.device)
        return (project_by_passes(B.clamp_min(0), B, G) * back.to(X.device)[:, None]).to(dtype)
    out = torch.empty(basis.rank, X.shape[1], dtype=dtype)
    left, s = basis.left.cpu(), out.numpy()
    for start in range(0, X.shape[1], CHUNK):
        b = (left @ X[:, start : start + CHUNK].double()).numpy()
        done = over_blocks(partial(solve_columns, basis.gram, b, s[:, start : start + CHUNK], basis.scale), b.shape[1])
        if not all(done):
            raise ValueError("project: X and W must be finite, got NaN or infinite values.")
    return out


def project_by_passes(S: Tensor, B: Tensor, G: Tensor, *, tol: float = 1e-9, max_rounds: int = 400) -> Tensor:
    """Return the same minimiser by coordinate passes alone, 25 at a time: the form for devices without branches.

    Each column stops mattering once a round moves nothing by more than ``tol`` of the largest entry.
    """
    S = torch.where((G.diagonal() > G.diagonal().max() * DEAD)[:, None], S, torch.zeros_like(S))
    for _ in range(max_rounds):
        before, S = S, sweep(S, B, G, n_sweeps=25)
        if float((S - before).abs().max()) <= tol * float(S.abs().max()):
            break
    return S
