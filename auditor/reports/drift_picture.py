"""The drift between two versions as one PNG: matched concepts against the null band, layers, classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from auditor.release.drift import Drift

RED, BLUE, GREY = "#d62728", "#1f5ac8", "#b8b8b8"


def drift_picture(found: Drift, path: str | Path, names: tuple[str, str] = ("A", "B")) -> Path:
    """Draw matched concepts, CKA per layer and the change of contributions by class; return the path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplot_mosaic([["concepts", "cka"], ["change", "change"]], width_ratios=[3, 2])
    verdict = "DRIFT" if found.drift else "no drift"
    figure.suptitle(
        f"{names[0]}  to  {names[1]}: {verdict}   similarity {found.similarity:.3f}, "
        f"re-fitting alone explains down to {found.null_low:.3f} (p = {found.p_value:.3f}, {found.n_images} images)"
    )
    ax = axes["concepts"]
    order = sorted(range(len(found.matched)), key=lambda i: -found.matched[i][2])  # the same in both pictures
    rows, change = [found.matched[i] for i in order], found.change[order]
    gone = {(i, j) for i, j, _ in rows if i in found.died or j in found.born}
    ax.bar(range(len(rows)), [s for *_, s in rows], color=[RED if (i, j) in gone else BLUE for i, j, _ in rows])
    ax.axhspan(found.null_low, found.null_high, color=GREY, alpha=0.5, label="null band of the mean similarity")
    ax.axhline(sum(found.within) / 2, color="black", linewidth=1, linestyle=":", label="re-fits of one version, mean")
    ax.axhline(found.similarity, color="black", linewidth=1, linestyle="--", label="mean similarity of A and B")
    ax.set_xticks(range(len(rows)), [f"{i}–{j}" for i, j, _ in rows], fontsize=8)  # noqa: RUF001
    ax.set(
        xlabel="concept of A and its match in B (red: died or born)",
        ylabel="correlation of profiles",
        ylim=(-0.1, 1.05),
    )
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, fontsize=8)  # off the bars
    ax = axes["cka"]
    ax.barh(list(found.cka), list(found.cka.values()), color=BLUE)
    ax.invert_yaxis()
    ax.set(xlabel="CKA of the layer between the versions", xlim=(0, 1.02))
    ax.tick_params(axis="y", labelsize=8)
    ax = axes["change"]
    top = max(float(np.abs(change).max()), 1e-9)
    shown = ax.imshow(change, cmap="RdBu_r", vmin=-top, vmax=top, aspect="auto")
    ax.set_yticks(range(len(rows)), [f"{i}–{j}" for i, j, _ in rows], fontsize=8)  # noqa: RUF001
    ax.set_xticks(range(len(found.classes)), [c[:14] for c in found.classes], rotation=60, ha="right", fontsize=8)
    ax.set_title("change of the mean contribution, by concept and class", fontsize=10)
    figure.colorbar(shown, ax=ax)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path
