"""Concepts inside the network (kind ``deepfacto``): a non-negative factorization  Z ~ M S  after a layer, trained in.

The columns of M are factors of the layer, the scores S say where each is seen, and a linear head reads the logits off
the scores alone. The layers below are fine-tuned with it by Block-ADMM, so that few factors carry what the network
knows (see `deepfacto_training`). Since the head is linear, a factor's contribution to a logit is an exact sum; what the
factorized network says differently from the model is the residual.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as nf

from auditor.metrics.attribute_probe import (
    Attributes,
    labels_as_attributes,
    majority_accuracy,
    pooled_features,
    principal_scores,
    probe_accuracy,
    read_attributes,
)
from auditor.network.below_layer import Cut
from auditor.data.source import Data
from auditor.explainers.deepfacto.examples import (
    DeepFactoConfig,
    Examples,
    check_activations,
    factorizable_layer,
    gather,
    rank_for,
)
from auditor.explainers.deepfacto.factor_admm import (
    FULL_STEPS,
    HEAD_STEPS,
    State,
    Task,
    Trained,
    activations_of,
    check_memory,
    fit_head,
    train,
)
from auditor.errors import OptionError
from auditor.explainers.base import Explainer, ExplainerConfig, Progress, silent
from auditor.explainers.explanation import Concept, Explanation, class_scores
from auditor.explainers.deepfacto.factorized_network import FactorizedNetwork, ScoreLayer
from auditor.explainers.gallery import Gallery
from auditor.kernels.factorization.deepfacto import LinearHead, projected
from auditor.kernels.factorization.nmf import factorize
from auditor.subject.layers import Layout
from auditor.metrics.concept_matching import match_columns
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)

EXPORT_STEPS = (50, 100, 200, 400)  # of the unrolled projection: the first that is within EXPORT_ERROR of the exact one
EXPORT_ERROR = 1e-4
SIDES = (1, 2, 4)  # of the head's grid, tried in this order
TRIAL_IMAGES = 2000  # at most, for that choice


class DeepFactoExplainer(Explainer):
    """Factors of a layer inside a fine-tuned copy of the network.

    ``DeepFactoExplainer(layer="layer4", rank=16).fit(subject, data).explain(subject, images)``
    """

    kind: ClassVar[str] = "deepfacto"
    carries_network: ClassVar[bool] = True
    Config: ClassVar[type[ExplainerConfig]] = DeepFactoConfig

    M_: Tensor  # (channels, factors), columns of norm at most one, the most important first
    scale_: float  # root mean square of the layer: scores are in its units
    head_: LinearHead
    weights_: dict[str, Tensor]  # fine-tuned parameters below the layer, by their names in the model
    importance_: Tensor  # (factors,) mean |contribution| to the predicted class, held-out images
    by_class_: Tensor  # (factors, classes) mean contribution when the class is predicted
    status_: str
    gallery_: Gallery

    def __init__(self, config: ExplainerConfig | None = None, /, **options: Any) -> None:
        super().__init__(config, **options)
        self._cuts: WeakKeyDictionary[Subject, Cut] = WeakKeyDictionary()

    def fit(self, subject: Subject, data: Data, progress: Progress = silent) -> DeepFactoExplainer:
        """Warm-start on the layer as it is, fine-tune everything by Block-ADMM, measure on held-out images."""
        cfg: DeepFactoConfig = self.config
        if cfg.target is not None:
            subject.class_index(cfg.target)
        layer = factorizable_layer(subject, cfg.layer)
        cut = Cut(subject, layer)
        rank = rank_for(cfg.rank, layer, cut.layout)
        n = min(len(data), cfg.max_images)
        check_memory(n, cut, rank, cfg.dual_step > 0, cfg.memory_limit)
        self.layer_ = layer
        examples = gather(subject, data, n, cfg, progress)
        attributes = self._attributes(subject, examples)
        Z = activations_of(cut, examples.batch.images, cfg.batch_size)
        check_activations(Z, layer)
        self.scale_ = max(float(Z.square().mean().sqrt()), 1e-12)
        Z = Z / self.scale_
        warm = self._warm_start(Z, rank, cut.layout, examples, cfg.seed, progress)
        trained = self._train(cut, warm, examples, cfg.seed, progress)
        self.M_, self.head_, self.weights_ = trained.state.M, trained.state.head, trained.state.weights
        self.status_ = trained.status
        self.metrics = {
            "rank": float(rank),
            "epochs": float(len(trained.history)),
            "epoch_kept": float(trained.state.epoch),
            "cells": float(self.head_.pool.shape[1]),
            "reseeded": float(trained.state.reseeded),
            "basis_moved": 1 - float(match_columns(warm[0], self.M_).cosine.mean()),
        }
        if trained.history:
            self.metrics |= {"residual_layer": trained.history[-1][1], "residual_product": trained.history[-1][2]}
        self._measure(subject, cut, Z, warm, examples, attributes, progress)
        if cfg.refits:
            self.metrics["basis_stability"] = self._basis_stability(subject, Z, examples, progress)
        self._fitted_to(subject, data, layer)
        return self

    def explain(self, subject: Subject, images: Any, target: int | str | None = None) -> list[Explanation]:
        """Explain each image by the factors; contributions, bias and residual add up to the model's own logit."""
        self._check(subject)
        x = subject.pixels(images)
        cut = self._cut(subject)
        found: list[Explanation] = []
        for part in torch.split(x, self.config.batch_size):
            with torch.no_grad():
                logits = subject.logits(part)
                S = self.scores(cut(part))
            found.extend(self._explained(subject, cut.layout, logits, S, target))
        return found

    def scores(self, f: Tensor) -> Tensor:
        """Return the scores (batch, factors, positions) of fine-tuned activations (batch, channels, positions)."""
        return projected(f.cpu() / self.scale_, self.M_)

    def logits(self, subject: Subject, images: Any) -> Tensor:
        """Return what the factorized network says, (batch, classes)."""
        self._check(subject)
        cut, x = self._cut(subject), subject.pixels(images)
        with torch.no_grad():
            parts = [self.head_.logits(self.scores(cut(part))) for part in torch.split(x, self.config.batch_size)]
        return torch.cat(parts)

    @contextmanager
    def network(self, subject: Subject) -> Iterator[Subject]:
        """Give the factorized network as a subject of its own, ready to be exported, while the context lasts.

        Inside, the subject's module holds the fine-tuned weights; its own come back at the end.
        """
        self._check(subject)
        cut = self._cut(subject)
        with cut.in_place() as body:
            scores = ScoreLayer(self.M_, self.scale_, cut.layout, int(self.metrics.get("export_steps", 200)))
            module = FactorizedNetwork(body, cut.layer, scores, self.head_).eval()
            pre = subject.preprocessing
            yield Subject(
                module,
                input_shape=subject.input_shape,
                class_names=subject.class_names,
                mean=pre.mean,
                std=pre.std,
                resize=pre.resize,
            )

    def tensors(self) -> dict[str, Tensor]:
        """Return basis, head, fine-tuned weights, importance, contributions by class and the gallery's crops."""
        own = {"basis": self.M_, "head.weight": self.head_.weight, "head.bias": self.head_.bias}
        own |= {"head.pool": self.head_.pool, "importance": self.importance_, "by_class": self.by_class_}
        own |= {f"weights.{k}": v.detach().cpu() for k, v in self.weights_.items()}
        return {k: v.contiguous() for k, v in {**own, **self.gallery_.tensors()}.items()}

    def state(self) -> dict[str, Any]:
        """Return the layer's scale, how the training ended and the gallery's captions."""
        return {"scale": self.scale_, "status": self.status_, "gallery": self.gallery_.captions()}

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any], files: dict[str, bytes]) -> None:
        """Take back a stored factorization."""
        self.M_, self.scale_, self.status_ = tensors["basis"], float(state["scale"]), str(state["status"])
        self.head_ = LinearHead(tensors["head.weight"], tensors["head.bias"], tensors["head.pool"])
        self.weights_ = {k.removeprefix("weights."): v for k, v in tensors.items() if k.startswith("weights.")}
        self.importance_, self.by_class_ = tensors["importance"], tensors["by_class"]
        self.gallery_ = Gallery.restore(tensors, state["gallery"])

    def label(self, index: int) -> str:
        """Return the name a person gave to a factor, or a plain one."""
        return self.labels.get(index, f"factor {index}")

    # inside

    def _cut(self, subject: Subject) -> Cut:
        if subject not in self._cuts:
            assert self.layer_ is not None
            self._cuts[subject] = Cut(subject, self.layer_, self.weights_)
        return self._cuts[subject]

    def _attributes(self, subject: Subject, examples: Examples) -> Attributes:
        cfg: DeepFactoConfig = self.config
        if cfg.attributes is None:
            return labels_as_attributes(examples.labels)
        return read_attributes(
            cfg.attributes, examples.batch.ids, examples.batch.labels, subject.class_names, cfg.threshold
        )

    def _warm_start(
        self, Z: Tensor, rank: int, layout: Layout, examples: Examples, seed: int, progress: Progress
    ) -> tuple[Tensor, LinearHead]:
        """Return the NMF of the layer as it is, columns of unit norm, and the head trained alone on its scores."""
        cfg: DeepFactoConfig = self.config
        seen = Z[~examples.held]
        columns = seen.permute(1, 0, 2).flatten(1)
        if columns.shape[1] > cfg.max_positions:
            keep = torch.randperm(columns.shape[1], generator=torch.Generator().manual_seed(seed))
            columns = columns[:, keep[: cfg.max_positions].sort().values]
        if rank > columns.shape[1]:
            raise OptionError(
                f"deepfacto: rank {rank} needs as many positions and there are {columns.shape[1]}; give more images."
            )
        init: Literal["auto", "random"] = "auto" if seed == cfg.seed else "random"
        M = factorize(
            columns, rank, seed=seed, init=init, on_step=lambda t, _: progress("factorizing the layer", t, 200)
        ).W
        task, S = examples.task(cfg.fidelity), projected(seen, M)
        side = cfg.cells if cfg.cells is not None else chosen_side(S, task, layout)
        empty = empty_head(task.teacher.shape[1], rank, pool_matrix(layout, side))
        return M, fit_head(empty.pooled(S), task, empty, FULL_STEPS, cfg.fidelity)

    def _train(
        self, cut: Cut, warm: tuple[Tensor, LinearHead], examples: Examples, seed: int, progress: Progress
    ) -> Trained:
        cfg: DeepFactoConfig = self.config

        def told(state: State) -> None:
            progress("fine-tuning by Block-ADMM", state.epoch, cfg.epochs)

        return train(cut, *warm, examples.task(cfg.fidelity), cfg.settings(seed), self.scale_, told)

    def _basis_stability(self, subject: Subject, Z: Tensor, examples: Examples, progress: Progress) -> float:
        """Return the mean matched cosine between the basis and those of whole re-fits from other, random starts."""
        cosines = []
        for i in range(self.config.refits):
            assert self.layer_ is not None
            cut, seed = Cut(subject, self.layer_), self.config.seed + 1 + i
            warm = self._warm_start(Z, self.M_.shape[1], cut.layout, examples, seed, progress)
            other = self._train(cut, warm, examples, seed, progress).state.M
            cosines.append(float(match_columns(self.M_, other).cosine.mean()))
        return sum(cosines) / len(cosines)

    def _measure(
        self,
        subject: Subject,
        cut: Cut,
        Z: Tensor,
        warm: tuple[Tensor, LinearHead],
        examples: Examples,
        attributes: Attributes,
        progress: Progress,
    ) -> None:
        """Measure on held-out images before and after, run the probe, order the factors, gather the gallery."""
        progress("measuring", 0, None)
        held = examples.held
        f = activations_of(cut, examples.batch.images, self.config.batch_size) / self.scale_
        S, S_warm = projected(f, self.M_), projected(Z, warm[0])
        after, before = self.head_.logits(S)[held], warm[1].logits(S_warm)[held]
        own, truth = examples.logits[held], examples.labels[held]
        predicted = own.argmax(1)
        if examples.labelled:
            known = truth >= 0
            for name, logits in (("accuracy_before", own), ("accuracy_warm", before), ("accuracy", after)):
                self.metrics[name] = share(logits.argmax(1)[known] == truth[known])
        scale = float(S[held].amax().clamp_min(1e-30))
        self.metrics |= {
            "relative_error": relative_error(f[held], self.M_, S[held]),
            "relative_error_warm": relative_error(Z[held], warm[0], S_warm[held]),
            "sparsity": share(S[held] <= 1e-6 * scale),
            "f_cls": share(after.argmax(1) == predicted),
            "f_reg": float((after - own).abs().mean()),
            "f_reg_warm": float((before - own).abs().mean()),
            "layer_moved": float((f - Z)[held].norm() / Z[held].norm().clamp_min(1e-30)),
            "n_held_out": float(held.sum()),
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
        self.metrics = {k: v for k, v in self.metrics.items() if not math.isnan(v)}

    def _measure_export(self, cut: Cut, f: Tensor, S: Tensor, held: Tensor) -> None:
        """Choose the steps of the unrolled projection on some images, and report how far it is from the exact one."""
        some = held.nonzero()[:64, 0]
        z = cut.layout.from_positions(f[some] * self.scale_, native_zeros(cut, len(some)))
        for n_steps in EXPORT_STEPS:
            with torch.no_grad():
                found = ScoreLayer(self.M_, self.scale_, cut.layout, n_steps)(z).flatten(2)
            error = float((found - S[some]).abs().max() / S[some].amax().clamp_min(1e-30))
            if error <= EXPORT_ERROR:
                break
        self.metrics |= {"export_steps": float(n_steps), "export_error": error}

    def _importance(self, subject: Subject, S: Tensor, predicted: Tensor) -> list[int]:
        """Order factors by their mean |contribution| to the predicted class, and keep the means by class."""
        parts = self.head_.parts(S, predicted).double()  # (images, factors)
        by_class = torch.zeros(parts.shape[1], subject.n_classes, dtype=torch.float64)
        by_class.index_add_(1, predicted, parts.T.contiguous())
        seen = torch.bincount(predicted, minlength=subject.n_classes).clamp_min(1)
        importance = parts.abs().mean(0)
        order = importance.argsort(descending=True, stable=True)
        self.importance_ = importance[order].float()
        self.by_class_ = (by_class / seen)[order].float()
        self.M_ = self.M_[:, order].contiguous()
        self.head_ = LinearHead(self.head_.weight[:, order].contiguous(), self.head_.bias, self.head_.pool)
        return [int(k) for k in order]

    def _explained(
        self, subject: Subject, layout: Layout, logits: Tensor, S: Tensor, target: int | str | None
    ) -> list[Explanation]:
        targets = self._targets(subject, logits, target)
        predictions, wanted = class_scores(logits, subject.class_names, targets)
        parts = self.head_.parts(S.double(), torch.tensor(targets))
        own = self.head_.logits(S)
        found = []
        for i, k in enumerate(targets):
            bias = float(self.head_.bias[k])
            concepts = tuple(
                Concept(
                    index=j,
                    label=self.label(j),
                    activation=float(S[i, j].mean()),
                    contribution=float(parts[i, j]),
                    heatmap=S[i, j].reshape(layout.grid),
                )
                for j in range(S.shape[1])
            )
            value = bias + sum(c.contribution or 0.0 for c in concepts)
            found.append(
                Explanation(
                    kind=self.kind,
                    name=self.name,
                    prediction=predictions[i],
                    target=wanted[i],
                    target_value=wanted[i].logit,
                    bias=bias,
                    residual=wanted[i].logit - value,
                    concepts=concepts,
                    extra={"factorized_logit": value, "factorized_prediction": int(own[i].argmax())},
                )
            )
        return found


def pool_matrix(layout: Layout, side: int) -> Tensor:
    """Return (positions, cells): each column averages the positions of one cell of a grid, ``side`` cells wide.

    >>> pool_matrix(Layout("map", 3, (1, 4)), 2)
    tensor([[0.5000, 0.0000],
            [0.5000, 0.0000],
            [0.0000, 0.5000],
            [0.0000, 0.5000]])
    """
    h, w = layout.grid
    each = torch.eye(h * w).reshape(h * w, 1, h, w)
    return nf.adaptive_avg_pool2d(each, (min(side, h), min(side, w))).flatten(1)


def empty_head(classes: int, rank: int, pool: Tensor) -> LinearHead:
    """Return a head that says nothing."""
    return LinearHead(torch.zeros(classes, rank, pool.shape[1]), torch.zeros(classes), pool)


def chosen_side(S: Tensor, task: Task, layout: Layout) -> int:
    """Return the side of `SIDES` whose head tells most of some other images right, the smallest of equals.

    What a head on mean scores can tell is bounded: parts of a digit are where they are, and their amounts say little.
    """
    some = torch.arange(len(S)) % max(1, math.ceil(len(S) / TRIAL_IMAGES)) == 0
    S, task = S[some], task.part(some)
    held = torch.arange(len(S)) % 4 == 3
    seen, known = task.part(~held), held & (task.labels >= 0)
    sides = [side for side in SIDES if side <= max(layout.grid)]
    if len(sides) < 2 or not bool(known.any()):
        return sides[0]
    right = []
    for side in sides:
        empty = empty_head(task.teacher.shape[1], S.shape[1], pool_matrix(layout, side))
        head = fit_head(empty.pooled(S[~held]), seen, empty, HEAD_STEPS, fidelity=0.0)
        right.append(share(head.logits(S[known]).argmax(1) == task.labels[known]))
    log.info("deepfacto: right on trial images by side of the head's grid: %s", dict(zip(sides, right, strict=True)))
    return sides[right.index(max(right))]


def native_zeros(cut: Cut, n: int) -> Tensor:
    """Return zeros of the layer's own shape: class and register tokens have no part in the factorization."""
    return torch.zeros(n, *cut.subject.layer(cut.layer).shape)


def relative_error(Z: Tensor, M: Tensor, S: Tensor) -> float:
    """Return |Z - M S| / |Z|."""
    return float((Z - M @ S).norm() / Z.norm().clamp_min(1e-30))


def share(mask: Tensor) -> float:
    """Return the share of true entries."""
    return float(mask.double().mean())
