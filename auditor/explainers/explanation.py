"""What one explainer says of one image: a few concepts whose contributions add up to the logit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from auditor.subject.outputs import Output
from auditor.subject.subject import Subject

ADDS_NOTHING = 0.005  # contributions below it are shown as 0.00


@dataclass(frozen=True, slots=True)
class ClassScore:
    """A class with its index, name, probability and logit."""

    index: int
    label: str
    probability: float
    logit: float


@dataclass(frozen=True, slots=True)
class Concept:
    """One concept behind a decision. ``heatmap`` is a small float grid, as fine as the layer; None where there is none.

    ``contribution`` is signed: how much the concept adds to (or takes from) the target's value; None for kinds that
    give relevance only.
    """

    index: int
    label: str
    activation: float
    contribution: float | None
    heatmap: Tensor | None = field(default=None, repr=False)
    note: str = ""

    @property
    def strength(self) -> float:
        """How much it counts, by which concepts are ranked: |contribution|, or |activation| where there is none."""
        return abs(self.activation if self.contribution is None else self.contribution)

    @property
    def counts_for(self) -> bool | None:
        """Whether it counts for the target (red) or against it (blue); None where it adds 0.00: then it has no colour.

        A kind that gives relevance only has concepts that count for the target.

        >>> [Concept(0, "a", 1.0, c).counts_for for c in (0.7, -0.7, 0.004, None)]
        [True, False, None, True]
        """
        if self.contribution is None:
            return True
        return None if abs(self.contribution) < ADDS_NOTHING else self.contribution > 0


@dataclass(frozen=True, slots=True, repr=False)
class Explanation:
    """What one explainer says of one image: ``bias + sum(contributions) + residual == target_value``.

    ``target_value`` is the model's own target logit, or what ``target_value_of`` says. ``extra`` holds what a kind has
    beyond that, ready for JSON. ``image`` is what a notebook shows beside it: bytes (channels, height, width), small.
    """

    kind: str
    prediction: ClassScore
    target: ClassScore
    target_value: float
    concepts: tuple[Concept, ...]
    bias: float | None = None
    residual: float | None = None
    name: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    target_value_of: str = "logit"
    image: Tensor | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        strongest = ", ".join(
            f"{c.label} {c.activation:.3g}" if c.contribution is None else f"{c.label} {c.contribution:+.2f}"
            for c in self.ranked()[:3]
        )
        more = f" and {len(self.concepts) - 3} more" if len(self.concepts) > 3 else ""
        label = f"{self.kind} {self.name!r}" if self.name else self.kind
        return (
            f"Explanation({label}: {self.prediction.label} {self.prediction.probability:.1%}, {self.target_value_of} "
            f"of {self.target.label} {self.target_value:.3f}; {strongest}{more})"
        )

    def _repr_html_(self) -> str:
        from auditor.explainers.notebook import explanation_html

        return explanation_html(self)

    def to_pandas(self) -> Any:
        """Return the concepts as a pandas frame, the strongest first, with bias and residual as the last rows."""
        import pandas as pd

        rows: list[dict[str, Any]] = [
            {"concept": c.label, "index": c.index, "activation": c.activation, "contribution": c.contribution}
            for c in self.ranked()
        ]
        for name, value in (("bias", self.bias), ("residual", self.residual)):
            if value is not None:
                rows.append({"concept": name, "index": None, "activation": None, "contribution": value})
        return pd.DataFrame(rows, columns=["concept", "index", "activation", "contribution"])

    def gap(self) -> float:
        """Return ``|bias + sum(contributions) + residual - target_value| / max(1, |target_value|)``."""
        if self.bias is None or self.residual is None:
            raise ValueError(f"an explanation of kind {self.kind!r} gives no contributions")
        total = self.bias + self.residual + sum(c.contribution or 0.0 for c in self.concepts)
        return abs(total - self.target_value) / max(1.0, abs(self.target_value))

    def ranked(self) -> list[Concept]:
        """Return the concepts, the strongest contribution of either sign first."""
        return sorted(self.concepts, key=lambda c: -c.strength)

    def explained_share(self, shown: Sequence[Concept]) -> float | None:
        """Return the share that some of the concepts explain; None for kinds without contributions.

        It is  sum |c| over those shown  by  sum |c| over all + |residual| : 1 where nothing is left out or unexplained.
        """
        if self.residual is None or any(c.contribution is None for c in self.concepts):
            return None
        whole = sum(c.strength for c in self.concepts) + abs(self.residual)
        return sum(c.strength for c in shown) / whole if whole > 0 else 1.0

    def to_json(self, heatmaps: bool = True) -> dict[str, Any]:
        """Return plain Python for JSON, heatmaps as nested lists of floats."""
        return {
            "name": self.name,
            "kind": self.kind,
            "target_value": self.target_value,
            "bias": self.bias,
            "residual": self.residual,
            "concepts": [
                {
                    "index": c.index,
                    "label": c.label,
                    "activation": c.activation,
                    "contribution": c.contribution,
                    "heatmap": np.round(c.heatmap.numpy(force=True).astype(float), 6).tolist()
                    if heatmaps and c.heatmap is not None
                    else None,
                    **({"note": c.note} if c.note else {}),
                }
                for c in self.concepts
            ],
            **({"extra": self.extra} if self.extra else {}),
        }


def class_scores(
    logits: Tensor, subject: Subject | Sequence[str], targets: list[int]
) -> tuple[list[ClassScore], list[ClassScore]]:
    """Return prediction and target of every row of ``logits`` (batch, classes).

    Kinds of other packages may still give the class names alone, as before; then probabilities sum to one.
    """
    if isinstance(subject, Subject):
        probabilities, names = subject.probabilities(logits), subject.class_names
    else:
        probabilities, names = Output().probabilities(logits), tuple(subject)

    def score(row: int, index: int) -> ClassScore:
        return ClassScore(index, names[index], float(probabilities[row, index]), float(logits[row, index]))

    best = logits.argmax(1).tolist()
    rows = range(len(best))
    return [score(i, best[i]) for i in rows], [score(i, targets[i]) for i in rows]
