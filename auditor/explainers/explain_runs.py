"""Explain runs: every image of a source by the explainers of a model, into a folder of Parquet files.

One file per run of images (`auditor.runners.image_runs.cut`), written by whichever worker explained the run. A file is
there as a whole or not at all, and says in its metadata what it was made of, so the same command goes on where an
interrupted one stopped; ``explanations.json`` says whose the folder is, and when it is finished what is in it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from auditor.data.output_folder import OutputFolder, open_output
from auditor.data.source import Batch, Data
from auditor.errors import OptionError
from auditor.explainers.answer import Answer, ExplainedModel, Question, answer, raised
from auditor.explainers.answer_options import AnswerOptions
from auditor.explainers.explanation_table import SCHEMA_VERSION, read_about, row_of, table_of
from auditor.explainers.forward_pass import TorchPass
from auditor.progress import Progress, silent
from auditor.runners.image_runs import MOST_BYTES, RUN, EndOfRun, ImageRun, cut, read_run
from auditor.runners.runner import current

log = logging.getLogger(__name__)

ABOUT = "_explanations.json"  # readers of Parquet leave out names that begin with an underscore
PART = re.compile(r"^part-(\d{9})-(\d{9})\.parquet$")
BATCH = 64
MOST_NUMBERS = 2_500_000  # of the images of one pass
BROKEN_SHOWN = 1000  # names in the summary


class LayoutPass(TorchPass):
    """The pass in the layout that a CPU convolves fastest."""

    def run(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return logits and activations from one pass."""
        return super().run(self.subject.in_fast_layout(x))


@dataclass(frozen=True)
class PartWritten(EndOfRun):
    """A file that was written."""

    name: str = ""


@dataclass(frozen=True)
class ExplainRun:
    """Explains the images of a run and writes its file."""

    model: ExplainedModel
    options: AnswerOptions
    data: Data | None
    label_names: tuple[str, ...] | None
    out: OutputFolder
    about: Mapping[str, Any]
    batch_size: int

    def __call__(self, run: MarkedRun) -> Iterator[PartWritten]:
        """Yield one word of the file."""
        began, rows = time.perf_counter(), list[dict[str, Any]]()
        part = None if self.data is None else self.data.run(run.start, run.stop)
        before = 0 if part is None else part.read_bytes
        subject = self.model.subject
        for batch, positions in run.batches if part is None else read_run(part, run, subject, self.batch_size):
            rows += self._rows(batch, positions)
        skipped, leaves = ({}, {}) if part is None else (dict(part.skipped), part.leaves)
        learned = {"skipped": skipped, "leaves": {str(k): leaf for k, leaf in leaves.items()}}
        about = {**self.about, "run": {"start": run.start, "stop": run.stop, "mark": run.mark}, "read": learned}
        name = part_name(run.start, run.stop)
        self.out.write(name, _parquet(table_of(rows, about)))
        n_bytes = 0 if part is None else part.read_bytes - before
        yield PartWritten(len(rows), n_bytes, time.perf_counter() - began, skipped, leaves, name)

    def _rows(self, batch: Batch, positions: Tensor) -> list[dict[str, Any]]:
        questions = [Question.of(self.model, x, self.options) for x in batch.images]
        answers: Sequence[Answer] = [raised(result) for result in answer(self.model, questions)]
        return [
            row_of(a, batch.ids[i], int(positions[i]), self._label(int(batch.source_labels[i]), int(batch.labels[i])))
            for i, a in enumerate(answers)
        ]

    def _label(self, of_source: int, of_model: int) -> tuple[int, str] | None:
        if of_source < 0:
            return None
        names = self.label_names or self.model.subject.class_names
        return of_model, names[of_source] if of_source < len(names) else str(of_source)


@dataclass(frozen=True)
class MarkedRun(ImageRun):
    """A run with a text that changes when its files do; "" where none is known."""

    mark: str = ""


@dataclass
class Explained:
    """What a folder of explanations holds."""

    out: str
    about: dict[str, Any]
    images: int = 0
    parts: int = 0
    parts_before: int = 0  # that an earlier command had finished
    skipped: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return what the folder's own file says."""
        broken = dict(list(self.skipped.items())[:BROKEN_SHOWN])
        return {
            **self.about,
            "schema_version": SCHEMA_VERSION,
            "images": self.images,
            "parts": self.parts,
            "broken": {"images": len(self.skipped), "names": broken},
        }


def explain_all(
    model: ExplainedModel, data: Data, out: str, options: AnswerOptions, *, progress: Progress = silent
) -> Explained:
    """Explain every image of ``data`` by the explainers of a model, into Parquet files below ``out``.

    Runs on the current runner. Files that an earlier call with the same model, explainers, options and data has
    finished stay; those whose images changed meanwhile are made again.
    """
    folder, subject = open_output(out), model.subject
    model = replace(model, forward=LayoutPass(subject, model.explainers.values()))
    Question.of(model, subject.blank(1)[0], options)  # unknown explainers and targets are an error now
    data.announce(subject)
    return _Job(model, data, folder, _about(model, data, options), options, progress).run(out)


