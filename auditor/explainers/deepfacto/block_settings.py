"""Settings of a deepfacto fit whose blocks above the layer stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from auditor.training.block_admm import BlockAdmmConfig


@dataclass(frozen=True, slots=True)
class BlockSettings:
    """What the training takes; see `DeepFactoConfig`."""

    epochs: int = 6
    patience: int = 3
    warm_passes: int = 20
    batch: int = 32
    lr: float = 3e-4
    lr_above: float = 1e-3
    beta: float = 1.0
    gamma: float = 1.0
    reconstruction: float = 0.003
    dual_step: float = 0.1
    inner_steps: int = 3
    basis_steps: int = 1
    start: Literal["forward", "kept"] = "forward"
    fidelity: float = 0.5
    squared: bool = False
    seed: int = 0

    def block_admm(self) -> BlockAdmmConfig:
        """Return the settings of Block-ADMM for the blocks below, factorization and above."""
        return BlockAdmmConfig(
            batch=self.batch, lr=self.lr, lr_factors=(1.0, 1.0, self.lr_above / self.lr / 4), beta=self.beta,
            gamma=self.gamma, reconstruction=self.reconstruction, dual_step=self.dual_step, z_steps=self.inner_steps,
            basis_steps=self.basis_steps, start=self.start, decay_epochs=self.epochs, seed=self.seed,
        )  # fmt: skip
