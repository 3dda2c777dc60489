"""Whether concepts are the classes under other names: then they explain nothing, however faithful they are."""

from __future__ import annotations

import torch
from torch import Tensor

RESTATES = 0.8  # mean share of a concept's scores that its class has: above it concepts are classes by other names


def restates_classes(activations: Tensor, classes: Tensor) -> bool:
    """Whether concepts are the classes: one of each, and each seen in images of its class alone.

    ``activations`` (images, concepts) are mean scores, ``classes`` (images,) what is predicted.

    >>> restates_classes(torch.eye(3).repeat(4, 1), torch.arange(3).repeat(4))
    True
    >>> restates_classes(torch.ones(12, 3), torch.arange(3).repeat(4))
    False
    """
    present = sorted(set(classes.tolist()))
    if len(present) != activations.shape[1]:
        return False
    by_class = torch.stack([activations[classes == k].double().mean(0) for k in present])  # (classes, concepts)
    share, best = (by_class / by_class.sum(0).clamp_min(1e-30)).max(0)
    return len(set(best.tolist())) == len(present) and float(share.mean()) >= RESTATES


def restating(activations: Tensor, classes: Tensor, deeper: str) -> list[str]:
    """Return what must be said of concepts that are the classes, with a way to go deeper; nothing where they are not.

    >>> restating(torch.eye(3).repeat(4, 1), torch.arange(3).repeat(4), "--set bases=class")[0][:62]
    'the 3 concepts are the 3 classes under other names, which expl'
    """
    if not restates_classes(activations, classes):
        return []
    n = activations.shape[1]
    return [
        f"the {n} concepts are the {n} classes under other names, which explains nothing; go deeper: {deeper}, another "
        f"rank (--set rank={3 * n}), or an earlier layer (auditor layers)"
    ]
