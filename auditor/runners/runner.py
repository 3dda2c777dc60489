"""Runner: calls one function for many items and gives what it yields in the order of the items.

What is fitted or measured asks `current` for the runner and streams over it; ``using(runner)`` says which that is. A
function that runs on another machine travels there with everything it holds, so it is a frozen dataclass of the
subject, tensors and numbers that it needs, with ``__call__(item)``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass
class Share:
    """What one worker has done."""

    items: int = 0
    images: int = 0
    seconds: float = 0.0  # of work, without waiting
    read_bytes: int = 0


@dataclass
class Tally:
    """What all workers have done, by the name of each, and what was lost on the way."""

    workers: dict[str, Share] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)  # names of workers that ended before their time

    def of(self, worker: str) -> Share:
        """Return the share of a worker."""
        return self.workers.setdefault(worker, Share())

    def add(self, worker: str, part: Any) -> None:
        """Count a part that says how much it was."""
        if isinstance(part, Counted):
            share = self.of(worker)
            share.items += 1
            share.images += part.images
            share.read_bytes += part.read_bytes
            share.seconds += part.seconds

    def to_json(self, elapsed_s: float) -> dict[str, Any]:
        """Return images per second in all and per worker, and the bytes that they read.

        >>> Tally({"a": Share(2, 30, 1.5, 900)}).to_json(2.0)["images_per_second"]
        15.0
        """
        images = sum(share.images for share in self.workers.values())
        return {
            "seconds": round(elapsed_s, 3),
            "images": images,
            "images_per_second": round(images / elapsed_s, 3) if elapsed_s > 0 else None,
            "bytes_read": sum(share.read_bytes for share in self.workers.values()),
            "lost": list(self.lost),
            "workers": {
                name: {
                    "items": share.items,
                    "images": share.images,
                    "seconds": round(share.seconds, 3),
                    "images_per_second": round(share.images / share.seconds, 3) if share.seconds > 0 else None,
                    "bytes_read": share.read_bytes,
                }
                for name, share in sorted(self.workers.items())
            },
        }


@dataclass(frozen=True)
class Counted:
    """A part that says how much an item was: images, bytes that were read for them, seconds."""

    images: int = 0
    read_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class One(Generic[Item, Result]):
    """A function of one result per item, as one that yields."""

    work: Callable[[Item], Result]

    def __call__(self, item: Item) -> Iterator[Result]:
        """Yield the result."""
        yield self.work(item)


class Crew(ABC):
    """Members with a state of their own, each made of an item and living where a runner put it."""

    @abstractmethod
    def __len__(self) -> int:
        """How many members there are."""

    @abstractmethod
    def ask(self, method: str, *arguments: Any, each: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Call a method of every member with the arguments, and with its own of ``each`` behind them.

        The results are in the order of the members.
        """


class LocalCrew(Crew):
    """Members in this process, asked one after the other.

    >>> LocalCrew([[1], [2, 3]]).ask("index", each=[(1,), (3,)])
    [0, 1]
    """

    def __init__(self, members: Sequence[Any]) -> None:
        self._members = list(members)

    def __len__(self) -> int:
        return len(self._members)

    def ask(self, method: str, *arguments: Any, each: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Call a method of every member."""
        rows = [()] * len(self._members) if each is None else each
        return [getattr(m, method)(*arguments, *row) for m, row in zip(self._members, rows, strict=True)]


class Runner(ABC):
    """Runs the parts of a computation."""

    tally: Tally

    @property
    @abstractmethod
    def n_workers(self) -> int:
        """How many items may run at once."""

    @property
    @abstractmethod
    def is_remote(self) -> bool:
        """Whether items leave this process, so that what they bring must be small."""

    @abstractmethod
    def stream(self, work: Callable[[Item], Iterator[Result]], items: Iterable[Item]) -> Iterator[Result]:
        """Yield all that ``work(item)`` yields for every item, in the order of the items; few results wait."""

    @abstractmethod
    def crew(self, make: Callable[[Item], Any], items: Sequence[Item]) -> AbstractContextManager[Crew]:
        """Give members ``make(item)`` that keep a state of their own until the context ends."""

    def map(self, work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yield ``work(item)`` for every item, in the order of the items.

        >>> list(LocalRunner().map(abs, [-1, 2]))
        [1, 2]
        """
        return self.stream(One(work), items)


class LocalRunner(Runner):
    """Runs one item after another in this process."""

    def __init__(self) -> None:
        self.tally = Tally()

    @property
    def n_workers(self) -> int:
        """One."""
        return 1

    @property
    def is_remote(self) -> bool:
        """No."""
        return False

    def stream(self, work: Callable[[Item], Iterator[Result]], items: Iterable[Item]) -> Iterator[Result]:
        """Yield all of one item after the other, each part when it is asked for."""
        for item in items:
            for result in work(item):
                self.tally.add("this process", result)
                yield result

    def crew(self, make: Callable[[Item], Any], items: Sequence[Item]) -> AbstractContextManager[Crew]:
        """Give members in this process."""
        return nullcontext(LocalCrew([make(item) for item in items]))


@contextmanager
def as_many_threads(n: int) -> Iterator[None]:
    """Let torch use ``n`` threads inside: sums of large products depend on that, to the last bit.

    What is worked on with its thread count gives the same everywhere; an iteration would make more of that last bit.
    """
    import torch  # commands that only read a stored audit open a block of workers too

    before = torch.get_num_threads()
    if before == n:
        yield
        return
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_CURRENT: ContextVar[Runner | None] = ContextVar("runner", default=None)
_LOCAL = LocalRunner()


def chosen() -> Runner | None:
    """Return the runner that somebody chose for the computation that goes on."""
    return _CURRENT.get()


def current() -> Runner:
    """Return the runner of the computation that goes on; this process where nobody said otherwise."""
    return chosen() or _LOCAL


@contextmanager
def using(runner: Runner) -> Iterator[Runner]:
    """Let everything inside run there."""
    token = _CURRENT.set(runner)
    try:
        yield runner
    finally:
        _CURRENT.reset(token)
