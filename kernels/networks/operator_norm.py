"""Spectral norms that are proved, not only estimated: of matrices, and of convolutions without their matrix.

A power or Lanczos iteration approaches the norm from below, so what it stops at bounds nothing. The upper bounds here:

- matrices:     the largest eigenvalue of the Gram matrix in float64, plus what rounding can have taken away;
- convolutions: zero padding, stride, dilation and groups make it a compression of the convolution on a torus large
                enough that nothing wraps round. There it falls apart into one small matrix per frequency,

                    B(w) = s^(-1/2) [W(w + 2 pi a / s)]_a      W(w) = sum_t W_t exp(i w t),   s the stride

                and the largest of their norms bounds the operator's, closely for maps larger than the kernel. On large
                maps fewer frequencies do: between m grid points a trigonometric polynomial of degree d rises at most
                by the factor 1 / cos(pi d / m) [EhlichZeller1964]. Of many channels even these are too many: then the
                taps of the kernel are bounded one by one, sum_t |W_t|, since a shift moves nothing twice, or together,
                by Cauchy and Schwarz: the root of their number times the norm of their weights beside each other;
- anything else: Lanczos from a random start. After k steps the largest Ritz value of an n x n matrix is below
                (1 - e) lambda with probability at most 1.648 sqrt(n) exp(-sqrt(e) (2k - 1))
                [KuczynskiWozniakowski1992], which is solved for e.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EPS = torch.finfo(torch.float64).eps
MOST_SIDE = 4096  # shorter side of a matrix whose Gram matrix is formed
FAILURE = 1e-9  # probability that a Lanczos bound is too low
BLOCK = 1 << 24  # numbers at a time
WORK = 2e9  # multiplications on the frequencies of one convolution: about a second
MOST_WORK = 4e9  # of the coarsest grid; beyond it the taps are bounded


def matrix_norm(m: Tensor) -> float:
    """Return an upper bound of the largest singular value of ``m`` (rows, columns), tight to about 1e-9.

    >>> round(matrix_norm(torch.tensor([[3.0, 0.0], [0.0, 1.0], [0.0, 0.0]])), 9)
    3.0
    """
    if m.shape[0] > m.shape[1]:
        m = m.T
    if m.numel() == 0:
        return 0.0
    n, inner = m.shape
    if n > MOST_SIDE:
        return _norm_by_lanczos(m)
    gram = torch.zeros(n, n, dtype=torch.float64, device=m.device)
    for part in torch.split(m, max(1, BLOCK // n), dim=1):
        wide = part.double()
        gram += wide @ wide.T
    return float(_root_of(gram[None], inner)[0])


def _root_of(gram: Tensor, inner: int) -> Tensor:
    """Return the root of the largest eigenvalue of (…, n, n) Gram matrices of ``inner`` products, rounded up."""
    largest = torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0)
    # both the products (inner terms each) and the eigenvalues are off by at most a multiple of the trace
    trace = gram.diagonal(dim1=-2, dim2=-1).real.sum(-1)
    root: Tensor = (largest + 8 * (inner + gram.shape[-1]) * EPS * trace).sqrt() * (1 + 4 * EPS)
    return root


def convolution_norm(
    weight: Tensor,
    size: Sequence[int],
    *,
    stride: Sequence[int],
    pad: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int = 1,
) -> float:
    """Return an upper bound of the norm of a convolution of any rank on maps of ``size`` with zero padding.

    ``weight`` is (out, in / groups, *kernel), ``pad`` before and after per dimension. A transposed convolution has the
    norm of the convolution that it is the transpose of.

    >>> one = torch.ones(1, 1, 1, 3)
    >>> bound = convolution_norm(one, [1, 50], stride=[1, 1], pad=[(0, 0), (1, 1)], dilation=[1, 1])
    >>> 2.99 < bound < 3.001
    True
    """
    kernel = weight.shape[2:]
    w = weight.double().reshape(groups, weight.shape[0] // groups, weight.shape[1], *kernel)
    lines = [_Line.of(*each) for each in zip(size, kernel, stride, pad, dilation, strict=True)]
    short, long = sorted((w.shape[1], w.shape[2] * math.prod(stride)))
    work = groups * short * short * long
    grids = _grids(lines, work)
    if math.prod(grids) * work > MOST_WORK:
        return _bound_by_taps(w)
    factor = math.prod(line.rise(m) for line, m in zip(lines, grids, strict=True))
    return _largest_symbol(w, lines, grids) * factor


@dataclass(frozen=True, slots=True)
class _Line:
    """A convolution along one dimension: its torus and what its symbol is made of."""

    torus: int  # a multiple of the stride
    kernel: int
    stride: int
    dilation: int
    degree: int  # of the symbol as a trigonometric polynomial of the output's frequency

    @classmethod
    def of(cls, n: int, kernel: int, stride: int, pad: tuple[int, int], dilation: int) -> _Line:
        reach = dilation * (kernel - 1) + 1
        out = (n + pad[0] + pad[1] - reach) // stride + 1
        last = stride * (out - 1) + reach - 1 - pad[0]
        least = max(n + pad[0], last + 1, stride * out)
        taps = kernel if stride == 1 else -(-reach // stride)
        return cls(-(-least // stride) * stride, kernel, stride, dilation, taps // 2)

    def rise(self, m: int) -> float:
        """How far the symbol can rise above its largest value on ``m`` equidistant frequencies."""
        return 1.0 if m == self.torus // self.stride else 1 / math.cos(math.pi * self.degree / m)

    def waves(self, m: int) -> Tensor:
        """Return  exp(i w t)  for the ``m`` frequencies, their ``stride`` aliases and all taps: (m, stride, kernel)."""
        low = torch.arange(m, dtype=torch.float64) * (2 * math.pi / (m * self.stride))
        if m != self.torus // self.stride and self.stride == 1:
            low = low / self.dilation  # sup over w: dilation only turns the circle faster
        alias = torch.arange(self.stride, dtype=torch.float64) * (2 * math.pi / self.stride)
        taps = torch.arange(self.kernel, dtype=torch.float64) * self.dilation
        angle = (low[:, None, None] + alias[None, :, None]) * taps
        return torch.polar(torch.ones_like(angle), angle)


def _grids(lines: list[_Line], work: int) -> list[int]:
    """Return how many frequencies to look at per dimension: all of the torus when affordable, else a coarser grid.

    Where the kernel has one tap all frequencies are alike.
    """
    exact = [line.torus // line.stride if line.degree else 1 for line in lines]
    best = exact
    for most in (1 << 30, 96, 64, 48, 32, 24, 16):
        best = [min(e, max(most, 8 * line.degree)) for e, line in zip(exact, lines, strict=True)]
        if math.prod(best) * work <= WORK:
            break
    return best


def _bound_by_taps(w: Tensor) -> float:
    """Return the smallest of three bounds of a convolution (groups, out, in, *kernel) by matrices of its taps."""
    groups, out, inner = w.shape[:3]
    taps = w.reshape(groups, out, inner, -1)
    n = taps.shape[3]
    each = sum(max(matrix_norm(taps[g, :, :, t]) for g in range(groups)) for t in range(n))
    wide = max(matrix_norm(taps[g].flatten(1)) for g in range(groups))
    tall = max(matrix_norm(taps[g].transpose(1, 2).flatten(0, 1)) for g in range(groups))
    return float(min(each, math.sqrt(n) * wide, math.sqrt(n) * tall)) * (1 + 8 * n * EPS)


def _largest_symbol(w: Tensor, lines: list[_Line], grids: list[int]) -> float:
    """Return the largest norm of the symbol over the grid; conjugate frequencies are looked at once."""
    waves = [line.waves(m) for line, m in zip(lines, grids, strict=True)]
    shrink = math.prod(line.stride for line in lines) ** -0.5
    groups, out, inner = w.shape[:3]
    half = [*grids[:-1], grids[-1] // 2 + 1]
    points = torch.tensor(list(itertools.product(*[range(m) for m in half])))
    each = groups * out * inner * math.prod(line.stride for line in lines)
    best = 0.0
    for part in torch.split(points, max(1, BLOCK // (4 * each))):
        b = w.to(torch.complex128)[None, ..., None]  # (points, groups, out, in, *kernel, aliases)
        for dim, wave in enumerate(waves):
            # the first kernel dimension left is contracted, its aliases join those of the dimensions before
            e = wave[part[:, dim]]
            b = torch.einsum("pgoik...a,psk->pgoi...as", b.expand(len(part), *b.shape[1:]), e).flatten(-2)
        b = b.flatten(3) * shrink
        best = max(best, _largest_norm(b.flatten(0, 1), best))
    return best


def _largest_norm(b: Tensor, so_far: float) -> float:
    """Return the largest norm of a batch of complex matrices, or ``so_far`` when none exceeds it."""
    if b.shape[1] > b.shape[2]:
        b = b.mH
    inner = b.shape[2]
    if b.shape[1] == 1:
        return max(so_far, float(b.abs().square().sum((1, 2)).max().sqrt()) * (1 + 8 * inner * EPS))
    gram = b @ b.mH
    # |G^2|_F^(1/4) >= |B|: only matrices that could hold the largest norm are taken apart
    power = gram @ gram if gram.shape[1] > 16 else gram
    above = torch.linalg.matrix_norm(power) ** (0.25 if gram.shape[1] > 16 else 0.5) * (1 + 64 * inner * EPS)
    order = above.argsort(descending=True)
    step = max(1, (1 << 20) // gram.shape[1] ** 2)
    for rows in torch.split(order, step):
        if float(above[rows[0]]) <= so_far:
            break
        so_far = max(so_far, float(_root_of(gram[rows], inner).max()))
    return so_far


@dataclass(frozen=True, slots=True)
class Estimate:
    """Largest singular value found (never above the truth) and a bound that fails with probability ``FAILURE``."""

    lower: float
    upper: float
    n_steps: int


def lanczos_norm(
    apply: Callable[[Tensor], Tensor],
    transpose: Callable[[Tensor], Tensor],
    like: Tensor,
    *,
    n_steps: int,
    seed: int = 0,
) -> Estimate:
    """Estimate the norm of a linear map from tensors ``like`` by Lanczos on  A^T A  with full reorthogonalisation.

    >>> d = torch.tensor([5.0, 2.0, 1.0], dtype=torch.float64)
    >>> e = lanczos_norm(lambda v: d * v, lambda v: d * v, d, n_steps=10)
    >>> round(e.lower, 6), round(e.upper, 6)
    (5.0, 5.0)
    """
    generator = torch.Generator().manual_seed(seed)
    n = like.numel()
    q = torch.randn(n, dtype=torch.float64, generator=generator).to(like.device)
    basis = (q / q.norm())[None]
    alphas: list[float] = []
    betas: list[float] = []
    exhausted = False
    for _ in range(min(n_steps, n)):
        q = basis[-1]
        z = transpose(apply(q.view(like.shape))).reshape(-1).double()
        alphas.append(float(q @ z))
        for _twice in range(2):
            z = z - basis.T @ (basis @ z)
        beta = float(z.norm())
        if beta <= 1e-12 * max(alphas):
            exhausted = True
            break
        betas.append(beta)
        basis = torch.cat([basis, (z / beta)[None]])
    k = len(alphas)
    t = torch.diag(torch.tensor(alphas, dtype=torch.float64))
    off = torch.tensor(betas[: k - 1], dtype=torch.float64)
    t += torch.diag(off, 1) + torch.diag(off, -1)
    ritz = max(0.0, float(torch.linalg.eigvalsh(t)[-1]))
    if exhausted or k == n:  # the whole space that a random start can see: exact but for rounding
        return Estimate(math.sqrt(ritz), math.sqrt(ritz) * (1 + 1e-9), k)
    e = (math.log(1.648 * math.sqrt(n) / FAILURE) / (2 * k - 1)) ** 2
    return Estimate(math.sqrt(ritz), math.sqrt(ritz / (1 - e)) * (1 + 1e-9) if e < 1 else math.inf, k)


def _norm_by_lanczos(m: Tensor) -> float:
    wide = m.double()
    return lanczos_norm(lambda v: wide @ v, lambda u: wide.T @ u, wide[0], n_steps=200).upper
