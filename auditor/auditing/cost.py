"""Cost: how many forward passes per image each check may take, how many it took, and where the time went.

A pass is one image through the model, counted by a hook on it. Gradients and runs of a part of the network are not
passes by this count; their time is in ``seconds``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from auditor.auditing.checks import duration

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Cost:
    """What one check was allowed and what it took; passes are per image that it measured on."""

    check: str
    owners: tuple[str, ...]  # explainers; none: it is of the model
    images: int
    budget: float | None  # passes per image at most; None: not known beforehand
    passes: float = 0.0
    seconds: float = 0.0
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain Python for JSON."""
        return {
            "check": self.check,
            "explainers": list(self.owners),
            "images": self.images,
            "passes_per_image_at_most": self.budget,
            "passes_per_image": round(self.passes, 2),
            "seconds": round(self.seconds, 2),
            "note": self.note,
        }

    def words(self, seconds_per_pass: float | None = None) -> str:
        """Return the sentence that is printed before the check starts."""
        owners = f" of {', '.join(self.owners)}" if self.owners else ""
        if self.budget is None:
            return f"{self.check}{owners}: {self.note or 'its forward passes are not known beforehand'}"
        took = "" if seconds_per_pass is None else f", about {duration(self.budget * self.images * seconds_per_pass)}"
        return f"{self.check}{owners}: at most {self.budget:.1f} forward passes for each of {self.images} images{took}"


class Meter:
    """Counts the images that go through a model, and the time that takes."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock, self.images, self.seconds, self._began = clock, 0, 0.0, 0.0

    @property
    def seconds_per_pass(self) -> float | None:
        """Mean time of one image in the model; None before the first."""
        return self.seconds / self.images if self.images else None

    @contextmanager
    def on(self, module: nn.Module) -> Iterator[Meter]:
        """Count while the context lasts; the hook is gone afterwards."""

        def count(_module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            self._began = self.clock()
            if torch.compiler.is_exporting():  # no image passes, and len() would fix the graph to the example's batch
                return
            first = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
            self.images += len(first) if first is not None and first.ndim else 1

        def end(_module: nn.Module, _args: Any, _output: Any) -> None:
            if not torch.compiler.is_exporting():
                self.seconds += self.clock() - self._began

        handles = [module.register_forward_pre_hook(count, with_kwargs=True), module.register_forward_hook(end)]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def since(self, cost: Cost, images: int, began: float) -> Cost:
        """Return a cost with what was used since a count of images and a time."""
        passes = (self.images - images) / max(1, cost.images)
        return Cost(cost.check, cost.owners, cost.images, cost.budget, passes, self.clock() - began, cost.note)


def cost_sentence(costs: Sequence[Mapping[str, Any]], most: int = 4) -> str:
    """Return where the time of an audit went, the longest first, from its JSON.

    >>> cost_sentence([{"check": "noise", "explainers": ["c"], "seconds": 7.0}])
    'noise 7 s'
    """
    spent: dict[str, float] = {}
    for entry in costs:
        spent[entry["check"]] = spent.get(entry["check"], 0.0) + entry["seconds"]
    longest = sorted(spent.items(), key=lambda item: -item[1])[:most]
    return ", ".join(f"{name} {duration(round(seconds))}" for name, seconds in longest)
