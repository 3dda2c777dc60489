"""Readers behind ``open_data``: ``.npz`` members, idx files, scikit-learn's digits and torchvision's data sets."""

from __future__ import annotations

import ast
import gzip
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from auditor.data.source import Array, ArrayData, Data
from auditor.errors import DataError

IDX_FAMILY = {"MNIST", "FashionMNIST", "KMNIST", "QMNIST"}


def open_npz(opened: Callable[[], IO[bytes]], spec: str, options: dict[str, Any]) -> Data:
    """Stream the members ``images`` and ``labels`` of an ``.npz``; nothing is unpickled and nothing read whole."""
    try:
        with opened() as file, zipfile.ZipFile(file) as archive:
            members = {name.removesuffix(".npy") for name in archive.namelist()}
            if "images" not in members:
                raise DataError(
                    f"data {spec}: want a member called images, got {', '.join(sorted(members)) or 'none'}; "
                    "save with np.savez(path, images=…, labels=…)."
                )
            with archive.open("images.npy") as stream:
                shape, dtype = _npy_header(stream, spec, "images")
            labels = np.full(shape[0], -1, dtype=np.int64)
            if "labels" in members:
                with archive.open("labels.npy") as stream:
                    label_shape, label_type = _npy_header(stream, spec, "labels")
                    is_whole = np.issubdtype(label_type, np.integer) or label_type == np.bool_
                    if len(label_shape) > 2 or label_shape[0] != shape[0] or not is_whole:
                        raise DataError(
                            f"data {spec}: labels must be {shape[0]} integers, one per image, or 0 and 1 of shape "
                            f"({shape[0]}, labels), got {label_type} of shape {label_shape}."
                        )
                    labels = np.frombuffer(stream.read(), dtype=label_type).astype(np.int64).reshape(label_shape)
                    if labels.ndim == 2 and not np.isin(labels, (0, 1)).all():
                        raise DataError(
                            f"data {spec}: labels of shape {label_shape} say which labels are true and must be 0 or 1, "
                            f"got {int(labels.min())} to {int(labels.max())}."
                        )
    except (zipfile.BadZipFile, EOFError, KeyError) as error:
        raise DataError(
            f"data {spec}: not a readable .npz ({error}); save it with np.savez(path, images=…)."
        ) from error

    def read(batch_size: int) -> Iterator[tuple[Array, Array]]:
        row = int(np.prod(shape[1:])) * dtype.itemsize
        with opened() as file, zipfile.ZipFile(file) as archive, archive.open("images.npy") as stream:
            _npy_header(stream, spec, "images")
            for start in range(0, shape[0], batch_size):
                n = min(batch_size, shape[0] - start)
                try:
                    raw = stream.read(n * row)
                except zipfile.BadZipFile as error:
                    raise DataError(f"data {spec}: the file is damaged ({error}).") from error
                if len(raw) != n * row:
                    raise DataError(f"data {spec}: the file ends early at image {start}; write it again.")
                yield np.frombuffer(raw, dtype=dtype).reshape(n, *shape[1:]), labels[start : start + n]

    single = np.where(labels.sum(1) == 1, labels.argmax(1), -1) if labels.ndim == 2 else labels
    return ArrayData(spec, single, read, **options)


