"""The tree as a drawing and a page: every node, the path, names that are escaped, folding."""

import dataclasses
import html
import re
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from auditor.errors import OptionError
from auditor.explainers.gallery import Gallery
from auditor.explainers.tree.page import HEIGHT, MANY, TOP, WIDTH, tree_page, tree_svg, write_tree_page
from auditor.kernels.trees.tree import TreeLimits, fit_tree

SVG = "{http://www.w3.org/2000/svg}"


def test_the_drawing_shows_every_node_and_marks_the_path(fitted, tmp_path):
    _, explainer, images, explanations = fitted
    root = ET.fromstring(tree_svg(explainer, explanations[0]))
    groups = [g.get("class") for g in root.iter("{http://www.w3.org/2000/svg}g")]
    tree = explainer.tree_
    assert sum(c.startswith("leaf") for c in groups) == tree.n_leaves
    assert sum(c.startswith("node") for c in groups) == tree.n_nodes - tree.n_leaves
    assert sum(c.endswith(" on") for c in groups) == len(explanations[0].extra["path"]) + 1
    assert len(list(root.iter("{http://www.w3.org/2000/svg}image"))) >= tree.n_leaves
    page = write_tree_page(explainer, tmp_path / "t.html", explanations[0], images[0]).read_text()
    assert explanations[0].extra["path"][0]["rule"].replace(">", "&gt;").replace("<", "&lt;") in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")  # self-contained
    assert write_tree_page(explainer, tmp_path / "t.svg").read_text().startswith("<svg")


def test_groups_lie_where_the_leaves_are_counted_from_left_to_right(fitted):
    _, explainer, _, _ = fitted
    ours = "{http://www.w3.org/2000/svg}"
    results = []

    def walk(group, x, y):
        right, down = map(float, group.get("transform")[10:-1].split(","))
        x, y = x + right, y + down
        if group.get("class").startswith("leaf"):
            results.append((x, y))
        for below in group.findall(f"{ours}g"):
            for child in below.findall(f"{ours}g"):
                walk(child, x, y)

    walk(ET.fromstring(tree_svg(explainer)).find(f"{ours}g"), 0.0, 0.0)
    expected = [(i + 0.5) * WIDTH for i in range(explainer.tree_.n_leaves)]
    np.testing.assert_allclose(
        [x for x, _ in results], expected, atol=0.06 * explainer.tree_.depth
    )  # rounded per level
    assert max(y for _, y in results) == TOP + explainer.tree_.depth * HEIGHT


def test_the_page_of_concepts_is_the_tree_and_its_features_can_be_named(fitted, tmp_path):
    subject, explainer, _, _ = fitted
    used = int(explainer.tree_.features_used[0])
    try:
        explainer.rename(used, "upper loop")
        assert "upper loop ≤ " in explainer.write_page(subject, tmp_path / "tree.html").read_text()
    finally:
        explainer.labels = {}
    assert explainer.write_page(subject, tmp_path / "tree.svg").read_text().startswith("<svg")
    with pytest.raises(OptionError, match=r"ends in \.html or \.svg"):
        explainer.write_page(subject, tmp_path / "tree.png")
    with pytest.raises(OptionError, match="has concepts 0 to 47, got 48"):
        explainer.rename(48, "beyond")


def test_names_are_escaped_in_the_page(fitted):
    _, explainer, _, _ = fitted
    used = int(explainer.tree_.features_used[0])
    explainer.labels = {used: "<script>alert(1)</script>"}
    try:
        page = tree_svg(explainer)
        assert "<script>" not in page
        assert "&lt;script&gt;" in page
    finally:
        explainer.labels = {}


@pytest.mark.slow
def test_the_page_folds_and_opens_in_a_browser(fitted, tmp_path):
    from tests.browser import chromium

    _, explainer, images, explanations = fitted
    path = write_tree_page(explainer, tmp_path / "t.html", explanations[0], images[0])
    n_leaves, n_steps = explainer.tree_.n_leaves, len(explanations[0].extra["path"])
    shown = "return [...document.querySelectorAll('svg .leaf')].filter(g => g.getBoundingClientRect().width).length"
    width = "return Number(document.querySelector('.tree-view svg').getAttribute('width'))"
    with chromium() as browser:
        browser.look(1200, 900)
        browser.open(path.as_uri())
        assert n_leaves > MANY  # so the page opens with only the path unfolded
        assert 1 <= browser.script(shown) <= n_steps + 1
        narrow = browser.script(width)
        browser.click("#open")
        assert browser.script(shown) == n_leaves
        assert browser.script(width) == n_leaves * WIDTH > narrow
        first = "document.querySelector('svg .node').querySelector(':scope > .box')"
        browser.script(f"{first}.dispatchEvent(new MouseEvent('click', {{bubbles: true}}))")
        assert browser.script(shown) == 0
        browser.click("#fold")
        assert browser.script(width) == narrow
        browser.script("document.querySelector('svg .node > .box').focus()")
        browser.press("Enter")  # by keyboard as by mouse
        assert (
            browser.script("return document.querySelector('svg .node > .box').getAttribute('aria-expanded')") == "false"
        )
        for dark in (False, True):
            for size in (1280, 360):
                browser.look(size, 900, dark=dark)
                assert browser.violations() == [], (dark, size)
                assert browser.script("return document.documentElement.scrollWidth") <= size
        assert browser.messages() == []


