"""A decision tree that says what the model says (kind ``tree``), by intersection regularization.

On top of one layer a quantised representation, a small network and a tree are trained so that network and tree agree
(see `intersection`). An image is explained by its path through the tree: readable rules, each with what it added to the
class's value; where in the image each feature on the path gets its value; and what would have to change.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from auditor.data.source import Data, open_data
from auditor.errors import NumericsError
from auditor.explainers.base import Explainer, ExplainerConfig, FurtherOutput, HoldOutConfig, Reads
from auditor.explainers.explanation import Concept, Explanation, class_scores
from auditor.explainers.gallery import Gallery
from auditor.explainers.tree.attribute_fidelity import fidelity_metrics
from auditor.explainers.tree.decision_path import Boxes, Decision, decisions, tree_from_json, tree_to_json
from auditor.explainers.tree.intersection_training import (
    Epoch,
    Recipe,
    TreeExamples,
    Variant,
    codes_of,
    few_threads,
    train,
)
from auditor.explainers.tree.quantised_features import Backbone, Representation
from auditor.explainers.tree.reading import ReadExamples, prototypes, read
from auditor.kernels.trees.tree import Codes, Tree, TreeLimits, fit_tree
from auditor.metrics.attribute_probe import read_attributes
from auditor.network.aten_graph import graph_of
from auditor.network.graph_module import LayerModule, weights_digest
from auditor.progress import Progress, silent
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)


class TreeConfig(HoldOutConfig):
    """Options of kind ``tree``."""

    n_features: int = Field(default=128, ge=1, le=4096, description="Features of the quantised representation.")
    bits: int = Field(default=4, ge=2, le=8, description="Bits per feature.")
    depth: int | None = Field(default=None, ge=1, le=24, description="Depth of the tree; default ceil(log2 classes)+4.")
    leaf_rows: int = Field(default=2, ge=1, description="Images a leaf must hold at least.")
    balance: float = Field(default=0.5, ge=0, description="Preference of even splits, so that depth suffices; 0: CART.")
    variant: Variant = Field(default="full", description="full, tree, l1, l2, quantised or soft_tree.")
    lambda_1: float = Field(default=2.0, ge=0, description="Weight of the labels.")
    lambda_2: float = Field(default=1.0, ge=0, description="Weight of the tree.")
    lambda_3: float = Field(default=1e-3, ge=0, description="Weight of sparsity.")
    p: float = Field(default=0.5, ge=0, le=1, description="Share of features the sparsity sees in a batch.")
    l1_norm: Literal["batch", "dataset"] = Field(default="batch", description="What the sparsity is averaged over.")
    epochs: int = Field(default=20, ge=1, description="Epochs at most.")
    min_epochs: int = Field(default=5, ge=0, description="Epochs before a drop of accuracy counts.")
    stop_after_drops: int = Field(default=2, ge=0, description="Stop at this drop of trial accuracy; 0: never.")
    train_batch: int = Field(default=64, ge=2, description="Images per training step.")
    lr: float = Field(default=2e-3, gt=0, description="Learning rate.")
    optimiser: Literal["adam", "sgd"] = Field(default="adam", description="The paper used sgd.")
    hidden: int = Field(default=64, ge=1, description="Width of the two-layer network.")
    refit_every: int | None = Field(default=None, ge=1, description="Batches between tree fits; default: epoch / 8.")
    per_feature: bool = Field(default=False, description="One range per feature instead of one for all.")
    percentile: float = Field(
        default=100.0, gt=50, le=100, description="Range of a batch; below 100 cuts outliers off."
    )
    keep_better: bool = Field(default=False, description="Keep the older tree where a new one fits the network worse.")
    attributes: str | None = Field(default=None, description="CSV of attributes per image or class, for the fidelity.")
    threshold: float = Field(default=50.0, description="An attribute's value above this means yes.")
    fine_tune: bool = Field(default=False, description="Train a copy of the backbone, too.")
    pooling: Literal["auto", "flatten", "mean"] = Field(default="auto", description="How positions become inputs.")
    held_out_every: int = Field(
        default=5, ge=2, description="Each n-th image is held out, in turn for the metrics and to decide when to stop."
    )
    max_images: int = Field(default=60_000, ge=4, description="Images read at most, spread over the classes.")
    prototypes: int = Field(default=3, ge=1, le=16, description="Images kept per leaf.")
    alternatives: int = Field(default=3, ge=0, description="Nearest leaves of another class that are named.")

    def recipe(self, limits: TreeLimits) -> Recipe:
        """Return the numbers of algorithm 1 for a tree of these limits."""
        shared = Recipe.__dataclass_fields__.keys() & type(self).model_fields.keys()
        return Recipe(limits=limits, batch=self.train_batch, **{name: getattr(self, name) for name in shared})


class TreeExplainer(Explainer):
    """Quantised representation, small network and decision tree on one layer of the subject.

    ``TreeExplainer(depth=8).fit(subject, data).explain(subject, images)``
    """

    kind: ClassVar[str] = "tree"
    Config: ClassVar[type[ExplainerConfig]] = TreeConfig
    target_value_of: ClassVar[str] = "tree's value"
    page_suffixes: ClassVar[tuple[str, ...]] = (".html", ".svg")
    page_shows_image: ClassVar[bool] = True
    headline: ClassVar[tuple[str, ...]] = ("accuracy_tree", "agreement")
    remedy: ClassVar[str] = "a deeper tree (--set depth=12), another layer (auditor layers), or more images"

    net_: Representation
    tree_: Tree
    gallery_: Gallery  # the concepts are leaves, in the order of ``Boxes.leaves``
    history_: list[Epoch]
    is_flat_: bool
    tuned_: dict[str, Tensor]  # weights of a fine-tuned backbone; empty when it was frozen

    def __init__(self, config: ExplainerConfig | None = None, /, **options: Any) -> None:
        super().__init__(config, **options)
        self._backbones: WeakKeyDictionary[Subject, Backbone] = WeakKeyDictionary()
        self._hashed: tuple[dict[str, Tensor], str] | None = None

    def fit(self, subject: Subject, data: Any, progress: Progress = silent) -> TreeExplainer:
        """Train on the data's labels (the model's predictions where there are none).

        Each n-th image is held out, in turn for the metrics and to decide when to stop.
        """
        cfg: TreeConfig = self.config
        data = open_data(data)
        data.check_labels(subject)
        layer = subject.layer(cfg.layer).name
        backbone = Backbone(subject, layer, pooling=cfg.pooling, trainable=cfg.fine_tune)
        drawn = data.spaced(cfg.max_images, cfg.seed)
        some = data.only(drawn)
        material = read(subject, some, backbone, cfg.held_out_every, cfg.batch_size, progress)
        self._class_names = subject.class_names
        examples, parts = material.examples, material.parts
        parts.warn_if_few(self.kind, "when to stop")
        marks = None
        if cfg.attributes is not None:  # read before the training, which takes minutes
            names = [material.ids[i] for i in parts.report.nonzero()[:, 0].tolist()]
            of = examples.y[parts.report], subject.class_names
            marks = read_attributes(cfg.attributes, names, *of, cfg.threshold).values
        fitted = examples.rows(parts.learn)
        trial = examples.rows(parts.choose) if bool(parts.choose.any()) else fitted
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
        n_sample = min(len(fitted.x), 2048 if backbone.module is None else 64)
        sample = fitted.x[torch.linspace(0, len(fitted.x) - 1, n_sample).long()]  # the first may be of one class
        sample = sample if backbone.module is None else backbone.inputs(sample).detach()
        net.standardise(sample)
        with few_threads(backbone.module is None):
            self.history_ = self._follow(train(net, backbone, fitted, trial, cfg.recipe(limits)), progress)
        self.net_, self.layer_, self.is_flat_ = net.eval(), layer, backbone.is_flat
        codes, g = codes_of(net, backbone, fitted.x)
        _check_alive(codes, layer)
        self.tree_ = fit_tree(codes, g.double().numpy(force=True), limits, bits=cfg.bits)
        self.tuned_ = backbone.state()
        self._backbones.clear()
        self._depth_limit = depth
        reported = examples.rows(parts.report)
        self._measure(fitted, reported, material.predicted[parts.report], backbone, material.is_labelled)
        if marks is not None:
            self.metrics |= fidelity_metrics(codes_of(self.net_, backbone, reported.x)[0], marks, cfg.bits)
        self.gallery_ = self._prototypes(subject, some, backbone, material)
        self.record_fit(subject, data, layer, parts, some)
        return self

    def explain(self, subject: Subject, images: Any, target: int | str | None = None) -> list[Explanation]:
        """Explain each image by its path; contributions add up to the tree's value for the target class.

        Without a target the class explained is the tree's own.
        """
        return self.explain_by_passes(subject, images, target)

    def reads(self) -> Reads:
        """Return the layer below the tree; of a fine-tuned backbone the activation that it gives instead."""
        assert self.layer_ is not None
        if not self.tuned_:
            return Reads((self.layer_,))
        layer, tuned = self.layer_, self.tuned_
        return Reads(
            (), (FurtherOutput(self._tuned_key(), None, lambda subject: LayerModule(graph_of(subject), layer, tuned)),)
        )

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
        backbone = self._backbone(subject)
        z = activations.get(self._tuned_key() if self.tuned_ else backbone.layer)
        with torch.no_grad():
            z = backbone.activations(images) if z is None else z
            v = self.net_.codes(backbone.pool(z))
            probabilities = torch.softmax(self.net_.logits(v), dim=1)
        codes = v.to(torch.uint8).numpy(force=True)
        leaves = self.tree_.apply(codes)
        classes: list[int] = self.tree_.value[leaves].argmax(1).tolist()
        requested = [self.config.target if t is None else t for t in targets]
        chosen = [k if t is None else subject.class_index(t) for t, k in zip(requested, classes, strict=True)]
        predictions, target_scores = class_scores(logits, subject, chosen)
        paths = [decisions(self.tree_, row, k)[0] for row, k in zip(codes, chosen, strict=True)]
        on_path = [list(dict.fromkeys(step.feature for step in path)) for path in paths]
        maps = self._heatmaps(backbone, images, z, on_path) if heatmaps else [[None] * len(some) for some in on_path]
        boxes = Boxes.of(self.tree_)
        return [
            Explanation(
                kind=self.kind,
                name=self.name,
                prediction=predictions[i],
                target=target_scores[i],
                target_value=float(self.tree_.value[leaves[i], chosen[i]]),
                bias=float(self.tree_.value[0, chosen[i]]),
                residual=0.0,
                concepts=self._concepts(paths[i], codes[i], on_path[i], maps[i]),
                extra=self._extra(subject, boxes, paths[i], codes[i], int(leaves[i]), classes[i])
                | self._agreement(subject, probabilities[i], classes[i], predictions[i].index),
                target_value_of=self.target_value_of,
            )
            for i in range(len(chosen))
        ]

    def lines(self, explanation: Explanation) -> list[str]:
        """Return the path to the leaf, rule by rule, and what would have to change for another class."""
        e = explanation.extra
        alternatives = [
            f"{other['class']} ({other['probability']:.0%}) with "
            + ", ".join(f"{c['label']} from {c['code']} to {c['wanted']}" for c in other["changes"])
            for other in e["alternatives"]
        ]
        return [
            f"path to leaf {e['leaf']}, which says {e['tree_class']} ({e['tree_probability']:.0%}):",
            *(f"  {step['rule']}  {step['contribution']:+.3f}" for step in e["path"]),
            *alternatives,
        ]

    @property
    def n_concepts(self) -> int:
        """Number of features of the quantised representation."""
        return int(self.tree_.n_features)

    @property
    def gallery(self) -> Gallery:
        """The top images of each leaf."""
        return self.gallery_

    def write_page(
        self, subject: Subject, path: str | Path, explanation: Explanation | None = None, image: Tensor | None = None
    ) -> Path:
        """Write the tree as a page, or as a drawing alone; with an explanation its path is drawn in colour."""
        from auditor.explainers.tree.page import write_tree_page

        return write_tree_page(self, path, explanation, image)

    @property
    def carries_network(self) -> bool:
        """Whether the layers below were fine-tuned with the tree."""
        return bool(self.tuned_)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes at the leaves."""
        return self._class_names

    def label(self, index: int) -> str:
        """Return the name a person gave to a feature, or a plain one."""
        return self.labels.get(index, f"feature {index}")

    def leaf_label(self, leaf: int) -> str:
        """Return what a leaf (a node of the tree) says: its class and the class's share."""
        leaf_class = int(self.tree_.value[leaf].argmax())
        return f"leaf {leaf}: {self._class_names[leaf_class]} {float(self.tree_.value[leaf, leaf_class]):.0%}"

    def gallery_label(self, index: int) -> str:
        """Return what the pictures at ``index`` of the gallery show: a leaf, not a feature."""
        return self.leaf_label(int(Boxes.of(self.tree_).leaves[index]))

    def tensors(self) -> dict[str, Tensor]:
        """Return quantiser ranges, representation, network, fine-tuned weights and prototype images."""
        network = {f"net.{name}": value for name, value in self.net_.state_dict().items()}
        tuned = {f"backbone.{name}": value for name, value in self.tuned_.items()}
        return {**network, **tuned, **self.gallery_.tensors()}

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
        epochs = []
        for epoch in states:
            progress("training network and tree", epoch.number, self.config.epochs)
            if not math.isfinite(epoch.loss):
                raise NumericsError(
                    f"tree: the loss became {epoch.loss} in epoch {epoch.number}; lower lr or check the layer's values."
                )
            epochs.append(epoch)
        return epochs

    def _tuned_key(self) -> str:
        """Return what distinguishes this fine-tuned backbone; hashed once for each set of weights."""
        if self._hashed is None or self._hashed[0] is not self.tuned_:
            self._hashed = self.tuned_, weights_digest(self.layer_ or "", self.tuned_)
        return self._hashed[1]

    def _backbone(self, subject: Subject) -> Backbone:
        if subject in self._backbones:
            return self._backbones[subject]
        assert self.layer_ is not None
        pooling: Literal["flatten", "mean"] = "flatten" if self.is_flat_ else "mean"
        backbone = Backbone(subject, self.layer_, pooling=pooling, trainable=bool(self.tuned_))
        backbone.load(self.tuned_)
        self._backbones[subject] = backbone
        return backbone

    def _measure(
        self, fitted: TreeExamples, reported: TreeExamples, predicted: Tensor, backbone: Backbone, labelled: bool
    ) -> None:
        """Measure on the images to report on, of which the model's own predictions are given too."""
        cfg: TreeConfig = self.config
        codes, h = codes_of(self.net_, backbone, reported.x)
        network, branch = h.argmax(1).cpu(), torch.from_numpy(self.tree_.predict(codes).argmax(1))
        reached = np.unique(self.tree_.value[self.tree_.feature < 0].argmax(1))
        missed = [self._class_names[c] for c in torch.unique(fitted.y).tolist() if c not in reached]
        if missed:
            log.warning(
                "tree: with depth %d no leaf says %s (%d of %d classes); raise depth to separate them",
                self._depth_limit,
                ", ".join(missed[:5]) + (", …" if len(missed) > 5 else ""),
                len(missed),
                len(torch.unique(fitted.y)),
            )
        self.metrics = {
            "agreement": float((branch == network).double().mean()),
            "agreement_model": float((branch == predicted).double().mean()),
            "depth": float(self.tree_.depth),
            "leaves": float(self.tree_.n_leaves),
            "zero_codes": float((codes == 0).mean()),
            "features_used": float(len(self.tree_.features_used)),
            "classes_without_leaf": float(len(missed)),
            "epochs": float(len(self.history_)),
            "n_held_out": float(len(reported)),
        }
        if labelled:
            self.metrics |= {
                "accuracy_network": float((network == reported.y).double().mean()),
                "accuracy_tree": float((branch == reported.y).double().mean()),
                "accuracy_model": float((predicted == reported.y).double().mean()),
            }
        if 2**self.tree_.depth < len(torch.unique(fitted.y)) and cfg.depth is not None:
            log.warning("tree: depth %d cannot separate %d classes", cfg.depth, len(torch.unique(fitted.y)))

    def _prototypes(self, subject: Subject, data: Data, backbone: Backbone, of: ReadExamples) -> Gallery:
        """Return, per leaf, the images in it of which the network is surest."""
        leaves = Boxes.of(self.tree_).leaves
        classes = self.tree_.value[leaves].argmax(1)
        codes, sure = codes_of(self.net_, backbone, of.examples.x)
        index = np.searchsorted(leaves, self.tree_.apply(codes))
        surest = sure.cpu()[torch.arange(len(sure)), torch.from_numpy(classes[index])]
        return prototypes(subject, data, of, index, surest, len(leaves), self.config.prototypes)

    def _concepts(
        self, path: list[Decision], codes: Any, on_path: list[int], maps: Sequence[Tensor | None]
    ) -> tuple[Concept, ...]:
        """Return the features on a path with what their decisions added."""
        return tuple(
            Concept(
                index=f,
                label=self.label(f),
                activation=float(codes[f]),
                contribution=sum(step.contribution for step in path if step.feature == f),
                heatmap=heatmap,
                note="; ".join(step.rule(self.label(f)) for step in path if step.feature == f),
            )
            for f, heatmap in zip(on_path, maps, strict=True)
        )

    def _extra(
        self, subject: Subject, boxes: Boxes, path: list[Decision], codes: Any, leaf: int, tree_class: int
    ) -> dict[str, Any]:
        """Return leaf, path, prototypes and alternatives, ready for JSON."""
        index = int(np.searchsorted(boxes.leaves, leaf))
        return {
            "leaf": leaf,
            "gallery": index,  # where the leaf's pictures are
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
            "tree_class": subject.class_names[tree_class],
            "tree_probability": float(self.tree_.value[leaf, tree_class]),
            "alternatives": self._alternatives(boxes, subject, codes),
            "prototypes": [
                {"id": shot.id, "label": shot.label, "probability": shot.score} for shot in self.gallery_.shots[index]
            ],
        }

    def _agreement(self, subject: Subject, probabilities: Tensor, tree_class: int, predicted: int) -> dict[str, Any]:
        """Return what the small network says, and whether it and the model agree with the tree."""
        says = int(probabilities.argmax())
        return {
            "network_class": subject.class_names[says],
            "network_probability": float(probabilities[says]),
            "agrees_with_network": says == tree_class,
            "agrees_with_model": predicted == tree_class,
        }

    def _heatmaps(
        self, backbone: Backbone, images: Tensor, z: Tensor, features: Sequence[list[int]]
    ) -> list[list[Tensor]]:
        """Return where each image's features get their values: on the layer's grid, or by gradients where it has none.

        Gradients need a pass that autograd follows, one for the whole batch.
        """
        first: Any = self.net_.encode[0]
        weights = first.weight.detach() * self.net_.scale
        grid = backbone.layout.grid
        if backbone.layout.n_positions > 1:
            return [
                list(backbone.maps(z[i : i + 1], weights[some])[0].clamp_min(0).reshape(-1, *grid).cpu())
                for i, some in enumerate(features)
            ]
        maps: list[list[Tensor]] = [[] for _ in features]
        x = images.detach().clone().requires_grad_()
        with torch.enable_grad():
            values = backbone.inputs(x) @ weights.T
            for j in range(max((len(some) for some in features), default=0)):
                rows = [i for i, some in enumerate(features) if len(some) > j]
                (grad,) = torch.autograd.grad(values[rows, [features[i][j] for i in rows]].sum(), x, retain_graph=True)
                heat = (grad * x).detach().sum(1, keepdim=True).clamp_min(0)
                size = (min(heat.shape[2], 16), min(heat.shape[3], 16))
                pooled = torch.nn.functional.adaptive_avg_pool2d(heat, size)[:, 0].cpu()
                for i in rows:
                    maps[i].append(pooled[i])
        return maps

    def _alternatives(self, boxes: Boxes, subject: Subject, row: Any) -> list[dict[str, Any]]:
        return [
            {
                "leaf": change.leaf,
                "class": subject.class_names[change.target],
                "probability": change.value,
                "steps": change.cost,
                "changes": [
                    {"feature": f, "label": self.label(f), "code": code, "wanted": new_code}
                    for f, code, new_code in change.features
                ],
            }
            for change in boxes.changes(self.tree_, row, self.config.alternatives)
        ]


def _check_alive(codes: Codes, layer: str) -> None:
    if (codes == codes[:1]).all():
        raise NumericsError(
            f"tree: all {len(codes)} images have the same codes at layer {layer!r}; the representation has died or "
            "the layer is constant: lower lambda_3 or lr, or take another layer."
        )
