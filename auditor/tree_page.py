"""The tree as a picture: an SVG with prototype images at the leaves, and a page around it where branches fold.

A click on a decision folds what is below it; with an explanation, the image's path is drawn in colour.
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

from auditor.explanation import Explanation
from auditor.heatmap import to_rgb
from auditor.tree_paths import Boxes

if TYPE_CHECKING:
    from auditor.tree import TreeExplainer

WIDTH, HEIGHT, THUMB = 76, 74, 48  # pixels per leaf, per level, and of a prototype
HUES = ("#1f5ac8", "#d62728", "#2c9f4b", "#8a56c2", "#e08a1e", "#159a9c", "#b3548f", "#7a6a4f", "#5b7fa6", "#93a11f")
STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:24px;color:#1e1e1e;background:#fff}
.scroll{overflow:auto;border:1px solid #ddd;border-radius:6px;max-height:80vh}
svg text{font:11px system-ui,sans-serif;fill:#1e1e1e}svg .edge{stroke:#bbb;stroke-width:1.2;fill:none}
svg .on>.edge{stroke:#d62728;stroke-width:3}svg .box{fill:#f4f6f9;stroke:#8a94a3}
svg .on>.box{stroke:#d62728;stroke-width:2.5}
svg .node{cursor:pointer}svg .folded>.below{display:none}svg .folded>.box{fill:#dfe5ee}
table{border-collapse:collapse;margin:8px 0 16px}td,th{border:1px solid #ddd;padding:3px 9px;text-align:left}
"""
SCRIPT = """
document.querySelectorAll('svg .node').forEach(n=>n.querySelector(':scope>.box').addEventListener('click',e=>{
n.classList.toggle('folded');e.stopPropagation()}));
document.getElementById('fold').onclick=()=>document.querySelectorAll('svg .node').forEach(n=>{
if(!n.classList.contains('on'))n.classList.add('folded')});
document.getElementById('open').onclick=()=>document.querySelectorAll('svg .node').forEach(n=>{
n.classList.remove('folded')});
"""


def tree_svg(explainer: TreeExplainer, explanation: Explanation | None = None) -> str:
    """Return the tree as one SVG; the path of an explained image carries the class ``on``."""
    tree, names = explainer.tree_, explainer.class_names
    leaves = Boxes.of(tree).leaves
    path = set() if explanation is None else {step["node"] for step in explanation.extra["path"]}
    path |= set() if explanation is None else {explanation.extra["leaf"]}
    column = {int(leaf): i for i, leaf in enumerate(_in_order(tree))}
    x = np.zeros(tree.n_nodes)
    level = np.zeros(tree.n_nodes, dtype=int)
    for node in range(tree.n_nodes):
        if tree.feature[node] >= 0:
            level[[tree.left[node], tree.right[node]]] = level[node] + 1
    for node in range(tree.n_nodes - 1, -1, -1):
        is_leaf = tree.feature[node] < 0
        x[node] = (column[node] + 0.5) * WIDTH if is_leaf else (x[tree.left[node]] + x[tree.right[node]]) / 2
    y = 24 + level * HEIGHT
    hue = {int(c): HUES[int(c) % len(HUES)] for c in range(tree.value.shape[1])}

    def draw(node: int, parent: int | None) -> str:
        own = int(tree.value[node].argmax())
        on = " on" if node in path else ""
        line = ""
        if parent is not None:
            middle = (y[parent] + y[node]) / 2
            line = (
                f'<path class="edge" d="M{x[parent]:.1f} {y[parent] + 14:.1f}C{x[parent]:.1f} {middle:.1f} '
                f'{x[node]:.1f} {middle:.1f} {x[node]:.1f} {y[node] - 12:.1f}"/>'
            )
        if tree.feature[node] < 0:
            share = float(tree.value[node, own])
            about = escape(f"leaf {node}: {names[own]} {share:.0%}, {tree.rows[node]} images")
            shots = explainer.gallery_.shots[int(np.searchsorted(leaves, node))]
            picture = "".join(
                f'<image href="{_png(shot.crop)}" x="{x[node] - THUMB / 2:.1f}" '
                f'y="{y[node] + 16 + i * (THUMB + 3):.1f}" width="{THUMB}" height="{THUMB}">'
                f"<title>{escape(shot.id)}</title></image>"
                for i, shot in enumerate(shots)
            )
            return (
                f'<g class="leaf{on}">{line}<rect class="box" x="{x[node] - 34:.1f}" y="{y[node] - 12:.1f}" width="68" '
                f'height="26" rx="12" style="fill:{hue[own]}22"><title>{about}</title></rect>'
                f'<text x="{x[node]:.1f}" y="{y[node] + 5:.1f}" text-anchor="middle">{escape(_short(names[own]))} '
                f"{share:.0%}</text>{picture}</g>"
            )
        feature, threshold = int(tree.feature[node]), int(tree.threshold[node])
        rule = escape(f"{explainer.label(feature)} ≤ {threshold}")
        below = draw(int(tree.left[node]), node) + draw(int(tree.right[node]), node)
        return (
            f'<g class="node{on}" id="n{node}">{line}<rect class="box" x="{x[node] - 52:.1f}" y="{y[node] - 12:.1f}" '
            f'width="104" height="26" rx="4"><title>node {node}: {rule}; {tree.rows[node]} images</title></rect>'
            f'<text x="{x[node]:.1f}" y="{y[node] + 5:.1f}" text-anchor="middle" pointer-events="none">{rule}</text>'
            f'<g class="below">{below}</g></g>'
        )

    n_shots = max((len(shots) for shots in explainer.gallery_.shots), default=0)
    width = max(len(leaves) * WIDTH, 160)
    height = int(y.max()) + 40 + n_shots * (THUMB + 3)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="decision tree"><style>{escape(STYLE, quote=False)}</style>{draw(0, None)}</svg>'
    )


