"""The forward pass by torch: one run gives the logits and every layer that an explainer reads."""

from types import SimpleNamespace

import torch

from auditor.explainers.base import Reads
from auditor.explainers.forward_pass import TorchPass, layers_read


def reads(*layers):
    return SimpleNamespace(reads=lambda: Reads(layers))


def test_layers_are_named_once_and_in_order():
    assert layers_read([reads("relu", "conv"), reads(), reads("relu")]) == ["conv", "relu"]
    assert layers_read([]) == []


def test_one_run_gives_what_the_modules_give(tiny):
    x = torch.rand(3, 1, 13, 17)
    calls = []
    hook = tiny.module.conv.register_forward_hook(lambda *_: calls.append(1))
    run = TorchPass(tiny, [reads("relu"), reads("conv", "relu")], "asked for")
    logits, activations = run.run(x)
    hook.remove()
    assert (run.engine, run.reason, run.layers, len(calls)) == ("torch", "asked for", ["conv", "relu"], 1)
    net = tiny.module
    with torch.no_grad():
        conv = net.conv(x)
        torch.testing.assert_close(activations["conv"], conv)
        torch.testing.assert_close(activations["relu"], conv.relu())
        torch.testing.assert_close(logits, net(x))
    assert not logits.requires_grad
    assert set(activations) == {"conv", "relu"}
    assert not net.conv._forward_hooks
