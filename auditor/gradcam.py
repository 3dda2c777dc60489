"""Grad-CAM and Grad-CAM++: gradient-weighted class activation maps, familiar baselines beside excitation backprop.

Selvaraju et al. weigh every channel of a layer by the mean gradient of the logit; Chattopadhay et al. weigh positive
gradients by a closed form of the higher derivatives of  exp(logit).
"""

from __future__ import annotations

import torch
from torch import Tensor

from auditor.errors import LayerError
from auditor.subject.subject import Subject


def grad_cam(subject: Subject, images: Tensor, targets: Tensor | int, layer: str | None = None) -> Tensor:
    """Return Grad-CAM maps (batch, h, w) of the layer's grid, non-negative and not scaled."""
    A, g = _activation_and_gradient(subject, images, targets, layer)
    return torch.relu((g.mean(-1, keepdim=True) * A).sum(1)).view(len(A), *_grid(subject, layer))


def grad_cam_plus_plus(subject: Subject, images: Tensor, targets: Tensor | int, layer: str | None = None) -> Tensor:
    """Return Grad-CAM++ maps (batch, h, w) of the layer's grid, non-negative and not scaled."""
    A, g = _activation_and_gradient(subject, images, targets, layer)
    den = 2 * g.square() + (A * g.pow(3)).sum(-1, keepdim=True)
    alpha = torch.where(den.abs() > 1e-30, g.square() / torch.where(den == 0, 1.0, den), 0.0)
    weight = (alpha * torch.relu(g)).sum(-1, keepdim=True)
    return torch.relu((weight * A).sum(1)).view(len(A), *_grid(subject, layer))


def _grid(subject: Subject, layer: str | None) -> tuple[int, int]:
    return subject.layout(subject.layer(layer).name).grid


def _activation_and_gradient(
    subject: Subject, images: Tensor, targets: Tensor | int, layer: str | None
) -> tuple[Tensor, Tensor]:
    """Return activation and gradient of the target logit as (batch, channels, positions)."""
    name = subject.layer(layer).name
    layout = subject.layout(name)
    if layout.n_positions == 1 and layout.name == "vector":
        raise LayerError(f"grad_cam: layer {name!r} has no positions to draw a map on; take a convolutional layer.")
    with torch.no_grad():
        z = subject.activations(images, [name])[name]
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        logits = subject.forward_from(name, z)
        rows = torch.arange(len(logits))
        wanted = torch.as_tensor(targets).expand(len(logits)) if isinstance(targets, int) else targets
        (g,) = torch.autograd.grad(logits[rows, wanted].sum(), z)
    return layout.to_positions(z.detach()), layout.to_positions(g)