def tree_page(explainer: TreeExplainer, explanation: Explanation | None = None, image: Tensor | None = None) -> str:
    """Return a self-contained page: metrics, the foldable tree, and the rules of an explained image."""
    title = f"Decision tree {explainer.name}".strip()
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{value:.4g}</td></tr>" for name, value in sorted(explainer.metrics.items())
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>'
        f"{escape(title)}</title><style>{STYLE}</style><h1>{escape(title)}</h1>"
        f"{'' if explanation is None else _story(explanation, image)}"
        "<p>A decision sends an image left where its rule holds. Click one to fold what is below. "
        '<button id="fold">fold all</button> <button id="open">open all</button></p>'
        f'<div class="scroll">{tree_svg(explainer, explanation)}</div>'
        f"<h2>Measured on held-out images</h2><table>{rows}</table><script>{SCRIPT}</script></html>"
    )


def write_tree_page(
    explainer: TreeExplainer, path: str | Path, explanation: Explanation | None = None, image: Tensor | None = None
) -> Path:
    """Write the page (or, for a name that ends in ``.svg``, the drawing alone) and return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    is_drawing = path.suffix == ".svg"
    text = tree_svg(explainer, explanation) if is_drawing else tree_page(explainer, explanation, image)
    path.write_text(text, encoding="utf-8")
    return path


def _story(explanation: Explanation, image: Tensor | None) -> str:
    e = explanation.extra
    picture = ""
    if image is not None:
        raw = Image.fromarray(to_rgb(image))
        side = max(1, 128 // max(raw.size))
        picture = (
            f'<img alt="the image" width="128" src="{_encode(raw.resize((raw.width * side, raw.height * side), 0))}">'
        )
    steps = "".join(
        f"<tr><td>{i + 1}</td><td>{escape(step['rule'])}</td><td>{step['contribution']:+.3f}</td></tr>"
        for i, step in enumerate(e["path"])
    )
    others = "".join(
        f"<li>{escape(other['class'])} ({other['probability']:.0%}): "
        + escape(", ".join(f"{c['label']} from {c['code']} to {c['wanted']}" for c in other["changes"]))
        + "</li>"
        for other in e["alternatives"]
    )
    agree = "agrees" if e["agrees_with_model"] else "does not agree"
    return (
        f"{picture}<p>The tree says <b>{escape(e['tree_class'])}</b> ({e['tree_probability']:.0%}) and {agree} with "
        f"the model ({escape(explanation.prediction.label)}). Value of {escape(explanation.target.label)}: "
        f"{explanation.bias:.3f} at the root, {explanation.target_value:.3f} at leaf {e['leaf']}.</p>"
        f"<table><tr><th></th><th>rule</th><th>adds</th></tr>{steps}</table>"
        f"{'<p>What would have to change:</p><ul>' + others + '</ul>' if others else ''}"
    )


def _in_order(tree: Any) -> list[int]:
    """Return the leaves from left to right."""
    found, stack = [], [0]
    while stack:
        node = stack.pop()
        if tree.feature[node] < 0:
            found.append(node)
        else:
            stack += [int(tree.right[node]), int(tree.left[node])]
    return found


def _png(crop: Tensor) -> str:
    return _encode(Image.fromarray(to_rgb(crop.float() / 255)))


def _encode(picture: Image.Image) -> str:
    stream = io.BytesIO()
    picture.save(stream, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def _short(text: str, most: int = 7) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
