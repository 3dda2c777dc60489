"""What a fit with a basis per class says of itself: order and pictures of the concepts, and metrics on held-out images.

The basis of a class turns almost any image into that class, so ``f_cls`` (each image by the basis of its own class) is
high by itself. Two figures stand beside it: ``f_cls_runner_up``, how often the basis of the runner-up class makes the
image the runner-up, and ``f_cls_contested``, how often the model's class wins when the five classes nearest to the
image each stand in with their own basis and the largest logit decides (chance: one in five). An audit's ``f_cls`` is
measured like the latter: there the explanation stands in for the whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from auditor.data.source import Data
from auditor.explainers.activation_store import ActivationStore
from auditor.explainers.contributions import contributions
from auditor.explainers.gallery import Gallery
from auditor.metrics.concept_groups import dominance, groups
from auditor.network.above_layer import values_from
from auditor.progress import Progress
from auditor.subject.layers import Layout
from auditor.subject.subject import Subject

if TYPE_CHECKING:
    from auditor.explainers.nmf.explainer import NmfExplainer

LOOKED_AT = 8  # images of a class by which its concepts are ordered and grouped
CONTESTANTS = 5  # classes that an image is contested by
CONTESTED = 100  # images on which that is tried
CROPS = 4000  # pictures of a gallery at most, and at least two of a concept
BLOCK = 32  # images whose activations are in memory at once


def stand_in_logits(
    explainer: NmfExplainer,
    layout: Layout,
    logits_from: Callable[[Tensor], Tensor],
    z: Tensor,
    logits: Tensor,
    targets: list[int],
) -> Tensor:
    """Return the logits (batch, classes) when concepts stand in for the layer's output ``z``.

    Where classes have bases of their own, each of the classes nearest to the image (the largest ``logits``) speaks for
    itself: its logit is that of its own basis. The other classes get what the basis of the target gives them.
    """
    hat = logits_from(explainer.reconstructed(layout, z, targets))
    owners = torch.tensor([basis.index for basis in explainer.bases_.parts[1:]], device=z.device)
    if not len(owners):
        return hat
    nearest = owners[logits[:, owners].topk(min(CONTESTANTS, len(owners)), dim=1).indices]  # (images, contestants)
    for column in nearest.T:
        by_own = logits_from(explainer.reconstructed(layout, z, column.tolist()))
        hat = hat.scatter(1, column[:, None], by_own.gather(1, column[:, None]))
    return hat


class ClassReport:
    """Orders, draws and measures the concepts of an explainer whose bases are fitted."""

    def __init__(
        self,
        explainer: NmfExplainer,
        subject: Subject,
        layout: Layout,
        stored: ActivationStore,
        held: ActivationStore,
        progress: Progress,
    ) -> None:
        self.explainer, self.subject, self.layout, self.progress = explainer, subject, layout, progress
        self.stored, self.held = stored, held if len(held) else stored
        self.layer = explainer.layer_ or ""
        self.logits_from = values_from(subject, self.layer)

    def order_concepts(self, seed: int) -> None:
        """Put the concepts of every class in the order of their mean |contribution| on images of the class."""
        e = self.explainer
        n, n_classes = e.bases_.n_concepts, self.subject.n_classes
        order, parts = list(range(n)), [[k] for k in e.bases_.shared.concepts]
        size, signed = torch.zeros(n), torch.zeros(n)
        e.by_class_ = torch.zeros(len(e.bases_.shared.concepts), n_classes)
        for done, basis in enumerate(e.bases_.parts[1:]):
            rows = self.stored.rows_of(basis.index)[:LOOKED_AT]
            S, c = self._contributions(rows, basis.index)
            here = c.abs().mean(0).argsort(descending=True, stable=True)
            order[basis.first : basis.stop] = (here + basis.first).tolist()
            size[basis.first : basis.stop], signed[basis.first : basis.stop] = c.abs().mean(0)[here], c.mean(0)[here]
            parts += [[basis.first + k for k in part] for part in groups(S[:, here], seed=seed)]
            self.progress("ordering concepts", done + 1, len(e.bases_) - 1)
        e.W_ = e.W_[:, order].contiguous()
        e.importance_, e.to_own_class_, e.groups_ = size, signed, parts

    def _contributions(self, rows: list[int], target: int) -> tuple[Tensor, Tensor]:
        """Return scores and contributions to a class, by its own basis, of stored images."""
        e = self.explainer
        z = self.stored.read(rows).to(self.subject.device)
        basis = e.bases_.for_class(target)
        with torch.no_grad():
            S, logits = e.scores(self.layout, z, basis), self.logits_from(z)
        W = e.directions(basis).to(z)
        c = contributions(self.subject, self.layer, self.layout, z, logits, W, S, [target] * len(rows), (1, 3))
        return S.cpu(), c.contributions.cpu().float()

    def gallery(self, data: Data, top_images: int) -> Gallery:
        """Return the top images of every concept; images are read once more, the network does not run."""
        e = self.explainer
        n_top = max(1, min(top_images, max(2, CROPS // max(1, e.n_concepts))))
        gallery = Gallery(e.n_concepts, n_top, self.layout.grid, data.foreign_labels(self.subject))
        class_of = {row: k for k in self.stored.classes for row in self.stored.rows_of(k)}
        start = 0
        for batch in data.batches(self.subject, BLOCK):
            rows = [row for row in range(start, start + len(batch)) if row in class_of]
            z = self.stored.read(rows)
            for basis, some in e.rows_by_basis([class_of[row] for row in rows]):
                mask = torch.zeros(len(batch), dtype=torch.bool)
                mask[[rows[i] - start for i in some]] = True
                gallery.offer(batch.take(mask), e.scores(self.layout, z[some], basis), first=basis.first)
            if rows:
                mask = torch.zeros(len(batch), dtype=torch.bool)
                mask[[row - start for row in rows]] = True
                gallery.offer(batch.take(mask), e.scores(self.layout, z, e.bases_.shared))
            start += len(batch)
            self.progress("gathering pictures", start, len(data))
        return gallery

    def measured(self) -> dict[str, float]:
        """Return the metrics of the held-out images (of those of the fit where none are held out)."""
        rows = [(row, k) for k in self.held.classes for row in self.held.rows_of(k)]
        sums = dict.fromkeys(("lost", "total", "agree", "logit_error", "zero", "scores", "error"), 0.0)
        for lo in range(0, len(rows), BLOCK):
            part = rows[lo : lo + BLOCK]
            self._add([row for row, _ in part], [k for _, k in part], sums)
            self.progress("measuring", lo + len(part), len(rows))
        n = len(rows)
        return {
            "relative_error": (sums["lost"] / sums["total"]) ** 0.5 if sums["total"] else 0.0,
            "f_cls": sums["agree"] / n,
            "f_reg": sums["logit_error"] / n,
            "sparsity": sums["zero"] / sums["scores"],
            "integration_error": sums["error"] / n,
            "n_held_out": float(n),
            **self._contested(rows),
            **self._groups(),
        }

    def _add(self, rows: list[int], classes: list[int], sums: dict[str, float]) -> None:
        e = self.explainer
        z = self.held.read(rows).to(self.subject.device)
        with torch.no_grad():
            logits = self.logits_from(z)
            hat = self.logits_from(e.reconstructed(self.layout, z, classes))
        target = torch.tensor(classes, device=z.device)
        sums["agree"] += float((hat.argmax(1) == target).sum())
        sums["logit_error"] += float((hat - logits).abs().mean(1).double().sum())
        for basis, some in e.rows_by_basis(classes):
            S, W = e.scores(self.layout, z[some], basis), e.directions(basis).to(z)
            p = self.layout.to_positions(z[some])
            sums["lost"] += float((p - W @ S).double().square().sum())
            sums["total"] += float(p.double().square().sum())
            sums["zero"] += float((1e-6 * S.max().clamp_min(1e-30) >= S).sum())
            sums["scores"] += S.numel()
            here = [classes[i] for i in some]
            c = contributions(self.subject, self.layer, self.layout, z[some], logits[some], W, S, here)
            sums["error"] += float((c.error / logits[some, here].abs().clamp_min(1)).sum())

    def _contested(self, rows: list[tuple[int, int]]) -> dict[str, float]:
        """Return how often the class wins against the nearest classes, each by its own basis, and the runner-up's."""
        e = self.explainer
        rows = [(row, k) for row, k in rows if not e.bases_.for_class(k).is_shared]
        rows = [rows[i] for i in torch.linspace(0, len(rows) - 1, min(CONTESTED, len(rows))).long().tolist()]
        owners = torch.tensor([basis.index for basis in e.bases_.parts[1:]])
        if len(owners) < 2 or not rows:
            return {}
        wins = turned = 0.0
        for lo in range(0, len(rows), BLOCK):
            part = rows[lo : lo + BLOCK]
            z = self.held.read([row for row, _ in part]).to(self.subject.device)
            classes = [k for _, k in part]
            with torch.no_grad():
                logits = self.logits_from(z)
                hat = stand_in_logits(e, self.layout, self.logits_from, z, logits, classes)
                second = owners[logits.cpu()[:, owners].topk(2, dim=1).indices[:, 1]]
                other = self.logits_from(e.reconstructed(self.layout, z, second.tolist())).cpu()
            wins += float((hat.argmax(1).cpu() == torch.tensor(classes)).sum())
            turned += float((other.argmax(1) == second).sum())
        return {"f_cls_contested": wins / len(rows), "f_cls_runner_up": turned / len(rows)}

    def _groups(self) -> dict[str, float]:
        """Return the number of groups, and the largest share that one group has of what speaks for its class."""
        e = self.explainer
        shares = []
        for basis in e.bases_.parts[1:]:
            parts = [[k - basis.first for k in part] for part in e.groups_ if part[0] in basis.concepts]
            shares.append(dominance(e.to_own_class_[basis.first : basis.stop, None], parts))
        largest = torch.cat(shares)
        top = {} if bool(largest.isnan().all()) else {"groups/dominance": float(largest[~largest.isnan()].max())}
        return {"groups/n": float(len(e.groups_)), **top}
