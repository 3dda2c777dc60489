"""Relevance maps of one image side by side, as one HTML page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from auditor.attribution.heatmap import overlay_signed
from auditor.auditing.map_comparison import MapComparison, RelevanceMap
from auditor.auditing.pictures import data_url
from auditor.pages.templates import render
from auditor.reports.drawings import number
from auditor.subject.subject import Subject

SIDE = 288


def write_maps_page(compared: MapComparison, subject: Subject, path: Path, title: str) -> Path:
    """Write the page and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render("maps.html", title=title, **shown_maps(compared, subject)), encoding="utf-8")
    return path


def shown_maps(compared: MapComparison, subject: Subject) -> dict[str, Any]:
    """Return what a template shows of the maps of one image, the best by pixel flipping first."""
    names = subject.class_names
    order = sorted(compared.maps, key=lambda m: (m.heat is None, m.flip_area if m.heat is not None else 0.0))
    blank = compared.image.new_zeros(compared.image.shape[1:])
    return {
        "image": data_url(overlay_signed(compared.image, blank, side=SIDE)),
        "target": names[compared.target],
        "prediction": names[compared.prediction],
        "probability": f"{compared.probability:.1%}",
        "random_area": number(compared.random_area),
        "maps": [_map(m, compared) for m in order],
    }


def _map(m: RelevanceMap, compared: MapComparison) -> Mapping[str, Any]:
    seconds = (
        "" if math.isnan(m.seconds) else f"{m.seconds:.1f} s" if m.seconds >= 0.1 else f"{1000 * m.seconds:.0f} ms"
    )
    return {
        "name": m.name,
        "kind": m.kind,
        "problem": m.problem,
        "picture": None if m.heat is None else data_url(overlay_signed(compared.image, m.heat, side=SIDE)),
        "seconds": seconds,
        "area": number(m.flip_area),
        "gain": number(m.flip_gain),
        "level": "good" if m.flip_gain > 0 else "warn",
    }
