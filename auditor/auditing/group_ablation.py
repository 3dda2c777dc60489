"""Ablation of whole groups of concepts: what is left of a class without the group that counts for it most.

A thing that is spread over nine of ten concepts survives when any one of them is taken out, so groups of concepts that
fire together go together, once with the residual kept (it may carry the same thing) and once without it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from auditor.auditing.case import Case
from auditor.metrics.concept_groups import dominance
from auditor.metrics.measure import Direction, Measure, of_items, of_value, skipped
from auditor.subject.layers import Layout

NAMES: dict[str, Direction] = {
    "group_dominance": "none",
    "group_ablation": "none",
    "group_ablation_without_residual": "none",
}
BATCH = 32


def group_ablation(case: Case) -> dict[str, Measure]:
    """Return the share of images that change class without the largest group of their class, and its dominance.

    The null with the residual: as many other concepts taken out, drawn at random. Without the residual: only the
    residual taken out.
    """
    explainer, subject = case.explainer, case.subject
    W, by_class, layer = explainer.concept_directions(), explainer.contributions_by_class, explainer.layer_
    if W is None or by_class is None or layer is None:
        reason = f"concepts of kind {explainer.kind} are no directions of a layer"
        return {name: skipped(reason, direction) for name, direction in NAMES.items()}
    groups = explainer.groups
    share = dominance(by_class, groups)
    of_group = torch.stack([by_class.clamp_min(0)[group].sum(0) for group in groups])  # (groups, classes)
    generator = torch.Generator().manual_seed(case.seed)
    changed: list[Tensor] = []
    for rows in torch.split(torch.arange(len(case.sample)), BATCH):
        x, label = case.sample.images[rows], case.sample.logits[rows].argmax(1)
        with torch.no_grad():
            z = subject.activations(x, [layer])[layer]
            layout, S = explainer.layer_scores(subject, z)
            S = S.to(z)
        largest = _largest(label, of_group, groups, len(by_class)).to(z)  # 1: a concept of the largest group
        others = torch.stack([_others(mask, generator) for mask in largest])
        P = layout.to_positions(z)
        R = P - W.to(z) @ S

        def says_else(p: Tensor, z: Tensor = z, label: Tensor = label, layout: Layout = layout) -> Tensor:
            with torch.no_grad():
                logits = subject.forward_from(layer, layout.from_positions(p, z)).cpu()
            return (logits.argmax(1) != label).double()

        def without(mask: Tensor, S: Tensor = S, P: Tensor = P) -> Tensor:
            return P - W.to(P) @ (S * mask[:, :, None])

        changed.append(
            torch.stack(
                [
                    says_else(without(largest)),
                    says_else(without(others)),
                    says_else(without(largest) - R),
                    says_else(P - R),
                ]
            )
        )
    taken, null, bare, bare_null = torch.cat(changed, 1)
    shares = share[~share.isnan()]
    return {
        "group_dominance": of_value(float(shares.max()) if len(shares) else 0.0, "none", n=len(shares)),
        "group_ablation": of_items(taken, "none", null=float(null.mean()), seed=case.seed),
        "group_ablation_without_residual": of_items(bare, "none", null=float(bare_null.mean()), seed=case.seed),
    }


def group_ablation_passes(case: Case) -> float | None:
    """Return the forward passes per image that it takes: one, and four above the layer counted as whole ones."""
    return 0.0 if case.explainer.concept_directions() is None else 5.0


def _largest(label: Tensor, of_group: Tensor, groups: list[list[int]], n_concepts: int) -> Tensor:
    """Return masks (images, concepts) of the concepts in the group that speaks most for each image's class."""
    masks = torch.zeros(len(label), n_concepts)
    for i, k in enumerate(label.tolist()):
        masks[i, groups[int(of_group[:, k].argmax())]] = 1.0
    return masks


def _others(mask: Tensor, generator: torch.Generator) -> Tensor:
    """Return a mask of as many concepts, drawn among those that are not in it as far as there are so many."""
    order = torch.rand(len(mask), generator=generator).to(mask) + 2 * mask
    return torch.zeros_like(mask).scatter(0, order.argsort()[: int(mask.sum())], 1.0)
