"""Intersection regularization (algorithm 1): train codes that both a small network and a decision tree can read.

Per batch, with v = q(F(x)), g = softmax G(v), T the tree fitted to all pairs (v, g) of the epoch so far, t = T(v):

    lambda_1 CE(y, g) + lambda_2 softCE(t, g) + lambda_3 mean_batch |v * M|_1,     M ~ Bernoulli(p)^n, fresh each time

Departures from [Intersection], on purpose: the tree splits by squared error on probabilities (the paper names a
classification criterion for a regression tree); the L1 term is averaged over the batch (the paper divides by the number
of images; ``l1_norm="dataset"`` does that); lambda_2 warms up linearly over the first epoch; an epoch's first batch is
taught by the last tree of the epoch before, because a tree of one batch has learned it by heart.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from auditor.explainers.tree.quantised_features import Backbone, Representation
from auditor.kernels.trees.grower import TreeGrower
from auditor.kernels.trees.tree import Codes, Tree, TreeLimits, fit_tree

Variant = Literal["full", "tree", "l1", "l2", "quantised", "soft_tree"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The numbers of algorithm 1; defaults are the paper's where it gives any."""

    variant: Variant = "full"
    lambda_1: float = 2.0
    lambda_2: float = 1.0
    lambda_3: float = 1e-3
    p: float = 0.5
    l1_norm: Literal["batch", "dataset"] = "batch"
    epochs: int = 20
    batch: int = 64
    lr: float = 2e-3
    optimiser: Literal["adam", "sgd"] = "adam"
    refit_every: int | None = None
    limits: TreeLimits = field(default_factory=TreeLimits)
    stop_after_drops: int = 2
    min_epochs: int = 5
    seed: int = 0
    keep_better: bool = False  # keep the older tree where the new one fits the epoch's pairs worse (Proposition 1)

    @property
    def has_tree(self) -> bool:
        """Whether the tree teaches the network."""
        return self.variant in ("full", "tree") and self.lambda_2 > 0


@dataclass(frozen=True, slots=True)
class Epoch:
    """State after an epoch: losses are means over batches, accuracies are on the trial rows."""

    number: int
    loss: float
    soft_loss: float
    sparsity_loss: float
    accuracy: float
    tree_accuracy: float
    agreement: float
    zero_share: float
    is_drop: bool


@dataclass(frozen=True, slots=True)
class TreeExamples:
    """Rows for training: pooled inputs when the backbone is frozen, images when it learns; and labels."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def rows(self, rows: Tensor) -> TreeExamples:
        """Return the rows that a mask selects."""
        return TreeExamples(self.x[rows], self.y[rows])


def train(
    net: Representation, backbone: Backbone, train_set: TreeExamples, trial: TreeExamples, recipe: Recipe
) -> Iterator[Epoch]:
    """Yield one state per epoch, with ``refit_every`` batches (default: an eighth of an epoch) between tree fits.

    ``net`` (and a trainable ``backbone``) hold the weights of the last one yielded.

    Early stopping is the paper's: at the ``stop_after_drops``-th epoch that lowers the trial accuracy, the weights
    of the epoch before come back and the iteration ends.
    """
    order_of, mask_of = (torch.Generator().manual_seed(recipe.seed + shift) for shift in (0, 1_000_003))
    optimiser = _optimiser([*net.parameters(), *backbone.parameters()], recipe)
    refit_every = recipe.refit_every or max(1, len(train_set) // recipe.batch // 8)
    tree: Tree | None = None
    before, drops = -1.0, 0
    state_before = (copy.deepcopy(net.state_dict()), backbone.state())
    for number in range(1, recipe.epochs + 1):
        net.train()
        sums = np.zeros(3)
        grower: TreeGrower | None = None
        batches = torch.split(torch.randperm(len(train_set), generator=order_of), recipe.batch)
        pending: list[tuple[Tensor, Tensor]] = []
        pairs: list[tuple[Tensor, Tensor]] = []  # of this epoch
        for i, rows in enumerate(batches):
            v = net.codes(_inputs(backbone, train_set.x[rows]))
            logits = net.logits(v)
            log_g = torch.log_softmax(logits, dim=1)
            loss = nn.functional.nll_loss(log_g, train_set.y[rows])
            soft = v.new_zeros(())
            if recipe.has_tree:
                if grower is None:
                    grower = _grower(net, logits.shape[1], len(train_set), recipe)
                pending.append((v.detach(), log_g.detach().exp()))
                if (i + 1) % refit_every == 0 or i == 0:
                    fitted = _append(grower, pending)
                    pairs += pending
                    if i or tree is None:
                        tree = _better(tree, fitted, pairs) if recipe.keep_better else fitted
                    pending = []
                assert tree is not None
                t = torch.from_numpy(tree.predict(_as_codes(v))).to(log_g)
                soft = -(t * log_g).sum(1).mean()
            sparse = _sparsity(v, recipe, mask_of, len(train_set))
            warm = min(1.0, (i + 1) / len(batches)) if number == 1 else 1.0
            total = recipe.lambda_1 * loss + warm * recipe.lambda_2 * soft + recipe.lambda_3 * sparse
            _descend(optimiser, total)
            sums += [loss.item(), soft.item(), sparse.item()]
        scored = _score(net, backbone, train_set, trial, recipe)
        is_drop = number > recipe.min_epochs and scored[0] < before
        drops += is_drop
        loss, soft, sparse = (sums / len(batches)).tolist()
        yield Epoch(number, loss, soft, sparse, *scored, is_drop)
        if is_drop and drops >= recipe.stop_after_drops > 0:
            net.load_state_dict(state_before[0])
            backbone.load(state_before[1])
            break
        before = scored[0]
        state_before = (copy.deepcopy(net.state_dict()), backbone.state())
    net.eval()


def _descend(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    optimiser.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step()


def _optimiser(parameters: list[nn.Parameter], recipe: Recipe) -> torch.optim.Optimizer:
    if recipe.optimiser == "adam":
        return torch.optim.Adam(parameters, lr=recipe.lr)
    return torch.optim.SGD(parameters, lr=recipe.lr, momentum=0.9)


@contextmanager
def few_threads(is_small: bool) -> Iterator[None]:
    """Let torch use one thread while small matrices train: two that wait for each other are slower than one."""
    before = torch.get_num_threads()
    if is_small:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def codes_of(net: Representation, backbone: Backbone, x: Tensor, batch: int = 256) -> tuple[Codes, Tensor]:
    """Return codes (uint8) by the frozen range, and the network's probabilities, for rows of examples."""
    net.eval()
    codes, probabilities = [], []
    for part in torch.split(x, batch):
        v = net.codes(_inputs(backbone, part))
        codes.append(_as_codes(v))
        probabilities.append(torch.softmax(net.logits(v), dim=1))
    return np.concatenate(codes), torch.cat(probabilities)


