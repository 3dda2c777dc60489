"""Figures of the latent space as in [CoupledNMF]: eigenvalues by layer, and concepts of an example's neighbours."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from PIL import Image
from torch import Tensor

INK = "#444444"


def eigenvalue_plot(eigenvalues: Sequence[tuple[str, Tensor]]) -> Image.Image:
    """Return a picture of the eigenvalues, descending, of every layer's cosines between concepts (figure 3)."""
    figure, axes = _canvas(5.2, 3.2)
    for name, values in eigenvalues:
        axes.plot(range(1, len(values) + 1), values.tolist(), marker="o", markersize=3, linewidth=1.3, label=name)
    axes.axhline(1.0, color=INK, linewidth=0.8, linestyle=":")
    axes.set_xlabel("eigenvalue, by size")
    axes.set_ylabel("of the cosines; all 1 when distinct")
    axes.legend(fontsize="small")
    return _picture(figure)


def concept_bars(shares: Sequence[float], strongest: int) -> Image.Image:
    """Return a bar chart of which share of an example's neighbours has which concept as its strongest (figure 5d)."""
    figure, axes = _canvas(3.2, 1.4)
    colours = ["#d62728" if k == strongest else "#8899aa" for k in range(len(shares))]
    axes.bar(range(len(shares)), shares, color=colours)
    axes.set_ylim(0, 1)
    axes.set_xlabel("concept", fontsize="small")
    axes.tick_params(labelsize="small")
    return _picture(figure)


def _canvas(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _picture(figure: Any) -> Image.Image:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return Image.open(io.BytesIO(buffer.getvalue())).convert("RGB")
