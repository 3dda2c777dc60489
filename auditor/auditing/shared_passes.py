"""Shared passes: what the model says of the audit's images under some condition, run once for all explainers.

A condition is the image as it is, a noisy copy of it, or the model with shuffled weights. The first explainer that
needs an image under a condition has the model run on it, with the layers that any explainer reads; the next ones read
the same logits and activations. What does not fit into memory is run again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from auditor.subject.subject import Subject

MOST_BYTES = 400_000_000
BATCH = 32
Outputs: TypeAlias = tuple[Tensor, dict[str, Tensor]]  # logits (n, classes), activations by layer (n, …)


class SharedPasses:
    """Logits and activations by condition and image."""

    def __init__(self, layers: Iterable[str], most_bytes: int = MOST_BYTES) -> None:
        self.layers, self.most_bytes = sorted(set(layers)), most_bytes
        self._rows: dict[tuple[Hashable, int], Outputs] = {}
        self._bytes = 0

    def run(self, subject: Subject, condition: Hashable, images: Tensor, index: Sequence[int]) -> Outputs:
        """Return logits and activations of ``images``, which are those of ``index`` under the condition."""
        outputs = {i: self._rows[condition, i] for i in index if (condition, i) in self._rows}
        todo = [row for row, i in enumerate(index) if i not in outputs]
        for part in torch.split(torch.tensor(todo, dtype=torch.long), BATCH):
            if not len(part):
                continue
            with torch.no_grad():
                logits, taken = subject.run(images[part], self.layers)
            for j, row in enumerate(part.tolist()):
                one = logits[j], {name: value[j] for name, value in taken.items()}
                outputs[index[row]] = one
                self._put(condition, index[row], one)
        rows = [outputs[i] for i in index]
        return torch.stack([y for y, _ in rows]), {k: torch.stack([z[k] for _, z in rows]) for k in self.layers}

    def _put(self, condition: Hashable, i: int, one: Outputs) -> None:
        if self._bytes + _size(one) <= self.most_bytes:
            # a copy: a row of a batch would keep the whole batch
            self._rows[condition, i] = one[0].clone(), {name: value.clone() for name, value in one[1].items()}
            self._bytes += _size(one)


def _size(one: Outputs) -> int:
    return sum(t.numel() * t.element_size() for t in (one[0], *one[1].values()))
