"""TCAV scores as one PNG: a bar per concept and class, random concepts behind it, a star where they differ."""

from __future__ import annotations

from pathlib import Path

from auditor.metrics.tcav import Tcav

BLUE, GREY = "#1f5ac8", "#b8b8b8"
MOST_CLASSES = 30


def tcav_picture(result: Tcav, path: str | Path) -> Path:
    """Draw the concept x class figure of [TCAV] and return the path; scores that are not significant are pale."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    concepts = list(dict.fromkeys(row.concept for row in result.rows))
    classes = list(dict.fromkeys(row.label for row in result.rows))[:MOST_CLASSES]
    of = {(row.concept, row.label): row for row in result.rows}
    figure = Figure(figsize=(max(5.0, 1.2 + 0.55 * len(classes)), 1.0 + 1.9 * len(concepts)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"TCAV at {result.layer}: {result.runs} random sets of {result.set_size} images", fontsize=10)
    axes = figure.subplots(len(concepts), 1, sharex=True, squeeze=False)[:, 0]
    for ax, concept in zip(axes, concepts, strict=True):
        rows = [of[concept, label] for label in classes]
        at = range(len(rows))
        ax.bar(at, [r.random_score for r in rows], width=0.8, color=GREY, alpha=0.6, label="random concepts")
        for i, row in enumerate(rows):
            ax.bar(i, row.score, width=0.5, color=BLUE, alpha=1.0 if row.is_significant else 0.3)
            ax.errorbar(i, row.score, row.spread, color="black", linewidth=1, capsize=2)
            if row.is_significant:
                ax.text(i, min(1.0, row.score + row.spread) + 0.03, "*", ha="center", fontsize=13)
        ax.axhline(0.5, color="black", linewidth=0.8, linestyle=":")
        ax.set(ylim=(0, 1.15), ylabel="share of images")
        ax.set_title(f"{concept} (classifiers right on {rows[0].accuracy:.0%})", fontsize=9)
    axes[-1].set_xticks(range(len(classes)), [c[:18] for c in classes], rotation=60, ha="right", fontsize=8)
    axes[0].legend(loc="lower right", fontsize=7, frameon=False)
    figure.savefig(path, dpi=130)
    return Path(path)
