"""Names that people give to concepts."""

from __future__ import annotations

from auditor.errors import OptionError
from auditor.explainers.base import Explainer
from auditor.explainers.tree.explainer import TreeExplainer

LONGEST = 80


def concept_count(explainer: Explainer) -> int:
    """Return how many concepts an explainer has; 0 for a kind without a fixed list of them."""
    if isinstance(explainer, TreeExplainer):
        return int(explainer.tree_.n_features)
    scores = getattr(explainer, "by_class_", None)
    return 0 if scores is None else int(scores.shape[0])


def name_concept(explainer: Explainer, index: int, text: str) -> Explainer:
    """Give concept ``index`` a name and return the explainer; save it to make a new revision of the artifact."""
    n = concept_count(explainer)
    if n == 0:
        raise OptionError(
            f"label: the {explainer.kind} explainer {explainer.name!r} has no concepts that can be named."
        )
    if not 0 <= index < n:
        raise OptionError(
            f"label: {explainer.name or explainer.kind} has concepts 0 to {n - 1}, got {index}; name one of these."
        )
    text = " ".join(text.split())
    if not 1 <= len(text) <= LONGEST or not text.isprintable():
        raise OptionError(f"label: want a name of 1 to {LONGEST} printable characters, got {len(text)}.")
    explainer.labels[index] = text
    return explainer