@dataclass
class _Job:
    model: ExplainedModel
    data: Data
    folder: OutputFolder
    about: dict[str, Any]
    options: AnswerOptions
    progress: Progress

    def run(self, out: str) -> Explained:
        """Make the files that are missing."""
        files = self.folder.files()
        self._claim(files, out)
        result = Explained(out, dict(self.about))
        runs = [MarkedRun(run.start, run.stop, (), self.data.mark(run.start, run.stop)) for run in self._runs()]
        missing = []
        for run in runs:
            finished = self._finished(files, run)
            if finished is None:
                missing.append(run)
            else:
                self._count(result, finished)
                result.parts_before += 1
        self._explain(missing, result)
        self.data.check_any_read(result.images)
        self.data.warn_skipped()
        result.about["data"] = {**self.about["data"], "digest": self.data.digest}
        self.folder.write(ABOUT, _json({**result.to_json(), "finished": True}))
        return result

    def _runs(self) -> Iterator[ImageRun]:
        if self.data.reads_runs:
            return cut(self.data)
        n = max(16, min(RUN, MOST_BYTES // (4 * math.prod(self.model.subject.input_shape))))
        edges = [*range(0, len(self.data), n), len(self.data)]
        return (ImageRun(a, b) for a, b in itertools.pairwise(edges))

    def _explain(self, missing: list[MarkedRun], result: Explained) -> None:
        if not missing:
            return
        data, runner = self.data, current()
        batch_size = min(BATCH, max(8, MOST_NUMBERS // math.prod(self.model.subject.input_shape)))
        shared = data if data.reads_runs else None
        work = ExplainRun(self.model, self.options, shared, data.class_names, self.folder, self.about, batch_size)
        runs = iter(missing) if data.reads_runs else self._read(missing, batch_size)
        for written in runner.stream(work, runs):
            self._count(result, written)
            self.progress("explaining", min(len(data), result.images + len(result.skipped)), len(data))

    def _read(self, missing: list[MarkedRun], batch_size: int) -> Iterator[MarkedRun]:
        """Read the images of runs in this process, in their order; those of finished runs are read and left."""
        waiting, held, at = deque(missing), list[tuple[Batch, Tensor]](), 0
        for batch in self.data.batches(self.model.subject, batch_size):
            positions = self.data.positions(batch.ids, at)
            at = int(positions[-1]) + 1
            while waiting and waiting[0].start < at:
                inside = (positions >= waiting[0].start) & (positions < waiting[0].stop)
                if bool(inside.any()):
                    held.append((batch.take(inside), positions[inside]))
                if waiting[0].stop > at:
                    break
                yield replace(waiting.popleft(), batches=tuple(held))
                held = []
        for run in waiting:
            yield replace(run, batches=tuple(held))
            held = []

    def _count(self, result: Explained, part: EndOfRun) -> None:
        result.images += part.images
        result.parts += 1
        result.skipped.update(part.skipped)
        self.data.add_skipped(part.skipped)
        self.data.add_leaves(part.leaves)

    def _claim(self, files: Mapping[str, Any], out: str) -> None:
        """Write whose the folder is, or raise when it is another's."""
        if ABOUT in files:
            try:
                before = json.loads(self.folder.read(files[ABOUT]))
            except ValueError:
                before = {}
            mine = json.loads(_json(self.about))
            other = [key for key in mine if before.get(key, {}) != mine[key] and key != "data"]
            theirs = {k: v for k, v in before.get("data", {}).items() if k != "digest"}
            other += [] if theirs == mine["data"] else ["data"]
            if other:
                raise OptionError(
                    f"output {out}: it holds explanations of another {' and another '.join(other)} "
                    f"({_difference(before, mine, other[0])}); give another folder, or remove it."
                )
            return
        strangers = [name for name in files if name.endswith(".parquet")]
        if strangers:
            raise OptionError(
                f"output {out}: it holds {strangers[0]}, which is not of auditor explain-all; give an empty folder."
            )
        self.folder.write(ABOUT, _json({**self.about, "finished": False}))

    def _finished(self, files: Mapping[str, Any], run: MarkedRun) -> EndOfRun | None:
        """Return what a finished file says of its run; None where there is none, or its images may have changed."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        file = files.get(part_name(run.start, run.stop))
        if file is None or not run.mark:
            return None
        try:
            with self.folder.open(file) as stream:
                footer = pq.ParquetFile(stream, pre_buffer=False).metadata
        except (pa.ArrowException, OSError):
            return None
        about = read_about(footer.metadata)
        if about.get("run") != {"start": run.start, "stop": run.stop, "mark": run.mark}:
            return None
        if any(about.get(key) != value for key, value in json.loads(_json(self.about)).items()):
            return None
        read = about.get("read", {})
        leaves = {int(k): str(leaf) for k, leaf in read.get("leaves", {}).items()}
        return EndOfRun(footer.num_rows, 0, 0.0, dict(read.get("skipped", {})), leaves)


def part_name(start: int, stop: int) -> str:
    """Return the name of the file of a run.

    >>> part_name(0, 256)
    'part-000000000-000000256.parquet'
    """
    return f"part-{start:09d}-{stop:09d}.parquet"


def _about(model: ExplainedModel, data: Data, options: AnswerOptions) -> dict[str, Any]:
    rows = hashlib.sha256(data.sample.rows.astype("<i8").tobytes()).hexdigest()
    subject = model.subject
    return {
        "model": {"name": subject.name, "version": subject.version, "digest": subject.digest},
        "explainers": {name: explainer.digest_ for name, explainer in model.explainers.items()},
        "options": options.model_dump(mode="json"),
        "data": {"spec": data.spec, "images": len(data), "rows": rows},
    }


def _difference(before: Mapping[str, Any], mine: Mapping[str, Any], key: str) -> str:
    def short(value: Any) -> str:
        return json.dumps(value, sort_keys=True)[:80]

    old, new = before.get(key, {}), mine[key]
    names = [name for name in new if not isinstance(old, dict) or old.get(name) != new[name]]
    name = names[0] if names else key
    return f"{name}: {short(old.get(name) if isinstance(old, dict) else old)} there, {short(new.get(name))} here"


def _json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()


def _parquet(table: Any) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    content: bytes = sink.getvalue().to_pybytes()
    return content
