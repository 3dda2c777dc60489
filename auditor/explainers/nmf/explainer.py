"""Concepts by non-negative matrix factorization of one layer's activations (kind ``nmf``).

Activations of all images, read as channels by positions, are factorized  A ~ W S,  W >= 0 and S >= 0: the columns of W
are concepts, S says where each is seen. A new image is projected on the basis (S only), and its concepts' contributions
add up to the logit (see `contributions`). A signed layer (GELU, no ReLU) is factorized by semi-NMF: W free, S >= 0.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from auditor.data.source import Data
from auditor.errors import NumericsError, OptionError
from auditor.explainers.base import Explainer, ExplainerConfig, Reads
from auditor.explainers.contributions import contributions
from auditor.explainers.explanation import Concept, Explanation, class_scores
from auditor.explainers.fitted_images import FittedImages
from auditor.explainers.gallery import Gallery
from auditor.explainers.layer_activations import Reservoir, as_columns, harvest
from auditor.kernels.factorization.nmf import Factorization, factorize
from auditor.kernels.factorization.projection import Basis, prepare, project, project_images
from auditor.kernels.factorization.streaming import factorize_stream
from auditor.metrics.concept_groups import dominance, groups
from auditor.metrics.concept_matching import match_columns
from auditor.network.above_layer import prepare_above_layer
from auditor.progress import Progress, silent
from auditor.subject.layers import Layout
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)

AUTO_RANKS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
AUTO_POSITIONS = 2000  # of the images to choose on, by which concepts are grouped
AUTO_GAIN = 0.03  # a next rank must lower the held-out error by this share of the smallest rank's to be worth it
SPLIT_GAIN = 0.15  # the same where concepts only split: those that fire together in the same places are one group


class NmfConfig(ExplainerConfig):
    """Options of kind ``nmf``."""

    rank: int | Literal["auto"] | None = Field(
        default=None,
        description="Number of concepts; 'auto' chooses by the error on images set aside; default 10 or what fits.",
    )
    init: Literal["nndsvda", "random"] = Field(default="nndsvda", description="Start of the factorization.")
    max_iter: int = Field(default=300, ge=1, description="Sweeps at most.")
    tol: float = Field(default=1e-4, gt=0, description="Stop when ten sweeps gain less than this share.")
    max_positions: int = Field(default=40_000, ge=16, description="Positions kept in memory for the factorization.")
    epochs: int = Field(
        default=0, ge=0, description="Passes over all positions that refine the basis beyond those kept in memory."
    )
    held_out_every: int = Field(
        default=5,
        ge=2,
        description="Each n-th image is held out for the metrics; every second of these chooses rank=auto.",
    )
    max_eval: int = Field(default=400, ge=1, description="Held-out images at most on which metrics are measured.")
    refits: int = Field(default=2, ge=1, description="Re-fits from other starts, for the basis stability.")
    top_images: int = Field(default=8, ge=1, le=64, description="Images kept per concept, as small crops.")


class NmfExplainer(Explainer):
    """Concept basis of one layer by NMF (semi-NMF where the layer is signed).

    ``NmfExplainer(layer="layer4", rank=10).fit(subject, data).explain(subject, images)``
    """

    kind: ClassVar[str] = "nmf"
    Config: ClassVar[type[ExplainerConfig]] = NmfConfig
    headline: ClassVar[tuple[str, ...]] = ("f_cls", "relative_error", "basis_stability")
    remedy: ClassVar[str] = "more concepts (--set rank=30), another layer (auditor layers), or more images"

    W_: Tensor  # (channels, concepts), unit columns, the most important first
    importance_: Tensor  # (concepts,) mean |contribution| to the predicted class, held-out images
    by_class_: Tensor  # (concepts, classes) mean contribution when the class is predicted; 0 where it never was
    signed_: bool
    gallery_: Gallery
    groups_: list[list[int]]  # concepts that fire together in the same places
    _ready: tuple[Tensor, Basis] | None = None  # the basis made ready for projection, and the W it was made of

    def fit(self, subject: Subject, data: Data, progress: Progress = silent) -> NmfExplainer:
        """Fit the basis on the data; every n-th image is held out for the metrics."""
        cfg: NmfConfig = self.config
        layer = subject.layer(cfg.layer).name
        layout = subject.layout(layer)
        if cfg.target is not None:
            subject.class_index(cfg.target)
        if isinstance(cfg.rank, int) and cfg.rank < 1:
            raise OptionError(f"nmf: rank must be at least 1, got {cfg.rank}.")
        parts = FittedImages.each(len(data), cfg.held_out_every, choose=cfg.rank == "auto")
        learned, trial = Reservoir(cfg.max_positions, cfg.seed), Reservoir(cfg.max_positions // 4, cfg.seed)
        n_images, low = 0, 0.0
        for batch, rows, _, z in harvest(subject, data, layer, batch_size=cfg.batch_size, progress=progress):
            learned.put(as_columns(layout, z[parts.learn[rows]]))
            trial.put(as_columns(layout, z[parts.choose[rows]]))
            low = min(low, float(z.min()))
            n_images += len(batch)
        X, Y = learned.columns(), trial.columns()
        parts = parts.first(n_images)
        if not bool(parts.report.any()):
            log.warning(
                "nmf: only %d images, none can be held out; metrics are measured on the images of the fit", n_images
            )
        elif cfg.rank == "auto":
            parts.warn_if_few(self.kind, "the rank")
        if Y.shape[1] == 0:
            Y = X
        self.signed_ = low < 0
        if self.signed_:
            log.info("nmf: layer %s has negative values; semi-NMF is used (basis free, scores non-negative)", layer)
        self.layer_ = layer
        rank = self._choose_rank(X, Y, progress)
        best = self._factorize(X, rank, cfg.seed, cfg.init, progress)
        self.W_ = best.W
        self.metrics = {
            "rank": float(rank),
            "kkt": best.kkt,
            "fit_relative_error": best.relative_error,
            "basis_stability": self._basis_stability(X, best.W, progress),
        }
        if cfg.epochs:
            self._stream(subject, data, layout, parts, progress)
        self._measure(subject, data, layout, parts, progress)
        self.record_fit(subject, data, layer, parts)
        return self

    def explain(self, subject: Subject, images: Any, target: int | str | None = None) -> list[Explanation]:
        """Explain each image by the concepts of the basis; contributions add up to the target's logit."""
        return self.explain_by_passes(subject, images, target)

    @property
    def n_concepts(self) -> int:
        """Number of concepts of the basis."""
        return int(self.W_.shape[1])

    @property
    def gallery(self) -> Gallery:
        """The top images of each concept."""
        return self.gallery_

    @property
    def contributions_by_class(self) -> Tensor:
        """Mean contribution (concepts, classes) when the class is predicted."""
        return self.by_class_

    @property
    def groups(self) -> list[list[int]]:
        """Concepts that fire together in the same places."""
        return self.groups_

    def concept_directions(self) -> Tensor:
        """Return the basis (channels, concepts)."""
        return self.W_

    def score_maps(self, subject: Subject, z: Tensor) -> Tensor:
        """Return the scores of the layer's output."""
        assert self.layer_ is not None
        return self.scores(subject.layout(self.layer_), z)

    def reads(self) -> Reads:
        """Return the one layer of the basis."""
        assert self.layer_ is not None
        return Reads((self.layer_,))

    def prepare(self, subject: Subject) -> None:
        """Trace the network above the explained layer."""
        assert self.layer_ is not None
        prepare_above_layer(subject, self.layer_)

    def explain_from(
        self,
        subject: Subject,
        images: Tensor,
        logits: Tensor,
        activations: Mapping[str, Tensor],
        targets: Sequence[int | None],
        *,
        heatmaps: bool = True,
        **options: Any,
    ) -> list[Explanation]:
        """Explain from logits and activations that a shared pass has already given."""
        assert self.layer_ is not None
        layout, z = subject.layout(self.layer_), activations[self.layer_]
        return self.explain_scores(
            subject, logits, z, self.scores(layout, z), self.targets_for(subject, logits, targets)
        )

    def explain_scores(
        self, subject: Subject, logits: Tensor, z: Tensor, S: Tensor, targets: list[int]
    ) -> list[Explanation]:
        """Explain from scores S (batch, concepts, positions) that are already known."""
        assert self.layer_ is not None
        layout = subject.layout(self.layer_)
        c = contributions(subject, self.layer_, layout, z, logits, self.W_.to(z), S, targets)
        predictions, target_scores = class_scores(logits, subject, targets)
        maps = S.reshape(*S.shape[:2], *layout.grid).cpu()
        # whole tensors become lists at once: number by number costs more than the mathematics
        biases, residuals, errors = c.bias.tolist(), c.residual.tolist(), c.error.tolist()
        means, parts = S.mean(-1).tolist(), c.contributions.tolist()
        return [
            Explanation(
                kind=self.kind,
                name=self.name,
                prediction=predictions[i],
                target=target_scores[i],
                target_value=target_scores[i].logit,
                bias=biases[i],
                residual=residuals[i],
                concepts=tuple(
                    Concept(
                        index=k,
                        label=self.label(k),
                        activation=means[i][k],
                        contribution=parts[i][k],
                        heatmap=maps[i, k],
                    )
                    for k in range(S.shape[1])
                ),
                extra={"integration_error": errors[i]},
            )
            for i in range(len(targets))
        ]

    def stand_in(self, subject: Subject, images: Tensor) -> Tensor:
        """Return the logits of the layer as the concepts reconstruct it."""
        assert self.layer_ is not None
        layout, logits_hat = subject.layout(self.layer_), []
        with torch.no_grad():
            for part in torch.split(subject.pixels(images), self.config.batch_size):
                z = subject.activations(part, [self.layer_])[self.layer_]
                z_hat = layout.from_positions(self.W_.to(z) @ self.scores(layout, z), z)
                logits_hat.append(subject.forward_from(self.layer_, z_hat))
        return torch.cat(logits_hat)

    def scores(self, layout: Layout, z: Tensor) -> Tensor:
        """Return the scores S (batch, concepts, positions) of activations by non-negative projection."""
        if self._ready is None or self._ready[0] is not self.W_:
            self._ready = self.W_, prepare(self.W_)
        return project_images(layout.to_positions(z), self._ready[1])

    def tensors(self) -> dict[str, Tensor]:
        """Return basis, importance, contributions by class and the gallery's crops."""
        tensors = {"basis": self.W_, "importance": self.importance_, "by_class": self.by_class_}
        return {**tensors, **self.gallery_.tensors()}

    def state(self) -> dict[str, Any]:
        """Return the sign of the layer and the gallery's captions."""
        return {"signed": self.signed_, "gallery": self.gallery_.captions(), "groups": self.groups_}

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any], files: dict[str, bytes]) -> None:
        """Take back a stored basis."""
        self.W_, self.importance_, self.by_class_ = tensors["basis"], tensors["importance"], tensors["by_class"]
        self.signed_ = bool(state["signed"])
        self.gallery_ = Gallery.restore(tensors, state["gallery"])
        self.groups_ = [[int(k) for k in part] for part in state.get("groups", [[k] for k in range(self.n_concepts)])]

    # inside

    def _factorize(self, X: Tensor, rank: int, seed: int, init: Any, progress: Progress) -> Factorization:
        cfg: NmfConfig = self.config
        channels, positions = X.shape
        if rank > min(channels, positions):
            raise OptionError(
                f"nmf: rank must be at most {min(channels, positions)} for layer {self.layer_!r}, {channels} channels "
                f"and {positions} positions, got {rank}; choose a smaller rank or give more images."
            )

        def on_step(t: int, _objective: float) -> None:
            progress(f"factorizing, rank {rank}", t, cfg.max_iter)

        try:
            return factorize(
                X, rank, seed=seed, init=init, max_iter=cfg.max_iter, tol=cfg.tol, signed=self.signed_, on_step=on_step
            )
        except ValueError as error:
            raise NumericsError(f"layer {self.layer_!r}: {error}") from error

    def _stream(self, subject: Subject, data: Data, layout: Layout, parts: FittedImages, progress: Progress) -> None:
        """Refine the basis on every position of the images of the fit; memory holds one batch at a time."""
        cfg: NmfConfig = self.config
        assert self.layer_ is not None
        layer, epoch = self.layer_, 0

        def shards() -> Iterator[Tensor]:
            def report(_stage: str, done: int, total: int | None) -> None:
                progress(f"pass {epoch + 1} of {cfg.epochs + 1} over all positions", done, total)

            for _, rows, _, z in harvest(subject, data, layer, batch_size=cfg.batch_size, progress=report):
                learn = parts.learn[rows]
                if bool(learn.any()):
                    yield as_columns(layout, z[learn]).float().contiguous()

        def on_step(t: int, _objective: float) -> None:
            nonlocal epoch
            epoch = t

        try:
            fit = factorize_stream(
                shards,
                self.W_.shape[1],
                W0=self.W_,
                signed=self.signed_,
                max_iter=cfg.epochs,
                tol=cfg.tol,
                on_step=on_step,
            )
        except ValueError as error:
            raise NumericsError(f"layer {layer!r}: {error}") from error
        self.W_ = fit.W
        self.metrics.update(
            kkt=fit.kkt, fit_relative_error=fit.relative_error, fit_epochs=fit.n_iter, fit_positions=fit.positions
        )
        log.info(
            "nmf: %d passes over %d positions: relative error %.4f (%s)",
            fit.n_iter + 1, fit.positions, fit.relative_error, fit.status.value,
        )  # fmt: skip

    def _choose_rank(self, X: Tensor, Y: Tensor, progress: Progress) -> int:
        """Return the rank asked for; for ``auto`` the one beyond which there is nothing new to see in images Y.

        That is where the error hardly falls. A next rank that has no more groups of concepts than this one only splits
        what is there, and must lower the error far more to be worth it.
        """
        rank = self.config.rank
        top = min(X.shape)
        if isinstance(rank, int):
            return rank
        if rank is None:
            return min(10, top)
        errors: dict[int, float] = {}
        n_groups: dict[int, int] = {}
        for r in [r for r in AUTO_RANKS if r <= top] or [1]:
            W = self._factorize(X, r, self.config.seed, self.config.init, progress).W
            errors[r] = relative_error(Y, W)
            n_groups[r] = len(groups(project(Y[:, :AUTO_POSITIONS], W).T[:, :, None], seed=self.config.seed))
        ranks = sorted(errors)
        chosen = ranks[-1]
        for a, b in itertools.pairwise(ranks):
            wanted = SPLIT_GAIN if n_groups[b] <= n_groups[a] else AUTO_GAIN
            if errors[a] - errors[b] < wanted * errors[ranks[0]]:
                chosen = a
                break
        tried = {r: (round(e, 4), n_groups[r]) for r, e in errors.items()}
        log.info("nmf: rank %d chosen by trial error and groups of concepts %s", chosen, tried)
        return chosen

    def _basis_stability(self, X: Tensor, W: Tensor, progress: Progress) -> float:
        """Return the mean matched cosine between the basis and re-fits from other, random starts."""
        cosines = []
        for i in range(self.config.refits):
            other = self._factorize(X, W.shape[1], self.config.seed + 1 + i, "random", progress).W
            cosines.append(float(match_columns(W, other).cosine.mean()))
        return sum(cosines) / len(cosines)

    def _measure(self, subject: Subject, data: Data, layout: Layout, parts: FittedImages, progress: Progress) -> None:
        """Measure on the images to report on: errors, agreement, sparsity, importance; gather the top images of all."""
        cfg: NmfConfig = self.config
        measured = data.draw(cfg.max_eval, cfg.seed, parts.report if bool(parts.report.any()) else None)
        assert self.layer_ is not None
        k = self.W_.shape[1]
        gallery = Gallery(k, cfg.top_images, layout.grid, data.foreign_labels(subject))
        sums = dict.fromkeys(("lost", "total", "agree", "logit_error", "zero", "scores", "error", "n"), 0.0)
        importance = torch.zeros(k, dtype=torch.float64)
        by_class = torch.zeros(k, subject.n_classes, dtype=torch.float64)
        counts = torch.zeros(subject.n_classes, dtype=torch.float64)
        maps: list[Tensor] = []

        def report(_stage: str, done: int, total: int | None) -> None:
            progress("measuring", done, total)

        for batch, rows, logits, z in harvest(subject, data, self.layer_, batch_size=cfg.batch_size, progress=report):
            S = self.scores(layout, z)
            gallery.offer(batch, S)
            some = measured[rows].nonzero()[:, 0]
            if some.numel() == 0:
                continue
            z, S, logits = z[some], S[some], logits[some]
            maps.append(S.cpu())
            p = layout.to_positions(z)
            targets = logits.argmax(1)
            c = contributions(subject, self.layer_, layout, z, logits, self.W_.to(z), S, targets.tolist())
            sums["lost"] += float((p - self.W_.to(z) @ S).double().square().sum())
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
        order = importance.argsort(descending=True, stable=True)
        self.W_ = self.W_[:, order].contiguous()
        self.importance_ = (importance[order] / n).float()
        self.by_class_ = (by_class[order] / counts.clamp_min(1)).float()
        self.gallery_ = gallery.reordered(order.tolist())
        self.groups_ = groups(torch.cat(maps)[:, order], seed=cfg.seed)
        largest = dominance(self.by_class_, self.groups_)
        self.metrics["groups/n"] = float(len(self.groups_))
        if not bool(largest.isnan().all()):
            self.metrics["groups/dominance"] = float(largest[~largest.isnan()].max())
        self.metrics.update(
            relative_error=(sums["lost"] / sums["total"]) ** 0.5 if sums["total"] else 0.0,
            f_cls=sums["agree"] / n,
            f_reg=sums["logit_error"] / n,
            sparsity=sums["zero"] / sums["scores"],
            integration_error=sums["error"] / n,
            n_held_out=n,
        )


def relative_error(X: Tensor, W: Tensor) -> float:
    """Return |X - W S| / |X| with S the projection of X on W."""
    return float((X - W @ project(X, W)).norm() / X.norm().clamp_min(1e-30))