def _inputs(backbone: Backbone, rows: Tensor) -> Tensor:
    return rows if backbone.module is None else backbone.inputs(rows)


def _as_codes(v: Tensor) -> Codes:
    return v.detach().to(torch.uint8).numpy(force=True)


def _grower(net: Representation, n_classes: int, n_rows: int, recipe: Recipe) -> TreeGrower:
    return TreeGrower(net.n_features, n_classes, recipe.limits, bits=net.bits, expected_rows=n_rows, span=(0.0, 1.0))


def _append(grower: TreeGrower, pending: list[tuple[Tensor, Tensor]]) -> Tree:
    v, g = (torch.cat(parts) for parts in zip(*pending, strict=True))
    return grower.append(_as_codes(v), g.double().numpy(force=True))


def _better(old: Tree | None, new: Tree, pairs: list[tuple[Tensor, Tensor]]) -> Tree:
    """Return the tree that is nearer to the network on all pairs of the epoch, by L[G, T] of equation 5.

    An exact minimiser of a convex problem would never be worse than its predecessor; a greedy tree may be.
    """
    if old is None:
        return new
    v, g = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    codes, log_g = _as_codes(v), g.double().clamp_min(1e-30).log().numpy(force=True)
    losses = [-(tree.predict(codes) * log_g).sum(1).mean() for tree in (old, new)]
    return old if losses[0] < losses[1] else new


def _sparsity(v: Tensor, recipe: Recipe, generator: torch.Generator, n_rows: int) -> Tensor:
    """Return the masked L1 (or squared L2) length of the codes per image; 0 where the variant has none."""
    if recipe.variant not in ("full", "l1", "l2") or recipe.lambda_3 == 0:
        return v.new_zeros(())
    mask = (torch.rand(v.shape[1], generator=generator) < recipe.p).to(v)
    size = (v.square() if recipe.variant == "l2" else v) * mask
    return size.sum() / (len(v) if recipe.l1_norm == "batch" else n_rows)


def _score(
    net: Representation, backbone: Backbone, train_set: TreeExamples, trial: TreeExamples, recipe: Recipe
) -> tuple[float, float, float, float]:
    """Return trial accuracy of network and tree, their agreement, and the share of zero codes."""
    codes, g = codes_of(net, backbone, train_set.x)
    tree = fit_tree(codes, g.double().numpy(force=True), recipe.limits, bits=net.bits)
    unseen, h = codes_of(net, backbone, trial.x)
    predicted, branch = h.argmax(1).cpu(), torch.from_numpy(tree.predict(unseen).argmax(1))
    return (
        float((predicted == trial.y).double().mean()),
        float((branch == trial.y).double().mean()),
        float((branch == predicted).double().mean()),
        float((unseen == 0).mean()),
    )
