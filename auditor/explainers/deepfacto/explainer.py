"""Concepts inside the network (kind ``deepfacto``): a non-negative factorization  Z ~ M S  after a layer, trained in.

The columns of M are factors of the layer, the scores S say where each is seen, and the network's own blocks above the
layer (or a linear head in their stead) read the logits off the scores alone. Everything is fine-tuned by Block-ADMM, so
that few factors carry what the network knows (see `forms`). A factor's contribution to a logit is an exact sum where
the head is linear and a path integral where blocks follow; what the factorized network says differently from the
model is the residual.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from auditor.data.python_objects import pixels_of_any
from auditor.data.source import open_data
from auditor.errors import OptionError
from auditor.explainers.base import Explainer, ExplainerConfig, FurtherOutput, Reads
from auditor.explainers.deepfacto.examples import (
    PASSES,
    DeepFactoConfig,
    FactorExamples,
    check_activations,
    factorizable_layer,
    gather,
    rank_for,
)
from auditor.explainers.deepfacto.factor_admm import activations_of, check_memory
from auditor.explainers.deepfacto.factorized_network import FactorizedNetwork, ScoreLayer
from auditor.explainers.deepfacto.forms import Form, form_for, reordered, score_head
from auditor.explainers.deepfacto.page import Followed, followed_attributes
from auditor.explainers.deepfacto.score_heads import ScoreHead
from auditor.explainers.explanation import Concept, Explanation, class_scores
from auditor.explainers.gallery import Gallery
from auditor.explainers.restating import restating
from auditor.kernels.factorization.deepfacto import projected
from auditor.kernels.factorization.nmf import factorize
from auditor.metrics.attribute_probe import (
    Attributes,
    labels_as_attributes,
    majority_accuracy,
    pooled_features,
    principal_scores,
    probe_accuracy,
    read_attributes,
)
from auditor.metrics.concept_matching import match_columns
from auditor.network.aten_graph import graph_of
from auditor.network.below_layer import BelowLayer
from auditor.network.graph_module import LayerModule, weights_digest
from auditor.progress import Progress, silent
from auditor.subject.layers import Layout
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)

EXPORT_STEPS = (50, 100, 200, 400)  # of the unrolled projection: the first that is within EXPORT_ERROR of the exact one
EXPORT_ERROR = 1e-4


class DeepFactoExplainer(Explainer):
    """Factors of a layer inside a fine-tuned copy of the network.

    ``DeepFactoExplainer(layer="layer4", rank=16).fit(subject, data).explain(subject, images)``
    """

    kind: ClassVar[str] = "deepfacto"
    Config: ClassVar[type[ExplainerConfig]] = DeepFactoConfig
    makes_network: ClassVar[bool] = True
    headline: ClassVar[tuple[str, ...]] = ("f_cls", "relative_error", "basis_stability")
    remedy: ClassVar[str] = (
        "a higher rank (--set rank=32), another layer (auditor layers), more images, or, for many classes, kind "
        "nmf, which has a basis per class"
    )

    M_: Tensor  # (channels, factors), columns of norm at most one, the most important first
    scale_: float  # root mean square of the layer: scores are in its units
    form_: str  # "blocks" or "linear"
    head_: dict[str, Tensor]  # of what reads the scores, see `score_head`
    weights_: dict[str, Tensor]  # fine-tuned parameters below the layer, by their names in the model
    importance_: Tensor  # (factors,) mean |contribution| to the predicted class, held-out images
    by_class_: Tensor  # (factors, classes) mean contribution when the class is predicted
    status_: str
    passes_: int  # over the images, at most
    remarks_: list[str]
    followed_: list[Followed]  # attributes that single factors follow; none without a file of attributes
    gallery_: Gallery

    def __init__(self, config: ExplainerConfig | None = None, /, **options: Any) -> None:
        super().__init__(config, **options)
        self._cuts: WeakKeyDictionary[Subject, BelowLayer] = WeakKeyDictionary()
        self._heads: WeakKeyDictionary[Subject, tuple[dict[str, Tensor], ScoreHead]] = WeakKeyDictionary()
        self._hashed: tuple[dict[str, Tensor], str] | None = None

    def fit(self, subject: Subject, data: Any, progress: Progress = silent) -> DeepFactoExplainer:
        """Warm-start on the layer as it is, fine-tune everything by Block-ADMM, measure on held-out images."""
        cfg: DeepFactoConfig = self.config
        data = open_data(data)
        data.check_labels(subject)
        if cfg.target is not None:
            subject.class_index(cfg.target)
        layer = factorizable_layer(subject, cfg.layer)
        cut = BelowLayer(subject, layer)
        rank = rank_for(cfg.rank, layer, cut.layout)
        form, why = form_for(cfg.head, subject, layer, cfg.trained_from)
        n = min(len(data), cfg.max_images)
        check_memory(n, cut, rank, cfg.of_form("dual_step", form.name) > 0, cfg.memory_limit)
        self.layer_, self.form_, self.remarks_ = layer, form.name, [why] if why else []
        examples = gather(subject, data, n, cfg, progress)
        attributes = self._attributes(subject, examples)
        Z = activations_of(cut, examples.batch.images, cfg.batch_size)
        check_activations(Z, layer)
        self.scale_ = max(float(Z[~examples.held].square().mean().sqrt()), 1e-12)
        Z = Z / self.scale_
        fitting = form(subject, layer, cfg, examples, Z, self.scale_)
        self.passes_ = fitting.passes()
        warm = self._basis(Z, rank, examples, cfg.seed, progress)
        trained = fitting.fit(warm, cfg.seed, self._reporter(progress))
        self.M_, self.head_, self.weights_, self.status_ = trained.M, trained.head, trained.weights, trained.status
        self.metrics = {
            "rank": float(rank),
            "epochs": float(len(trained.history)),
            "epoch_kept": float(trained.epoch),
            "reseeded": float(trained.revived),
            "basis_moved": 1 - float(match_columns(warm, self.M_).cosine.mean()),
        }
        if trained.history:
            self.metrics |= {"residual_layer": trained.history[-1][1], "residual_product": trained.history[-1][2]}
        self._measure(subject, Z, warm, trained.warm_logits, examples, attributes, progress)
        if cfg.refits:
            self.metrics["basis_stability"] = self._basis_stability(fitting, progress)
        self.record_fit(subject, data, layer, examples.fitted, examples.drawn)
        return self

    def explain(self, subject: Subject, images: Any, target: int | str | None = None) -> list[Explanation]:
        """Explain each image by the factors; contributions, bias and residual add up to the model's own logit."""
        return self.explain_by_passes(subject, images, target)

    def reads(self) -> Reads:
        """Return the activation of the fine-tuned network, which a shared pass may give; no layer of the model."""
        assert self.layer_ is not None
        layer, weights = self.layer_, self.weights_
        output = FurtherOutput(self._key(), None, lambda subject: LayerModule(graph_of(subject), layer, weights))
        return Reads((), (output,))

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
        """Explain from logits that a shared pass has given; the fine-tuned layers run here unless it gave them too."""
        below, z = self._cut(subject), activations.get(self._key())
        with torch.no_grad():
            S = self.scores(below(images) if z is None else below.layout.to_positions(z.float()))
        return self._explained(subject, below.layout, logits, S, self.targets_for(subject, logits, targets))

    def prepare(self, subject: Subject) -> None:
        """Cut the network once, before requests come."""
        self.head(subject)

    @property
    def n_concepts(self) -> int:
        """Number of factors."""
        return int(self.M_.shape[1])

    @property
    def gallery(self) -> Gallery:
        """The top images of each factor."""
        return self.gallery_

    @property
    def contributions_by_class(self) -> Tensor:
        """Mean contribution (factors, classes) when the class is predicted."""
        return self.by_class_

    @property
    def carries_network(self) -> bool:
        """Whether it reads a network of its own: the fine-tuned one."""
        return True

    def scores(self, f: Tensor) -> Tensor:
        """Return the scores (batch, factors, positions) of fine-tuned activations (batch, channels, positions)."""
        return projected(f.cpu() / self.scale_, self.M_)

    def head(self, subject: Subject) -> ScoreHead:
        """Return what reads the scores."""
        stored, head = self._heads.get(subject, (None, None))
        if head is None or stored is not self.head_:
            assert self.layer_ is not None
            head = score_head(self.head_, subject, self.layer_)
            self._heads[subject] = self.head_, head
        return head

    def logits(self, subject: Subject, images: Any) -> Tensor:
        """Return what the factorized network says, (batch, classes)."""
        self.check_subject(subject)
        cut, head, x = self._cut(subject), self.head(subject), pixels_of_any(subject, images)
        with torch.no_grad():
            parts = [head.logits(self.scores(cut(part))) for part in torch.split(x, self.config.batch_size)]
        return torch.cat(parts)

    @contextmanager
    def network(self, subject: Subject) -> Iterator[Subject]:
        """Give the factorized network as a subject of its own, ready to be exported, while the context lasts.

        Inside, the subject's module holds the fine-tuned weights; its own come back at the end.
        """
        self.check_subject(subject)
        cut, head = self._cut(subject), self.head(subject).module()
        with cut.in_place() as body:
            scores = ScoreLayer(self.M_, self.scale_, cut.layout, int(self.metrics.get("export_steps", 200)))
            module = FactorizedNetwork(body, cut.layer, scores, head).eval()
            pre = subject.preprocessing
            yield Subject(
                module,
                input_shape=subject.input_shape,
                class_names=subject.class_names,
                mean=pre.mean,
                std=pre.std,
                resize=pre.resize,
                output="logits",  # the head's, whatever the subject's own outputs are
            )

    def tensors(self) -> dict[str, Tensor]:
        """Return basis, head, fine-tuned weights, importance, contributions by class and the gallery's crops."""
        tensors = {"basis": self.M_, **self.head_, "importance": self.importance_, "by_class": self.by_class_}
        tensors |= {f"weights.{k}": v.detach().cpu() for k, v in self.weights_.items()}
        return {k: v.contiguous() for k, v in {**tensors, **self.gallery_.tensors()}.items()}

    def state(self) -> dict[str, Any]:
        """Return the layer's scale, how the training ended and the gallery's captions."""
        numbers = {"scale": self.scale_, "status": self.status_, "passes": self.passes_, "form": self.form_}
        numbers["remarks"] = self.remarks_
        numbers |= {"followed": [f.to_json() for f in self.followed_]} if self.followed_ else {}
        return {**numbers, "gallery": self.gallery_.captions()}

    def write_page(
        self, subject: Subject, path: str | Path, explanation: Explanation | None = None, image: Tensor | None = None
    ) -> Path:
        """Write the page of the factors, and of the attributes that single ones follow."""
        from auditor.explainers.deepfacto.page import DeepFactoPage

        return DeepFactoPage(self, subject).write(path)

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any], files: dict[str, bytes]) -> None:
        """Restore a stored factorization."""
        self.M_, self.scale_, self.status_ = tensors["basis"], float(state["scale"]), str(state["status"])
        self.passes_ = int(state.get("passes", PASSES))
        self.form_ = str(state.get("form", "linear"))  # the only one of the first releases
        self.remarks_ = [str(text) for text in state.get("remarks", [])]
        self.followed_ = [Followed.from_json(entry) for entry in state.get("followed", [])]
        self.head_ = {k: v for k, v in tensors.items() if k.startswith(("head.", "lift.", "above."))}
        self.weights_ = {k.removeprefix("weights."): v for k, v in tensors.items() if k.startswith("weights.")}
        self.importance_, self.by_class_ = tensors["importance"], tensors["by_class"]
        self.gallery_ = Gallery.restore(tensors, state["gallery"])

    def remarks(self) -> list[str]:
        """Return how far the training went where the network is too costly for all passes."""
        if self.config.epochs is not None or self.passes_ >= PASSES:
            return self.remarks_
        return [
            *self.remarks_,
            f"trained for {self.passes_} passes over the images, {PASSES} being usual: this network's passes cost "
            f"much; --set epochs={PASSES} takes them all, and a GPU takes them fast",
        ]

    def label(self, index: int) -> str:
        """Return the name a person gave to a factor, or a plain one."""
        return self.labels.get(index, f"factor {index}")

    # inside

    def _key(self) -> str:
        """Return what distinguishes these fine-tuned weights; hashed once for each set of them."""
        if self._hashed is None or self._hashed[0] is not self.weights_:
            self._hashed = self.weights_, weights_digest(self.layer_ or "", self.weights_)
        return self._hashed[1]

    def _cut(self, subject: Subject) -> BelowLayer:
        if subject not in self._cuts:
            assert self.layer_ is not None
            self._cuts[subject] = BelowLayer(subject, self.layer_, self.weights_)
        return self._cuts[subject]

    def _attributes(self, subject: Subject, examples: FactorExamples) -> Attributes:
        cfg: DeepFactoConfig = self.config
        if cfg.attributes is None:
            return labels_as_attributes(examples.labels)
        return read_attributes(
            cfg.attributes, examples.batch.ids, examples.batch.labels, subject.class_names, cfg.threshold
        )

    def _basis(self, Z: Tensor, rank: int, examples: FactorExamples, seed: int, progress: Progress) -> Tensor:
        """Return the NMF of the layer as it is, columns of unit norm: where every form starts."""
        cfg: DeepFactoConfig = self.config
        columns = Z[~examples.held].permute(1, 0, 2).flatten(1)
        if columns.shape[1] > cfg.max_positions:
            keep = torch.randperm(columns.shape[1], generator=torch.Generator().manual_seed(seed))
            columns = columns[:, keep[: cfg.max_positions].sort().values]
        if rank > columns.shape[1]:
            raise OptionError(
                f"deepfacto: rank {rank} needs as many positions and there are {columns.shape[1]}; give more images."
            )
        init: Literal["auto", "random"] = "auto" if seed == cfg.seed else "random"
        return factorize(
            columns, rank, seed=seed, init=init, on_step=lambda t, _: progress("factorizing the layer", t, 200)
        ).W

    def _reporter(self, progress: Progress) -> Callable[[int], None]:
        return lambda epoch: progress("fine-tuning by Block-ADMM", epoch, self.passes_)

    def _basis_stability(self, fitting: Form, progress: Progress) -> float:
        """Return the mean matched cosine between the basis and those of whole re-fits from other, random starts."""
        cosines = []
        for i in range(self.config.refits):
            seed = self.config.seed + 1 + i
            start = self._basis(fitting.Z, self.n_concepts, fitting.examples, seed, progress)
            other = fitting.fit(start, seed, self._reporter(progress)).M
            cosines.append(float(match_columns(self.M_, other).cosine.mean()))
        return sum(cosines) / len(cosines)

    def _measure(
        self,
        subject: Subject,
        Z: Tensor,
        warm: Tensor,
        before: Tensor,
        examples: FactorExamples,
        attributes: Attributes,
        progress: Progress,
    ) -> None:
        """Measure on held-out images before and after, run the probe, order the factors, gather the gallery."""
        progress("measuring", 0, None)
        held, cut, head = examples.held, BelowLayer(subject, self.layer_ or "", self.weights_), self.head(subject)
        f = activations_of(cut, examples.batch.images, self.config.batch_size) / self.scale_
        S, S_warm = projected(f, self.M_), projected(Z, warm)
        after = head.logits(S[held])
        model_logits, truth = examples.logits[held], examples.labels[held]
        predicted = model_logits.argmax(1)
        if examples.labelled:
            labelled = truth >= 0
            for name, logits in (("accuracy_before", model_logits), ("accuracy_warm", before), ("accuracy", after)):
                self.metrics[name] = share(logits.argmax(1)[labelled] == truth[labelled])
        self.remarks_ += restating(S[held].mean(-1), predicted, "kind nmf with --set bases=class")
        scale = float(S[held].amax().clamp_min(1e-30))
        self.metrics |= {
            "relative_error": relative_error(f[held], self.M_, S[held]),
            "relative_error_warm": relative_error(Z[held], warm, S_warm[held]),
            "sparsity": share(S[held] <= 1e-6 * scale),
            "f_cls": share(after.argmax(1) == predicted),
            "f_reg": float((after - model_logits).abs().mean()),
            "f_reg_warm": float((before - model_logits).abs().mean()),
            "layer_moved": float((f - Z)[held].norm() / Z[held].norm().clamp_min(1e-30)),
            "n_held_out": float(held.sum()),
            "cells": float(head.cells),
        }
        others = {"deepfacto": S, "nmf": S_warm, "pca": principal_scores(Z, held, self.M_.shape[1])}
        for name, scores in others.items():
            progress("probing", 0, None)
            self.metrics[f"probe_{name}"] = probe_accuracy(pooled_features(scores), held, attributes, self.config.seed)
        self.metrics["probe_majority"] = majority_accuracy(held, attributes)
        self._measure_export(cut, f, S, held)
        order = self._importance(subject, S[held], predicted)
        gallery = Gallery(len(order), self.config.top_images, cut.layout.grid)
        gallery.offer(examples.batch, S[:, order])
        self.gallery_ = gallery
        self.followed_ = self._followed(S[:, order].mean(-1), examples, attributes)
        self.metrics = {k: v for k, v in self.metrics.items() if not math.isnan(v)}

    def _followed(self, amounts: Tensor, examples: FactorExamples, attributes: Attributes) -> list[Followed]:
        """Return which factors follow which attributes, and which pictures of the gallery show who has them."""
        if self.config.attributes is None:
            return []
        row_of = {name: i for i, name in enumerate(examples.batch.ids)}
        results = []
        for f in followed_attributes(amounts, examples.held, attributes):
            marks = attributes.values[:, attributes.names.index(f.attribute)]
            shots = self.gallery_.shots[f.factor]
            results.append(replace(f, has=tuple(bool(marks[row_of[shot.id]]) for shot in shots)))
        return results

    def _measure_export(self, cut: BelowLayer, f: Tensor, S: Tensor, held: Tensor) -> None:
        """Choose the steps of the unrolled projection on learned images; on held-out ones say how far it is off."""

        def error(rows: Tensor, n_steps: int) -> float:
            z = cut.layout.from_positions(f[rows] * self.scale_, native_zeros(cut, len(rows)))
            with torch.no_grad():
                unrolled = ScoreLayer(self.M_, self.scale_, cut.layout, n_steps)(z).flatten(2)
            return float((unrolled - S[rows]).abs().max() / S[rows].amax().clamp_min(1e-30))

        learned, reported = (mask.nonzero()[:64, 0] for mask in (~held, held))
        n_steps = next((n for n in EXPORT_STEPS if error(learned, n) <= EXPORT_ERROR), EXPORT_STEPS[-1])
        self.metrics |= {"export_steps": float(n_steps), "export_error": error(reported, n_steps)}

    def _importance(self, subject: Subject, S: Tensor, predicted: Tensor) -> list[int]:
        """Order factors by their mean |contribution| to the predicted class, and keep the means by class."""
        parts = self.head(subject).contributions(S, predicted).parts  # (images, factors)
        by_class = torch.zeros(parts.shape[1], subject.n_classes, dtype=torch.float64)
        by_class.index_add_(1, predicted, parts.T.contiguous())
        counts = torch.bincount(predicted, minlength=subject.n_classes).clamp_min(1)
        importance = parts.abs().mean(0)
        order = importance.argsort(descending=True, stable=True)
        self.importance_ = importance[order].float()
        self.by_class_ = (by_class / counts)[order].float()
        self.M_ = self.M_[:, order].contiguous()
        self.head_ = reordered(self.head_, order.tolist())
        return [int(k) for k in order]

    def _explained(
        self, subject: Subject, layout: Layout, logits: Tensor, S: Tensor, targets: list[int]
    ) -> list[Explanation]:
        predictions, target_scores = class_scores(logits, subject, targets)
        head = self.head(subject)
        made, factorized = head.contributions(S, torch.tensor(targets)), head.logits(S)
        explanations = []
        for i in range(len(targets)):
            bias = float(made.bias[i])
            concepts = tuple(
                Concept(
                    index=j,
                    label=self.label(j),
                    activation=float(S[i, j].mean()),
                    contribution=float(made.parts[i, j]),
                    heatmap=S[i, j].reshape(layout.grid),
                )
                for j in range(S.shape[1])
            )
            value = bias + sum(c.contribution or 0.0 for c in concepts)
            explanations.append(
                Explanation(
                    kind=self.kind,
                    name=self.name,
                    prediction=predictions[i],
                    target=target_scores[i],
                    target_value=target_scores[i].logit,
                    bias=bias,
                    residual=target_scores[i].logit - value,
                    concepts=concepts,
                    extra={
                        "factorized_logit": value,
                        "factorized_prediction": int(factorized[i].argmax()),
                        "integration_error": float(made.error[i]),
                    },
                )
            )
        return explanations


def native_zeros(cut: BelowLayer, n: int) -> Tensor:
    """Return zeros of the layer's own shape: class and register tokens have no part in the factorization."""
    return torch.zeros(n, *cut.subject.layer(cut.layer).shape)


def relative_error(Z: Tensor, M: Tensor, S: Tensor) -> float:
    """Return |Z - M S| / |Z|."""
    return float((Z - M @ S).norm() / Z.norm().clamp_min(1e-30))


def share(mask: Tensor) -> float:
    """Return the share of true entries."""
    return float(mask.double().mean())
