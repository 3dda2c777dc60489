"""The tree as a picture: an SVG with prototype images at the leaves, and a page around it where branches fold.

A click on a decision folds what is below it, and the rest moves together; with an explanation, the image's path is
drawn in colour. Every node is a group that is placed relative to its parent, so that moving it moves what is below.
"""

from __future__ import annotations

import base64
import io
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from torch import Tensor

from auditor.attribution.heatmap import to_rgb
from auditor.explainers.concept_page import checked_suffix
from auditor.explainers.explanation import Explanation
from auditor.explainers.tree.decision_path import Boxes
from auditor.pages.templates import render

if TYPE_CHECKING:
    from auditor.explainers.tree.explainer import TreeExplainer

WIDTH, HEIGHT, THUMB = 84, 74, 48  # pixels per leaf, per level, and of a prototype
TOP, FOLDED = 24, 112  # pixels above the root, and per decision whose branches are folded
MANY = 24  # leaves from which the page opens with only the path, or only the upper levels, unfolded
HUES = ("#1f5ac8", "#d62728", "#2c9f4b", "#8a56c2", "#e08a1e", "#159a9c", "#b3548f", "#7a6a4f", "#5b7fa6", "#93a11f")
# of the drawing where it stands alone; on the page the style sheet of all pages says the same for light and dark
STYLE = """
svg{background:#fff}text{font:11px system-ui,sans-serif;fill:#1b1f24}.edge{stroke:#8a94a3;stroke-width:1.2;fill:none}
.on>.edge{stroke:#b3171d;stroke-width:3}.box{fill:#f5f7f9;stroke:#8a94a3}.on>.box{stroke:#b3171d;stroke-width:2.5}
.mostly{display:none}
"""


def tree_svg(explainer: TreeExplainer, explanation: Explanation | None = None, *, alone: bool = True) -> str:
    """Return the tree as one SVG; the path of an explained image carries the class ``on``.

    ``alone``: it is a file of its own, so it brings its style along; else it lies on a page on which branches fold.
    """
    tree, names = explainer.tree_, explainer.class_names
    leaves = Boxes.of(tree).leaves
    path = set() if explanation is None else {step["node"] for step in explanation.extra["path"]}
    path |= set() if explanation is None else {explanation.extra["leaf"]}
    column = {int(leaf): i for i, leaf in enumerate(_in_order(tree))}
    x = np.zeros(tree.n_nodes)
    for node in range(tree.n_nodes - 1, -1, -1):
        is_leaf = tree.feature[node] < 0
        x[node] = (column[node] + 0.5) * WIDTH if is_leaf else (x[tree.left[node]] + x[tree.right[node]]) / 2
    hue = {int(c): HUES[int(c) % len(HUES)] for c in range(tree.value.shape[1])}

    def draw(node: int, parent: int | None, level: int) -> str:
        top = int(tree.value[node].argmax())
        on = " on" if node in path else ""
        right, down = (x[node], TOP) if parent is None else (x[node] - x[parent], HEIGHT)
        position = f'transform="translate({right:.1f},{down})"'
        line = ""
        if parent is not None:
            curve = f"M{-right:.1f} {14 - down}C{-right:.1f} {-down / 2:.0f} 0 {-down / 2:.0f} 0 -12"
            line = f'<path class="edge" d="{curve}"/>'
        share = float(tree.value[node, top])
        if tree.feature[node] < 0:
            about = escape(f"{explainer.leaf_label(node)}, {tree.rows[node]} images")
            shots = explainer.gallery_.shots[int(np.searchsorted(leaves, node))]
            picture = "".join(
                f'<image href="{_png(shot.crop)}" x="{-THUMB // 2}" y="{16 + i * (THUMB + 3)}" width="{THUMB}" '
                f'height="{THUMB}"><title>{escape(shot.id)}</title></image>'
                for i, shot in enumerate(shots)
            )
            return (
                f'<g class="leaf{on}" {position}>{line}<rect class="box" x="-39" y="-12" width="78" '
                f'height="26" rx="12" style="fill:{hue[top]}22"><title>{about}</title></rect>'
                f'<text y="5" text-anchor="middle">{escape(_short(names[top]))} {share:.0%}</text>{picture}</g>'
            )
        feature, threshold = int(tree.feature[node]), int(tree.threshold[node])
        rule = escape(f"{_short(explainer.label(feature), 14)} ≤ {threshold}")
        whole = escape(f"node {node}: {explainer.label(feature)} ≤ {threshold}; {tree.rows[node]} images")
        below = "".join(draw(int(child), node, level + 1) for child in (tree.left[node], tree.right[node]))
        return (
            f'<g class="node{on}" id="n{node}" data-level="{level}" {position}>{line}<rect class="box" x="-52" y="-12" '
            f'width="104" height="26" rx="4"><title>{whole}</title></rect>'
            f'<text y="5" text-anchor="middle" pointer-events="none">{rule}</text>'
            f'<text class="mostly" y="28" text-anchor="middle">{escape(_short(names[top], 9))} {share:.0%} …</text>'
            f'<g class="below">{below}</g></g>'
        )

    n_shots = max((len(shots) for shots in explainer.gallery_.shots), default=0)
    width = max(len(leaves) * WIDTH, 160)
    height = TOP + tree.depth * HEIGHT + 40 + n_shots * (THUMB + 3)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="{"img" if alone else "group"}" aria-label="decision tree">'
        f"{f'<style>{escape(STYLE, quote=False)}</style>' if alone else ''}{draw(0, None, 0)}</svg>"
    )


