"""Whether a fitted explainer stands in for the model: limits of its fit's metrics, sentences about those exceeded.

An explanation that does not give the model's decisions back explains something else. The limits are the same for all
kinds that measure these; a metric that a kind does not measure is left out, one that is NaN counts against it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

AT_LEAST = "at least"


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit on one metric of a fit; ``words`` says what the metric means, with its value as ``{value}``."""

    metric: str
    side: Literal["at least", "at most"]
    limit: float
    words: str

    def is_broken_by(self, value: float) -> bool:
        """Whether a value is beyond the limit; NaN is."""
        return not (value >= self.limit if self.side == AT_LEAST else value <= self.limit)


LIMITS = (
    Limit("f_cls", "at least", 0.5, "the model's class survives on {value:.0%} of held-out images when it stands in"),
    Limit(
        "f_cls_positive", "at least", 0.5, "the model's class survives on {value:.0%} of the images of the class itself"
    ),
    Limit("f_reg_relative", "at most", 1.0, "it misses the logit by {value:.2g} times the logit's own spread"),
    Limit("agreement_model", "at least", 0.5, "its branches give the model's class on {value:.0%} of held-out images"),
)


def shortcomings(metrics: Mapping[str, float], limits: tuple[Limit, ...] = LIMITS) -> list[str]:
    """Return what is wrong with a fit, a phrase per broken limit; nothing where it stands in for the model.

    >>> shortcomings({"f_cls": 0.98, "f_cls_positive": 0.08})
    ["the model's class survives on 8% of the images of the class itself (at least 50% wanted)"]
    >>> shortcomings({"f_cls": 0.9, "n_held_out": 40.0})
    []
    """
    return [_phrase(item, metrics[item.metric]) for item in limits if _breaks(item, metrics)]


def _breaks(item: Limit, metrics: Mapping[str, float]) -> bool:
    return item.metric in metrics and item.is_broken_by(metrics[item.metric])


def _phrase(item: Limit, value: float) -> str:
    if math.isnan(value):
        return f"{item.metric} could not be measured"
    limit = f"{item.limit:.0%}" if item.side == AT_LEAST else f"{item.limit:g}"
    return f"{item.words.format(value=value)} ({item.side} {limit} wanted)"
