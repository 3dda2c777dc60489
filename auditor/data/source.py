"""Data: image sources that stream batches, know a sha256 over all their content, and never hold the set in memory.

``open_data`` parses one string: a folder of images, an ``.npz``, ``sklearn:digits``, or
``torchvision:MNIST?root=…&split=test``.
"""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import torch
from torch import Tensor

from auditor.errors import DataError
from auditor.subject.preprocessing import Preprocessing, from_array, read_image
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"})
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Batch:
    """Images as pixels in [0, 1] (batch, channels, height, width), labels (-1 where unknown) and their names."""

    images: Tensor
    labels: Tensor
    ids: list[str]

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, keep: Tensor) -> Batch:
        """Return the images where ``keep`` is true."""
        ids = [name for name, k in zip(self.ids, keep.tolist(), strict=True) if k]
        return Batch(self.images[keep], self.labels[keep], ids)


class Data(ABC):
    """A source of images. ``batches`` gives the same images in the same order each time."""

    def __init__(self, spec: str, *, strict: bool = False, limit: int | None = None) -> None:
        self.spec, self.strict, self.limit = spec, strict, limit
        self.class_names: tuple[str, ...] | None = None
        self.skipped: dict[str, str] = {}
        self._warned = False
        self._digest: str | None = None

    @abstractmethod
    def _items(self, pre: Preprocessing, batch_size: int) -> Iterator[tuple[Array, Array, list[str]]]:
        """Yield images (float32 in [0, 1]), labels and ids, ``batch_size`` at a time."""

    @abstractmethod
    def _content(self) -> Iterator[bytes]:
        """Yield every byte that matters, for the digest."""

    def __len__(self) -> int:
        """Return how many images there are, broken ones included."""
        total = self._count()
        return total if self.limit is None else min(total, self.limit)

    @abstractmethod
    def _count(self) -> int: ...

    @property
    def digest(self) -> str:
        """Sha256 over all content: every pixel or file byte, every label, every name that matters."""
        if self._digest is None:
            h = hashlib.sha256()
            for part in self._content():
                h.update(len(part).to_bytes(8, "little"))
                h.update(part)
            if self.limit is not None:
                h.update(f"limit={self.limit}".encode())
            self._digest = h.hexdigest()
        return self._digest

    def batches(self, subject: Subject | Preprocessing, batch_size: int = 64) -> Iterator[Batch]:
        """Yield batches sized for the subject. A source without one readable image is an error."""
        pre = subject.preprocessing if isinstance(subject, Subject) else subject
        names = subject.class_names if isinstance(subject, Subject) else None
        remap = self._label_map(names)
        seen = 0
        for images, labels, ids in self._items(pre, batch_size):
            room = len(ids) if self.limit is None else min(len(ids), self.limit - seen)
            if room <= 0:
                break
            seen += room
            y = torch.from_numpy(labels[:room].astype(np.int64))
            if remap is not None:
                y = torch.where(y >= 0, remap[y.clamp_min(0)], y)
            yield Batch(torch.from_numpy(images[:room]), y, ids[:room])
        if seen == 0:
            broken = f" ({len(self.skipped)} could not be read)" if self.skipped else ""
            raise DataError(f"data {self.spec}: holds no readable image{broken}; give a source with at least one.")
        self._warn_skipped()

    def _label_map(self, names: tuple[str, ...] | None) -> Tensor | None:
        """Map the source's class numbers to the model's where both have names and these agree."""
        if names is None or self.class_names is None or not set(self.class_names) <= set(names):
            return None
        return torch.tensor([names.index(name) for name in self.class_names], dtype=torch.int64)

    def _skip(self, name: str, why: str) -> None:
        if self.strict:
            raise DataError(f"data {self.spec}: {name} is broken ({why}); repair or remove it, or do without strict.")
        self.skipped[name] = why

    def _warn_skipped(self) -> None:
        if self.skipped and not self._warned:
            self._warned = True
            shown = ", ".join(list(self.skipped)[:5]) + (", …" if len(self.skipped) > 5 else "")
            log.warning(
                "%d of %d images could not be read and were skipped: %s", len(self.skipped), self._count(), shown
            )