def tree_page(explainer: TreeExplainer, explanation: Explanation | None = None, image: Tensor | None = None) -> str:
    """Return a self-contained page: metrics, the foldable tree, and the rules of an explained image."""
    from markupsafe import Markup

    return render(
        "tree.html",
        title=f"Decision tree {explainer.name}".strip(),
        story=None if explanation is None else _story(explanation, image),
        drawing=Markup(tree_svg(explainer, explanation, alone=False)),
        metrics=[(name, f"{value:.4g}") for name, value in sorted(explainer.metrics.items())],
        sizes=Markup(f"const WIDTH={WIDTH},HEIGHT={HEIGHT},TOP={TOP},FOLDED={FOLDED},MANY={MANY},SHOT={THUMB + 3};"),
    )


def write_tree_page(
    explainer: TreeExplainer, path: str | Path, explanation: Explanation | None = None, image: Tensor | None = None
) -> Path:
    """Write the page (or, for a name that ends in ``.svg``, the drawing alone) and return its path."""
    path = checked_suffix(path, explainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    is_drawing = path.suffix.lower() == ".svg"
    text = tree_svg(explainer, explanation) if is_drawing else tree_page(explainer, explanation, image)
    path.write_text(text, encoding="utf-8")
    return path


def _story(explanation: Explanation, image: Tensor | None) -> dict[str, Any]:
    """Return what the page says of an explained image."""
    e, picture = explanation.extra, ""
    if image is not None:
        raw = Image.fromarray(to_rgb(image))
        side = max(1, 128 // max(raw.size))
        picture = _encode(raw.resize((raw.width * side, raw.height * side), 0))
    return {
        "picture": picture,
        "says": e["tree_class"],
        "probability": f"{e['tree_probability']:.0%}",
        "agrees": "agrees" if e["agrees_with_model"] else "does not agree",
        "model": explanation.prediction.label,
        "target": explanation.target.label,
        "root": f"{explanation.bias:.3f}",
        "value": f"{explanation.target_value:.3f}",
        "leaf": e["leaf"],
        "steps": [(step["rule"], f"{step['contribution']:+.3f}") for step in e["path"]],
        "others": [
            {
                "name": other["class"],
                "probability": f"{other['probability']:.0%}",
                "changes": ", ".join(f"{c['label']} from {c['code']} to {c['wanted']}" for c in other["changes"]),
            }
            for other in e["alternatives"]
        ],
    }


def _in_order(tree: Any) -> list[int]:
    """Return the leaves from left to right."""
    leaves, stack = [], [0]
    while stack:
        node = stack.pop()
        if tree.feature[node] < 0:
            leaves.append(node)
        else:
            stack += [int(tree.right[node]), int(tree.left[node])]
    return leaves


def _png(crop: Tensor) -> str:
    return _encode(Image.fromarray(to_rgb(crop.float() / 255)))


def _encode(picture: Image.Image) -> str:
    stream = io.BytesIO()
    picture.save(stream, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def _short(text: str, most: int = 7) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
