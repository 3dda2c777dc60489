"""Class bases: which concepts of an artifact explain which class.

Concepts are numbered over the whole artifact: those of the shared basis first, then those of each class with a basis of
its own, classes in order. An image is explained with the basis of its target; a class without one takes the shared
basis, and the explanation says so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from auditor.errors import TamperError

FEW = 4  # images of a class below which its concepts are little more than these images


@dataclass(frozen=True, slots=True)
class ClassBasis:
    """A run of concepts ``first`` to ``stop`` (not included), the class they are of and the images they come from."""

    index: int  # of the class; -1 for the shared basis
    name: str
    first: int
    stop: int
    images: int
    also: tuple[str, ...] = ()  # classes that lent images where it has too few

    @property
    def concepts(self) -> range:
        """Numbers of its concepts."""
        return range(self.first, self.stop)

    @property
    def is_shared(self) -> bool:
        """Whether it is of all classes together."""
        return self.index < 0

    @property
    def words(self) -> str:
        """What it was made of, in a few words."""
        n = f"{self.images} image{'' if self.images == 1 else 's'}"
        if self.is_shared:
            return f"concepts shared by all classes ({n})"
        lent = f", and some of {', '.join(self.also)}" if self.also else ""
        return f"concepts of {self.name} ({'only ' if self.images < FEW else ''}{n}{lent})"


class ClassBases:
    """The bases of one artifact, the shared one first.

    >>> bases = ClassBases.of(10, 80, {3: ("cat", 4, 12), 7: ("dog", 5, 2)})
    >>> bases.for_class(3).concepts, bases.for_class(5).concepts, len(bases)
    (range(10, 14), range(0, 10), 3)
    >>> bases.of_concept(15).words
    'concepts of dog (only 2 images)'
    """

    def __init__(self, parts: Sequence[ClassBasis]) -> None:
        self.parts = tuple(parts)
        self._by_class = {part.index: part for part in parts}
        self._firsts = [part.first for part in parts]

    @classmethod
    def of(cls, n_shared: int, n_images: int, classes: Mapping[int, tuple[Any, ...]]) -> ClassBases:
        """Return bases numbered in order; ``classes`` gives name, numbers of concepts and images, lenders by class."""
        parts = [ClassBasis(-1, "", 0, n_shared, n_images)]
        for index in sorted(classes):
            name, n_concepts, *about = classes[index]
            parts.append(ClassBasis(index, name, parts[-1].stop, parts[-1].stop + n_concepts, *about))
        return cls(parts)

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def shared(self) -> ClassBasis:
        """The basis of all classes together."""
        return self.parts[0]

    @property
    def are_per_class(self) -> bool:
        """Whether any class has a basis of its own."""
        return len(self.parts) > 1

    @property
    def n_concepts(self) -> int:
        """Number of concepts of all bases."""
        return self.parts[-1].stop

    def for_class(self, index: int) -> ClassBasis:
        """Return the basis that explains a class: its own, else the shared one."""
        return self._by_class.get(index, self.shared)

    def of_concept(self, concept: int) -> ClassBasis:
        """Return the basis that a concept belongs to."""
        return self.parts[bisect_right(self._firsts, concept) - 1]

    def to_json(self) -> list[dict[str, Any]]:
        """Return plain Python for the manifest."""
        return [
            {"class": p.index, "name": p.name, "concepts": [p.first, p.stop], "images": p.images}
            | ({"also": list(p.also)} if p.also else {})
            for p in self.parts
        ]

    @classmethod
    def restore(cls, rows: Any, n_concepts: int) -> ClassBases:
        """Take back what ``to_json`` gave; artifacts of earlier releases have one shared basis and no rows."""
        if rows is None:
            return cls.of(n_concepts, 0, {})
        try:
            parts = []
            for row in rows:
                (first, stop), also = row["concepts"], tuple(str(name) for name in row.get("also", []))
                numbers = int(first), int(stop), int(row["images"])
                parts.append(ClassBasis(int(row["class"]), str(row["name"]), *numbers, also))
            ends = [0, *(p.stop for p in parts)]
            fits = all(p.first == start <= p.stop for p, start in zip(parts, ends, strict=False))
            in_order = [p.index for p in parts] == sorted({p.index for p in parts}) and parts[0].index == -1
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise TamperError(
                f"the artifact's list of class bases cannot be read ({error}); attach it again."
            ) from None
        if not (fits and in_order and ends[-1] == n_concepts):
            raise TamperError(
                f"the artifact's class bases do not fit its {n_concepts} concepts; attach the explainer again."
            )
        return cls(parts)