def drawn(codes, targets, depth, names=("a", "b", "c")):
    """The groups of the drawing of a tree of two-bit codes, each with its node, parent and absolute position."""
    tree = fit_tree(codes, targets, TreeLimits(depth, leaf_rows=1), bits=2)
    explainer = SimpleNamespace(
        tree_=tree,
        class_names=names,
        gallery_=Gallery(tree.n_leaves, 1, (1, 1)),
        label=lambda i: f"feature {i}",
        leaf_label=lambda node: f"leaf {node}",
    )
    root = ET.fromstring(tree_svg(explainer))
    groups = []

    def walk(group, node, parent, x, y):
        right, down = map(float, group.get("transform")[10:-1].split(","))
        groups.append((group, node, parent, x + right, y + down))
        children = group.findall(f"{SVG}g/{SVG}g")
        below = [] if tree.feature[node] < 0 else [int(tree.left[node]), int(tree.right[node])]
        for child, number in zip(children, below, strict=True):
            walk(child, number, node, x + right, y + down)

    walk(root.find(f"{SVG}g"), 0, None, 0.0, 0.0)
    return tree, root, groups


def codes_and_targets(seed):
    codes = np.random.default_rng(seed).integers(0, 4, (60, 3)).astype(np.uint8)
    return codes, np.eye(3)[(codes[:, 0] > 1).astype(int) + (codes[:, 1] > 2)]


@pytest.mark.parametrize("seed", range(3))
def test_a_decision_stands_between_its_branches_and_edges_begin_at_it(seed):
    tree, root, groups = drawn(*codes_and_targets(seed), 4)
    assert len(groups) == tree.n_nodes > 5
    at = {node: (x, y) for _, node, _, x, y in groups}
    for group, node, parent, x, y in groups:
        if tree.feature[node] >= 0:
            assert x == pytest.approx((at[tree.left[node]][0] + at[tree.right[node]][0]) / 2, abs=0.2)  # rounded to 0.1
            assert group.find(f"{SVG}text").text == f"feature {tree.feature[node]} ≤ {tree.threshold[node]}"
            assert group.get("id") == f"n{node}"
            assert int(group.get("data-level")) == round((y - TOP) / HEIGHT)
        edge = group.find(f"{SVG}path")
        assert (edge is None) == (parent is None)
        if edge is not None:
            start_x, start_y = map(float, re.match(r"M(\S+) (\S+)C", edge.get("d")).groups())
            assert (x + start_x, y + start_y) == pytest.approx((at[parent][0], at[parent][1] + 14), abs=0.1)
    assert float(root.get("width")) == tree.n_leaves * WIDTH
    assert float(root.get("height")) == TOP + tree.depth * HEIGHT + 40


def test_a_tree_of_one_leaf_is_drawn():
    tree, root, groups = drawn(np.zeros((4, 3), np.uint8), np.eye(3)[[2, 2, 2, 2]], 3)
    assert tree.n_leaves == 1
    ((group, _, _, x, y),) = groups
    assert (x, y) == (WIDTH / 2, TOP)
    assert group.find(f"{SVG}text").text == "c 100%"
    assert float(root.get("width")) == 160


def test_a_long_class_name_is_cut_in_the_box():
    names = ("short", "sevenly", "eight lo")
    _, _, groups = drawn(*codes_and_targets(0), 4, names)
    shown = {group.find(f"{SVG}text").text.rpartition(" ")[0] for group, *_ in groups if group.get("class") == "leaf"}
    assert shown == {"short", "sevenly", "eight …"}


def test_the_page_says_what_the_tree_says(fitted):
    _, explainer, images, explanations = fitted
    e = explanations[0]
    text = html.unescape(tree_page(explainer, e, images[0]))
    assert f"<b>{e.extra['tree_class']}</b> ({e.extra['tree_probability']:.0%})" in text
    assert f"{e.bias:.3f} at the root, {e.target_value:.3f} at leaf {e.extra['leaf']}." in text
    cells = [
        f'<td>{i + 1}</td><td>{s["rule"]}</td><td class="num">{s["contribution"]:+.3f}</td>'
        for i, s in enumerate(e.extra["path"])
    ]
    assert "</tr><tr>".join(cells) in text
    for other in e.extra["alternatives"]:
        changes = ", ".join(f"{c['label']} from {c['code']} to {c['wanted']}" for c in other["changes"])
        assert f"<li>{other['class']} ({other['probability']:.0%}): {changes}</li>" in text
    for name, value in explainer.metrics.items():
        assert f'<tr><th scope="row">{name}</th><td class="num">{value:.4g}</td></tr>' in text
    assert 'alt="the image"' in text
    assert 'alt="the image"' not in tree_page(explainer, e)


@pytest.mark.parametrize(("agrees", "words"), [(True, "and agrees with"), (False, "and does not agree with")])
def test_without_alternatives_nothing_would_have_to_change(fitted, agrees, words):
    _, explainer, _, explanations = fitted
    extra = {**explanations[0].extra, "alternatives": [], "agrees_with_model": agrees}
    text = tree_page(explainer, dataclasses.replace(explanations[0], extra=extra))
    assert "What would have to change" not in text
    assert words in text


def test_an_image_larger_than_its_frame_is_kept_as_it_is(fitted):
    _, explainer, _, explanations = fitted
    assert 'width="128"' in tree_page(explainer, explanations[0], torch.rand(3, 200, 130))
