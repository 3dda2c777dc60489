"""Second opinions: an explainer's heat is asked within the budget, the worst classes first, and what it names."""

import numpy as np
import pytest
import torch
from torch import nn

from auditor import fit, open_data
from auditor.auditing import second_opinions as module
from auditor.auditing.second_opinions import Passes, second_opinions, why_not_asked
from auditor.reliance import RelianceConfig, judge, measure
from tests.auditor.reliance.planted import ReadsBlock, images, subject


class Looker:
    """As much of an explainer as is asked here."""

    kind, searches, layer_, groups = "looker", False, None, ()

    class config:
        target = None

    def can_explain(self, _label):
        return True

    def concept_directions(self):
        return None


@pytest.fixture(scope="module")
def reads_block():
    return subject(ReadsBlock())


@pytest.fixture(scope="module")
def measured(reads_block):
    x, y = images(60)
    return x, measure(reads_block, x, y, RelianceConfig(images_per_class=20))


@pytest.fixture
def blind(monkeypatch):
    """Heat that lies in the upper right corner, where nothing is."""

    def heat(_explainer, _subject, x, _targets):
        maps = torch.zeros(len(x), *x.shape[2:])
        maps[:, :4, -6:] = 1.0
        return module.Heat(maps, "blind", 2.0)

    monkeypatch.setattr(module, "explainer_heat", heat)


def ask(reads_block, measured, passes, explainers=None):
    x, reference = measured
    return second_opinions(
        reads_block, x, explainers or {"blind": Looker()}, reference, judge(reference), passes, seed=0
    )


def test_heat_that_misses_the_block_comes_to_another_verdict(reads_block, measured, blind):
    _, reference = measured
    (worst, *_) = judge(reference)
    assert (worst.name, worst.verdict) == ("marked", "found")
    passes = Passes(60 * len(reference.rows), reference.image_passes)
    opinions = ask(reads_block, measured, passes)
    marked = opinions.findings["blind"][1]
    assert marked.boxes is None or float(marked.boxes.top.float().mean()) < 4
    spots = {"box", "spot"}
    assert marked.cause not in spots  # whole-image transplants are those of the reference, whatever the heat
    assert passes.spent <= 60 * len(reference.rows)
    assert passes.spent > reference.image_passes


def test_the_budget_is_kept_and_the_worst_class_is_asked_first(reads_block, measured, blind):
    passes = Passes(130, 0)  # twelve images at nine passes: one class
    opinions = ask(reads_block, measured, passes)
    assert list(opinions.findings["blind"]) == [1]
    assert passes.spent == 12 * 9
    broke = ask(reads_block, measured, Passes(10, 0))
    assert broke.findings == {}
    assert broke.not_used == {"blind": "the 60 passes per image were spent"}


def test_two_explainers_share_what_is_left(reads_block, measured, blind):
    passes = Passes(240, 0)
    opinions = ask(reads_block, measured, passes, {"a": Looker(), "b": Looker()})
    assert {name: list(f) for name, f in opinions.findings.items()} == {"a": [1], "b": [1]}


def test_some_kinds_are_not_asked_and_the_reason_is_said(reads_block, measured, blind, monkeypatch):
    searching = Looker()
    searching.searches = True
    assert "searches every image" in why_not_asked(searching, [0])
    partial = Looker()
    partial.can_explain = lambda label: label == 0
    assert why_not_asked(partial, [0]) == ""
    assert why_not_asked(partial, [0, 1]) == "it explains some classes only"
    monkeypatch.setattr(module, "explainer_heat", lambda *a: module.Heat(torch.zeros(len(a[2]), 24, 32), "", 0.0))
    assert ask(reads_block, measured, Passes(1e6, 0)).not_used == {"blind": "it gives no maps"}


def test_concepts_of_a_real_explainer_leak_and_cost_a_pass_per_image(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 2)).eval()
    x, _ = images(40)
    with torch.no_grad():
        net[4].bias[0] -= (net(x)[:, 0] - net(x)[:, 1]).median()  # both classes are predicted
    real = subject(net)
    np.savez(tmp_path / "x.npz", images=x.permute(0, 2, 3, 1).numpy())
    concepts = fit("nmf", real, open_data(tmp_path / "x.npz"), layer="1", rank=3, refits=1)
    reference = measure(real, x, None, RelianceConfig(images_per_class=12))
    n = sum(c.n for c in reference.classes)
    passes = Passes(1e6, 0)
    opinions = second_opinions(real, x, {"c": concepts}, reference, judge(reference), passes, seed=0)
    assert set(opinions.leaks["c"]) == {0, 1}
    assert all(0 <= leak.auc <= 1 and 0 < leak.area <= 1 for leak in opinions.leaks["c"].values())
    silent = 2 - len(opinions.findings["c"])  # a class that no concept counts for has no maps
    assert passes.spent == n + 9 * n - 5 * 12 * silent
