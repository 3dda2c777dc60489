"""Report of one basis for all classes: order of its concepts, their top images, metrics of held-out images."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from auditor.data.source import Data
from auditor.explainers.contributions import contributions
from auditor.explainers.fitted_images import FittedImages
from auditor.explainers.gallery import Gallery
from auditor.explainers.layer_activations import harvest
from auditor.explainers.restating import restating
from auditor.metrics.concept_groups import dominance, groups
from auditor.progress import Progress
from auditor.subject.layers import Layout
from auditor.subject.subject import Subject

if TYPE_CHECKING:
    from auditor.explainers.nmf.explainer import NmfExplainer


def measure_shared(
    explainer: NmfExplainer, subject: Subject, data: Data, layout: Layout, parts: FittedImages, progress: Progress
) -> None:
    """Measure on the images to report on: errors, agreement, sparsity, importance; gather the top images of all."""
    e, cfg = explainer, explainer.config
    measured = data.draw(cfg.max_eval, cfg.seed, parts.report if bool(parts.report.any()) else None)
    assert e.layer_ is not None
    k = e.W_.shape[1]
    gallery = Gallery(k, cfg.top_images, layout.grid, data.foreign_labels(subject))
    sums = dict.fromkeys(("lost", "total", "agree", "logit_error", "zero", "scores", "error", "n"), 0.0)
    importance, counts = (torch.zeros(n, dtype=torch.float64) for n in (k, subject.n_classes))
    by_class = torch.zeros(k, subject.n_classes, dtype=torch.float64)
    maps: list[Tensor] = []
    predictions: list[Tensor] = []

    def report(_: str, done: int, total: int | None) -> None:
        progress("measuring", done, total)

    for batch, rows, logits, z in harvest(subject, data, e.layer_, batch_size=cfg.batch_size, progress=report):
        S = e.scores(layout, z)
        gallery.offer(batch, layout.on_grid(S))
        some = measured[rows].nonzero()[:, 0]
        if some.numel() == 0:
            continue
        z, S, logits = z[some], S[some], logits[some]
        maps.append(S.cpu())
        p = layout.to_positions(z)
        targets = logits.argmax(1)
        predictions.append(targets.cpu())
        c = contributions(subject, e.layer_, layout, z, logits, e.W_.to(z), S, targets.tolist())
        sums["lost"] += float((p - e.W_.to(z) @ S).double().square().sum())
        sums["total"] += float(p.double().square().sum())
        sums["agree"] += float((c.logits_hat.argmax(1) == targets).sum())
        sums["logit_error"] += float((c.logits_hat - logits).abs().mean(1).double().sum())
        sums["zero"] += float((1e-6 * S.max().clamp_min(1e-30) >= S).sum())
        sums["scores"] += S.numel()
        sums["error"] += float((c.error / logits.gather(1, targets[:, None])[:, 0].abs().clamp_min(1)).sum())
        sums["n"] += len(some)
        importance += c.contributions.abs().sum(0).cpu()
        by_class.index_add_(1, targets.cpu(), c.contributions.T.cpu())
        counts += torch.bincount(targets.cpu(), minlength=subject.n_classes)
    n = sums["n"]
    deeper = "--set bases=class for concepts of every class"
    e.remarks_ += restating(torch.cat(maps).mean(-1), torch.cat(predictions), deeper)
    order = importance.argsort(descending=True, stable=True)
    e.take_basis(e.W_[:, order].contiguous())
    e.to_own_class_ = torch.zeros(k)
    e.importance_ = (importance[order] / n).float()
    e.by_class_ = (by_class[order] / counts.clamp_min(1)).float()
    e.gallery_ = gallery.reordered(order.tolist())
    _measure_groups(e, torch.cat(maps)[:, order])
    e.metrics.update(
        relative_error=(sums["lost"] / sums["total"]) ** 0.5 if sums["total"] else 0.0,
        f_cls=sums["agree"] / n,
        f_reg=sums["logit_error"] / n,
        sparsity=sums["zero"] / sums["scores"],
        integration_error=sums["error"] / n,
        n_held_out=n,
    )


def _measure_groups(e: NmfExplainer, maps: Tensor) -> None:
    """Group the concepts by their maps, and measure how much of a class one group has."""
    e.groups_ = groups(maps, seed=e.config.seed)
    largest, e.metrics["groups/n"] = dominance(e.by_class_, e.groups_), float(len(e.groups_))
    if not bool(largest.isnan().all()):
        e.metrics["groups/dominance"] = float(largest[~largest.isnan()].max())
