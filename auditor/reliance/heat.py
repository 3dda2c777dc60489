"""Heat: where the evidence for the target class lies in an image, as a non-negative map as large as the image.

From an attached explainer: its concept maps, each of unit mass, weighted by their positive contributions. Without one:
Grad-CAM [GradCAM] at the last layer that has a height and a width, sharpened by the margin's gradients along the way
from the blurred image [IG]. Grad-CAM alone is right about the object and coarse about the place; gradients are fine and
noisy; their product finds a plate of 24 x 56 pixels in 224 x 224 with a mean overlap of .55 where Grad-CAM has .29.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from auditor.attribution.baselines import grad_cam
from auditor.attribution.heatmap import upsample
from auditor.errors import LayerError
from auditor.explainers.base import Explainer
from auditor.explainers.explanation import Explanation
from auditor.reliance.fills import blurred
from auditor.reliance.logits import logits_of
from auditor.subject.subject import Subject

PATH_POINTS = 3
FLOOR = 0.05  # share of Grad-CAM's peak that every place keeps: a map of 13 x 13 cells may miss by a cell
PASSES_OF_A_GRADIENT = 3  # a forward pass and a backward pass of twice its cost


@dataclass(frozen=True)
class Heat:
    """Maps (images, height, width), where they come from, and what they cost in forward passes per image."""

    maps: Tensor
    source: str
    passes: float


def plain_heat(subject: Subject, images: Tensor, targets: Tensor, batch_size: int = 32) -> Heat:
    """Return Grad-CAM times the smoothed positive gradients of the margin; gradients alone where there is no map."""
    fine = torch.cat(
        [
            margin_gradients(subject, x, t)
            for x, t in zip(torch.split(images, batch_size), torch.split(targets, batch_size), strict=True)
        ]
    )
    passes = PASSES_OF_A_GRADIENT * PATH_POINTS
    try:
        coarse = torch.cat(
            [
                grad_cam(subject, x, t).mean(1)
                for x, t in zip(torch.split(images, batch_size), torch.split(targets, batch_size), strict=True)
            ]
        )
    except LayerError:
        return Heat(fine, "gradients", passes)
    peak = coarse.amax((1, 2), keepdim=True).clamp_min(1e-12)
    return Heat((coarse / peak).clamp_min(FLOOR) * fine, "Grad-CAM and gradients", passes + PASSES_OF_A_GRADIENT)


def margin_gradients(subject: Subject, images: Tensor, targets: Tensor) -> Tensor:
    """Return what each pixel adds to the margin on the way from the blurred image, negative parts cut, smoothed.

    The margin is the target's logit less the largest other one (the logit itself where there is only one).
    """
    start = blurred(images)
    total = torch.zeros_like(images)
    for k in range(PATH_POINTS):
        x = (start + (k + 0.5) / PATH_POINTS * (images - start)).detach().requires_grad_()
        with torch.enable_grad():
            total += torch.autograd.grad(margins(logits_of(subject, x), targets).sum(), x)[0].to(total)
    added = ((images - start) * total / PATH_POINTS).sum(1).clamp_min(0)
    window = max(3, images.shape[2] // 32) | 1
    return F.avg_pool2d(added[:, None], window, stride=1, padding=window // 2)[:, 0]


def margins(logits: Tensor, targets: Tensor) -> Tensor:
    """Return each row's target logit less its largest other logit.

    >>> margins(torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 1.0]]), torch.tensor([0, 2])).tolist()
    [1.0, -4.0]
    """
    column = targets.to(logits.device)[:, None]
    at_target = logits.gather(1, column)[:, 0]
    if logits.shape[1] == 1:
        return at_target
    return at_target - logits.scatter(1, column, -torch.inf).amax(1)


def explainer_heat(
    explainer: Explainer, subject: Subject, images: Tensor, targets: Tensor, batch_size: int = 32
) -> Heat:
    """Return the heat of an attached explainer; an image it says nothing positive of gets a map of zeros."""
    size = (images.shape[2], images.shape[3])
    maps: list[Tensor] = []
    for x, t in zip(torch.split(images, batch_size), torch.split(targets, batch_size), strict=True):
        with torch.no_grad():
            logits, activations = subject.run(x, explainer.layers())
        explanations = explainer.explain_from(subject, x, logits, activations, t.tolist())
        maps += [explanation_heat(e, size) for e in explanations]
    return Heat(torch.stack(maps), explainer.name or explainer.kind, 2.0)


def explanation_heat(explanation: Explanation, size: tuple[int, int]) -> Tensor:
    """Return the positive-contribution-weighted sum of concept maps of unit mass."""
    relevance = explanation.extra.get("relevance")
    if relevance is not None:
        return upsample(torch.tensor(relevance, dtype=torch.float32).clamp_min(0), size)
    total = torch.zeros(size)
    for concept in explanation.concepts:
        weight = concept.activation if concept.contribution is None else concept.contribution
        if concept.heatmap is None or weight <= 0 or float(concept.heatmap.clamp_min(0).sum()) <= 0:
            continue
        positive = concept.heatmap.float().clamp_min(0).cpu()
        total += weight * upsample(positive / positive.sum(), size) * (positive.numel() / total.numel())
    return total


def overlap_of_sources(a: Tensor, b: Tensor, share: float = 0.05) -> Tensor:
    """Return per image how much of the hottest ``share`` of pixels two maps have in common."""
    k = max(1, round(share * a[0].numel()))

    def hottest(maps: Tensor) -> Tensor:
        flat = maps.flatten(1)
        return torch.zeros_like(flat).scatter_(1, flat.topk(k, 1).indices, 1.0)

    return (hottest(a) * hottest(b)).sum(1) / k


def pooled(heats: Sequence[Heat]) -> Heat:
    """Return one heat from several sources, each scaled to mass 1 per image."""
    maps = torch.stack([h.maps / h.maps.sum((1, 2), keepdim=True).clamp_min(1e-12) for h in heats])
    return Heat(maps.mean(0), " and ".join(h.source for h in heats), sum(h.passes for h in heats))
