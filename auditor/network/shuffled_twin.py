"""Randomised twins of a model: the same network with the weights of its upper layers shuffled, from the top down.

An explanation that stays the same when the model's weights are destroyed does not describe the model [SanityChecks].
Shuffling keeps every tensor's values and scale, so that activations stay in range.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from auditor.subject.subject import Subject


def weighted_layers(subject: Subject) -> list[str]:
    """Return the names of modules that own weights (at least a matrix), in the order in which they run."""
    weighted = {
        name
        for name, module in subject.module.named_modules()
        if any(p.ndim > 1 for p in module.parameters(recurse=False))
    }
    ran = [layer.name for layer in subject.layers() if layer.name in weighted]
    return ran + sorted(weighted - set(ran) - {""}) + ([""] if "" in weighted else [])


@contextmanager
def shuffled(subject: Subject, layers: list[str], seed: int) -> Iterator[Subject]:
    """Shuffle the weights of the named layers in place, yield the subject's twin, and put everything back.

    An exported graph cannot be copied, so the module itself is changed for the time being; nothing else uses it. The
    twin carries the original's digest, so that explainers fitted to the original agree to explain it.
    """
    generator = torch.Generator().manual_seed(seed)
    twin = subject.twin()
    parameters = [p for name in layers for p in subject.module.get_submodule(name).parameters(recurse=False)]
    with subject.at_rest(), torch.no_grad():
        original = [p.detach().clone() for p in parameters]
        try:
            for p in parameters:
                p.copy_(p.flatten()[torch.randperm(p.numel(), generator=generator).to(p.device)].view_as(p))
            with torch.enable_grad():
                yield twin
        finally:
            for p, before in zip(parameters, original, strict=True):
                p.copy_(before)


def stages(subject: Subject, n: int = 3) -> list[list[str]]:
    """Return which layers are shuffled at each stage: the top one alone, at last all of them, evenly between.

    With one stage it is all of them at once.
    """
    top_down = weighted_layers(subject)[::-1]
    if not top_down:
        return []
    deepest = len(top_down)
    depths = {deepest} if n == 1 else {round(1 + (deepest - 1) * i / (n - 1)) for i in range(n)}
    return [top_down[:depth] for depth in sorted(depths)]
