"""Gallery: the images that show a concept best, as small crops around where it is seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auditor.data.source import Batch

CROP = 48  # pixels of a stored crop's side
SMALL = 64  # pixels of side up to which an image is shown whole: half of it would say too little


@dataclass(frozen=True, slots=True)
class Shot:
    """One image of a concept: its name, label, score, where the crop was taken (share of height and width) and it."""

    id: str
    label: int
    score: float
    box: tuple[float, float, float, float]  # top, left, bottom, right
    crop: Tensor  # uint8 (channels, CROP, CROP)
    heat: Tensor  # uint8 (CROP, CROP): where in the crop, 255 at the image's peak


class Gallery:
    """The top images of each concept, kept while batches stream by.

    ``label_names`` are the names of the data's labels where these are no classes of the model.
    """

    def __init__(
        self, n_concepts: int, n_top: int, grid: tuple[int, int], label_names: Sequence[str] | None = None
    ) -> None:
        self.n_top, self.grid = n_top, grid
        self.label_names = None if label_names is None else tuple(label_names)
        self.shots: list[list[Shot]] = [[] for _ in range(n_concepts)]

    def offer(self, batch: Batch, scores: Tensor, first: int = 0) -> None:
        """Look at a batch with scores (batch, concepts, positions) and keep what beats the present top.

        The scores are of the concepts from ``first`` on.
        """
        peak, where = scores.max(-1)  # (batch, concepts)
        labels = batch.labels if self.label_names is None else batch.source_labels
        for k, shots in enumerate(self.shots[first : first + scores.shape[1]]):
            floor = shots[-1].score if len(shots) == self.n_top else 0.0
            order = peak[:, k].argsort(descending=True, stable=True)[: self.n_top]
            for i in order.tolist():
                score = float(peak[i, k])
                if score <= floor:
                    break
                box = self._box(int(where[i, k]), min(batch.images[i].shape[1:]))
                crop = _cut(batch.images[i], box)
                heat = self._heat(scores[i, k], box)
                shots.append(Shot(batch.ids[i], int(labels[i]), score, box, crop, heat))
            shots.sort(key=lambda shot: -shot.score)  # stable: earlier images win ties
            del shots[self.n_top :]

    def reordered(self, order: list[int]) -> Gallery:
        """Return the gallery with its concepts in another order."""
        out = Gallery(len(order), self.n_top, self.grid, self.label_names)
        out.shots = [self.shots[k] for k in order]
        return out

    def label_of(self, shot: Shot, class_names: Sequence[str]) -> str:
        """Return the label of an image: the data's own name of it, else the model's class; empty without label."""
        names = class_names if self.label_names is None else self.label_names
        return names[shot.label] if 0 <= shot.label < len(names) else ""

    def tensors(self) -> dict[str, Tensor]:
        """Return all crops in one tensor, and their heat in another."""
        shots = [shot for row in self.shots for shot in row]
        if not shots:
            none = torch.zeros(0, 1, CROP, CROP, dtype=torch.uint8)
            return {"crops": none, "crop_heat": none[:, 0]}
        return {"crops": torch.stack([s.crop for s in shots]), "crop_heat": torch.stack([s.heat for s in shots])}

    def captions(self) -> dict[str, Any]:
        """Return all that is not pixels, ready for JSON."""
        rows = [
            [{"id": s.id, "label": s.label, "score": s.score, "box": list(s.box)} for s in row] for row in self.shots
        ]
        names = {} if self.label_names is None else {"label_names": list(self.label_names)}
        return {"n_top": self.n_top, "grid": list(self.grid), "shots": rows, **names}

    @classmethod
    def restore(cls, tensors: dict[str, Tensor], captions: dict[str, Any]) -> Gallery:
        """Put a stored gallery together again."""
        rows: list[list[dict[str, Any]]] = captions["shots"]
        grid = (captions["grid"][0], captions["grid"][1])
        out = cls(len(rows), int(captions["n_top"]), grid, captions.get("label_names"))
        crops, heats = iter(tensors["crops"]), iter(tensors["crop_heat"])
        out.shots = [
            [Shot(r["id"], r["label"], r["score"], tuple(r["box"]), next(crops), next(heats)) for r in row]
            for row in rows
        ]
        return out

    def _heat(self, scores: Tensor, box: tuple[float, float, float, float]) -> Tensor:
        """Return one image's scores over the crop, as fine as the crop."""
        grid = scores.reshape(1, 1, *self.grid).float()
        fine = torch.nn.functional.interpolate(grid, size=(4 * CROP, 4 * CROP), mode="bilinear", align_corners=False)
        return _cut((fine[0] / scores.max().clamp_min(1e-30)).clamp(0, 1).cpu(), box)[0]

    def _box(self, position: int, side: int) -> tuple[float, float, float, float]:
        """Return a window of half the image around a cell, moved inside the image; all of a small image."""
        h, w = self.grid
        if h * w == 1 or side <= SMALL:
            return (0.0, 0.0, 1.0, 1.0)
        y, x = (position // w + 0.5) / h, (position % w + 0.5) / w
        top, left = min(max(y - 0.25, 0.0), 0.5), min(max(x - 0.25, 0.0), 0.5)
        return (top, left, top + 0.5, left + 0.5)


def _cut(image: Tensor, box: tuple[float, float, float, float]) -> Tensor:
    _, h, w = image.shape
    top, left = int(box[0] * h), int(box[1] * w)
    bottom, right = max(top + 1, round(box[2] * h)), max(left + 1, round(box[3] * w))
    piece = image[None, :, top:bottom, left:right]
    mode = "nearest" if min(piece.shape[2:]) < CROP // 2 else "bilinear"
    sized = torch.nn.functional.interpolate(piece, size=(CROP, CROP), mode=mode)
    return (sized[0] * 255).round().clamp(0, 255).to(torch.uint8)
