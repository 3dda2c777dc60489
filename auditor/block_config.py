"""Settings of Stochastic Block-ADMM (`auditor.training.block_admm`)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from auditor.training.losses import LossName


class BlockAdmmConfig(BaseModel):
    """Settings of Stochastic Block-ADMM."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    loss: LossName = "squared"
    beta: float = Field(default=1.0, gt=0, description="Penalty of every coupling.")
    beta_ratio: float = Field(
        default=1.0, gt=0, description="beta_t / beta_{t+1}: stiffer couplings below keep Z_t from absorbing the error."
    )
    batch: int = Field(default=128, ge=1, description="Samples per mini-batch.")
    optimizer: Literal["adam", "sgd"] = Field(default="adam", description="For the blocks.")
    lr: float = Field(default=1e-3, gt=0, description="Step size of the blocks (eta).")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="Of sgd.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled, as in AdamW.")
    theta_steps: int = Field(default=1, ge=1, description="Optimizer steps per block and visit.")
    warm_up: int = Field(default=0, ge=0, description="Mini-batches over which lr rises linearly.")
    decay_epochs: int | None = Field(default=None, ge=1, description="Cosine decay of lr to zero over so many epochs.")
    z_optimizer: Literal["newton", "gradient", "adam", "sgd"] = "newton"
    z_lr: float = Field(
        default=1.0, gt=0, description="Step on Z (zeta): a factor of the safe step; lr of adam or sgd."
    )
    z_steps: int = Field(default=5, ge=1, description="Steps on every Z_t per visit.")
    start: Literal["forward", "kept"] = Field(default="forward", description="Where Z starts at each visit.")
    carry: bool = Field(default=False, description="Carry what Z_{t-1} moved up through f_t: the residual of t stays.")
    dual_step: float = Field(default=0.1, ge=0, le=1.9, description="Damping of the dual; 0: penalty only, no duals.")
    dual_decay: float = Field(default=0.0, ge=0, le=1, description="Share of U forgotten at each visit; 0: none.")
    dual_clip: float = Field(default=10.0, gt=0, description="Largest |U| in units of the root mean square of Z.")
    penalty_factor: float | None = Field(default=None, gt=0, lt=1, description="c of eq. 4.7: beta grows by 1/c.")
    penalty_bound: float = Field(default=0.5, gt=0, description="First bound on the relative residual.")
    penalty_decay: float = Field(default=0.95, gt=0, le=1, description="The bound shrinks by this every epoch.")
    penalty_max: float = Field(default=100.0, gt=0, description="The last beta never grows beyond this.")
    average: float = Field(default=0.0, ge=0, lt=1, description="Decay of a running average of the weights; 0: none.")
    workers: int = Field(default=1, ge=1, description="Blocks updated at the same time.")
    parallel: Literal["threads", "processes"] = Field(
        default="threads", description="What the workers are; threads use a stream each on a GPU."
    )
    variables: Path | None = Field(default=None, description="Folder for the variables, as mapped files.")
    memory_limit: int | None = Field(
        default=None, ge=1, description="Bytes the variables may take; default: what is free."
    )
    refresh: int = Field(default=8, ge=1, description="Mini-batches between two curvature estimates.")
    seed: int = Field(default=0, ge=0)
