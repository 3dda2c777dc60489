"""A decision tree that says what the model says (kind ``tree``), by intersection regularization.

On top of one layer a quantised representation, a small network and a tree are trained so that network and tree agree
(see `intersection`). An image is explained by its path through the tree: readable rules, each with what it added to the
class's value; where in the image each feature on the path gets its value; and what would have to change.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from auditor.data.source import Data
from auditor.errors import DataError, NumericsError
from auditor.explainers.base import Explainer, ExplainerConfig, Progress, silent
from auditor.explainers.explanation import Concept, Explanation, class_scores
from auditor.explainers.gallery import Gallery
from auditor.explainers.tree.intersection_training import Epoch, Examples, codes_of, few_threads, train
from auditor.kernels.trees.tree import Tree, TreeLimits, fit_tree
from auditor.explainers.tree.quantised_features import Backbone, Representation
from auditor.subject.subject import Subject
from auditor.tree_config import TreeConfig
from auditor.explainers.tree.decision_path import Boxes, decisions, tree_from_json, tree_to_json

log = logging.getLogger(__name__)


class TreeExplainer(Explainer):
    """Quantised representation, small network and decision tree on one layer of the subject.

    ``TreeExplainer(depth=8).fit(subject, data).explain(subject, images)``
    """

    kind: ClassVar[str] = "tree"
    Config: ClassVar[type[ExplainerConfig]] = TreeConfig

    net_: Representation
    tree_: Tree
    gallery_: Gallery  # the concepts are leaves, in the order of ``Boxes.leaves``
    history_: list[Epoch]
    is_flat_: bool
    tuned_: dict[str, Tensor]  # weights of a fine-tuned backbone; empty when it was frozen

    def fit(self, subject: Subject, data: Data, progress: Progress = silent) -> TreeExplainer:
        """Train on the data's labels (the model's predictions where there are none); each n-th image is held out."""
        cfg: TreeConfig = self.config
        layer = subject.layer(cfg.layer).name
        backbone = Backbone(subject, layer, pooling=cfg.pooling, trainable=cfg.fine_tune)
        fitted, held, labelled, agreed = self._read(subject, data, backbone, progress)
        k = subject.n_classes
        depth = cfg.depth if cfg.depth is not None else math.ceil(math.log2(max(k, 2))) + 4
        limits = TreeLimits(depth, leaf_rows=cfg.leaf_rows, balance=cfg.balance)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(cfg.seed)
            net = Representation(
                backbone.n_inputs,
                cfg.n_features,
                k,
                bits=cfg.bits,
                hidden=cfg.hidden,
                per_feature=cfg.per_feature,
                percentile=cfg.percentile,
                soft_depth=depth if cfg.variant == "soft_tree" else None,
            )
        sample = fitted.x[:2048] if backbone.module is None else backbone.inputs(fitted.x[:64]).detach()
        net.standardise(sample)
        with few_threads(backbone.module is None):
            self.history_ = self._follow(train(net, backbone, fitted, held, cfg.recipe(limits)), progress)
        self.net_, self.layer_, self.is_flat_ = net.eval(), layer, backbone.is_flat
        codes, g = codes_of(net, backbone, fitted.x)
        if (codes == codes[:1]).all():
            raise NumericsError(
                f"tree: all {len(codes)} images have the same codes at layer {layer!r}; the representation has died or "
                "the layer is constant: lower lambda_3 or lr, or take another layer."
            )
        self.tree_ = fit_tree(codes, g.double().numpy(force=True), limits, bits=cfg.bits)
        self.tuned_ = backbone.state()
        self._measure(fitted, held, codes, backbone, labelled, agreed, depth)
        self._keep_prototypes(subject, data, backbone, progress)
        self._fitted_to(subject, data, layer)
        return self

    def explain(self, subject: Subject, images: Any, target: int | str | None = None) -> list[Explanation]:
        """Explain each image by its path; contributions add up to the tree's value for the target class.

        Without a target the class explained is the tree's own.
        """
        self._check(subject)
        backbone = self._backbone(subject)
        boxes = Boxes.of(self.tree_)
        found: list[Explanation] = []
        for part in torch.split(subject.pixels(images), self.config.batch_size):
            with torch.no_grad():
                logits = subject.logits(part)
                z = backbone.activations(part)
                v = self.net_.codes(backbone.pool(z))
                probabilities = torch.softmax(self.net_.logits(v), dim=1)
            codes = v.to(torch.uint8).numpy(force=True)
            leaves = self.tree_.apply(codes)
            own = self.tree_.value[leaves].argmax(1)
            chosen = target if target is not None else self.config.target
            targets = own.tolist() if chosen is None else [subject.class_index(chosen)] * len(part)
            predictions, wanted = class_scores(logits, subject.class_names, targets)
            for i in range(len(part)):
                path, leaf = decisions(self.tree_, codes[i], targets[i])
                on_path = list(dict.fromkeys(step.feature for step in path))
                maps = self._heatmaps(backbone, part[i : i + 1], z[i : i + 1], on_path)
                concepts = tuple(
                    Concept(
                        index=f,
                        label=self.label(f),
                        activation=float(codes[i, f]),
                        contribution=sum(step.contribution for step in path if step.feature == f),
                        heatmap=maps[j],
                        note="; ".join(step.rule(self.label(f)) for step in path if step.feature == f),
                    )
                    for j, f in enumerate(on_path)
                )
                says = int(probabilities[i].argmax())
                extra = {
                    "leaf": leaf,
                    "gallery": int(np.searchsorted(boxes.leaves, leaf)),  # where the leaf's pictures are
                    "path": [
                        {
                            "node": step.node,
                            "feature": step.feature,
                            "threshold": step.threshold,
                            "code": step.code,
                            "direction": "<=" if step.goes_left else ">",
                            "rule": step.rule(self.label(step.feature)),
                            "contribution": step.contribution,
                        }
                        for step in path
                    ],
                    "tree_class": subject.class_names[own[i]],
                    "tree_probability": float(self.tree_.value[leaf, own[i]]),
                    "network_class": subject.class_names[says],
                    "network_probability": float(probabilities[i, says]),
                    "agrees_with_network": bool(says == own[i]),
                    "agrees_with_model": bool(predictions[i].index == own[i]),
                    "alternatives": self._alternatives(boxes, subject, codes[i]),
                    "prototypes": [
                        {"id": shot.id, "label": shot.label, "probability": shot.score}
                        for shot in self.gallery_.shots[int(np.searchsorted(boxes.leaves, leaf))]
                    ],
                }
                found.append(
                    Explanation(
                        kind=self.kind,
                        name=self.name,
                        prediction=predictions[i],
                        target=wanted[i],
                        target_value=float(self.tree_.value[leaf, targets[i]]),
                        bias=float(self.tree_.value[0, targets[i]]),
                        residual=0.0,
                        concepts=concepts,
                        extra=extra,
                    )
                )
        return found

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes at the leaves."""
        return self._class_names

    def label(self, index: int) -> str:
        """Return the name a person gave to a feature, or a plain one."""
        return self.labels.get(index, f"feature {index}")

    def leaf_label(self, leaf: int) -> str:
        """Return what a leaf (a node of the tree) says: its class and the class's share."""
        own = int(self.tree_.value[leaf].argmax())
        return f"leaf {leaf}: {self._class_names[own]} {float(self.tree_.value[leaf, own]):.0%}"

    def gallery_label(self, index: int) -> str:
        """Return what the pictures at ``index`` of the gallery show: a leaf, not a feature."""
        return self.leaf_label(int(Boxes.of(self.tree_).leaves[index]))

    def tensors(self) -> dict[str, Tensor]:
        """Return quantiser ranges, representation, network, fine-tuned weights and prototype images."""
        own = {f"net.{name}": value for name, value in self.net_.state_dict().items()}
        tuned = {f"backbone.{name}": value for name, value in self.tuned_.items()}
        return {**own, **tuned, **self.gallery_.tensors()}

    def state(self) -> dict[str, Any]:
        """Return sizes, the history of training and the prototypes' captions."""
        first: Any = self.net_.encode[0]
        return {
            "n_inputs": first.in_features,
            "n_classes": int(self.tree_.value.shape[1]),
            "flattened": self.is_flat_,
            "depth_limit": self._depth_limit,
            "history": [{name: getattr(epoch, name) for name in Epoch.__slots__} for epoch in self.history_],
            "class_names": list(self._class_names),
            "gallery": self.gallery_.captions(),
        }

    def files(self) -> dict[str, bytes]:
        """Return ``tree.json``, and the tree as a page that opens in any browser."""
        from auditor.explainers.tree.page import tree_page

        document = tree_to_json(self.tree_, self._class_names, self.labels)
        text = json.dumps(document, indent=1, allow_nan=False)
        return {"tree.json": text.encode(), "tree.html": tree_page(self).encode()}

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any], files: dict[str, bytes]) -> None:
        """Take back what was stored."""
        cfg: TreeConfig = self.config
        self._class_names, self._depth_limit = tuple(state["class_names"]), int(state["depth_limit"])
        self.tree_ = tree_from_json(json.loads(files["tree.json"]))
        self.is_flat_ = bool(state["flattened"])
        self.history_ = [Epoch(**epoch) for epoch in state["history"]]
        self.net_ = Representation(
            int(state["n_inputs"]),
            cfg.n_features,
            int(state["n_classes"]),
            bits=cfg.bits,
            hidden=cfg.hidden,
            per_feature=cfg.per_feature,
            percentile=cfg.percentile,
            soft_depth=self._depth_limit if cfg.variant == "soft_tree" else None,
        )
        self.net_.load_state_dict({k[4:]: v for k, v in tensors.items() if k.startswith("net.")})
        self.net_.eval()
        self.tuned_ = {k[9:]: v for k, v in tensors.items() if k.startswith("backbone.")}
        self.gallery_ = Gallery.restore(tensors, state["gallery"])

    # inside

    _class_names: tuple[str, ...] = ()
    _depth_limit: int = 0

    def _follow(self, states: Iterator[Epoch], progress: Progress) -> list[Epoch]:
        seen = []
        for epoch in states:
            progress("training network and tree", epoch.number, self.config.epochs)
            if not math.isfinite(epoch.loss):
                raise NumericsError(
                    f"tree: the loss became {epoch.loss} in epoch {epoch.number}; lower lr, or mend the layer's values."
                )
            seen.append(epoch)
        return seen

    def _backbone(self, subject: Subject) -> Backbone:
        assert self.layer_ is not None
        pooling: Literal["flatten", "mean"] = "flatten" if self.is_flat_ else "mean"
        backbone = Backbone(subject, self.layer_, pooling=pooling, trainable=bool(self.tuned_))
        backbone.load(self.tuned_)
        return backbone

    def _read(
        self, subject: Subject, data: Data, backbone: Backbone, progress: Progress
    ) -> tuple[Examples, Examples, bool, float]:
        """Return rows to fit and held-out rows, whether all have labels, and the model's accuracy on held-out ones."""
        cfg: TreeConfig = self.config
        xs, ys, said = [], [], []
        n = 0
        for batch in data.batches(subject, cfg.batch_size):
            with torch.no_grad():
                logits, taken = subject.run(batch.images, [backbone.layer])
            x = backbone.pool(taken[backbone.layer])
            bad = int((~torch.isfinite(x)).any(1).sum())
            if bad:
                raise NumericsError(
                    f"layer {backbone.layer!r}: {bad} of {len(batch)} images give NaN or infinite features (batch that "
                    f"starts with {batch.ids[0]}); mend the model or its preprocessing first."
                )
            xs.append(x if backbone.module is None else batch.images)
            ys.append(batch.labels)
            said.append(logits.argmax(1).cpu())
            n += len(batch)
            progress("reading features", min(n, cfg.max_images), min(len(data), cfg.max_images))
            if n >= cfg.max_images:
                break
        x, y, predicted = (torch.cat(parts)[: cfg.max_images] for parts in (xs, ys, said))
        labelled = bool((y >= 0).all())
        if not labelled:
            log.warning(
                "tree: %d of %d images have no label; the model's predictions are learned", int((y < 0).sum()), n
            )
            y = predicted
        if int(y.max()) >= subject.n_classes:
            raise DataError(
                f"tree: labels must be 0 to {subject.n_classes - 1} like the model's classes, got {int(y.max())}."
            )
        seen = torch.unique(y)
        if len(seen) < 2:
            raise DataError(
                f"tree: all {len(y)} images are of one class ({subject.class_names[int(seen[0])]}); a tree needs at "
                "least two classes to separate: give data with more."
            )
        held = torch.arange(len(y)) % cfg.held_out_every == cfg.held_out_every - 1
        if not held.any() or len(y) < 4:
            raise DataError(
                f"tree: {len(y)} images are too few to hold some out; give at least {max(cfg.held_out_every, 4)}."
            )
        right = float((predicted == y)[held].double().mean())
        self._class_names = subject.class_names
        self._said = predicted[held]
        return Examples(x[~held], y[~held]), Examples(x[held], y[held]), labelled, right

    def _measure(
        self,
        fitted: Examples,
        held: Examples,
        codes: Any,
        backbone: Backbone,
        labelled: bool,
        right: float,
        depth: int,
    ) -> None:
        cfg: TreeConfig = self.config
        self._depth_limit = depth
        held_codes, h = codes_of(self.net_, backbone, held.x)
        network, branch = h.argmax(1).cpu(), torch.from_numpy(self.tree_.predict(held_codes).argmax(1))
        reached = np.unique(self.tree_.value[self.tree_.feature < 0].argmax(1))
        missed = [self._class_names[c] for c in torch.unique(fitted.y).tolist() if c not in reached]
        if missed:
            log.warning(
                "tree: with depth %d no leaf says %s (%d of %d classes); raise depth to separate them",
                depth,
                ", ".join(missed[:5]) + (", …" if len(missed) > 5 else ""),
                len(missed),
                len(torch.unique(fitted.y)),
            )
        self.metrics = {
            "agreement": float((branch == network).double().mean()),
            "agreement_model": float((branch == self._said).double().mean()),
            "depth": float(self.tree_.depth),
            "leaves": float(self.tree_.n_leaves),
            "zero_codes": float((held_codes == 0).mean()),
            "features_used": float(len(self.tree_.features_used)),
            "classes_without_leaf": float(len(missed)),
            "epochs": float(len(self.history_)),
            "n_held_out": float(len(held)),
        }
        if labelled:
            self.metrics |= {
                "accuracy_network": float((network == held.y).double().mean()),
                "accuracy_tree": float((branch == held.y).double().mean()),
                "accuracy_model": right,
            }
        if 2**self.tree_.depth < len(torch.unique(fitted.y)) and cfg.depth is not None:
            log.warning("tree: depth %d cannot tell %d classes apart", cfg.depth, len(torch.unique(fitted.y)))

    def _keep_prototypes(self, subject: Subject, data: Data, backbone: Backbone, progress: Progress) -> None:
        """Keep, per leaf, the images in it of which the network is surest."""
        cfg: TreeConfig = self.config
        leaves = Boxes.of(self.tree_).leaves
        classes = self.tree_.value[leaves].argmax(1)
        gallery = Gallery(len(leaves), cfg.prototypes, (1, 1))
        n = 0
        for batch in data.batches(subject, cfg.batch_size):
            with torch.no_grad():
                v = self.net_.codes(backbone.inputs(batch.images))
                sure = torch.softmax(self.net_.logits(v), dim=1).cpu()
            place = np.searchsorted(leaves, self.tree_.apply(v.to(torch.uint8).numpy(force=True)))
            scores = torch.zeros(len(batch), len(leaves), 1)
            rows = torch.arange(len(batch))
            scores[rows, torch.from_numpy(place), 0] = sure[rows, torch.from_numpy(classes[place])].float()
            gallery.offer(batch, scores)
            n += len(batch)
            progress("finding prototypes", min(n, cfg.max_images), min(len(data), cfg.max_images))
            if n >= cfg.max_images:
                break
        self.gallery_ = gallery

    def _heatmaps(self, backbone: Backbone, image: Tensor, z: Tensor, features: list[int]) -> list[Tensor]:
        """Return where each feature gets its value: on the layer's grid, or by gradients where the layer has none."""
        if not features:
            return []
        first: Any = self.net_.encode[0]
        weights = first.weight.detach()[features] * self.net_.scale
        if backbone.layout.n_positions > 1:
            return list(backbone.maps(z, weights)[0].clamp_min(0).reshape(len(features), *backbone.layout.grid).cpu())
        maps = []
        x = image.detach().clone().requires_grad_()
        with torch.enable_grad():
            values = backbone.inputs(x) @ weights.T
            for j in range(len(features)):
                (grad,) = torch.autograd.grad(values[0, j], x, retain_graph=True)
                heat = (grad * x).detach().sum(1, keepdim=True).clamp_min(0)
                size = (min(heat.shape[2], 16), min(heat.shape[3], 16))
                maps.append(torch.nn.functional.adaptive_avg_pool2d(heat, size)[0, 0].cpu())
        return maps

    def _alternatives(self, boxes: Boxes, subject: Subject, row: Any) -> list[dict[str, Any]]:
        return [
            {
                "leaf": change.leaf,
                "class": subject.class_names[change.target],
                "probability": change.value,
                "steps": change.cost,
                "changes": [
                    {"feature": f, "label": self.label(f), "code": code, "wanted": wanted}
                    for f, code, wanted in change.features
                ],
            }
            for change in boxes.changes(self.tree_, row, self.config.alternatives)
        ]
