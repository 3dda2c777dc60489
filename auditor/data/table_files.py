"""Table files: Parquet, whose shards are row groups, and Arrow, whose shards are record batches, with an image column.

Nothing but the image column is read for images, and the label column once. An Arrow stream says nowhere how many rows
it has: behind an address it is read once for that and for its digests, and what came of it is kept.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from auditor.data import merkle
from auditor.data.columns import Columns, LabelColumn, choose_columns, contents
from auditor.data.folder_images import CHANGED
from auditor.data.item_labels import ItemLabels
from auditor.data.read_cache import ReadCache
from auditor.data.shards import Content, Layout, sha256_of
from auditor.data.source import Shard
from auditor.data.store import READERS, Store, Stored, short
from auditor.errors import DataError

AT_ONCE = 32  # rows of a batch of images


class TableFiles(Layout):
    """Files of rows. Row n of a file is called ``file#n``."""

    def __init__(self, store: Store, files: Sequence[Stored], image: str | None, label: str | None) -> None:
        self.store, self.files = store, tuple(files)
        with ThreadPoolExecutor(READERS if store.is_far else 1, thread_name_prefix="auditor-head") as pool:
            schemas = list(pool.map(self._checked_schema, range(len(self.files))))
        self.columns: Columns = choose_columns(schemas[0], image, label, store.spec)
        for file, schema in zip(self.files[1:], schemas[1:], strict=True):
            missing = [name for name in self.columns.all if name not in schema.names]
            if missing:
                raise DataError(
                    f"data {store.spec}: {file.name} has no column {missing[0]!r} as {self.files[0].name} has; its "
                    f"columns: {', '.join(schema.names)}."
                )
        counts, self._labels = self._read_index()
        self._runs: list[tuple[int, int]] = [(f, k) for f, runs in enumerate(counts) for k in range(len(runs))]
        edges = np.cumsum([0, *(n for runs in counts for n in runs)])
        self._shards = tuple(
            Shard(i, f"{self.files[f].name}, part {k + 1}", int(edges[i]), int(edges[i + 1]))
            for i, (f, k) in enumerate(self._runs)
        )
        self._begins = np.cumsum([0, *(sum(runs) for runs in counts)])
        if not len(self._labels.numbers):
            raise DataError(f"data {store.spec}: its files have no rows; give at least one image.")

    @abstractmethod
    def _schema(self, number: int) -> Any: ...

    @abstractmethod
    def _read_index(self) -> tuple[list[list[int]], ItemLabels]:
        """Return the rows of each part of each file, and all labels."""

    @abstractmethod
    def _batches(self, number: int, part: int) -> Iterator[Any]:
        """Yield record batches of the image column of a part of a file."""

    def _checked_schema(self, number: int) -> Any:
        try:
            return self._schema(number)
        except (pa.ArrowException, OSError, MemoryError, ValueError) as error:
            raise self._damaged(number, error) from error

    def _damaged(self, number: int, error: BaseException) -> DataError:
        if isinstance(error, DataError):
            return error
        cause = error.__cause__ or error.__context__
        if isinstance(cause, DataError):  # a reading that failed inside pyarrow
            return cause
        return DataError(f"data {self.store.spec}: {self.files[number].name} is damaged ({short(error)}).")

    @property
    def shards(self) -> tuple[Shard, ...]:
        """All row groups or record batches."""
        return self._shards

    @property
    def labels(self) -> ItemLabels:
        """The labels of all rows."""
        return self._labels

    def name(self, row: int) -> str:
        """Return ``file#n``."""
        number = int(np.searchsorted(self._begins, row, side="right")) - 1
        return f"{self.files[number].name}#{row - int(self._begins[number])}"

    @cached_property
    def _number_of(self) -> dict[str, int]:
        return {file.name: i for i, file in enumerate(self.files)}

    def row(self, name: str) -> int | None:
        """Return the row of ``file#n``."""
        file, _, n = name.rpartition("#")
        number = self._number_of.get(file)
        if number is None or not n.isdecimal() or int(n) >= self._begins[number + 1] - self._begins[number]:
            return None
        return int(self._begins[number]) + int(n)

    def read(self, shard: Shard, rows: Sequence[int]) -> Iterator[Content]:
        """Yield the images of rows."""
        number, part = self._runs[shard.index]
        wanted, at = [row - shard.start for row in rows], 0
        try:
            for batch in self._batches(number, part):
                here = [row - at for row in wanted if at <= row < at + batch.num_rows]
                yield from contents(batch.column(0), here)
                at += batch.num_rows
                if wanted and at > wanted[-1]:
                    return
        except (pa.ArrowException, OSError, MemoryError) as error:
            raise self._damaged(number, error) from error

    def mark(self, shard: Shard) -> str:
        """Return the mark of the file, its size and the columns; "" where it has none."""
        number, part = self._runs[shard.index]
        return self._file_mark(number) and f"{self._file_mark(number)} {part}"

    def _file_mark(self, number: int) -> str:
        file = self.files[number]
        return file.mark and f"{file.name} {file.size} {file.mark} {self.columns}"

    def check_unchanged(self) -> None:
        """Ask for each file again."""
        for file in self.files:
            now = self.store.stat(file.name)
            if now.size != file.size or (file.mark and now.mark and now.mark != file.mark):
                raise DataError(f"data {self.store.spec}: {file.name} {CHANGED}")


