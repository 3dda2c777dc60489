"""The page of shared concepts: latent images, how distinct concepts are in each layer, sensitivity and neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor

from auditor.explainers.concept_page import SIDE, ConceptPage, Section, sized
from auditor.explainers.coupled.figures import concept_bars, eigenvalue_plot
from auditor.explainers.coupled.latent_space import Neighbours, distinctness, mask_of, neighbours
from auditor.subject.subject import Subject

if TYPE_CHECKING:
    from auditor.explainers.coupled.explainer import CoupledExplainer

N_NEIGHBOURS, N_COUNTED, THUMB_SIDE, MATRIX_SIDE = 10, 30, 48, 160  # shown, and counted for their concepts
LAMBDAS = ("1", "0.1", "0.01", "0.001")


NEIGHBOURS_TEXT = (
    "An example, what the latent image of its strongest concept covers of it, which concepts are the strongest of its "
    "nearest neighbours, and the nearest of them."
)


class CoupledPage(ConceptPage):
    """The page of a concept basis, and after it the latent space."""

    explainer: CoupledExplainer

    def __init__(self, explainer: CoupledExplainer, subject: Subject) -> None:
        super().__init__(explainer, subject)

    def figures(self, concept: int) -> list[tuple[Image.Image, str]]:
        """Return the latent image of a concept, where pixels were coupled."""
        latent = self.explainer.latent_image(concept)
        if not latent.numel():
            return []
        top = float(latent.max())
        return [(sized(latent / top if top > 0 else latent, SIDE), "latent image")]

    def sections(self) -> list[Section]:
        """Return cosines, the paper's table of penalties, sensitivity and neighbours."""
        e = self.explainer
        measured = [(name, distinctness(basis)) for name, basis in self._layers()]
        cosines = [
            (_matrix(d.cosines), f"{name}: top eigenvalues {d.top_mean:.2f}, off-diagonal {d.off_diagonal:.2f}")
            for name, d in measured
        ]
        rows = [("Cosines between concepts", cosines)]
        if measured:
            plot = eigenvalue_plot([(name, d.eigenvalues) for name, d in measured])
            rows.append(("Eigenvalues of the cosines: the nearer to 1, the more distinct", [(plot, "by layer")]))
        parts = [*self._labels(), Section("How distinct the concepts are in each layer", rows=rows)]
        table = cka_table(e.metrics)
        if table:
            title = "CKA of the latent between fits whose penalty on it is scaled"
            parts.append(Section(title, columns=("by", *LAMBDAS), table=table))
        title = "Concept sensitivity: share of a class's images whose logit rises with the concept"
        parts.append(Section(title, columns=("concept", *self._shown_classes()), table=self._sensitivity()))
        examples = [self._example(i, near) for i, near in self._neighbours()]
        return [*parts, Section("Neighbours in the latent space", NEIGHBOURS_TEXT, rows=examples)]

    def _labels(self) -> list[Section]:
        """Return the table of the labels, and super-classes, whose images hold most of each concept (table I)."""
        e = self.explainer
        names = e.label_names_ or tuple(self.subject.class_names)
        if not bool((e.labels_ >= 0).any()):
            return []
        above = sorted(set(e.superclasses_))
        table = []
        for k, scores in enumerate(e.class_score_):
            top = [names[i] for i in scores.argsort(descending=True, stable=True)[:4].tolist() if float(scores[i]) > 0]
            row = [e.label(k), ", ".join(top)]
            if above:
                total = dict.fromkeys(above, 0.0)
                for value, superclass in zip(scores.tolist(), e.superclasses_, strict=True):
                    total[superclass] += value
                row.append(", ".join(sorted(total, key=lambda s: -total[s])[:2]))
            table.append(row)
        columns = ("concept", "top labels", *(("top super-classes",) if above else ()))
        return [Section("What the images of each concept are, by the labels of the data", columns=columns, table=table)]

    def _example(self, i: int, near: Neighbours) -> tuple[str, list[tuple[Image.Image, str]]]:
        """Return one example as figure 5 has it: its concept, what that masks, the neighbours and their concepts."""
        e = self.explainer
        concept = int(e.F_[:, i].argmax())
        strongest, share = _strongest(near)
        text = f"{e.ids_[i]} and its neighbours; {share:.0%} of the nearest {N_COUNTED}: {e.label(strongest)}"
        figures = [(self._thumb(i), e.ids_[i])]
        latent = e.latent_image(concept)
        if latent.numel():
            x = e.thumbs_[i].float() / 255
            mask = mask_of(latent.mean(0)).float()[None, None]
            mask = torch.nn.functional.interpolate(mask, x.shape[1:], mode="nearest")[0]
            figures.append((sized(x * mask, THUMB_SIDE), f"where {e.label(concept)} is above its median"))
        bars = (concept_bars(near.concepts, strongest), f"concepts of the nearest {N_COUNTED}")
        return text, [*figures, bars, *((self._thumb(j), e.ids_[j]) for j in near.index[:N_NEIGHBOURS])]

    def rows(self) -> list[tuple[str, list[Image.Image]]]:
        """Return the cosines of every layer in one row, and a row of neighbours per example."""
        e, rows = self.explainer, []
        measured = [(name, distinctness(basis)) for name, basis in self._layers()]
        if measured:
            text = ", ".join(f"{name} (off-diagonal {d.off_diagonal:.2f})" for name, d in measured)
            rows.append((f"cosines between the concepts in {text}", [_matrix(d.cosines) for _, d in measured]))
        for i, near in self._neighbours():
            strongest, share = _strongest(near)
            text = f"{e.ids_[i]} and its neighbours; {share:.0%} of them: {e.label(strongest)}"
            rows.append((text, [self._thumb(j) for j in (i, *near.index[:N_NEIGHBOURS])]))
        return rows

    def _layers(self) -> list[tuple[str, Tensor]]:
        e = self.explainer
        return [(b.name, basis) for b, basis in zip(e.blocks_, e.P_, strict=True) if b.layer is not None]

    def _neighbours(self) -> list[tuple[int, Neighbours]]:
        F = self.explainer.F_
        return [(i, neighbours(F[:, i], F, N_COUNTED, skip=i)) for i in examples_of(self.explainer.labels_)]

    def _thumb(self, i: int) -> Image.Image:
        return sized(self.explainer.thumbs_[i].float() / 255, THUMB_SIDE)

    def _shown_columns(self) -> list[int]:
        e = self.explainer
        return [c for c in range(len(self.subject.class_names)) if not bool(e.sensitivity_[:, c].isnan().all())][:20]

    def _shown_classes(self) -> list[str]:
        return [self.subject.class_names[c][:14] for c in self._shown_columns()]

    def _sensitivity(self) -> list[list[str]]:
        e, columns = self.explainer, self._shown_columns()
        return [[e.label(k), *(f"{float(row[c]):.2f}" for c in columns)] for k, row in enumerate(e.sensitivity_)]


