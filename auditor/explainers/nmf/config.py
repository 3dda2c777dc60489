"""Options of kind ``nmf``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from auditor.explainers.base import HoldOutConfig


class NmfConfig(HoldOutConfig):
    """Options of kind ``nmf``."""

    rank: int | Literal["auto"] | None = Field(
        default=None,
        description="Number of concepts; 'auto' chooses by the error on images set aside; default 10 or what fits.",
    )
    bases: Literal["auto", "shared", "class"] = Field(
        default="auto",
        description="One shared basis, one per predicted class, or (auto, with rank left open) one per class where the "
        "shared one does not stand in for the model or only restates its classes.",
    )
    class_weights: bool = Field(
        default=True, description="Channels count by how much the class depends on them, in a basis per class."
    )
    class_images: int = Field(default=100, ge=1, description="Images of a class at most that its basis is made of.")
    borrow: int = Field(
        default=0,
        ge=0,
        le=100,
        description="Images of a class below which it borrows from its nearest ones, and is kept apart less well.",
    )
    init: Literal["nndsvda", "random"] = Field(default="nndsvda", description="Start of the factorization.")
    max_iter: int = Field(default=300, ge=1, description="Sweeps at most.")
    tol: float = Field(default=1e-4, gt=0, description="Stop when ten sweeps gain less than this share.")
    max_positions: int = Field(default=40_000, ge=16, description="Positions kept in memory for the factorization.")
    epochs: int = Field(
        default=0, ge=0, description="Passes over all positions that refine the basis beyond those kept in memory."
    )
    held_out_every: int = Field(
        default=5,
        ge=2,
        description="Each n-th image is held out for the metrics; every second of these chooses rank=auto.",
    )
    max_eval: int = Field(default=400, ge=1, description="Held-out images at most on which metrics are measured.")
    refits: int = Field(default=2, ge=1, description="Re-fits from other starts, for the basis stability.")
    top_images: int = Field(default=8, ge=1, le=64, description="Images kept per concept, as small crops.")

    def with_another_start(self, k: int) -> NmfConfig:
        """Return the options of the k-th re-fit: another seed, and a random start."""
        return self.model_copy(update={"seed": self.seed + k, "init": "random"})

    @property
    def n_refits(self) -> int:
        """Re-fits behind the fit's ``basis_stability``."""
        return self.refits
