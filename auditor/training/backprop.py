"""Back-propagation through the chained blocks by SGD or Adam: what every ADMM variant is measured against."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from auditor.training.cycle import Cycle, Snapshot, Watch, check_blocks, check_labels, forward
from auditor.training.losses import LossName, loss_of


class BackpropConfig(BaseModel):
    """Settings of plain training."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    loss: LossName = "squared"
    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: float = Field(default=0.005, gt=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    batch: int = Field(default=128, ge=1)
    decay_epochs: int | None = Field(default=None, ge=1, description="Cosine decay of lr to zero over so many epochs.")
    seed: int = Field(default=0, ge=0)


def backprop(
    blocks: Sequence[nn.Module], x: Tensor, y: Tensor, config: BackpropConfig | None = None
) -> Iterator[Cycle]:
    """Yield a cycle per epoch; the blocks are changed in place."""
    cfg = config or BackpropConfig()
    shapes = check_blocks(blocks, x, cfg.optimizer)
    check_labels(y, len(x), None if cfg.loss == "triplet" else shapes[-1][0], cfg.optimizer)
    loss, last_good, watch = loss_of(cfg.loss), Snapshot(blocks), Watch(cfg.optimizer)
    parameters = [p for block in blocks for p in block.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(parameters, lr=cfg.lr, weight_decay=cfg.weight_decay)
        if cfg.optimizer == "adam"
        else torch.optim.SGD(parameters, lr=cfg.lr, momentum=cfg.momentum, weight_decay=cfg.weight_decay)
    )
    generator = torch.Generator().manual_seed(cfg.seed)
    n_batches = max(1, round(len(x) / cfg.batch))
    for epoch in itertools.count(1):
        for block in blocks:
            block.train()
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        order = torch.randperm(len(x), generator=generator).to(x.device)
        for i, rows in enumerate(torch.tensor_split(order, n_batches)):
            if cfg.decay_epochs is not None:
                done = min(1.0, ((epoch - 1) * n_batches + i) / (cfg.decay_epochs * n_batches))
                for group in optimizer.param_groups:
                    group["lr"] = cfg.lr * 0.5 * (1 + math.cos(math.pi * done))
            value = loss.value(forward(blocks, x[rows]), y[rows])
            optimizer.zero_grad(set_to_none=True)
            (value / len(rows)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += value.detach()
        for block in blocks:
            block.eval()
        mean = float(total) / len(x)
        with last_good.restored_on_error():
            watch.judge(epoch, mean, ())
        last_good.take()
        yield Cycle(epoch, mean)
