"""Annotated heat: how much of each class's heat, and of its deciding spots, lies on annotated objects and parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from auditor.metrics.measure import Measure, of_items, skipped
from auditor.metrics.names import plain
from auditor.reliance import Finding, Reliance, shares_of_heat
from auditor.reliance.measures import ClassReliance

OUTSIDE, INSIDE = 0.2, 0.8  # share of the spots' area on annotated parts: up to, and from


@dataclass(frozen=True, eq=False)
class HeatOnParts:
    """Per part, and for the background: the share of each image's heat on it and of its area, by row of the images.

    ``covered`` (height, width) by row is what any part covers; rows without annotation have none.
    """

    shares: Mapping[str, Mapping[int, float]]
    areas: Mapping[str, Mapping[int, float]]
    covered: Mapping[int, Tensor]
    words: str

    @classmethod
    def of(cls, reference: Reliance, ids: Sequence[str], regions: Mapping[str, Mapping[str, Tensor]]) -> HeatOnParts:
        """Measure the heat of a reliance whose images are called ``ids``."""
        rows = reference.rows.tolist()
        names = [ids[row] for row in rows]
        shares, areas = (shares_of_heat(m, names, regions) for m in (reference.heat, torch.ones_like(reference.heat)))
        covered = {}
        for row, name in zip(rows, names, strict=True):
            masks = [of_image[name] for of_image in regions.values() if name in of_image]
            if masks:
                covered[row] = torch.stack(masks).amax(0)
        words = f"{len(covered)} of {len(rows)} images have annotations ({', '.join(sorted(regions))})"

        def by_row(values: Tensor) -> dict[int, float]:
            return {row: float(v) for row, v in zip(rows, values, strict=True) if row in covered}

        return cls(
            {part: by_row(v) for part, v in shares.items()},
            {part: by_row(v) for part, v in areas.items()},
            covered,
            words,
        )

    def metrics(self, c: ClassReliance) -> dict[str, Measure]:
        """Return ``heat_on_<part>`` of a class; the null is the part's share of the image."""
        out: dict[str, Measure] = {}
        for part, of_row in self.shares.items():
            rows = [r for r in c.rows if r in of_row]
            name = f"heat_on_{plain(part)}"
            if not rows:
                out[name] = skipped("none of the images of this class has annotations", "none")
                continue
            null = float(torch.tensor([self.areas[part][r] for r in rows]).mean())
            out[name] = of_items(torch.tensor([of_row[r] for r in rows]), "none", null=null)
        return out

    def sentence(self, f: Finding) -> str:
        """Return where the spots of a finding lie; where it has none, how much of the heat lies on annotated parts."""
        rows = [i for i, row in enumerate(f.rows) if row in self.covered]
        if not rows:
            return ""
        parts = ", ".join(sorted(p for p in self.shares if p != "background"))
        area = float(torch.stack([self.covered[f.rows[i]].mean() for i in rows]).mean())
        if f.boxes is None:
            on = 1 - sum(self.shares["background"][f.rows[i]] for i in rows) / len(rows)
            return f"Of the heat {on:.0%} lies on {parts}, which cover{'s' if ',' not in parts else ''} {area:.0%}."
        masks = f.boxes.masks((self.covered[f.rows[rows[0]]].shape[0], self.covered[f.rows[rows[0]]].shape[1]))[:, 0]
        on = float(
            torch.stack([(masks[i] * self.covered[f.rows[i]]).sum() / masks[i].sum().clamp_min(1) for i in rows]).mean()
        )
        where = "lie outside" if on <= OUTSIDE else "lie on" if on >= INSIDE else "lie partly on"
        return f"The spots {where} what is annotated ({parts}): {on:.0%} of their area is on it."
