"""What a fit with a basis per class says of itself: order and pictures of the concepts, and metrics on held-out images.

The basis of a class turns almost any image into that class (it has nothing else to say it with), so ``f_cls``, each
image by the basis of its own class, is high by itself. Three figures stand beside it:

``f_cls_runner_up``   how often the basis of the runner-up class makes the image the runner-up;
``f_cls_contested``   how often the model's class survives when the concepts of the five classes nearest to the image
                      stand in together and compete for its activation: nothing says which class is the right one;
``f_cls_without``     the same without the concepts of the model's class, the next nearest in their place: what
                      ``f_cls_contested`` is worth by concepts that know nothing of the class.

An audit's ``f_cls`` is the contested one: there the explanation stands in for the whole model. Projections in a metric
of the head, shared concepts beside a class's own and the choice of a basis by its error were tried; none gives a figure
that is both high and honest (tests/benchmarks/bench_class_bases.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from auditor.data.source import Data
from auditor.explainers.activation_store import ActivationStore
from auditor.explainers.contributions import contributions
from auditor.explainers.gallery import Gallery
from auditor.kernels.factorization.projection import prepare, project_images
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
PROVES_ANY = 0.5  # share of images that the runner-up's basis makes the runner-up: beyond it a reader must know
CROPS = 4000  # pictures of a gallery at most, and at least two of a concept
BLOCK = 32  # images whose activations are in memory at once


def contestants(explainer: NmfExplainer, logits: Tensor, without: Sequence[int] | None = None) -> list[list[int]]:
    """Return for every image the classes nearest to it (the largest ``logits``) that have a basis of their own.

    ``without`` are classes (one per image) that must not be among them.
    """
    owners = torch.tensor([basis.index for basis in explainer.bases_.parts[1:]], device=logits.device)
    sizes = logits[:, owners].clone()
    if without is not None:
        sizes[owners == torch.tensor(without, device=logits.device)[:, None]] = -torch.inf
    n = min(CONTESTANTS, len(owners) - (without is not None))
    chosen: list[list[int]] = owners[sizes.topk(n, dim=1).indices].tolist()
    return chosen


def together(explainer: NmfExplainer, layout: Layout, z: Tensor, classes: Sequence[Sequence[int]]) -> Tensor:
    """Return the layer's output as the concepts of several classes give it together, for each image its own classes.

    One non-negative projection on all their concepts; channels count by the mean of the bases' weights. A class
    without a basis of its own brings the shared concepts.
    """
    p = layout.to_positions(z)
    hat = torch.empty_like(p)
    for i, some in enumerate(classes):
        bases = list(dict.fromkeys(explainer.bases_.for_class(k) for k in some))
        W = torch.cat([explainer.directions(basis) for basis in bases], 1).to(p)
        weights = torch.stack([explainer.channel_weights(basis) for basis in bases]).mean(0).to(p)
        S = project_images(p[i : i + 1] * weights[:, None], prepare(W * weights[:, None]))
        hat[i] = W @ S[0].to(p)
    return layout.from_positions(hat, z)


def stand_in_logits(
    explainer: NmfExplainer,
    layout: Layout,
    logits_from: Callable[[Tensor], Tensor],
    z: Tensor,
    logits: Tensor,
    targets: list[int],
) -> Tensor:
    """Return the logits (batch, classes) when concepts stand in for the layer's output ``z``.

    Where classes have bases of their own, those of the classes nearest to the image compete for it. A target without
    one brings the shared concepts in.
    """
    if not explainer.bases_.are_per_class:
        return logits_from(explainer.reconstructed(layout, z, targets))
    unmet = [[k] if explainer.bases_.for_class(k).is_shared else [] for k in targets]
    sets = [near + more for near, more in zip(contestants(explainer, logits), unmet, strict=True)]
    return logits_from(together(explainer, layout, z, sets))


def remark_of(metrics: Mapping[str, float]) -> list[str]:
    """Return what must be known of a basis per class before it is read; nothing where bases keep classes apart.

    >>> remark_of({"f_cls_runner_up": 0.2, "f_cls_contested": 0.9, "f_cls_without": 0.1})
    []
    >>> "on 60%, without" in remark_of({"f_cls_runner_up": 0.95, "f_cls_contested": 0.6, "f_cls_without": 0.2})[0]
    True
    """
    turned = metrics.get("f_cls_runner_up", 0.0)
    if turned <= PROVES_ANY:
        return []
    contested, without = metrics["f_cls_contested"], metrics["f_cls_without"]
    return [
        "the basis of a class shows what speaks for it and does not prove it: that of the runner-up turns "
        f"{turned:.0%} of images into the runner-up. Where the concepts of the five nearest classes compete, the "
        f"model's class survives on {contested:.0%}, without its own concepts on {without:.0%}"
    ]


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
                S = self.layout.on_grid(e.scores(self.layout, z[some], basis))
                gallery.offer(batch.take(mask), S, first=basis.first)
            if rows:
                mask = torch.zeros(len(batch), dtype=torch.bool)
                mask[[row - start for row in rows]] = True
                gallery.offer(batch.take(mask), self.layout.on_grid(e.scores(self.layout, z, e.bases_.shared)))
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
        """Return how often the class wins among the nearest ones, with and without its concepts, and the runner-up."""
        e = self.explainer
        rows = [(row, k) for row, k in rows if not e.bases_.for_class(k).is_shared]
        rows = [rows[i] for i in torch.linspace(0, len(rows) - 1, min(CONTESTED, len(rows))).long().tolist()]
        owners = torch.tensor([basis.index for basis in e.bases_.parts[1:]])
        if len(owners) < 2 or not rows:
            return {}
        wins = without = turned = 0.0
        for lo in range(0, len(rows), BLOCK):
            part = rows[lo : lo + BLOCK]
            z = self.held.read([row for row, _ in part]).to(self.subject.device)
            classes = [k for _, k in part]
            with torch.no_grad():
                logits = self.logits_from(z)
                hat = stand_in_logits(e, self.layout, self.logits_from, z, logits, classes)
                others = self.logits_from(together(e, self.layout, z, contestants(e, logits, without=classes)))
                second = owners[logits.cpu()[:, owners].topk(2, dim=1).indices[:, 1]]
                other = self.logits_from(e.reconstructed(self.layout, z, second.tolist())).cpu()
            truth = torch.tensor(classes)
            wins += float((hat.argmax(1).cpu() == truth).sum())
            without += float((others.argmax(1).cpu() == truth).sum())
            turned += float((other.argmax(1) == second).sum())
        n = len(rows)
        return {"f_cls_contested": wins / n, "f_cls_without": without / n, "f_cls_runner_up": turned / n}

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
