"""Names of many images in little memory: one text, and where each name of it begins."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload


class Names(Sequence[str]):
    """Names that are only added to; ten million of 40 letters take half a gigabyte, as strings they would take two.

    >>> names = Names(["a/1.png", "b/1.png"])
    >>> names[1], names.find("a/1.png"), names.find("c"), len(names)
    ('b/1.png', 0, None, 2)
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._text = bytearray()
        self._ends = array("q")
        self._is_sorted = True
        self._last = b""
        self._rows: dict[str, int] | None = None
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        """Add a name at the end."""
        encoded = name.encode(errors="surrogateescape")
        self._is_sorted = self._is_sorted and (encoded > self._last or not self._ends)
        self._last = encoded
        self._text += encoded
        self._ends.append(len(self._text))
        self._rows = None

    @property
    def is_sorted(self) -> bool:
        """Whether each name stands behind the one before it, so that none stands there twice."""
        return self._is_sorted

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, row: int) -> str: ...

    @overload
    def __getitem__(self, row: slice) -> list[str]: ...

    def __getitem__(self, row: int | slice) -> str | list[str]:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        if not -len(self) <= row < len(self):
            raise IndexError(row)
        row %= len(self)
        return self._text[self._ends[row - 1] if row else 0 : self._ends[row]].decode(errors="surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def find(self, name: str) -> int | None:
        """Return the row of a name; None where it is none of these."""
        if not self._is_sorted:
            if self._rows is None:
                self._rows = {self[i]: i for i in range(len(self) - 1, -1, -1)}
            return self._rows.get(name)
        wanted = name.encode(errors="surrogateescape")
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self[middle].encode(errors="surrogateescape") < wanted:
                low = middle + 1
            else:
                high = middle
        return low if low < len(self) and self[low] == name else None
