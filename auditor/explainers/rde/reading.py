"""Reading: statistics of the images of a fit, gathered wherever a runner reads, and the images that calibrate."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from auditor.data.source import Batch, Data
from auditor.errors import DataError
from auditor.explainers.fitted_images import FittedImages
from auditor.explainers.rde.search import RdeConfig
from auditor.perturbation.replacement import Statistics
from auditor.progress import Progress
from auditor.runners.image_runs import counted, over_batches
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class StatisticsPass:
    """Gathers the statistics of a batch; what is drawn follows from the seed and the place of the batch."""

    learn: Tensor  # (positions,)
    choose: Tensor
    rank: int
    keep: int
    seed: int

    def __call__(self, subject: Subject, batch: Batch, positions: Tensor) -> tuple[Statistics | None, Tensor]:
        """Return the statistics of the learned images of a batch, and its images to calibrate on."""
        learned = batch.images[self.learn[positions]]
        random = torch.Generator().manual_seed((self.seed << 32) + int(positions[0]))
        statistics = Statistics.of(learned, random, self.rank, self.keep) if len(learned) else None
        return statistics, batch.images[self.choose[positions]].clone()


def gather(subject: Subject, data: Data, cfg: RdeConfig, progress: Progress) -> tuple[Statistics, Tensor, FittedImages]:
    """Return the statistics of the data, some images held out of them, and which of those read are which."""
    parts = FittedImages.each(len(data), cfg.held_out_every)
    choose = data.spaced(cfg.calibration_images, cfg.seed, parts.report)
    parts = FittedImages(parts.learn, choose, parts.report & ~choose)
    is_wanted = cfg.obfuscation == "reference" or not bool(choose.any())  # else images would travel for nothing
    keep = cfg.reference_size if is_wanted else 0
    work = StatisticsPass(parts.learn, parts.choose, cfg.rank, keep, cfg.seed)
    statistics: Statistics | None = None
    held, order = list[Tensor](), list[Tensor]()
    report = counted(progress, "gathering statistics", len(data))
    for part in over_batches(work, subject, data, batch_size=cfg.batch_size, progress=report):
        shard, chosen = part.given
        held.extend(chosen)
        order.append(part.positions)
        if shard is not None:
            statistics = shard if statistics is None else statistics.merge(shard)
    n_read = sum(map(len, order))
    if statistics is None or statistics.count < 2:
        raise DataError(f"rde: wanted at least 2 images for the noise statistics, got {n_read}; give more data.")
    if not held:
        log.warning("rde: only %d images, none can be held out; the limit is calibrated on those of the fit", n_read)
        held = list(statistics.sample[: cfg.calibration_images])
    return statistics, torch.stack(held), parts.rows(torch.cat(order))
