"""Shards: every position of the images of a fit, batch by batch, as often as a streaming factorization asks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from auditor.data.source import Data
from auditor.explainers.fitted_images import FittedImages
from auditor.explainers.layer_activations import as_columns, harvest
from auditor.kernels.factorization.streaming import factorize_stream
from auditor.progress import Progress
from auditor.subject.layers import Layout
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)


@dataclass
class Shards:
    """Columns of one layer, a batch of images at a time; every pass runs the network again."""

    subject: Subject
    data: Data
    layer: str
    layout: Layout
    parts: FittedImages
    batch_size: int
    epochs: int
    progress: Progress
    epoch: int = 0

    def __call__(self) -> Iterator[Tensor]:
        """Yield the columns (channels, positions) of every batch that holds images to learn from."""

        def report(_stage: str, done: int, total: int | None) -> None:
            self.progress(f"pass {self.epoch + 1} of {self.epochs + 1} over all positions", done, total)

        work = harvest(
            self.subject, self.data, self.layer, batch_size=self.batch_size, progress=report, with_images=False
        )
        for _, rows, _, z in work:
            learn = self.parts.learn[rows]
            if bool(learn.any()):
                yield as_columns(self.layout, z[learn]).float().contiguous()

    def refine(self, W: Tensor, *, signed: bool, tol: float) -> Any:
        """Return the factorization that ``epochs`` passes over all columns make of the basis W."""

        def on_step(t: int, _objective: float) -> None:
            self.epoch = t

        fit = factorize_stream(self, W.shape[1], W0=W, signed=signed, max_iter=self.epochs, tol=tol, on_step=on_step)
        log.info(
            "nmf: %d passes over %d positions: relative error %.4f (%s)",
            fit.n_iter + 1, fit.positions, fit.relative_error, fit.status.value,
        )  # fmt: skip
        return fit
