"""Concepts by non-negative matrix factorization of one layer's activations (kind ``nmf``).

Activations of all images, read as channels by positions, are factorized  A ~ W S,  W >= 0 and S >= 0: the columns of W
are concepts, S says where each is seen. A new image is projected on the basis (S only), and its concepts' contributions
add up to the logit (see `contributions`). A signed layer (GELU, no ReLU) is factorized by semi-NMF: W free, S >= 0.

Ten concepts of all images stand in for a model of ten classes, not for one of a thousand. There every predicted class
gets a basis of its own (`class_fit`), and an image is explained with the basis of its target (`class_bases`).

A signed layer is read as deviations from its mean activation, and a transformer's class token among its positions
(`auditor.subject.layers.Deviations`); where in the image that token read its part is said by `class_token`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from auditor.data.source import Data, open_data
from auditor.errors import NumericsError, OptionError, TamperError
from auditor.explainers.activation_store import ActivationStore
from auditor.explainers.base import Explainer, ExplainerConfig, Reads
from auditor.explainers.contributions import contributions
from auditor.explainers.explanation import Concept, Explanation, class_scores
from auditor.explainers.fitted_images import FittedImages
from auditor.explainers.gallery import Gallery
from auditor.explainers.layer_activations import Reservoir, as_columns, check_varies, harvest
from auditor.explainers.layer_choice import choose_layer
from auditor.explainers.nmf.basis_choice import TRIED, basis_of_some, objection
from auditor.explainers.nmf.class_bases import ClassBases, ClassBasis
from auditor.explainers.nmf.class_fit import ClassFit, FittedBasis, sizes_of
from auditor.explainers.nmf.class_report import ClassReport, remark_of, stand_in_logits
from auditor.explainers.nmf.class_token import token_heat, with_token_heat
from auditor.explainers.nmf.config import NmfConfig
from auditor.explainers.nmf.rank_choice import chosen_rank
from auditor.explainers.nmf.shards import Shards
from auditor.explainers.nmf.shared_report import measure_shared
from auditor.explainers.predicted_classes import PredictedClasses
from auditor.explainers.refits import Refit
from auditor.kernels.factorization.nmf import Factorization, factorize
from auditor.kernels.factorization.projection import Basis, prepare, project_images
from auditor.metrics.concept_matching import match_columns
from auditor.network.above_layer import prepare_above_layer, values_from
from auditor.progress import Progress, silent
from auditor.runners.runner import current
from auditor.subject.layers import Deviations, Layout, reading_of
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)

AT_START = 64  # images whose mean activation a signed layer is read from


class NmfExplainer(Explainer):
    """Concept basis of one layer by NMF (semi-NMF where the layer is signed).

    ``NmfExplainer(layer="layer4", rank=10).fit(subject, data).explain(subject, images)``
    """

    kind: ClassVar[str] = "nmf"
    Config: ClassVar[type[ExplainerConfig]] = NmfConfig
    headline: ClassVar[tuple[str, ...]] = ("f_cls", "f_cls_contested", "relative_error", "basis_stability")
    remedy: ClassVar[str] = (
        "more concepts (--set rank=30), a basis per class (--set bases=class), another layer (auditor layers), or at "
        "least four images of every class"
    )

    W_: Tensor  # (channels, concepts), unit columns, the most important of each basis first
    bases_: ClassBases  # which of the concepts explain which class
    weights_: Tensor  # (bases, channels) by which channels count in a projection; ones for the shared basis
    remarks_: list[str]  # what the fit has to say of its images and choices
    importance_: Tensor  # (concepts,) mean |contribution| to the predicted class, held-out images
    by_class_: Tensor  # (shared concepts, classes) mean contribution when the class is predicted; 0 where it never was
    to_own_class_: Tensor  # (concepts,) mean contribution to the class the concept is of; 0 for shared ones
    signed_: bool
    start_: Tensor | None = None  # (channels, positions or 1) mean activation that a signed layer is read from
    gallery_: Gallery
    groups_: list[list[int]]  # concepts that fire together in the same places
    _ready: tuple[Tensor, dict[int, Basis]] | None = None  # bases made ready for projection, and the W they are of

    def fit(self, subject: Subject, data: Any, progress: Progress = silent) -> NmfExplainer:
        """Fit the basis on the data; every n-th image is held out for the metrics."""
        cfg: NmfConfig = self.config
        layer = choose_layer(subject, data := open_data(data), cfg.layer, cfg.seed)
        if cfg.target is not None:
            subject.class_index(cfg.target)
        if isinstance(cfg.rank, int) and cfg.rank < 1:
            raise OptionError(f"nmf: rank must be at least 1, got {cfg.rank}.")
        parts = FittedImages.each(len(data), cfg.held_out_every, choose=cfg.rank == "auto")
        self.layer_, self.remarks_ = layer, []
        layout = self._read(subject, data, parts)
        with ActivationStore(cfg.class_images, cfg.seed) as stored, ActivationStore(len(data), cfg.seed) as held:
            X, Y, parts, predicted = self._harvest(subject, data, layout, parts, (stored, held), progress)
            if self._goes_per_class(subject, layout, X, stored, progress):
                self._fit_classes(subject, data, layout, X, (stored, held), predicted, progress)
            else:
                self._fit_shared(subject, data, layout, X, Y, parts, progress)
        self.metrics["unmet"] = predicted.unmet
        thin = predicted.too_thin() if self.metrics["f_cls"] < 0.5 else ""
        self.remarks_ += [*predicted.remarks(), *([thin] if thin else [])]
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
    def concepts_are_of_class(self) -> bool:
        """Whether there is a basis per class."""
        return self.bases_.are_per_class

    @property
    def contributions_by_class(self) -> Tensor:
        """Mean contribution (concepts, classes) when the class is predicted; of a class's concepts to that class."""
        if not self.bases_.are_per_class:
            return self.by_class_
        dense = torch.zeros(self.n_concepts, self.by_class_.shape[1])
        dense[: len(self.by_class_)] = self.by_class_
        for basis in self.bases_.parts[1:]:
            dense[basis.first : basis.stop, basis.index] = self.to_own_class_[basis.first : basis.stop]
        return dense

    @property
    def sections(self) -> list[tuple[str, range]]:
        """The shared concepts and those of every class, under what each basis was made of."""
        if not self.bases_.are_per_class:
            return super().sections
        return [(basis.words, basis.concepts) for basis in self.bases_.parts]

    def label(self, index: int) -> str:
        """Return the name a person gave to a concept, or its number, with its class where it is of one."""
        basis = self.bases_.of_concept(index)
        return self.labels.get(index, f"concept {index}" if basis.is_shared else f"{basis.name}: concept {index}")

    def remarks(self) -> list[str]:
        """Return what the fit has to say of its images and choices."""
        return self.remarks_

    def shortcomings(self) -> list[str]:
        """Return why it does not stand in for the model; where the images cannot show it, that alone."""
        reasons = super().shortcomings()
        thin = [remark for remark in self.remarks_ if "no basis can stand in" in remark]
        return thin if thin and reasons else reasons

    @property
    def groups(self) -> list[list[int]]:
        """Concepts that fire together in the same places."""
        return self.groups_

    def concept_directions(self) -> Tensor:
        """Return the basis (channels, concepts)."""
        return self.W_

    def score_maps(self, subject: Subject, z: Tensor, concepts: Sequence[int] | None = None) -> Tensor:
        """Return the scores of the layer's output, each concept's by the projection on its own basis."""
        layout, S = self.layer_scores(subject, z, concepts)
        return layout.on_grid(S)

    def layer_scores(self, subject: Subject, z: Tensor, concepts: Sequence[int] | None = None) -> tuple[Layout, Tensor]:
        """Return how the layer is read, and the scores at all positions of that reading, class token included."""
        layout = self.reading(subject)
        indices = list(range(self.n_concepts)) if concepts is None else list(concepts)
        of_basis: dict[int, Tensor] = {}
        maps = []
        for k in indices:
            basis = self.bases_.of_concept(k)
            if basis.first not in of_basis:
                of_basis[basis.first] = self.scores(layout, z, basis)
            maps.append(of_basis[basis.first][:, k - basis.first])
        return layout, torch.stack(maps, 1)

    def reading(self, subject: Subject) -> Layout:
        """Return how the layer is read: as it is, or as deviations from its mean."""
        assert self.layer_ is not None
        layout = subject.layout(self.layer_)
        return layout if self.start_ is None else Deviations.of(layout, self.start_)

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
        z, chosen = activations[self.layer_], self.targets_for(subject, logits, targets)
        explanations: dict[int, Explanation] = {}
        for basis, rows in self.rows_by_basis(chosen):
            here = [chosen[i] for i in rows]
            x = images[rows] if heatmaps else None
            explanations.update(zip(rows, self._explain(subject, x, logits[rows], z[rows], basis, here), strict=True))
        return [explanations[i] for i in range(len(chosen))]

    def rows_by_basis(self, targets: Sequence[int]) -> Iterator[tuple[ClassBasis, list[int]]]:
        """Yield every basis that explains one of the targets, with the rows it explains."""
        rows: dict[int, list[int]] = {}
        for i, target in enumerate(targets):
            rows.setdefault(self.bases_.for_class(target).first, []).append(i)
        for some in rows.values():
            yield self.bases_.for_class(targets[some[0]]), some

    def _explain(
        self,
        subject: Subject,
        images: Tensor | None,
        logits: Tensor,
        z: Tensor,
        basis: ClassBasis,
        targets: list[int],
    ) -> list[Explanation]:
        """Explain rows that share a basis; without ``images`` no map says what a class token read."""
        assert self.layer_ is not None
        layout, W = self.reading(subject), self.directions(basis).to(z)
        S = self.scores(layout, z, basis)
        c = contributions(subject, self.layer_, layout, z, logits, W, S, targets)
        predictions, target_scores = class_scores(logits, subject, targets)
        cells, note, has_tokens = layout.on_grid(S), "", layout.has_start and layout.prefix > 0
        if has_tokens and images is not None:
            heat, note = token_heat(subject, self.layer_, layout, images, z, W)
            cells = cells if heat is None else with_token_heat(layout, S, c.by_tokens, heat)
        maps = cells.reshape(*S.shape[:2], *layout.grid).cpu()
        by_tokens = (
            (c.by_tokens * c.contributions.abs()).sum(1) / c.contributions.abs().sum(1).clamp_min(1e-30)
        ).tolist()
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
                        activation=means[i][j],
                        contribution=parts[i][j],
                        heatmap=maps[i, j],
                        note=note,
                    )
                    for j, k in enumerate(basis.concepts)
                ),
                extra={
                    "integration_error": errors[i],
                    **({"by_class_token": by_tokens[i]} if has_tokens else {}),
                    **self._about(basis, target_scores[i].label),
                },
            )
            for i in range(len(targets))
        ]

    def _about(self, basis: ClassBasis, target: str) -> dict[str, Any]:
        if not self.bases_.are_per_class:
            return {}
        why = f"no image of {target} was in the fit: " if basis.is_shared else ""
        return {"basis": {"class": basis.name, "images": basis.images, "words": why + basis.words}}

    def lines(self, explanation: Explanation) -> list[str]:
        """Return which basis explains the image, where classes have their own, and what came by the class token."""
        basis, by_token = explanation.extra.get("basis"), explanation.extra.get("by_class_token")
        lines = [basis["words"]] if isinstance(basis, Mapping) else []
        if by_token is not None:
            lines.append(f"{by_token:.0%} of the contributions come by the class token; maps show where it read them")
        return lines

    def stand_in(self, subject: Subject, images: Tensor) -> Tensor:
        """Return the logits of the layer as concepts reconstruct it, those of the near classes together."""
        assert self.layer_ is not None
        layout, logits_from, logits_hat = self.reading(subject), values_from(subject, self.layer_), []
        with torch.no_grad():
            for part in torch.split(subject.pixels(images), self.config.batch_size):
                logits, taken = subject.run(part, [self.layer_])
                chosen = self.targets_for(subject, logits, None)
                logits_hat.append(stand_in_logits(self, layout, logits_from, taken[self.layer_], logits, chosen))
        return torch.cat(logits_hat)

    def reconstructed(self, layout: Layout, z: Tensor, targets: Sequence[int]) -> Tensor:
        """Return the layer's output as the concepts of each target's basis give it, in the shape of ``z``."""
        positions = torch.empty_like(layout.to_positions(z))
        for basis, rows in self.rows_by_basis(targets):
            positions[rows] = self.directions(basis).to(z) @ self.scores(layout, z[rows], basis)
        return layout.from_positions(positions, z)

    def directions(self, basis: ClassBasis) -> Tensor:
        """Return the concepts (channels, concepts) of one basis."""
        return self.W_[:, basis.first : basis.stop]

    def channel_weights(self, basis: ClassBasis) -> Tensor:
        """Return by how much each channel counts in a projection on a basis."""
        return self.weights_[self.bases_.parts.index(basis)]

    def scores(self, layout: Layout, z: Tensor, basis: ClassBasis | None = None) -> Tensor:
        """Return the scores S (batch, concepts, positions) by non-negative projection on a basis (default: shared).

        Channels count by the weights of the basis.
        """
        basis = basis or self.bases_.shared
        if self._ready is None or self._ready[0] is not self.W_:
            self._ready = self.W_, {}
        ready, weights = self._ready[1], self.channel_weights(basis)
        if basis.first not in ready:
            ready[basis.first] = prepare(self.directions(basis) * weights.to(self.W_)[:, None])
        p = layout.to_positions(z)
        return project_images(p if basis.is_shared else p * weights.to(p)[:, None], ready[basis.first])

    def tensors(self) -> dict[str, Tensor]:
        """Return the bases, importance, contributions by class and the gallery's crops."""
        tensors = {"basis": self.W_, "importance": self.importance_, "by_class": self.by_class_}
        if self.bases_.are_per_class:
            tensors |= {"channel_weights": self.weights_, "to_own_class": self.to_own_class_}
        if self.start_ is not None:
            tensors["start"] = self.start_
        return {**tensors, **self.gallery_.tensors()}

    def state(self) -> dict[str, Any]:
        """Return the sign of the layer, which concepts are of which class, and the gallery's captions."""
        state = {"signed": self.signed_, "gallery": self.gallery_.captions(), "groups": self.groups_}
        if self.bases_.are_per_class:
            state["bases"] = self.bases_.to_json()
        return {**state, **({"remarks": self.remarks_} if self.remarks_ else {})}

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any], files: dict[str, bytes]) -> None:
        """Take back stored bases."""
        self.W_, self.importance_, self.by_class_ = tensors["basis"], tensors["importance"], tensors["by_class"]
        n = self.W_.shape[1]
        self.bases_ = ClassBases.restore(state.get("bases"), n)
        self.weights_ = tensors.get("channel_weights", torch.ones(1, self.W_.shape[0]))
        self.to_own_class_ = tensors.get("to_own_class", torch.zeros(n))
        self.start_ = tensors.get("start")  # earlier releases read every layer as it is
        if self.weights_.shape != (len(self.bases_), self.W_.shape[0]) or len(self.to_own_class_) != n:
            raise TamperError("the artifact's class bases and its tensors do not fit together; attach it again.")
        self.signed_ = bool(state["signed"])
        self.remarks_ = [str(remark) for remark in state.get("remarks", [])]
        self.gallery_ = Gallery.restore(tensors, state["gallery"])
        self.groups_ = [[int(k) for k in part] for part in state.get("groups", [[k] for k in range(n)])]

    # inside

    def _read(self, subject: Subject, data: Data, parts: FittedImages) -> Layout:
        """Choose how the layer is read, by some of the images of the fit."""
        assert self.layer_ is not None
        layer, self.start_ = subject.layer(self.layer_), None
        if layer.nonnegative:
            return subject.layout(self.layer_)
        some = data.only(data.draw(AT_START, self.config.seed, parts.learn))
        with torch.no_grad():
            zs = [subject.activations(b.images, [self.layer_])[self.layer_].cpu() for b in some.batches(subject, 16)]
        reading = reading_of(subject.layout(self.layer_), torch.cat(zs))
        self.start_ = reading.start if isinstance(reading, Deviations) else None
        return reading

    def _harvest(
        self,
        subject: Subject,
        data: Data,
        layout: Layout,
        parts: FittedImages,
        stores: tuple[ActivationStore, ActivationStore],
        progress: Progress,
    ) -> tuple[Tensor, Tensor, FittedImages, PredictedClasses]:
        """Read all images once: columns to learn from and to choose on, activations by predicted class."""
        cfg: NmfConfig = self.config
        assert self.layer_ is not None
        learned, trial = Reservoir(cfg.max_positions, cfg.seed), Reservoir(cfg.max_positions // 4, cfg.seed)
        measured = data.draw(cfg.max_eval, cfg.seed, parts.report) if bool(parts.report.any()) else parts.report
        predicted, n_images, low = PredictedClasses(subject), 0, 0.0
        work = harvest(subject, data, self.layer_, batch_size=cfg.batch_size, progress=progress, with_images=False)
        for batch, rows, logits, z in work:
            learned.put(as_columns(layout, z[parts.learn[rows]]))
            trial.put(as_columns(layout, z[parts.choose[rows]]))
            classes = predicted.add(logits, parts.learn[rows])
            if self._may_be_per_class:
                for store, mask in zip(stores, (parts.learn[rows], measured[rows]), strict=True):
                    some = mask.nonzero()[:, 0]
                    store.put((some + rows.start).tolist(), classes[some].tolist(), z[some])
            low = min(low, float(z.min()))
            n_images += len(batch)
        X, Y = learned.columns(), trial.columns()
        check_varies(self.layer_, X)
        parts = parts.first(n_images)
        if not bool(parts.report.any()):
            log.warning("nmf: only %d images, none can be held out; metrics are of the images of the fit", n_images)
        elif cfg.rank == "auto":
            parts.warn_if_few(self.kind, "the rank")
        self.signed_ = low < 0
        if self.signed_:
            log.info("nmf: layer %s has negative values; semi-NMF is used", self.layer_)
        return X, Y if Y.shape[1] else X, parts, predicted

    @property
    def _may_be_per_class(self) -> bool:
        cfg: NmfConfig = self.config
        return cfg.bases == "class" or (cfg.bases == "auto" and not isinstance(cfg.rank, int) and cfg.target is None)

    def _goes_per_class(
        self, subject: Subject, layout: Layout, X: Tensor, stored: ActivationStore, progress: Progress
    ) -> bool:
        """Whether every class gets a basis: asked for, or one shared basis keeps too few classes or restates them."""
        cfg: NmfConfig = self.config
        if cfg.bases != "auto" or not self._may_be_per_class or len(stored.classes) < 2:
            return cfg.bases == "class"
        rank = min(10, *X.shape)
        self.take_basis(basis_of_some(self.layer_ or "", X, rank, self.signed_, cfg.seed, cfg.init))
        rows = {row: k for k in stored.classes for row in stored.rows_of(k)}
        some = [sorted(rows)[i] for i in torch.linspace(0, len(rows) - 1, min(TRIED, len(rows))).long().tolist()]
        z, classes = stored.read(some).to(subject.device), torch.tensor([rows[row] for row in some])
        S = self.scores(layout, z)
        with torch.no_grad():
            z_hat = layout.from_positions(self.W_.to(z) @ S, z)
            same = subject.forward_from(self.layer_ or "", z_hat).argmax(1).cpu() == classes
        reason = objection(float(same.double().mean()), S.mean(-1).cpu(), classes)
        if reason:
            choice = "a basis per predicted class was chosen"
            self.remarks_.append(f"{choice}: {reason}; --set bases=shared keeps one for all classes")
        return bool(reason)

    def take_basis(self, W: Tensor) -> None:
        """Take one shared basis."""
        self.W_, self.bases_ = W, ClassBases.of(W.shape[1], 0, {})
        self.weights_ = torch.ones(1, W.shape[0])

    def _fit_shared(
        self,
        subject: Subject,
        data: Data,
        layout: Layout,
        X: Tensor,
        Y: Tensor,
        parts: FittedImages,
        progress: Progress,
    ) -> None:
        """Fit one basis for all classes."""
        cfg: NmfConfig = self.config
        rank = self._choose_rank(X, Y, progress)
        best = self._factorize(X, rank, cfg.seed, cfg.init, progress)
        self.take_basis(best.W)
        self.metrics = {
            "rank": float(rank),
            "kkt": best.kkt,
            "fit_relative_error": best.relative_error,
            "basis_stability": self._basis_stability(X, best.W),
        }
        if cfg.epochs:
            self._stream(subject, data, layout, parts, progress)
        measure_shared(self, subject, data, layout, parts, progress)

    def _fit_classes(
        self,
        subject: Subject,
        data: Data,
        layout: Layout,
        X: Tensor,
        stores: tuple[ActivationStore, ActivationStore],
        predicted: PredictedClasses,
        progress: Progress,
    ) -> None:
        """Fit a shared basis and one per predicted class, from activations that were read once."""
        cfg: NmfConfig = self.config
        assert self.layer_ is not None
        stored, held = stores
        prepare_above_layer(subject, self.layer_)
        rank = cfg.rank if isinstance(cfg.rank, int) else min(10, X.shape[0])
        if cfg.bases != "auto":  # else it was tried already
            self.take_basis(basis_of_some(self.layer_, X, rank, self.signed_, cfg.seed, cfg.init))
        options = {"signed": self.signed_, "init": cfg.init, "seed": cfg.seed}
        how = (options, cfg.refits, predicted.nearest, cfg.borrow, cfg.class_weights)
        work = ClassFit(subject, self.layer_, layout, stored, *how)
        fitted = work.bases(rank, lambda done, total: progress("factorizing classes", done, total))
        report = ClassReport(self, subject, layout, stored, held, progress)
        self._take_bases(subject, self.W_, fitted, predicted)
        report.order_concepts(cfg.seed)
        self.gallery_ = report.gallery(data, cfg.top_images)
        stable = [b.stability for b in fitted.values() if b.stability is not None]
        self.metrics = {
            "rank": float(rank),
            "bases": float(len(fitted)),
            "kkt": sum(b.kkt for b in fitted.values()) / len(fitted),
            "fit_relative_error": sum(b.relative_error for b in fitted.values()) / len(fitted),
            **({"basis_stability": sum(stable) / len(stable)} if stable else {}),
            **report.measured(),
        }
        self.remarks_ += remark_of(self.metrics)

    def _take_bases(
        self, subject: Subject, shared: Tensor, fitted: dict[int, FittedBasis], predicted: PredictedClasses
    ) -> None:
        order, n_images = sorted(fitted), predicted.learned
        self.bases_ = ClassBases.of(shared.shape[1], sum(n_images.values()), sizes_of(fitted, subject, n_images))
        self.W_ = torch.cat([shared, *(fitted[k].W for k in order)], 1).contiguous()
        self.weights_ = torch.stack([torch.ones(self.W_.shape[0]), *(fitted[k].weights for k in order)])

    def _factorize(self, X: Tensor, rank: int, seed: int, init: Any, progress: Progress) -> Factorization:
        cfg: NmfConfig = self.config
        if rank > min(X.shape):
            raise OptionError(
                f"nmf: rank must be at most {min(X.shape)} for layer {self.layer_!r}, {X.shape[0]} channels and "
                f"{X.shape[1]} positions, got {rank}; choose a smaller rank or give more images."
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
        shards = Shards(subject, data, self.layer_, layout, parts, cfg.batch_size, cfg.epochs, progress)
        try:
            fit = shards.refine(self.W_, signed=self.signed_, tol=cfg.tol)
        except ValueError as error:
            raise NumericsError(f"layer {self.layer_!r}: {error}") from error
        self.take_basis(fit.W)
        self.metrics.update(kkt=fit.kkt, fit_relative_error=fit.relative_error, fit_epochs=fit.n_iter)
        self.metrics["fit_positions"] = fit.positions

    def _choose_rank(self, X: Tensor, Y: Tensor, progress: Progress) -> int:
        """Return the rank asked for; for ``auto`` the one beyond which there is nothing new to see in images Y."""
        cfg: NmfConfig = self.config
        if isinstance(cfg.rank, int):
            return int(cfg.rank)
        if cfg.rank is None:
            return min(10, int(X.shape[0]), int(X.shape[1]))
        return chosen_rank(lambda r: self._factorize(X, r, cfg.seed, cfg.init, progress).W, min(X.shape), Y, cfg.seed)

    def _basis_stability(self, X: Tensor, W: Tensor) -> float:
        """Return the mean matched cosine between the basis and re-fits from other, random starts."""
        cfg: NmfConfig = self.config
        fit = Refit(X, W.shape[1], cfg.max_iter, cfg.tol, self.signed_, f"layer {self.layer_!r}: ")
        others = current().map(fit, range(cfg.seed + 1, cfg.seed + 1 + cfg.refits))
        return sum(float(match_columns(W, other.W).cosine.mean()) for other in others) / cfg.refits