class ParquetFiles(TableFiles):
    """Parquet files."""

    def _schema(self, number: int) -> Any:
        with self.store.open(self.files[number]) as stream:
            file = pq.ParquetFile(stream, pre_buffer=False)
            self._footers = {**getattr(self, "_footers", {}), number: file.metadata}
            return file.schema_arrow

    def _read_index(self) -> tuple[list[list[int]], ItemLabels]:
        labels = LabelColumn(self.columns.names, self.store.spec)
        counts = []
        for number in range(len(self.files)):
            footer = self._footers[number]
            counts.append([footer.row_group(k).num_rows for k in range(footer.num_row_groups)])
            if self.columns.label is None:
                labels.add_none(sum(counts[-1]))
                continue
            try:
                for batch in self._open(number).iter_batches(65536, columns=[self.columns.label]):
                    labels.add(batch.column(0))
            except (pa.ArrowException, OSError) as error:
                raise self._damaged(number, error) from error
        return counts, labels.labels()

    def _open(self, number: int) -> Any:
        stream = self.store.open(self.files[number])
        return pq.ParquetFile(stream, metadata=self._footers[number], pre_buffer=False, buffer_size=2**20)

    def _batches(self, number: int, part: int) -> Iterator[Any]:
        batches: Iterator[Any] = self._open(number).iter_batches(
            AT_ONCE, row_groups=[part], columns=[self.columns.image], use_threads=False
        )
        return batches


