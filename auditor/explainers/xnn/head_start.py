"""Where the training of explanation heads starts: at the slopes of the logits, which the model itself knows.

The gradient  g = d logit / d Z  says which dimensions of the layer speak for a class and which against it. A head
without hidden layers starts with a part of them in every x-feature: dimensions with g > 0 in some features, those with
g < 0 in the others, parted by which dimensions fire together,

    E_i = [ sum_{k in part i} |g_k| Z_k - least ]_+        v, c and decoder by least squares

Where logits are affine in the layer this start is exact on photos that no head was trained on, however few there were
to train on; from there the losses of [XNN], which is silent about the start, take over. With hidden layers the weights
start at random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from auditor.explainers.xnn.head_objective import Problem, fit_predictor, rescale
from auditor.explainers.xnn.heads import XHeads

AT_IMAGES = 4  # images at which the slope of a logit is taken where it is not the same everywhere
SAMPLE = 1024  # examples that part the dimensions and scale the features
ROUNDS = 12  # of k-means


def slopes(logits_of: Callable[[Tensor], Tensor], Z: Iterable[Tensor], classes: Sequence[int]) -> Tensor:
    """Return the mean gradient of each class's logit by the layer, (classes, the layer's native shape).

    ``Z`` are activations in the layer's native shape, a batch for each class.
    """
    gradients = []
    for z, k in zip(Z, classes, strict=True):
        with torch.enable_grad():
            leaf = z.detach().clone().requires_grad_(True)
            (gradient,) = torch.autograd.grad(logits_of(leaf)[:, k].sum(), leaf)
        gradients.append(gradient.mean(0))
    return torch.stack(gradients)


def affine_slopes(
    logits_of: Callable[[Tensor], Tensor], z: Tensor, classes: Sequence[int], at_once: int = 64
) -> Tensor:
    """Return the gradient of each class's logit by the layer at one activation ``z``, several classes in a pass."""
    gradients: list[Tensor] = []
    for some in torch.split(torch.tensor(list(classes), device=z.device), at_once):
        with torch.enable_grad():
            leaf = z.detach().repeat(len(some), *[1] * (z.ndim - 1)).requires_grad_(True)
            gradients += torch.autograd.grad(logits_of(leaf).gather(1, some[:, None]).sum(), leaf)
    return torch.cat(gradients)


def start_at_slopes(heads: XHeads, problem: Problem, slope: Tensor, seed: int) -> None:
    """Set heads without hidden layers to the slopes (classes, dims) of their logits by the raw dimensions."""
    assert len(heads.encoder_w) == 1
    n, toward = heads.n_features, slope * heads.scale  # rows are divided by the scale
    some = problem.activations(problem.sample(SAMPLE))
    rows = heads.rows(some)
    rows = rows[torch.linspace(0, len(rows) - 1, min(len(rows), 4 * SAMPLE)).long()]
    part = parts_of(rows, toward, n, seed)  # (classes, dims) which feature each dimension belongs to
    with torch.no_grad():
        w = torch.zeros_like(heads.encoder_w[0])
        w.scatter_(1, part.unsqueeze(1), (toward if n == 1 else toward.abs()).unsqueeze(1))
        without = (w == 0).all(2)  # a feature that got no dimension stays random
        heads.encoder_w[0].copy_(torch.where(without.unsqueeze(-1), heads.encoder_w[0], w))
        heads.encoder_b[0].zero_()
        values = torch.stack([rows @ one.T for one in heads.encoder_w[0]])  # (classes, rows, features)
        heads.encoder_b[0].copy_(-values.amin(1, keepdim=True))
        rescale(heads, (values + heads.encoder_b[0]).square().mean(1).sqrt())
        start_decoder(heads, rows)
    fit_predictor(heads, problem, ridge=1e-4)


def start_decoder(heads: XHeads, rows: Tensor) -> None:
    """Set a decoder without hidden layers to least squares from x-features to scaled rows."""
    for k in range(len(heads.c)):
        E = heads.select([k]).embed(rows)[0]
        A = torch.cat([E, torch.ones_like(E[:, :1])], 1)
        AtA = A.T @ A
        solution = torch.linalg.solve(AtA + 1e-4 * torch.diag(AtA.diagonal().clamp(min=1e-6)), A.T @ rows)
        heads.decoder_w[0][k], heads.decoder_b[0][k, 0] = solution[:-1].T, solution[-1]


def parts_of(rows: Tensor, toward: Tensor, n: int, seed: int) -> Tensor:
    """Return the feature of every dimension, (classes, dims): by the sign of its slope and by what fires together."""
    if n == 1:
        return torch.zeros(toward.shape, dtype=torch.long)
    n_against = n // 2
    speaks_for, against = firing_groups(rows, n - n_against, seed), firing_groups(rows, n_against, seed)
    return torch.where(toward > 0, speaks_for, n - n_against + against)


def firing_groups(rows: Tensor, n: int, seed: int) -> Tensor:
    """Part dimensions of ``rows`` (examples, dims) into ``n`` groups that fire on the same examples, (dims,) numbers.

    Spherical k-means of the centred columns, from ``n`` of them drawn at random.
    """
    columns = torch.nn.functional.normalize((rows - rows.mean(0)).T, dim=1)
    generator = torch.Generator().manual_seed(seed)
    centres = columns[torch.randperm(len(columns), generator=generator)[:n]]
    group = torch.zeros(len(columns), dtype=torch.long)
    for _ in range(ROUNDS):
        group = (columns @ centres.T).argmax(1)
        sums = torch.zeros_like(centres).index_add_(0, group, columns)
        centres = torch.nn.functional.normalize(sums, dim=1)
    return group
