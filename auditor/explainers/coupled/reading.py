"""Reading: the blocks of the images of a fit, harvested wherever a runner reads, and the images themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from auditor.data.source import Batch, Data
from auditor.errors import NumericsError
from auditor.explainers.coupled.blocks import Block, layer_rows, pixel_rows
from auditor.explainers.fitted_images import FittedImages
from auditor.explainers.gallery import CROP
from auditor.explainers.layer_activations import check_varies
from auditor.progress import Progress
from auditor.runners.image_runs import counted, over_batches
from auditor.subject.subject import Subject


@dataclass(frozen=True, eq=False)
class Part:
    """Blocks (rows, examples) of some images, not yet divided by their scales, and the images: small where learned."""

    blocks: list[Tensor]
    examples: Batch


@dataclass(frozen=True, eq=False)
class BlockPass:
    """Runs the network on a batch and returns what is learned from it and what is held out."""

    blocks: tuple[Block, ...]
    layers: tuple[str, ...]
    held: Tensor  # (positions,)

    def __call__(self, subject: Subject, batch: Batch, positions: Tensor) -> tuple[Part, Part]:
        """Return the learned part of the batch, then the held-out one."""
        with torch.no_grad():
            logits, outputs = subject.run(batch.images, list(self.layers))
            rows = rows_of(self.blocks, subject, batch.images, logits, outputs)
        held = self.held[positions]
        learned = batch.take(~held)
        if len(learned):
            learned = replace(learned, images=torch.nn.functional.adaptive_avg_pool2d(learned.images, CROP))
        return Part([r[:, ~held] for r in rows], learned), Part([r[:, held] for r in rows], batch.take(held))


def rows_of(
    blocks: tuple[Block, ...], subject: Subject, x: Tensor, logits: Tensor, outputs: Mapping[str, Tensor]
) -> list[Tensor]:
    """Return the blocks of a batch as (rows, examples), not yet divided by their scales."""
    rows = []
    for b in blocks:
        if b.layer is not None:
            rows.append(layer_rows(outputs[b.layer], subject.layout(b.layer), b.grid))
        elif b.name == "logits":
            rows.append(logits.T.contiguous())
        else:
            rows.append(pixel_rows(x, int(b.name.partition(" ")[2]), b.grid))
    return [r.float().cpu() for r in rows]


def read(
    subject: Subject,
    data: Data,
    blocks: tuple[Block, ...],
    layers: tuple[str, ...],
    held_out_every: int,
    batch_size: int,
    progress: Progress,
) -> tuple[Part, Part, FittedImages]:
    """Return the learned and the held-out part of a source, and which of the images that were read are which."""
    parts = FittedImages.each(len(data), held_out_every)
    learned, held, order = list[Part](), list[Part](), list[Tensor]()
    work = BlockPass(blocks, layers, parts.report)
    report = counted(progress, "reading activations", len(data))
    for batch in over_batches(work, subject, data, batch_size=batch_size, progress=report):
        for parts_of, part in zip((learned, held), batch.given, strict=True):
            if len(part.examples):
                parts_of.append(part)
        order.append(batch.positions)
    fitted = _joined(learned, subject, len(blocks))
    for b, x in zip(blocks, fitted.blocks, strict=True):
        if not bool(torch.isfinite(x).all()):
            raise NumericsError(f"coupled: block {b.name!r} has NaN or infinite values; correct the model first.")
        if b.layer is not None:
            check_varies(b.layer, x)
    return fitted, _joined(held, subject, len(blocks)), parts.rows(torch.cat(order))


def _joined(parts: list[Part], subject: Subject, n_blocks: int) -> Part:
    if not parts:
        nothing = Batch(torch.zeros(0, *subject.input_shape), torch.zeros(0, dtype=torch.int64), [])
        return Part([torch.zeros(0, 0)] * n_blocks, nothing)
    batches = [part.examples for part in parts]
    ids = [name for b in batches for name in b.ids]
    images, labels, source_labels = (
        torch.cat([getattr(b, of) for b in batches]) for of in ("images", "labels", "source_labels")
    )
    blocks = [torch.cat(column, dim=1) for column in zip(*(part.blocks for part in parts), strict=True)]
    return Part(blocks, Batch(images, labels, ids, source_labels))
