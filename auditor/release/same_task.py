"""Same task: two versions are compared only when they answer the same question about the same images."""

from __future__ import annotations

from typing import Protocol

from auditor.errors import OptionError, ShapeError


class Task(Protocol):
    """What a model is asked: the size of its images, and its classes in order."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Channels, height, width."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes."""


def check_comparable(a: Task, b: Task) -> None:
    """Raise one sentence when two versions do not answer the same question about the same images.

    >>> from types import SimpleNamespace as Model
    >>> check_comparable(Model(input_shape=(1, 8, 8), class_names=("a", "b")),
    ...                  Model(input_shape=(1, 8, 8), class_names=("a", "b")))
    """
    if tuple(a.input_shape) != tuple(b.input_shape):
        raise ShapeError(
            f"compare: the versions take images of different sizes, {tuple(a.input_shape)} and "
            f"{tuple(b.input_shape)}; compare versions with one input size."
        )
    if a.class_names != b.class_names:
        only = sorted(set(a.class_names) ^ set(b.class_names))
        what = (
            f"only one of them has {', '.join(only[:5])}{'…' if len(only) > 5 else ''}" if only else "the order differs"
        )
        raise OptionError(
            f"compare: the versions have different class lists ({len(a.class_names)} and {len(b.class_names)} classes, "
            f"{what}); compare versions with the same classes."
        )
