"""The page of deepfacto: its factors, and which of them follow single attributes that the training never saw.

As figure B.2 of [Khorram2020]: for an attribute, the row of S whose amount shows best who has it, over its top images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from auditor.explainers.concept_page import SIDE, ConceptPage, Section
from auditor.metrics.attribute_probe import Attributes
from auditor.subject.subject import Subject

if TYPE_CHECKING:
    from auditor.explainers.deepfacto.explainer import DeepFactoExplainer

MOST = 24  # attributes kept
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Followed:
    """An attribute and the factor that follows it: chosen on images of the fit, ``auc`` is of held-out ones."""

    attribute: str
    factor: int
    auc: float
    frequency: float  # among the held-out images
    has: tuple[bool, ...] = ()  # of each picture of the factor: whether the image has the attribute

    def to_json(self) -> dict[str, Any]:
        """Return plain Python for the manifest."""
        return asdict(self)

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Followed:
        """Restore what ``to_json`` gave."""
        return cls(**{**entry, "has": tuple(entry["has"])})


def followed_attributes(S: Tensor, held: Tensor, attributes: Attributes) -> list[Followed]:
    """Return attributes with the factor that follows each best, the clearest first.

    ``S`` (images, factors) are amounts. Attributes that do not vary among the images of the fit, or among the
    held-out ones, are left out.
    """
    amounts, is_held = S.double().numpy(), held.numpy()
    results = []
    for name, column in zip(attributes.names, attributes.values.T, strict=True):
        marks = column.astype(bool)
        learned, reported = marks[~is_held], marks[is_held]
        if learned.all() or not learned.any() or reported.all() or not reported.any():
            continue
        factor = int(areas(amounts[~is_held], learned).argmax())
        auc = float(areas(amounts[is_held][:, [factor]], reported)[0])
        results.append(Followed(name, factor, auc, float(reported.mean())))
    return sorted(results, key=lambda f: -f.auc)[:MOST]


def areas(amounts: Floats, marks: NDArray[np.bool_]) -> Floats:
    """Return the area under the ROC curve of each column: how often one that has it has more; ties count half.

    >>> areas(np.array([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]]), np.array([False, False, True])).tolist()
    [1.0, 0.5]
    """
    from scipy.stats import rankdata

    n_with, n_without = int(marks.sum()), int((~marks).sum())
    ranks = rankdata(amounts, axis=0)
    return np.asarray((ranks[marks].sum(0) - n_with * (n_with + 1) / 2) / (n_with * n_without), dtype=np.float64)


class DeepFactoPage(ConceptPage):
    """Concepts, then the attributes that single factors follow."""

    explainer: DeepFactoExplainer

    def __init__(self, explainer: DeepFactoExplainer, subject: Subject) -> None:
        super().__init__(explainer, subject)

    def sections(self) -> list[Section]:
        """Return the attributes with the pictures of their factors; nothing where the fit had no attributes."""
        return [attribute_section(self.explainer)] if self.explainer.followed_ else []


def attribute_section(explainer: DeepFactoExplainer) -> Section:
    """Return a row of pictures per attribute, heat showing where the factor is."""
    rows: list[tuple[str, Sequence[tuple[Any, str]]]] = []
    for f in explainer.followed_:
        shots = explainer.gallery.shots[f.factor]
        figures = [
            (explainer.picture(f.factor, shot, SIDE), f"{shot.id}: {'has it' if has else 'has it not'}")
            for shot, has in zip(shots, f.has, strict=False)
        ]
        title = f"{f.attribute}: {explainer.label(f.factor)}, area under the curve {f.auc:.2f} on held-out images"
        rows.append((f"{title} ({f.frequency:.0%} have it)", figures))
    return Section(
        "Factors that follow single attributes",
        "The training saw no attributes. For each, the factor whose amount shows best who has it, chosen on the images "
        "of the fit; the area is how often an image that has it has more of the factor than one that has not, on "
        "images the fit did not see: 0.5 by chance.",
        rows=rows,
    )
