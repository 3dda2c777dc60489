"""Ray crew: members with a state of their own on the workers of a cluster, asked all at once.

A member lives on one worker. When that ends, another one makes the member again and puts to it all that it was asked
so far: a member is a function of what it was made of and of its questions, so it is then where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from auditor.errors import ClusterError
from auditor.runners.runner import Crew
from auditor.runners.worker import Outcome

if TYPE_CHECKING:
    from auditor.runners.ray_pool import Hand, RayRunner

DEATHS = 3  # of workers by one member


@dataclass(frozen=True)
class Question:
    """A call that was put to all members: arguments for all, and those of each, in the object store."""

    method: str
    arguments: Any
    each: tuple[Any, ...] | None

    def of(self, i: int) -> list[Any]:
        """Return what one member is given."""
        return [self.arguments] if self.each is None else [self.arguments, self.each[i]]


class RayCrew(Crew):
    """Members on the workers of a pool; member i is made of item i."""

    def __init__(self, pool: RayRunner, make: Callable[[Any], Any], items: Sequence[Any]) -> None:
        self._pool, self._key, self._threads = pool, uuid4().hex, torch.get_num_threads()
        self._make, self._items = pool.sent(make), [pool.sent(item) for item in items]
        self._questions: list[Question] = []
        self._deaths = [0] * len(items)
        self._homes = [pool.hands[i % len(pool.hands)] for i in range(len(items))]
        enlisted = [self._enlist(i) for i in range(len(items))]
        for i, ref in enumerate(enlisted):
            self._result(i, ref)

    def __len__(self) -> int:
        return len(self._items)

    def ask(self, method: str, *arguments: Any, each: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Call a method of every member, all at once; return the results in the order of the members."""
        rows = None if each is None else tuple(self._pool.sent(tuple(row)) for row in each)
        question = Question(method, self._pool.sent(arguments), rows)
        refs = [self._put(i, question) for i in range(len(self))]
        self._questions.append(question)
        return [self._result(i, ref) for i, ref in enumerate(refs)]

    def dismiss(self) -> None:
        """Let the workers forget the members."""
        for hand in {id(hand): hand for hand in self._homes}.values():
            with suppress(Exception):  # the worker may be gone
                hand.actor.dismiss.remote(self._key)

    def _enlist(self, i: int) -> Any:
        return self._homes[i].actor.enlist.remote(self._key, i, [self._make, self._items[i]], self._threads)

    def _put(self, i: int, question: Question) -> Any:
        return self._homes[i].actor.ask.remote(self._key, i, question.method, question.of(i), self._threads)

    def _result(self, i: int, ref: Any) -> Any:
        """Return what a member answered; one whose worker has ended is made again elsewhere."""
        while True:
            outcome = self._pool.outcome(ref)
            if isinstance(outcome, Outcome):
                self._pool.relay(self._homes[i], outcome)
                if outcome.error is not None:
                    raise outcome.error
                return outcome.parts[0]
            ref = self._again(i, outcome.why)

    def _again(self, i: int, why: str) -> Any:
        """Make a member again on another worker, and put all questions to it; return the last answer's reference."""
        self._deaths[i] += 1
        if self._deaths[i] >= DEATHS:
            raise ClusterError(
                f"cluster {self._pool.options.address}: part {i + 1} of {len(self)} ended {DEATHS} workers, the last "
                f"of them: {why}; give workers more memory."
            )
        if self._homes[i] in self._pool.hands:
            self._pool.renew(self._homes[i], why)
        self._homes[i] = min(self._pool.hands, key=self._members_of)
        ref = self._enlist(i)
        for question in self._questions:
            ref = self._put(i, question)
        return ref

    def _members_of(self, hand: Hand) -> int:
        return sum(home is hand for home in self._homes)


@contextmanager
def ray_crew(pool: RayRunner, make: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[RayCrew]:
    """Give a crew; its members are forgotten at the end."""
    crew = RayCrew(pool, make, items)
    try:
        yield crew
    finally:
        crew.dismiss()
