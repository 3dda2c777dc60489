"""TCAV scores: for which share of a class's images would more of a concept raise the class's logit (Kim et al. 2018).

The direction of a concept is its factor in the layer; no classifier has to be trained to find it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from auditor.subject.subject import Subject


class Tcav:
    """Counts positive directional derivatives while batches stream by."""

    def __init__(self, directions: Tensor, n_classes: int) -> None:
        self.directions = directions  # (neurons of the layer, concepts), in the layer's own order
        self.positive = torch.zeros(directions.shape[1], n_classes, dtype=torch.float64)
        self.n = torch.zeros(n_classes, dtype=torch.float64)

    def add(self, subject: Subject, layer: str, z: Tensor, classes: Tensor) -> None:
        """Look at activations z of images of the given classes; -1 is left out."""
        known = classes >= 0
        z, classes = z[known].detach(), classes[known]
        if classes.numel() == 0:
            return
        with torch.enable_grad():
            point = z.clone().requires_grad_(True)
            logits = subject.forward_from(layer, point)
            (g,) = torch.autograd.grad(logits.gather(1, classes.to(z.device)[:, None]).sum(), point)
        slope = g.flatten(1).double().cpu() @ self.directions.double().cpu()
        self.positive.index_add_(1, classes, (slope > 0).double().T)
        self.n += classes.bincount(minlength=self.n.numel())

    def scores(self) -> Tensor:
        """Return (concepts, classes): shares in [0, 1], NaN for a class without images."""
        return (self.positive / self.n).float()
