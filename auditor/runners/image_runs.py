"""Image runs: all images of a source cut into runs of neighbours, each read and worked on by whichever worker is free.

The cut follows from the source and the sample alone, never from the workers, so every batch is the same images whoever
reads it. A source that can be read from any place (`Data.reads_runs`) is read by the workers; else the images are read
here, once, in their order, and travel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
from torch import Tensor

from auditor.data.source import Batch, Data
from auditor.progress import Progress
from auditor.runners.runner import Counted, Result, current
from auditor.subject.subject import Subject

RUN = 256  # images of a run, more where shards of the source are longer
MOST_BYTES = 32_000_000  # of images that travel at once

Given = TypeVar("Given", covariant=True)


class BatchWork(Protocol[Given]):
    """What is done with a batch; ``positions`` say where in the sample its images are."""

    def __call__(self, subject: Subject, batch: Batch, positions: Tensor) -> Given:
        """Return what the batch gives."""


@dataclass(frozen=True)
class ImageRun:
    """Positions ``start`` to ``stop`` of the sample; ``batches`` are its images where they were read already."""

    start: int
    stop: int
    batches: tuple[tuple[Batch, Tensor], ...] = ()  # with the positions of the images


@dataclass(frozen=True)
class OfBatch(Generic[Result]):
    """What one batch gave."""

    n: int
    positions: Tensor
    given: Result


@dataclass(frozen=True)
class EndOfRun(Counted):
    """What was learned of the source while a run was read."""

    skipped: Mapping[str, str] = field(default_factory=dict)
    leaves: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunWork(Generic[Result]):
    """Reads a run, where it was not read already, and works on its batches."""

    work: BatchWork[Result]
    subject: Subject
    data: Data | None
    batch_size: int

    def __call__(self, run: ImageRun) -> Iterator[OfBatch[Result] | EndOfRun]:
        """Yield what the batches of the run give, then what there is to say of the run."""
        began, n = time.perf_counter(), 0
        part = None if self.data is None else self.data.run(run.start, run.stop)
        before = 0 if part is None else part.read_bytes
        for batch, positions in run.batches if part is None else read_run(part, run, self.subject, self.batch_size):
            n += len(batch)
            yield OfBatch(len(batch), positions, self.work(self.subject, batch, positions))
        seconds = time.perf_counter() - began
        if part is None:
            yield EndOfRun(n, 0, seconds)
            return
        yield EndOfRun(n, part.read_bytes - before, seconds, dict(part.skipped), part.leaves)


def read_run(part: Data, run: ImageRun, subject: Subject, batch_size: int) -> Iterator[tuple[Batch, Tensor]]:
    """Yield the batches of a run with the positions of their images in the sample; ``part`` is ``data.run(…)``."""
    at = 0
    for batch in part.batches(subject, batch_size):
        positions = part.positions(batch.ids, at)
        at = int(positions[-1]) + 1
        yield batch, positions + run.start


def over_batches(
    work: BatchWork[Result],
    subject: Subject,
    data: Data,
    *,
    batch_size: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Iterator[OfBatch[Result]]:
    """Yield, in the order of the images, what ``work`` makes of every batch.

    ``progress`` hears how many images are done. A source without one readable image is an error.
    """
    runner, n_read = current(), 0
    data.announce(subject)
    if data.reads_runs:
        shared, runs = data, cut(data)
    else:
        shared, runs = None, read_here(data, subject, batch_size, RUN if runner.is_remote else 1)
    for part in runner.stream(RunWork(work, subject, shared, batch_size), runs):
        if isinstance(part, EndOfRun):
            data.add_skipped(part.skipped)
            data.add_leaves(part.leaves)
            continue
        n_read += part.n
        progress(n_read)
        yield part
    data.check_any_read(n_read)
    data.warn_skipped()


def counted(progress: Progress, stage: str, total: int) -> Callable[[int], None]:
    """Return what shows how many images of a stage are done."""
    return lambda done: progress(stage, done, total)


def cut(data: Data) -> Iterator[ImageRun]:
    """Cut the sample at shards of the source, so that a shard is read by one worker and its digest made on the way."""
    edges = np.searchsorted(data.sample.rows, [shard.stop for shard in data.shards]).tolist()
    start = 0
    for edge in [*edges, len(data)]:
        if edge - start >= RUN or (edge == len(data) and edge > start):
            yield ImageRun(start, edge)
            start = edge


def read_here(data: Data, subject: Subject, batch_size: int, at_once: int) -> Iterator[ImageRun]:
    """Read the source in this process, in full batches, and yield about so many images at once."""
    held: list[tuple[Batch, Tensor]] = []
    start = at = n_bytes = 0
    for batch in data.batches(subject, batch_size):
        positions = data.positions(batch.ids, at)
        held.append((batch, positions))
        at = int(positions[-1]) + 1
        n_bytes += batch.images.numel() * batch.images.element_size()
        if at - start >= at_once or n_bytes >= MOST_BYTES:
            yield ImageRun(start, at, tuple(held))
            held, start, n_bytes = [], at, 0
    if held:
        yield ImageRun(start, at, tuple(held))