class FolderData(Data):
    """A folder of image files: one sub-folder per class, or images side by side without labels."""

    def __init__(self, path: Path, spec: str, **options: Any) -> None:
        super().__init__(spec, **options)
        self.root = path
        files = sorted(
            (p.relative_to(path) for p in path.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file()),
            key=lambda p: p.as_posix(),
        )
        self.class_names = tuple(sorted({f.parts[0] for f in files if len(f.parts) > 1})) or None
        number = {name: i for i, name in enumerate(self.class_names or ())}
        self.files = [(f, number.get(f.parts[0], -1) if len(f.parts) > 1 else -1) for f in files]
        if not self.files:
            raise DataError(
                f"data {spec}: no image file ({', '.join(sorted(IMAGE_SUFFIXES))}) in this folder or below."
            )

    def _count(self) -> int:
        return len(self.files)

    def _items(self, pre: Preprocessing, batch_size: int) -> Iterator[tuple[Array, Array, list[str]]]:
        images: list[Array] = []
        labels: list[int] = []
        ids: list[str] = []
        for file, label in self.files:
            try:
                images.append(read_image(self.root / file, pre))
            except DataError as error:
                self._skip(file.as_posix(), str(error.__cause__ or error)[:80])
                continue
            labels.append(label)
            ids.append(file.as_posix())
            if len(ids) == batch_size:
                yield np.stack(images), np.array(labels), ids
                images, labels, ids = [], [], []
        if ids:
            yield np.stack(images), np.array(labels), ids

    def _content(self) -> Iterator[bytes]:
        for file, label in self.files:
            yield f"{file.as_posix()}|{label}".encode()
            yield (self.root / file).read_bytes()


class ArrayData(Data):
    """Arrays that a reader streams: ``.npz`` members, idx files, scikit-learn's digits."""

    def __init__(self, spec: str, n: int, read: Callable[[int], Iterator[tuple[Array, Array]]], **options: Any) -> None:
        super().__init__(spec, **options)
        self._n, self._read = n, read

    def _count(self) -> int:
        return self._n

    def _items(self, pre: Preprocessing, batch_size: int) -> Iterator[tuple[Array, Array, list[str]]]:
        start = 0
        for raw, labels in self._read(batch_size):
            images = from_array(raw, pre, f"data {self.spec}")
            yield images, labels, [str(i) for i in range(start, start + len(raw))]
            start += len(raw)

    def _content(self) -> Iterator[bytes]:
        for raw, labels in self._read(256):
            yield f"{raw.dtype}|{raw.shape[1:]}".encode()
            yield np.ascontiguousarray(raw).tobytes()
            yield labels.astype("<i8").tobytes()


def open_data(spec: str | Path | Data, *, strict: bool = False, limit: int | None = None) -> Data:
    """Open an image source named by one string.

    ``folder:PATH`` or a plain path to a folder, a path to an ``.npz`` with ``images`` and ``labels``,
    ``sklearn:digits`` (add ``?split=train`` or ``?split=test``), or ``torchvision:NAME?root=PATH&split=train|test``.

    >>> data = open_data("sklearn:digits")
    >>> len(data), data.digest[:8]
    (1797, 'f6fee29f')
    """
    from auditor.data import readers as sources

    if isinstance(spec, Data):
        return spec
    text = str(spec)
    if limit is not None and limit < 1:
        raise DataError(f"data {text}: limit must be at least 1, got {limit}.")
    options: dict[str, Any] = {"strict": strict, "limit": limit}
    scheme, _, rest = text.partition(":")
    if scheme in ("sklearn", "torchvision"):
        name, _, query = rest.partition("?")
        arguments = dict(parse_qsl(query, keep_blank_values=True))
        opener = sources.open_sklearn if scheme == "sklearn" else sources.open_torchvision
        return opener(name, arguments, text, options)
    path = Path(rest if scheme in ("folder", "npz", "file") and rest else text).expanduser()
    if path.is_dir():
        return FolderData(path, text, **options)
    if not path.exists():
        raise DataError(
            f"data {text}: no such file or folder; give an image folder, an .npz, sklearn:digits or "
            "torchvision:NAME?root=PATH."
        )
    if path.suffix == ".npz":
        return sources.open_npz(path, text, options)
    raise DataError(
        f"data {text}: want an image folder or an .npz file, got a file of type {path.suffix or 'unknown'}."
    )
