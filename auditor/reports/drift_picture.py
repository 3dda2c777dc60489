"""The drift between two versions as one PNG: matched concepts against the null band, layers, classes."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from auditor.attribution.heatmap import to_rgb
from auditor.release.drift import Drift
from auditor.release.version_changes import Regions

RED, BLUE, GREY = "#d62728", "#1f5ac8", "#b8b8b8"


def drift_picture(
    drift: Drift, path: str | Path, names: tuple[str, str] = ("A", "B"), regions: Regions | None = None
) -> Path:
    """Draw matched concepts, CKA per layer, the change by class, and where both versions look; return the path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7.5 if regions is None else 10.5), layout="constrained")
    FigureCanvasAgg(figure)
    halves: Any = (figure, None) if regions is None else figure.subfigures(2, 1, height_ratios=[7.5, 3])
    upper, lower = halves
    axes = upper.subplot_mosaic([["concepts", "cka"], ["change", "change"]], width_ratios=[3, 2])
    figure.suptitle("\n".join(textwrap.wrap(f"{names[0]}  to  {names[1]}: {drift.words()}", 130)), fontsize=10)
    if regions is not None and lower is not None:
        _draw_regions(lower, regions, names)
    ax = axes["concepts"]
    order = sorted(range(len(drift.matched)), key=lambda i: -drift.matched[i][2])  # the same in both pictures
    rows, change = [drift.matched[i] for i in order], drift.change[order]
    unmatched = {(i, j) for i, j, _ in rows if i in drift.died or j in drift.born}
    ax.bar(range(len(rows)), [s for *_, s in rows], color=[RED if (i, j) in unmatched else BLUE for i, j, _ in rows])
    ax.axhspan(drift.null_low, drift.null_high, color=GREY, alpha=0.5, label="null band of the mean similarity")
    ax.axhline(sum(drift.within) / 2, color="black", linewidth=1, linestyle=":", label="re-fits of one version, mean")
    ax.axhline(drift.similarity, color="black", linewidth=1, linestyle="--", label="mean similarity of A and B")
    ax.set_xticks(range(len(rows)), [f"{i}–{j}" for i, j, _ in rows], fontsize=8)  # noqa: RUF001
    ax.set(
        xlabel="concept of A and its match in B (red: died or born)",
        ylabel="correlation of profiles",
        ylim=(-0.1, 1.05),
    )
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, fontsize=8)  # off the bars
    ax = axes["cka"]
    ax.barh(list(drift.cka), list(drift.cka.values()), color=BLUE)
    ax.invert_yaxis()
    ax.set(xlabel="CKA of the layer between the versions", xlim=(0, 1.02))
    ax.tick_params(axis="y", labelsize=8)
    ax = axes["change"]
    top = max(float(np.abs(change).max()), 1e-9)
    shown = ax.imshow(change, cmap="RdBu_r", vmin=-top, vmax=top, aspect="auto")
    ax.set_yticks(range(len(rows)), [f"{i}–{j}" for i, j, _ in rows], fontsize=8)  # noqa: RUF001
    ax.set_xticks(range(len(drift.classes)), [c[:14] for c in drift.classes], rotation=60, ha="right", fontsize=8)
    ax.set_title("change of the mean contribution, by concept and class", fontsize=10)
    figure.colorbar(shown, ax=ax)
    if drift.band.is_known:
        axes["concepts"].axhline(drift.band.low, color=RED, linewidth=1, linestyle="-.")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def _draw_regions(figure: Any, regions: Regions, names: tuple[str, str]) -> None:
    """Draw both versions' deciding boxes on the same images, the first version above."""
    from matplotlib.patches import Rectangle

    axes = figure.subplots(2, max(2, len(regions.shown)), squeeze=False)
    for row, (side, name) in enumerate(zip((regions.a, regions.b), names, strict=True)):
        for column, ax in enumerate(axes[row]):
            ax.set_axis_off()
            if column >= len(regions.shown):
                continue
            i = regions.shown[column]
            ax.imshow(to_rgb(regions.images[i]))
            top, left, height, width = (float(getattr(side, k)[i]) for k in ("top", "left", "height", "width"))
            ax.add_patch(Rectangle((left, top), width, height, fill=False, edgecolor=RED, linewidth=2))
            ax.set_title(f"{name}: {regions.targets[i]}"[-26:], fontsize=7)
