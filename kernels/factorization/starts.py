"""Starting points for NMF: NNDSVDa [BoutsidisGallopoulos2008] from a randomised range finder, or |normal|."""

from __future__ import annotations

import torch
from torch import Tensor

OVERSAMPLING = 10
POWER_STEPS = 2


def truncated_svd(X: Tensor, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return (U, s, V^T) with ``rank`` leading triplets of X by a randomised range finder with power steps."""
    width = min(rank + OVERSAMPLING, *X.shape)
    Omega = torch.randn(X.shape[1], width, generator=generator, dtype=X.dtype).to(X.device)
    Q = torch.linalg.qr(X @ Omega).Q
    for _ in range(POWER_STEPS):
        Q = torch.linalg.qr(X @ (Q.T @ X).T).Q
    U, s, Vt = torch.linalg.svd(Q.T @ X, full_matrices=False)
    return Q @ U[:, :rank], s[:rank], Vt[:rank]


def nndsvda(X: Tensor, rank: int, generator: torch.Generator, *, signed: bool = False) -> tuple[Tensor, Tensor]:
    """Return (W, S): each singular pair's larger sign part, zeros filled with the mean of X.

    With ``signed`` only S is made non-negative: it takes the larger sign part, W keeps its singular vector.
    """
    U, s, Vt = truncated_svd(X, rank, generator)
    u_pos, v_pos = U.clamp_min(0), Vt.clamp_min(0)
    u_neg, v_neg = (-U).clamp_min(0), (-Vt).clamp_min(0)
    norms_pos = (v_pos if signed else u_pos).norm(dim=1 if signed else 0) * v_pos.norm(dim=1)
    norms_neg = (v_neg if signed else u_neg).norm(dim=1 if signed else 0) * v_neg.norm(dim=1)
    use_pos = norms_pos >= norms_neg
    strength = torch.where(use_pos, norms_pos, norms_neg)
    W = torch.where(use_pos, U, -U) if signed else torch.where(use_pos, u_pos, u_neg)
    S = torch.where(use_pos[:, None], v_pos, v_neg)
    tiny = torch.finfo(X.dtype).tiny
    W = W / W.norm(dim=0).clamp_min(tiny)
    S = S / S.norm(dim=1, keepdim=True).clamp_min(tiny)
    root = (s * strength).sqrt()
    W, S = W * root, S * root[:, None]
    fill = X.abs().mean()
    return (W if signed else torch.where(W <= 0, fill, W)), torch.where(S <= 0, fill, S)


def random_start(X: Tensor, rank: int, generator: torch.Generator, *, signed: bool = False) -> tuple[Tensor, Tensor]:
    """Return (W, S) with entries |normal| * sqrt(mean|X| / rank); W keeps its signs when ``signed``."""
    scale = (X.abs().mean() / rank).sqrt()
    W = torch.randn(X.shape[0], rank, generator=generator, dtype=X.dtype).to(X.device) * scale
    S = torch.randn(rank, X.shape[1], generator=generator, dtype=X.dtype).to(X.device).abs() * scale
    return (W if signed else W.abs()), S