def _npy_header(stream: IO[bytes], spec: str, member: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read an ``.npy`` header from a stream, leaving it at the first value; object and Fortran arrays are refused."""
    magic = stream.read(8)
    if magic[:6] != b"\x93NUMPY":
        raise DataError(f"data {spec}: member {member} is not a numpy array.")
    wide = magic[6] > 1
    (length,) = struct.unpack("<I" if wide else "<H", stream.read(4 if wide else 2))
    header = ast.literal_eval(stream.read(length).decode("latin1"))
    dtype, shape = np.dtype(header["descr"]), tuple(header["shape"])
    if dtype.hasobject:
        raise DataError(f"data {spec}: member {member} holds Python objects (a pickle), which are never loaded.")
    if header["fortran_order"] and len(shape) > 1:
        raise DataError(f"data {spec}: member {member} is in Fortran order; save np.ascontiguousarray(…).")
    if not shape:
        raise DataError(f"data {spec}: member {member} is one number, want an array with a row per image.")
    return shape, dtype


def open_sklearn(name: str, arguments: dict[str, str], spec: str, options: dict[str, Any]) -> Data:
    """Open scikit-learn's digits: 1,797 images of 8x8; every fifth is the test split."""
    if name != "digits":
        raise DataError(f"data {spec}: scikit-learn's only image set here is sklearn:digits, got {name!r}.")
    split = _split(arguments, spec, {"all", "train", "test"}, "all")
    from sklearn.datasets import load_digits

    digits = load_digits()
    is_test = np.arange(len(digits.target)) % 5 == 4
    keep = {"all": is_test | ~is_test, "train": ~is_test, "test": is_test}[split]
    images = (digits.images[keep] / 16.0).astype(np.float32)
    labels = digits.target[keep].astype(np.int64)

    def read(batch_size: int) -> Iterator[tuple[Array, Array]]:
        for start in range(0, len(images), batch_size):
            yield images[start : start + batch_size], labels[start : start + batch_size]

    data = ArrayData(spec, labels, read, **options)
    data.class_names = tuple(str(i) for i in range(10))
    return data


def open_torchvision(name: str, arguments: dict[str, str], spec: str, options: dict[str, Any]) -> Data:
    """Open a torchvision data set by name and root; MNIST and its relatives are streamed from their idx files."""
    split = _split(arguments, spec, None, "test")
    if "root" not in arguments:
        raise DataError(f"data {spec}: say where it lies: torchvision:{name or 'NAME'}?root=PATH&split=test.")
    root = Path(arguments.pop("root")).expanduser()
    arguments.pop("split", None)
    if not root.is_dir():
        raise DataError(
            f"data {spec}: no such folder {root}; nothing is downloaded here, give a root that holds {name}."
        )
    if name in IDX_FAMILY:
        return _open_idx(root / name / "raw", split, spec, options)
    import inspect

    import torchvision

    cls = getattr(torchvision.datasets, name, None)
    if not inspect.isclass(cls):
        raise DataError(f"data {spec}: torchvision has no data set called {name!r}.")
    accepted = inspect.signature(cls).parameters
    if "split" in accepted:
        arguments["split"] = split
    chosen: dict[str, Any] = {k: v for k, v in arguments.items() if k in accepted}
    if "train" in accepted:
        chosen["train"] = split == "train"
    if "download" in accepted:
        chosen["download"] = False
    try:
        opener: Any = cls
        source = opener(root=str(root), **chosen)
    except Exception as error:  # each data set fails in its own way; all mean "not usable from here"
        raise DataError(f"data {spec}: torchvision could not open it from {root}: {str(error)[:120]}") from error
    from auditor.data.python_objects import open_named

    return open_named(source, spec, options)


def _open_idx(folder: Path, split: str, spec: str, options: dict[str, Any]) -> Data:
    stem = {"train": "train", "test": "t10k"}.get(split)
    if stem is None:
        raise DataError(f"data {spec}: split must be train or test, got {split!r}.")
    images_path, labels_path = (
        _plain_or_gz(folder, f"{stem}-{part}", spec) for part in ("images-idx3-ubyte", "labels-idx1-ubyte")
    )
    with _open_stream(labels_path) as stream:
        (n,) = _idx_header(stream, spec)
        labels = np.frombuffer(stream.read(n), dtype=np.uint8).astype(np.int64)
    with _open_stream(images_path) as stream:
        count, h, w = _idx_header(stream, spec)
    if count != n or len(labels) != n:
        raise DataError(f"data {spec}: {count} images and {len(labels)} labels do not match; fetch the files again.")

    def read(batch_size: int) -> Iterator[tuple[Array, Array]]:
        with _open_stream(images_path) as stream:
            _idx_header(stream, spec)
            for start in range(0, n, batch_size):
                k = min(batch_size, n - start)
                raw = stream.read(k * h * w)
                if len(raw) != k * h * w:
                    raise DataError(f"data {spec}: {images_path.name} ends early; fetch the file again.")
                yield np.frombuffer(raw, dtype=np.uint8).reshape(k, h, w), labels[start : start + k]

    return ArrayData(spec, labels, read, **options)


def _plain_or_gz(folder: Path, name: str, spec: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(
        f"data {spec}: neither {name} nor {name}.gz in {folder}; give the root that holds the set's folder."
    )


def _open_stream(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.GzipFile(path)) if path.suffix == ".gz" else path.open("rb")


def _idx_header(stream: IO[bytes], spec: str) -> tuple[int, ...]:
    head = stream.read(4)
    if len(head) != 4 or head[:3] != b"\x00\x00\x08":
        raise DataError(f"data {spec}: not an idx file of bytes; fetch the file again.")
    return struct.unpack(f">{head[3]}I", stream.read(4 * head[3]))


def _split(arguments: dict[str, str], spec: str, allowed: set[str] | None, default: str) -> str:
    split = arguments.get("split", default)
    if allowed is not None:
        if split not in allowed:
            raise DataError(f"data {spec}: split must be one of {', '.join(sorted(allowed))}, got {split!r}.")
        unknown = set(arguments) - {"split"}
        if unknown:
            raise DataError(f"data {spec}: unknown option {', '.join(sorted(unknown))}; only split is known here.")
    return split