def examples_of(labels: Tensor, most: int = 8) -> list[int]:
    """Return the first example of each of a few classes; just the first examples where labels are unknown (-1).

    >>> examples_of(torch.tensor([2, 2, 0, -1, 1])), examples_of(torch.tensor([-1, -1]))
    ([2, 4, 0], [0, 1])
    """
    first = [int((labels == c).nonzero()[0, 0]) for c in sorted(set(labels.tolist())) if c >= 0][:most]
    return first or list(range(min(most, labels.numel())))


def cka_table(metrics: Mapping[str, float]) -> list[list[str]]:
    """Return the table of the CKA between fits whose penalty is scaled, from the fit's metrics; empty without them.

    >>> two = {"cka_lambda/0.1": 0.9, "cka_lambda/0.01": 0.8, "cka_lambda/0.1/0.01": 0.7}
    >>> cka_table(two)[1]
    ['0.1', '0.900', '1', '0.700', '']
    """
    if not any(name.startswith("cka_lambda/") for name in metrics):
        return []

    def cell(i: int, j: int) -> str:
        one, other = LAMBDAS[min(i, j)], LAMBDAS[max(i, j)]
        value = metrics.get(f"cka_lambda/{other}" if one == "1" else f"cka_lambda/{one}/{other}")
        return "1" if i == j else "" if value is None else f"{value:.3f}"

    n = len(LAMBDAS)
    return [[LAMBDAS[i], *(cell(i, j) for j in range(n))] for i in range(n)]


def _strongest(near: Neighbours) -> tuple[int, float]:
    concept = max(range(len(near.concepts)), key=near.concepts.__getitem__)
    return concept, near.concepts[concept]


def _matrix(C: Tensor) -> Image.Image:
    grey = 255 - (C.clamp(0, 1) * 255).round().to(torch.uint8)
    picture = Image.fromarray(grey.numpy())
    return picture.resize((MATRIX_SIDE, MATRIX_SIDE), Image.Resampling.NEAREST).convert("RGB")
