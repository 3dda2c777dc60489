"""Heads that suit a layer: their widths, how positions are pooled, and the slopes their training starts from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from auditor.explainers.xnn.examples import Examples
from auditor.explainers.xnn.head_objective import class_generator
from auditor.explainers.xnn.head_start import AT_IMAGES, affine_slopes, slopes
from auditor.explainers.xnn.heads import ChannelsFirst, XHeads
from auditor.network.above_layer import is_affine, prepare_above_layer, values_from
from auditor.subject.subject import Subject

if TYPE_CHECKING:
    from auditor.explainers.xnn.explainer import XnnConfig

WEIGHTS = 100_000_000  # weights of all heads together: 400 MB, which hidden layers may fill
MANY = 50  # classes whose slopes are worth a graph of the part above the layer
CELLS = 4  # of an x-feature where positions matter to the network


def make_heads(
    subject: Subject, examples: Examples, classes: Sequence[int], layer: str, cfg: XnnConfig
) -> tuple[XHeads, Tensor | None]:
    """Make untrained heads that fit the layer, and the slopes to start from where they have no hidden layers."""
    dims = examples.Z.shape[1]
    spatial = subject.layout(layer).n_positions > 1
    Z = native(subject, layer, examples.Z[:2].float())
    if not subject.one_image_is_enough(layer, Z):  # else passes from the layer up are cheap without a graph
        prepare_above_layer(subject, layer)
    affine = is_affine(values_from(subject, layer), Z)
    hidden = cfg.hidden
    if hidden is None:
        hidden = [] if spatial or affine else hidden_widths(dims, len(classes))
    options: dict[str, Any] = {
        "activation": cfg.activation,
        "cells": (cfg.cells or default_cells(subject, examples, layer)) if spatial else 1,
        "pooling": cfg.pooling,
        "signed_output": any(bool((part < 0).any()) for part in torch.split(examples.Z, 256)),
    }
    heads = XHeads(len(classes), dims, hidden, cfg.n, **options)
    for i, k in enumerate(classes):
        heads.replace([i], XHeads(1, dims, hidden, cfg.n, **options, generator=class_generator(cfg.seed, k)))
    if hidden or cfg.start == "random" or cfg.activation != "relu" or cfg.variant == "cae":
        return heads, None
    return heads, logit_slopes(subject, examples, classes, layer, affine)


def default_cells(subject: Subject, examples: Examples, layer: str) -> int:
    """Return 1 where logits stay when the positions of the layer change places, as under global pooling, else 4."""
    Z = examples.Z[:4].float()
    order = torch.randperm(Z[0, 0].numel(), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits_of = values_from(subject, layer)
        plain = logits_of(native(subject, layer, Z))
        moved = logits_of(native(subject, layer, Z.flatten(2)[:, :, order].view_as(Z)))
    return 1 if torch.allclose(plain, moved, rtol=1e-4, atol=1e-4 * float(plain.abs().max())) else CELLS


def hidden_widths(dims: int, n_classes: int) -> list[int]:
    """Return the widths of [XNN], or less: on a narrow layer, and so that the heads of all classes fit into memory.

    >>> hidden_widths(4096, 10), hidden_widths(64, 10), hidden_widths(4096, 1000)
    ([800, 100], [128, 32], [])
    """
    wide, narrow = min(800, max(32, 2 * dims)), min(100, max(16, dims // 2))
    wide = min(wide, WEIGHTS // (2 * n_classes * (dims + narrow)))
    return [wide, min(narrow, wide)] if wide >= 16 else []


def logit_slopes(
    subject: Subject, examples: Examples, classes: Sequence[int], layer: str, affine: bool = False
) -> Tensor:
    """Return the slope of each class's logit by every dimension, (classes, dims), at images where it is largest.

    Where logits are affine in the layer slopes are the same everywhere, and one activation has them all.
    """
    if not affine and len(classes) > MANY:
        prepare_above_layer(subject, layer)
    learn, logits_of = examples.parts.learn.nonzero().flatten(), values_from(subject, layer)
    if affine:
        gradients = affine_slopes(logits_of, native(subject, layer, examples.Z[learn[:1]]), classes)
    else:
        best = examples.logits[learn][:, list(classes)].topk(min(AT_IMAGES, len(learn)), 0).indices.T
        gradients = slopes(logits_of, (native(subject, layer, examples.Z[learn[rows]]) for rows in best), classes)
    moved = channels_first(gradients.float().cpu(), subject.layout(layer).name)
    return moved.flatten(2).sum(2) if moved.dim() > 2 else moved


def channels_first(z: Tensor, layout: str) -> Tensor:
    """Return activations of a layout as (examples, channels, height, width); vectors as they are."""
    moved: Tensor = ChannelsFirst(layout)(z)
    return moved


def native(subject: Subject, layer: str, Z: Tensor) -> Tensor:
    """Return stored activations as the layer puts them out: `channels_first` undone."""
    item = subject.layer(layer)
    if item.layout is not None and item.layout.name == "tokens":
        Z = Z.squeeze(-1).transpose(1, 2)
    elif item.layout is not None and item.layout.name == "map-last":
        Z = Z.permute(0, 2, 3, 1)
    return Z.reshape(-1, *item.shape).to(subject.device, subject.dtype)
