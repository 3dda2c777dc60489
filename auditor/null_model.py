"""Null model: the same network with weights that were never trained.

A number of a trained model means something when it differs from that of its null model. Weights are drawn from torch's
own initialisation (uniform within 1/sqrt(inputs) of zero, biases too), normalisation layers are the identity.
"""

from __future__ import annotations

import copy
import math

import torch

from auditor.errors import AuditError
from auditor.subject import Subject


def null_model(subject: Subject, seed: int = 0) -> Subject | None:
    """Return the subject with new random weights, or None where its module cannot be copied."""
    generator = torch.Generator().manual_seed(seed)
    with subject.at_rest():
        try:
            module = copy.deepcopy(subject.module)
        except Exception:  # foreign modules may hold anything
            return None
    width: dict[str, int] = {}  # inputs per neuron of the weight beside a bias
    with torch.no_grad():
        state = dict(module.named_parameters())
        for name, p in state.items():
            if p.dim() > 1:
                width[name.rpartition(".")[0]] = max(1, math.prod(p.shape[1:]))
        for name, p in state.items():
            owner, _, last = name.rpartition(".")
            if p.dim() > 1 or owner in width:
                reach = 1 / math.sqrt(width[owner])
                p.copy_((torch.rand(p.shape, generator=generator) * 2 - 1) * reach)
            else:
                p.fill_(1.0 if "weight" in last else 0.0)
        for name, b in module.named_buffers():
            if name.endswith("running_mean"):
                b.zero_()
            elif name.endswith("running_var"):
                b.fill_(1.0)
    pre = subject.preprocessing
    try:
        return Subject(module, input_shape=pre.input_shape, mean=pre.mean, std=pre.std)
    except AuditError:
        return None
