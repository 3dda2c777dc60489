"""Heads that suit a layer: hidden layers only where logits bend, cells only where positions matter."""

import itertools

import pytest
import torch
from torch import nn

from auditor import Subject
from auditor.explainers.fitted_images import FittedImages
from auditor.explainers.xnn.examples import Examples
from auditor.explainers.xnn.explainer import XnnConfig
from auditor.explainers.xnn.head_design import (
    channels_first,
    default_cells,
    hidden_widths,
    logit_slopes,
    make_heads,
    native,
)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.block, self.head = nn.Conv2d(1, 6, 4, 4), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.block(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


def network(kind):
    torch.manual_seed(0)
    conv = [nn.Conv2d(1, 5, 3, padding=1), nn.ReLU()]
    return {
        "pooled": nn.Sequential(*conv, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3)),
        "flat": nn.Sequential(*conv, nn.Flatten(), nn.Linear(5 * 64, 3)),
        "deep": nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)),
        "tokens": Tokens(),
    }[kind]


def case(kind, layer):
    subject = Subject(network(kind).eval(), input_shape=(1, 8, 8))
    with torch.no_grad():
        logits, taken = subject.run(torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0)), [layer])
    Z = channels_first(taken[layer], subject.layout(layer).name)
    examples = Examples(Z, logits, logits.argmax(1), FittedImages.each(20, 5, choose=True))
    return subject, examples, taken[layer]


@pytest.mark.parametrize(("kind", "layer"), [("pooled", "1"), ("flat", "1"), ("deep", "2"), ("tokens", "block")])
def test_stored_activations_go_back_into_the_layer(kind, layer):
    subject, examples, z = case(kind, layer)
    torch.testing.assert_close(native(subject, layer, examples.Z), z)


@pytest.mark.parametrize(("kind", "layer", "cells"), [("pooled", "1", 1), ("flat", "1", 4), ("tokens", "block", 1)])
def test_cells_only_where_positions_matter(kind, layer, cells):
    subject, examples, _ = case(kind, layer)
    assert default_cells(subject, examples, layer) == cells
    heads, _ = make_heads(subject, examples, [0, 2], layer, XnnConfig())
    assert heads.cells == cells
    assert make_heads(subject, examples, [0], layer, XnnConfig(cells=9))[0].cells == 9


def test_hidden_layers_only_where_logits_bend():
    subject, examples, _ = case("deep", "2")
    heads, slope = make_heads(subject, examples, [1], "2", XnnConfig())
    assert [w.shape[1] for w in heads.encoder_w] == [32, 16, 5]
    assert slope is None
    subject, examples, _ = case("deep", "4")
    heads, slope = make_heads(subject, examples, [1], "4", XnnConfig())
    assert [w.shape[1] for w in heads.encoder_w] == [5]
    torch.testing.assert_close(slope[0], subject.module[5].weight[1].detach())
    assert make_heads(subject, examples, [1], "4", XnnConfig(start="random"))[1] is None


@pytest.mark.parametrize(("kind", "layer"), [("pooled", "1"), ("tokens", "block")])
def test_slopes_of_positions_are_summed(kind, layer):
    subject, examples, _ = case(kind, layer)
    weight = subject.module.head.weight if kind == "tokens" else subject.module[4].weight
    torch.testing.assert_close(
        logit_slopes(subject, examples, [2, 0], layer), weight[[2, 0]].detach(), rtol=1e-4, atol=1e-5
    )


def test_a_class_starts_alike_alone_and_among_others():
    subject, examples, _ = case("deep", "2")
    many, _ = make_heads(subject, examples, [0, 1, 2], "2", XnnConfig())
    alone, _ = make_heads(subject, examples, [2], "2", XnnConfig())
    for a, b in zip(many.select([2]).parameters(), alone.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(many.encoder_w[0][0], many.encoder_w[0][1])


@pytest.mark.parametrize(("dims", "n"), [(4096, 1), (4096, 100), (4096, 1000), (64, 1000), (8, 3)])
def test_heads_of_all_classes_fit_into_memory(dims, n):
    widths = [dims, *hidden_widths(dims, n), 5]
    assert n * 2 * sum(a * b for a, b in itertools.pairwise(widths)) < 1.1e8
