"""Largest singular value of a Jacobian by power iteration, for a whole batch at once and without forming it.

    v <- J^T (J v),      sigma = max |J v| / |v|  over the span of all v so far

(the directions already tried are kept and mixed in the best way, as Lanczos does: at the same cost 20 steps find what
plain power iteration needs hundreds for). ``J v`` comes from forward-mode and ``J^T u`` from reverse-mode
differentiation of the same pass. The rows of a batch must not influence each other (a network in eval mode), so that J
is block diagonal. The value never exceeds |J|_2: it is attained by the direction that is returned with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

with warnings.catch_warnings():  # torch compiles its own rules here and deprecates the way it does so
    warnings.simplefilter("ignore")
    import torch._decomp.decompositions_for_jvp

Function = Callable[[Tensor], Tensor]


def push(f: Function, x: Tensor, v: Tensor) -> Tensor:
    """Return  J(x) v  for every row of the batch, in the shape of  f(x)."""
    return forth_and_back(f, x, v)[0].detach()


def pull(f: Function, x: Tensor, u: Callable[[Tensor], Tensor]) -> Tensor:
    """Return  J(x)^T u(f(x))  for every row of the batch, in the shape of ``x``."""
    with torch.enable_grad():
        x = x.detach().requires_grad_(True)
        out = f(x)
        if not out.requires_grad:
            return torch.zeros_like(x)
        back: Tensor | None = torch.autograd.grad(out, x, u(out.detach()), allow_unused=True)[0]
    return torch.zeros_like(x) if back is None else back


def pull_each(f: Function, x: Tensor, directions: Tensor) -> Tensor:
    """Return  J(x)^T u_k  for every direction (outputs numbers each) and row: (directions, *x.shape), one forward pass.

    >>> x = torch.tensor([[1.0, 2.0]])
    >>> pull_each(lambda z: z * z, x, torch.eye(2)).tolist()
    [[[2.0, 0.0]], [[0.0, 4.0]]]
    """
    with torch.enable_grad():
        leaf = x.detach().requires_grad_(True)
        out = f(leaf)
        if not out.requires_grad:
            return x.new_zeros(len(directions), *x.shape)
        pulled = []
        for k, u in enumerate(directions):
            keep = k + 1 < len(directions)
            gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
                out, leaf, u.expand(len(out), -1).view_as(out), retain_graph=keep, allow_unused=True
            )
            g = gradients[0]
            pulled.append(torch.zeros_like(x) if g is None else g)
    return torch.stack(pulled)


def largest_singular_values(f: Function, x: Tensor, v: Tensor, n_steps: int) -> tuple[Tensor, Tensor]:
    """Return the largest |J(x) v| over the unit v found in ``n_steps`` steps from ``v``, and that ``v``, per row.

    >>> diagonal = torch.tensor([3.0, 1.0], dtype=torch.float64)
    >>> x = torch.zeros(1, 2, dtype=torch.float64)
    >>> s, v = largest_singular_values(lambda z: z * diagonal, x, torch.ones_like(x), 20)
    >>> round(float(s[0]), 6)
    3.0
    """
    tried, images = [], []  # orthonormal directions (batch, inputs) and J times them (batch, outputs)
    v = unit(v)
    for _ in range(n_steps):
        moved, w = forth_and_back(f, x, v)
        tried.append(v.flatten(1))
        images.append(moved.flatten(1))
        basis = torch.stack(tried, 1)
        v = w.flatten(1)
        length = v.norm(dim=1)
        for _twice in range(2):
            v = v - torch.einsum("bkn,bk->bn", basis, torch.einsum("bkn,bn->bk", basis, v))
        fresh = v.norm(dim=1) > 1e-5 * length  # less is rounding: all directions that matter have been tried
        v = torch.where(fresh[:, None], unit(v), torch.zeros_like(v)).view_as(x)
        if not bool(fresh.any()):
            break
    span = torch.stack(images, 1).double()
    small = span @ span.transpose(1, 2)
    mix = torch.linalg.eigh(small).eigenvectors[:, :, -1].to(x.dtype)
    best = unit(torch.einsum("bkn,bk->bn", torch.stack(tried, 1), mix)).view_as(x)
    return push(f, x, best).flatten(1).norm(dim=1), best


def unit(v: Tensor) -> Tensor:
    """Scale every row to length 1; a zero row stays zero."""
    # two steps: the square of a float32 below 1e-23 is zero
    peak = v.flatten(1).abs().amax(dim=1).clamp_min(torch.finfo(v.dtype).tiny).view(-1, *[1] * (v.dim() - 1))
    v = v / peak
    scaled: Tensor = v / v.flatten(1).norm(dim=1).clamp_min(torch.finfo(v.dtype).tiny).view(-1, *[1] * (v.dim() - 1))
    return scaled


def forth_and_back(f: Function, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return  J v  and  J^T J v  at ``x``, both from one pass where forward-mode differentiation is possible."""
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # the fused attention has no forward mode
        leaf = x.detach().requires_grad_(True)
        try:
            with forward_ad.dual_level():
                both = f(forward_ad.make_dual(leaf, v))  # type: ignore[no-untyped-call]
                out, moved = forward_ad.unpack_dual(both)  # type: ignore[no-untyped-call]
                moved = torch.zeros_like(out) if moved is None else moved.detach()
        except NotImplementedError:
            out = f(leaf)
            moved = _twice_back(out, leaf, v)
        if not out.requires_grad:
            return torch.zeros_like(out), torch.zeros_like(x)
        back: Tensor | None = torch.autograd.grad(out, leaf, moved, allow_unused=True)[0]
    return moved, torch.zeros_like(x) if back is None else back


def _twice_back(out: Tensor, leaf: Tensor, v: Tensor) -> Tensor:
    """Return  J v  as the derivative of  <J^T u, v>  by u."""
    if not out.requires_grad:
        return torch.zeros_like(out)
    u = torch.zeros_like(out, requires_grad=True)
    g: Tensor | None = torch.autograd.grad(out, leaf, u, create_graph=True, allow_unused=True)[0]
    if g is None:
        return torch.zeros_like(out)
    moved: Tensor | None = torch.autograd.grad(g, u, v, retain_graph=True, allow_unused=True)[0]
    return torch.zeros_like(out) if moved is None else moved
