"""Counting passes by a hook, and the words of a budget."""

import pytest
import torch
from torch import nn

from auditor.auditing.cost import Cost, Meter, cost_sentence
from auditor.network.aten_graph import AtenGraph


def test_every_image_that_goes_through_is_counted_and_the_hook_is_gone_afterwards():
    ticks = iter([0.0, 1.0, 5.0, 5.4, 12.5])
    meter, net = Meter(lambda: next(ticks)), nn.Linear(3, 2)
    assert meter.seconds_per_pass is None
    with meter.on(net):
        net(torch.zeros(5, 3))
        net(input=torch.zeros(2, 3))
    net(torch.zeros(9, 3))
    assert meter.images == 7
    assert meter.seconds_per_pass == pytest.approx(0.2)
    assert not net._forward_pre_hooks
    assert not net._forward_hooks
    cost = meter.since(Cost("noise", ("a",), 2, 4.0), 1, 10.0)
    assert (cost.passes, cost.seconds) == (3.0, 2.5)


def test_an_error_inside_takes_the_hook_away_too():
    meter, net = Meter(), nn.Linear(3, 2)
    try:
        with meter.on(net):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert not net._forward_pre_hooks


def test_a_graph_traced_while_counting_takes_any_batch_and_counts_nothing():
    meter, net = Meter(), nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 11 * 15, 4))
    with meter.on(net):
        graph = AtenGraph.trace(net, torch.zeros(2, 1, 13, 17))
    assert graph.batch is None
    assert graph.run(torch.zeros(5, 1, 13, 17))[graph.output].shape == (5, 4)
    assert (meter.images, meter.seconds) == (0, 0.0)


def test_the_sentence_before_a_check():
    cost = Cost("flipping", ("a", "b"), 100, 12.5)
    assert cost.words() == "flipping of a, b: at most 12.5 forward passes for each of 100 images"
    assert cost.words(0.01).endswith("images, about 12 s")
    assert Cost("basis", ("a",), 10, None, note="fitted again").words(1.0) == "basis of a: fitted again"


def test_json_and_where_the_time_went():
    costs = [Cost("noise", ("a",), 3, None, 1.239, 2.0), Cost("reliance", (), 9, 60.0, 50.0, 100.0)]
    entries = [c.to_json() for c in costs]
    assert entries[0]["passes_per_image"] == 1.24
    assert entries[0]["passes_per_image_at_most"] is None
    assert cost_sentence([*entries, entries[0]]) == "reliance 1 min 40 s, noise 4 s"
    assert cost_sentence(entries, 1) == "reliance 1 min 40 s"