class ArrowFiles(TableFiles):
    """Arrow files of record batches, or streams of them, as Hugging Face's library writes."""

    def _source(self, number: int) -> Any:
        path = self.store.local_path(self.files[number].name)
        return pa.PythonFile(self.store.open(self.files[number]), "r") if path is None else pa.memory_map(str(path))

    def _schema(self, number: int) -> Any:
        source = self._source(number)
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        self._is_file = {**getattr(self, "_is_file", {}), number: is_file}
        return (pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)).schema

    def _read_index(self) -> tuple[list[list[int]], ItemLabels]:
        self._offsets: list[list[int]] = []
        self._leaves_read: dict[int, str] = {}
        cache = ReadCache(self.store.address)
        labels = LabelColumn(self.columns.names, self.store.spec)
        counts: list[list[int]] = []
        for number in range(len(self.files)):
            mark = self._file_mark(number) if self.store.is_far else ""
            index = cache.index(mark) if mark else None
            if index is None:
                try:
                    index = self._index_file(number) if self._is_file[number] else self._index_stream(number)
                except (pa.ArrowException, OSError, MemoryError, ValueError) as error:
                    raise self._damaged(number, error) from error
                if mark:
                    cache.put_index(mark, index)
            before = sum(map(len, counts))
            counts.append(index["counts"])
            self._offsets.append(index["offsets"])
            self._leaves_read |= {before + k: leaf for k, leaf in enumerate(index["leaves"])}
            if index["labels"] is None:
                labels.add_none(sum(counts[-1]))
            else:
                labels.add_values(index["labels"])
        return counts, labels.labels()

    def known_leaves(self) -> dict[int, str]:
        """Return the digests of streams that had to be read to be opened."""
        return self._leaves_read

    def _index_file(self, number: int) -> dict[str, Any]:
        schema = pa.ipc.open_file(self._source(number)).schema
        fields = [] if self.columns.label is None else [schema.names.index(self.columns.label)]
        reader = pa.ipc.open_file(self._source(number), options=pa.ipc.IpcReadOptions(included_fields=fields or [0]))
        counts: list[int] = []
        labels: list[Any] = []
        for k in range(reader.num_record_batches):
            batch = reader.get_batch(k)
            batch.validate(full=True)
            counts.append(batch.num_rows)
            labels += batch.column(0).to_pylist() if fields else []
        return {"counts": counts, "offsets": [], "leaves": [], "labels": labels if fields else None}

    def _index_stream(self, number: int) -> dict[str, Any]:
        """Go through the messages of a stream; one that comes from far is digested on the way."""
        schema = self._schema(number)
        source = self._source(number)
        counts: list[int] = []
        offsets: list[int] = []
        leaves: list[str] = []
        values: list[Any] = []
        names = LabelColumn(self.columns.names, self.store.spec)
        for offset, batch in self._stream(source, schema):
            batch.validate(full=True)
            label = None if self.columns.label is None else batch.column(self.columns.label)
            here = [None] * batch.num_rows if label is None else label.to_pylist()
            if self.store.is_far and not (label is not None and pa.types.is_nested(label.type)):
                leaves.append(self._leaf(self.files[number].name, sum(counts), batch, here, names))
            counts.append(batch.num_rows)
            offsets.append(offset)
            values += here
        return {
            "counts": counts,
            "offsets": offsets,
            "leaves": leaves,
            "labels": None if self.columns.label is None else values,
        }

    def _leaf(self, file: str, begin: int, batch: Any, values: list[Any], names: LabelColumn) -> str:
        leaf = merkle.Leaf()
        for k, content in enumerate(contents(batch.column(self.columns.image), range(batch.num_rows))):
            one = LabelColumn(names.names, names.spec)
            one.add_values([values[k]])
            leaf.add(f"{file}#{begin + k}", one.labels().text(0), sha256_of(content))
        return leaf.hexdigest()

    def _stream(self, source: Any, schema: Any) -> Iterator[tuple[int, Any]]:
        """Yield each record batch of a stream with the byte where its message begins."""
        if _has_dictionaries(schema):
            for batch in pa.ipc.open_stream(source):
                yield 0, batch
            return
        offset = source.tell()
        while True:
            try:
                message = pa.ipc.read_message(source)
            except EOFError:
                return
            if message.type == "record batch":
                yield offset, pa.ipc.read_record_batch(message, schema)
            offset = source.tell()

    def _batches(self, number: int, part: int) -> Iterator[Any]:
        source = self._source(number)
        image = self.columns.image
        if self._is_file[number]:
            at = pa.ipc.open_file(source).schema.names.index(image)
            source.seek(0)
            batch = pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=[at])).get_batch(part)
        else:
            schema = pa.ipc.open_stream(source).schema
            if _has_dictionaries(schema):
                source.seek(0)
                batch = next(b for k, b in enumerate(pa.ipc.open_stream(source)) if k == part)
            else:
                source.seek(self._offsets[number][part])
                batch = pa.ipc.read_record_batch(pa.ipc.read_message(source), schema)
        batch.validate(full=True)
        yield batch.select([image])


def _has_dictionaries(schema: Any) -> bool:
    return any(pa.types.is_dictionary(field.type) for field in schema)
