"""Options of kind ``tree``, and the recipe of training they make."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from auditor.explainers.base import ExplainerConfig
from auditor.explainers.tree.intersection_training import Recipe, Variant
from auditor.kernels.trees.tree import TreeLimits


class TreeConfig(ExplainerConfig):
    """Options of kind ``tree``."""

    n_features: int = Field(default=128, ge=1, le=4096, description="Features of the quantised representation.")
    bits: int = Field(default=4, ge=2, le=8, description="Bits per feature.")
    depth: int | None = Field(default=None, ge=1, le=24, description="Depth of the tree; default ceil(log2 classes)+4.")
    leaf_rows: int = Field(default=2, ge=1, description="Images a leaf must hold at least.")
    balance: float = Field(default=0.5, ge=0, description="Preference of even splits, so that depth suffices; 0: CART.")
    variant: Variant = Field(default="full", description="full, tree, l1, l2, quantised or soft_tree.")
    lambda_1: float = Field(default=2.0, ge=0, description="Weight of the labels.")
    lambda_2: float = Field(default=1.0, ge=0, description="Weight of the tree.")
    lambda_3: float = Field(default=1e-3, ge=0, description="Weight of sparsity.")
    p: float = Field(default=0.5, ge=0, le=1, description="Share of features the sparsity sees in a batch.")
    l1_norm: Literal["batch", "dataset"] = Field(default="batch", description="What the sparsity is averaged over.")
    epochs: int = Field(default=20, ge=1, description="Epochs at most.")
    min_epochs: int = Field(default=5, ge=0, description="Epochs before a drop of accuracy counts.")
    stop_after_drops: int = Field(default=2, ge=0, description="Stop at this drop of held-out accuracy; 0: never.")
    train_batch: int = Field(default=64, ge=2, description="Images per training step.")
    lr: float = Field(default=2e-3, gt=0, description="Learning rate.")
    optimiser: Literal["adam", "sgd"] = Field(default="adam", description="The paper used sgd.")
    hidden: int = Field(default=64, ge=1, description="Width of the two-layer network.")
    refit_every: int | None = Field(default=None, ge=1, description="Batches between tree fits; default: epoch / 8.")
    per_feature: bool = Field(default=False, description="One range per feature instead of one for all.")
    percentile: float = Field(
        default=100.0, gt=50, le=100, description="Range of a batch; below 100 cuts outliers off."
    )
    fine_tune: bool = Field(default=False, description="Train a copy of the backbone, too.")
    pooling: Literal["auto", "flatten", "mean"] = Field(default="auto", description="How positions become inputs.")
    held_out_every: int = Field(default=5, ge=2, description="Each n-th image is held out for the metrics.")
    max_images: int = Field(default=60_000, ge=4, description="Images read at most.")
    prototypes: int = Field(default=3, ge=1, le=16, description="Images kept per leaf.")
    alternatives: int = Field(default=3, ge=0, description="Nearest leaves of another class that are named.")

    def recipe(self, limits: TreeLimits) -> Recipe:
        """Return the numbers of algorithm 1 for a tree of these limits."""
        own = Recipe.__dataclass_fields__.keys() & type(self).model_fields.keys()
        return Recipe(limits=limits, batch=self.train_batch, **{name: getattr(self, name) for name in own})
