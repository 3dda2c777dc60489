"""Identity: what a model is, as digests of its parts: weights, graph, preprocessing and class names.

Digests of the first release (version 1) were those of the weights alone. They are still read; whoever compares says so.
Digests are compared without torch; only `of_weights` loads it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

VERSION = 2
WORDS = {"weights": "weights", "graph": "graph", "preprocessing": "preprocessing", "classes": "class names"}


@dataclass(frozen=True, slots=True)
class Identity:
    """The parts of a model, each a sha256. ``graph`` is empty for a module that was not loaded from an export."""

    weights: str
    graph: str
    preprocessing: str
    classes: str

    @property
    def digest(self) -> str:
        """Sha256 over the parts.

        >>> Identity("a", "", "b", "c").digest[:12]
        'f7ee5f94a560'
        """
        return of_json({"version": VERSION, **asdict(self)})

    def differences(self, other: Identity) -> list[str]:
        """Return the names of the parts that differ; a graph is compared where both have one.

        >>> Identity("a", "", "b", "c").differences(Identity("a", "g", "x", "c"))
        ['preprocessing']
        """
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in WORDS}
        if not all(pairs["graph"]):
            del pairs["graph"]
        return [WORDS[name] for name, (a, b) in pairs.items() if a != b]

    def to_json(self) -> dict[str, Any]:
        """Return what manifests and audits keep."""
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, value: Any) -> Identity | None:
        """Take back what ``to_json`` gave; None for anything else, such as nothing at all from a first release."""
        if not isinstance(value, Mapping) or value.get("version") != VERSION:
            return None
        parts = {name: value.get(name) for name in WORDS}
        return cls(**parts) if all(isinstance(part, str) for part in parts.values()) else None  # type: ignore[arg-type]


def of_json(value: Any) -> str:
    """Return the sha256 of a value as canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def of_weights(module: nn.Module) -> str:
    """Return the sha256 over the sorted names, types, shapes and bytes of all weights and buffers."""
    from torch import Tensor
    from torch import uint8 as byte

    h = hashlib.sha256()
    state = module.state_dict()
    for key in sorted(state):
        value = state[key]
        if not isinstance(value, Tensor):
            continue
        flat = value.detach().cpu().contiguous()
        h.update(f"{key}|{flat.dtype}|{tuple(flat.shape)}|".encode())
        h.update(flat.reshape(-1).view(byte).numpy().data)
    return h.hexdigest()
