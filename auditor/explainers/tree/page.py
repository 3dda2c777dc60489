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

if TYPE_CHECKING:
    from auditor.explainers.tree.explainer import TreeExplainer

WIDTH, HEIGHT, THUMB = 84, 74, 48  # pixels per leaf, per level, and of a prototype
TOP, FOLDED = 24, 112  # pixels above the root, and per decision whose branches are folded
MANY = 24  # leaves from which the page opens with only the path, or only the upper levels, unfolded
HUES = ("#1f5ac8", "#d62728", "#2c9f4b", "#8a56c2", "#e08a1e", "#159a9c", "#b3548f", "#7a6a4f", "#5b7fa6", "#93a11f")
STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:24px;color:#1e1e1e;background:#fff}
.scroll{overflow:auto;border:1px solid #ddd;border-radius:6px;max-height:80vh}
svg text{font:11px system-ui,sans-serif;fill:#1e1e1e}svg .edge{stroke:#bbb;stroke-width:1.2;fill:none}
svg .on>.edge{stroke:#d62728;stroke-width:3}svg .box{fill:#f4f6f9;stroke:#8a94a3}
svg .on>.box{stroke:#d62728;stroke-width:2.5}svg .mostly{display:none}svg .folded>.mostly{display:inline}
svg .node{cursor:pointer}svg .folded>.below{display:none}svg .folded>.box{fill:#dfe5ee}
table{border-collapse:collapse;margin:8px 0 16px}td,th{border:1px solid #ddd;padding:3px 9px;text-align:left}
"""
SCRIPT = """
const svg=document.querySelector('.scroll svg'),all=[...svg.querySelectorAll('.node')],root=svg.querySelector('g');
const below=g=>g.classList.contains('folded')?[]:[...(g.querySelector(':scope>.below')?.children??[])];
let end=0,deep=0;
function columns(g){const b=below(g);if(b.length){b.forEach(columns);g.at=(b[0].at+b[1].at)/2}else{
const w=g.classList.contains('node')?FOLDED:WIDTH;g.at=end+w/2;end+=w}}
function place(g,from,down,top=down){const x=g.at-from;
deep=Math.max(deep,top+40+g.querySelectorAll(':scope>image').length*SHOT);g.setAttribute('transform',`translate(${x},${down})`);
g.querySelector(':scope>.edge')?.setAttribute('d',`M${-x} ${14-down}C${-x} ${-down/2} 0 ${-down/2} 0 -12`);
below(g).forEach(c=>place(c,g.at,HEIGHT,top+HEIGHT))}
function lay(){end=deep=0;columns(root);end=Math.max(end,160);place(root,0,TOP);svg.setAttribute('width',end);
svg.setAttribute('height',deep);svg.setAttribute('viewBox',`0 0 ${end} ${deep}`)}
function fold(which){all.forEach(n=>n.classList.toggle('folded',which(n)));lay();show()}
function show(){const leaf=svg.querySelector('.leaf.on'),s=document.querySelector('.scroll');
const x=leaf?leaf.at:root.at;s.scrollLeft=x-s.clientWidth/2}
all.forEach(n=>n.querySelector(':scope>.box').addEventListener('click',e=>{n.classList.toggle('folded');lay();
e.stopPropagation()}));
const off=n=>!n.classList.contains('on'),marked=!!svg.querySelector('.on');
document.getElementById('fold').onclick=()=>fold(off);
document.getElementById('open').onclick=()=>fold(()=>false);
const many=svg.querySelectorAll('.leaf').length>MANY;
fold(n=>many&&(marked?off(n):n.dataset.level>=3));
"""


def tree_svg(explainer: TreeExplainer, explanation: Explanation | None = None) -> str:
    """Return the tree as one SVG; the path of an explained image carries the class ``on``."""
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
        f'role="img" aria-label="decision tree"><style>{escape(STYLE, quote=False)}</style>{draw(0, None, 0)}</svg>'
    )


def tree_page(explainer: TreeExplainer, explanation: Explanation | None = None, image: Tensor | None = None) -> str:
    """Return a self-contained page: metrics, the foldable tree, and the rules of an explained image."""
    title = f"Decision tree {explainer.name}".strip()
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{value:.4g}</td></tr>" for name, value in sorted(explainer.metrics.items())
    )
    sizes = f"const WIDTH={WIDTH},HEIGHT={HEIGHT},TOP={TOP},FOLDED={FOLDED},MANY={MANY},SHOT={THUMB + 3};"
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>'
        f"{escape(title)}</title><style>{STYLE}</style><h1>{escape(title)}</h1>"
        f"{'' if explanation is None else _story(explanation, image)}"
        "<p>A decision sends an image left where its rule holds. Click one to fold or open what is below. "
        '<button id="fold">fold all</button> <button id="open">open all</button></p>'
        f'<div class="scroll">{tree_svg(explainer, explanation)}</div>'
        f"<h2>Measured on held-out images</h2><table>{rows}</table><script>{sizes}{SCRIPT}</script></html>"
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
