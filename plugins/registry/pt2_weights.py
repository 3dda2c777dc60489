"""Weights of a pt2 archive, read off its records without torch: for their digest alone.

`digest_of_weights` gives what `auditor.subject.identity.of_weights` gives for the module that torch makes of the
archive, or None where the records leave any doubt how torch would read them: then the model is loaded.
"""

from __future__ import annotations

import hashlib
import json
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG = "data/weights/model_weights_config.json"
GRAPH = "models/model.json"
# torch's numbers for element types, as its archives have them: the name, and bytes per element
TYPES: Mapping[int, tuple[str, int]] = {
    1: ("uint8", 1),
    2: ("int8", 1),
    3: ("int16", 2),
    4: ("int32", 4),
    5: ("int64", 8),
    6: ("float16", 2),
    7: ("float32", 4),
    8: ("float64", 8),
    12: ("bool", 1),
    13: ("bfloat16", 2),
}
STRIDED = 7  # torch's number for the usual layout


def digest_of_weights(file: Path) -> str | None:
    """Return the sha256 over names, types, shapes and bytes of all weights; None where only torch can say."""
    try:
        with zipfile.ZipFile(file) as archive:
            return _digest(archive)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, zipfile.BadZipFile, OSError):
        return None


def _digest(archive: zipfile.ZipFile) -> str | None:
    records = _records(archive)
    if records is None or archive.read(records["byteorder"]) != b"little":
        return None
    config = json.loads(archive.read(records[CONFIG]))["config"]
    entries = {str(key): _Entry.of(entry) for key, entry in config.items()}
    if set(entries) != _names_in_graph(json.loads(archive.read(records[GRAPH]))):
        return None
    h = hashlib.sha256()
    for key in sorted(entries):
        entry = entries[key]
        if entry is None:
            return None
        content = archive.read(records[f"data/weights/{entry.record}"])
        if len(content) != entry.size:
            return None
        h.update(f"{key}|torch.{entry.type}|{entry.shape}|".encode())
        h.update(content)
    return h.hexdigest()


def _records(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo] | None:
    """Return the records by their names below the root; None where torch could find others under these names."""
    infos = archive.infolist()
    folded = {info.filename.casefold() for info in infos}  # torch looks names up without regard to case
    roots = {info.filename.partition("/")[0] for info in infos}
    packed = any(info.compress_type != zipfile.ZIP_STORED for info in infos)
    if packed or len(folded) != len(infos) or len(roots) != 1:
        return None
    records = {info.filename.partition("/")[2]: info for info in infos}
    graphs = [name for name in records if name.casefold().startswith("models/")]
    return records if graphs == [GRAPH] else None


class _Entry:
    """One weight: its record, type, shape and bytes; only those that lie in order, from the record's start."""

    def __init__(self, record: str, type_: str, shape: tuple[int, ...], size: int) -> None:
        self.record, self.type, self.shape, self.size = record, type_, shape, size

    @classmethod
    def of(cls, entry: Any) -> _Entry | None:
        meta = entry["tensor_meta"]
        type_, width = TYPES.get(meta["dtype"], ("", 0))
        shape, strides = (_numbers(meta[name]) for name in ("sizes", "strides"))
        in_order = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        plain = strides == in_order or all(n == 1 or s == o for n, s, o in zip(shape, strides, in_order, strict=True))
        if not type_ or not plain or entry["use_pickle"] or meta["layout"] != STRIDED or 0 in shape:
            return None
        if _numbers([meta["storage_offset"]]) != [0]:
            return None
        return cls(str(entry["path_name"]), type_, tuple(shape), width * math.prod(shape))


def _numbers(values: Any) -> list[int]:
    return [int(value["as_int"]) for value in values]


def _names_in_graph(graph: Any) -> set[str]:
    """Return the names of the weights and kept buffers that the graph takes."""
    names = set()
    for spec in graph["graph_module"]["signature"]["input_specs"]:
        (kind, entry), *_ = spec.items()
        if kind == "parameter":
            names.add(str(entry["parameter_name"]))
        elif kind == "buffer" and entry["persistent"]:
            names.add(str(entry["buffer_name"]))
    return names
