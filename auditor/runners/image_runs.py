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
from auditor.runners.runner import Result, current
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


@dataclass
class RunResult(Generic[Result]):
    """What the batches of a run gave, with the number of images of each, and what was learned of the source."""

    given: list[tuple[int, Result]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    leaves: Mapping[int, str] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class RunWork(Generic[Result]):
    """Reads a run, where it was not read already, and works on its batches."""

    work: BatchWork[Result]
    subject: Subject
    data: Data | None
    batch_size: int

    def __call__(self, run: ImageRun) -> RunResult[Result]:
        """Return what the batches of the run give."""
        result: RunResult[Result] = RunResult()
        began = time.perf_counter()
        for batch, positions in run.batches if self.data is None else self._read(self.data, run, result):
            result.given.append((len(batch), self.work(self.subject, batch, positions)))
        result.seconds = time.perf_counter() - began
        return result

    def _read(self, data: Data, run: ImageRun, result: RunResult[Result]) -> Iterator[tuple[Batch, Tensor]]:
        part = data.run(run.start, run.stop)
        skipped, leaves = set(part.skipped), set(part.leaves)
        at = run.start
        for batch in part.batches(self.subject, self.batch_size):
            positions = data.positions(batch.ids, at)
            at = int(positions[-1]) + 1
            yield batch, positions
        result.skipped = {name: why for name, why in part.skipped.items() if name not in skipped}
        result.leaves = {index: leaf for index, leaf in part.leaves.items() if index not in leaves}


def over_batches(
    work: BatchWork[Result],
    subject: Subject,
    data: Data,
    *,
    batch_size: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Iterator[tuple[int, Result]]:
    """Yield, in the order of the images, the number of images of every batch and what ``work`` makes of it.

    ``progress`` hears how many images are done. A source without one readable image is an error.
    """
    runner, n_read = current(), 0
    data.announce(subject)
    if data.reads_runs:
        shared, runs = data, _cut(data)
    else:
        shared, runs = None, _read_here(data, subject, batch_size, RUN if runner.is_remote else 1)
    for result in runner.map(RunWork(work, subject, shared, batch_size), runs):
        data.add_skipped(result.skipped)
        data.add_leaves(result.leaves)
        for n, given in result.given:
            n_read += n
            progress(n_read)
            yield n, given
    data.check_any_read(n_read)
    data.warn_skipped()


def counted(progress: Progress, stage: str, total: int) -> Callable[[int], None]:
    """Return what shows how many images of a stage are done."""
    return lambda done: progress(stage, done, total)


def _cut(data: Data) -> Iterator[ImageRun]:
    """Cut the sample at shards of the source, so that a shard is read by one worker and its digest made on the way."""
    edges = np.searchsorted(data.sample.rows, [shard.stop for shard in data.shards]).tolist()
    start = 0
    for edge in [*edges, len(data)]:
        if edge - start >= RUN or (edge == len(data) and edge > start):
            yield ImageRun(start, edge)
            start = edge


def _read_here(data: Data, subject: Subject, batch_size: int, at_once: int) -> Iterator[ImageRun]:
    """Read the source in this process, in full batches, and give about so many images at once."""
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
