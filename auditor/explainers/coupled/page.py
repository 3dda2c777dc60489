"""The page of shared concepts: latent images, how distinct concepts are in each layer, sensitivity and neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor

from auditor.explainers.concept_page import SIDE, ConceptPage, Section, sized
from auditor.explainers.coupled.latent_space import Neighbours, distinctness, neighbours
from auditor.subject.subject import Subject

if TYPE_CHECKING:
    from auditor.explainers.coupled.explainer import CoupledExplainer

N_NEIGHBOURS, THUMB_SIDE, MATRIX_SIDE = 10, 48, 160


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
        parts = [Section("How distinct the concepts are in each layer", rows=[("Cosines between concepts", cosines)])]
        scaled = {k.partition("/")[2]: v for k, v in e.metrics.items() if k.startswith("cka_lambda/")}
        if scaled:
            table = [(k, f"{v:.3f}") for k, v in sorted(scaled.items(), reverse=True)]
            parts.append(Section("CKA of the latent when its penalty is scaled", columns=("by", "CKA"), table=table))
        title = "Concept sensitivity: share of a class's images whose logit rises with the concept"
        parts.append(Section(title, columns=("concept", *self._shown_classes()), table=self._sensitivity()))
        rows = []
        for i, near in self._neighbours():
            strongest, share = _strongest(near)
            text = f"{e.ids_[i]} and its neighbours; {share:.0%} of them: {e.label(strongest)}"
            rows.append((text, [(self._thumb(j), e.ids_[j]) for j in (i, *near.index)]))
        return [*parts, Section("Neighbours in the latent space", rows=rows)]

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
            rows.append((text, [self._thumb(j) for j in (i, *near.index)]))
        return rows

    def _layers(self) -> list[tuple[str, Tensor]]:
        e = self.explainer
        return [(b.name, basis) for b, basis in zip(e.blocks_, e.P_, strict=True) if b.layer is not None]

    def _neighbours(self) -> list[tuple[int, Neighbours]]:
        F = self.explainer.F_
        return [(i, neighbours(F[:, i], F, N_NEIGHBOURS, skip=i)) for i in examples_of(self.explainer.labels_)]

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


def _strongest(near: Neighbours) -> tuple[int, float]:
    concept = max(range(len(near.concepts)), key=near.concepts.__getitem__)
    return concept, near.concepts[concept]


def _matrix(C: Tensor) -> Image.Image:
    grey = 255 - (C.clamp(0, 1) * 255).round().to(torch.uint8)
    picture = Image.fromarray(grey.numpy())
    return picture.resize((MATRIX_SIDE, MATRIX_SIDE), Image.Resampling.NEAREST).convert("RGB")
