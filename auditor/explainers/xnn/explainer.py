"""Explanation heads of a classifier (kind ``xnn``): a few x-features whose weighted sum is the logit of a class.

[XNN]. Losses: `auditor.kernels.networks.reconstruction_losses`; training: `auditor.explainers.xnn.head_objective`;
heatmap of an x-feature: contrastive excitation backprop from its neuron to the pixels.

    logit = c + sum_i v_i E_i + residual
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary

import torch
from pydantic import Field
from torch import Tensor

from auditor.attribution.excitation import ExcitationBackprop, Heatmaps
from auditor.data.source import Data
from auditor.errors import DataError, LayerError, ModelError, OptionError
from auditor.explainers.base import Explainer, ExplainerConfig, FurtherOutput, Reads
from auditor.explainers.explanation import Concept, Explanation, class_scores
from auditor.explainers.fitted_images import FittedImages
from auditor.explainers.layer_activations import harvest
from auditor.explainers.xnn.head_objective import SraeConfig
from auditor.explainers.xnn.head_training import Examples, Trained, check_classes, fit_heads
from auditor.explainers.xnn.heads import ChannelsFirst, XFeatures, XHeads
from auditor.explainers.xnn.logit_faithfulness import faithfulness_of, mean_over, with_heads
from auditor.network.aten_graph import graph_of
from auditor.progress import Progress, silent
from auditor.subject.layer_calls import locate
from auditor.subject.layers import Layout
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)

MAX_SHARED_FEATURES = 16_384  # x-features of all classes per image: beyond that the head of the one class is cheaper


class XnnConfig(ExplainerConfig):
    """Options of kind ``xnn``."""

    n: int = Field(default=5, ge=1, le=256, description="x-features per class.")
    targets: list[int | str] | None = Field(default=None, description="Several classes; default: all of them.")
    variant: Literal["srae", "nn", "sae", "cae"] = Field(default="srae", description="srae, or a baseline.")
    beta: float = Field(default=1.0, ge=0, description="Weight of the sparse reconstruction.")
    eta: float = Field(default=1.0, ge=0, description="Weight of the pull-away term.")
    q: float = Field(default=10.0, gt=0, description="Steepness of the log penalty.")
    hidden: list[int] | None = Field(default=None, description="Widths of the encoder; default 800, 100 or less.")
    activation: Literal["relu", "tanh"] = Field(default="relu", description="Of hidden units and x-features.")
    cells: int = Field(default=4, ge=1, description="Pooled cells per x-feature on a convolutional layer, a square.")
    lr: float = Field(default=2e-3, gt=0, description="Step size of Adam.")
    max_epochs: int = Field(default=200, ge=1, description="Epochs at most.")
    patience: int = Field(default=20, ge=1, description="Epochs without gain on trial images before stopping.")
    max_images: int = Field(default=20_000, ge=2, description="Images read at most, spread over the classes.")
    held_out_every: int = Field(
        default=5,
        ge=2,
        description="Each n-th image is held out, in turn for the metrics and to choose the best epoch.",
    )
    heatmap_layer: str | None = Field(default=None, description="Where heatmaps stop; default: the pixels.")
    checkpoint: str | None = Field(default=None, exclude=True, description="File to resume from after interruption.")


class XnnExplainer(Explainer):
    """Explanation heads on one layer, one per class, trained together.

    ``XnnExplainer(target=3).fit(subject, data).explain(subject, images)``
    """

    kind: ClassVar[str] = "xnn"
    Config: ClassVar[type[ExplainerConfig]] = XnnConfig
    headline: ClassVar[tuple[str, ...]] = ("f_cls", "f_reg", "pull_away")
    remedy: ClassVar[str] = "more x-features (--set n=10), longer training (--set max_epochs=500), or more images"

    heads_: XHeads
    classes_: list[int]
    layout_: str
    dead_: list[list[int]]  # dead x-features of every class

    def __init__(self, config: ExplainerConfig | None = None, /, **options: Any) -> None:
        super().__init__(config, **options)
        self._engines: WeakKeyDictionary[Subject, dict[int, ExcitationBackprop]] = WeakKeyDictionary()

    def fit(self, subject: Subject, data: Data, progress: Progress = silent) -> XnnExplainer:
        """Harvest the layer once and train the heads of all asked classes on it."""
        cfg: XnnConfig = self.config
        if math.isqrt(cfg.cells) ** 2 != cfg.cells:
            raise OptionError(f"xnn: cells must be a square number such as 1, 4 or 9, got {cfg.cells}.")
        layer = head_layer(subject, cfg.layer)
        layout = subject.layout(layer)
        classes = self._requested_classes(subject)
        drawn = data.spaced(cfg.max_images, cfg.seed)
        examples = read_examples(subject, data.only(drawn), layer, layout, cfg, progress)
        _refuse_logits(examples, layer, subject)
        self.classes_ = self._present(subject, examples, classes)
        check_classes(examples, self.classes_, cfg.n, subject.class_names)
        examples.parts.warn_if_few(self.kind, "the best epoch")
        heads = make_heads(examples, len(self.classes_), layout, cfg)
        trained = fit_heads(
            heads,
            examples,
            self.classes_,
            srae_config(cfg),
            max_epochs=cfg.max_epochs,
            patience=cfg.patience,
            checkpoint=Path(cfg.checkpoint) if cfg.checkpoint else None,
            stamp=self._stamp(subject, data, layer, examples.parts),
            progress=progress,
        )
        self.heads_, self.layout_ = heads, layout.name
        self._engines.clear()
        self.dead_ = [row.nonzero().flatten().tolist() for row in trained.dead]
        self.metrics = measure(trained, examples, self.classes_)
        if any(self.dead_):
            log.warning("xnn: %d of %d x-features are dead", int(trained.dead.sum()), trained.dead.numel())
        self.record_fit(subject, data, layer, examples.parts.among(drawn))
        return self

    def explain(self, subject: Subject, images: Any, target: int | str | None = None) -> list[Explanation]:
        """Explain each image by x-features; their contributions, bias and residual add up to the target's logit."""
        return self.explain_by_passes(subject, images, target)

    @property
    def n_concepts(self) -> int:
        """Number of x-features of a class; all heads have as many, and share their names."""
        return self.heads_.n_features

    def reads(self) -> Reads:
        """Return the one layer that the heads read."""
        assert self.layer_ is not None
        if self.heads_.v.numel() > MAX_SHARED_FEATURES:
            return Reads((self.layer_,))
        heads, layout = self.heads_, self.layout_
        return Reads((self.layer_,), (FurtherOutput(heads.digest, self.layer_, lambda _: XFeatures(heads, layout)),))

    def explainable_classes(self) -> list[int]:
        """Return the classes that have a head."""
        return self.classes_

    def stand_in(self, subject: Subject, images: Tensor) -> Tensor:
        """Return the logits with those of all heads replaced by what the heads say."""
        assert self.layer_ is not None
        logits_hat = []
        with torch.no_grad():
            for part in torch.split(subject.pixels(images), self.config.batch_size):
                logits, outputs = subject.run(part, [self.layer_])
                ybar = self.heads_.predict(self.features(outputs[self.layer_]))
                logits_hat.append(with_heads(ybar, logits.float().cpu(), self.classes_))
        return torch.cat(logits_hat)

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
        z = activations[self.layer_]
        shared = activations.get(self.heads_.digest)  # (batch, classes, features, cells)
        E = self.features(z) if shared is None else shared.transpose(0, 1).cpu()
        return self.explain_features(
            subject, images, logits, z, E, self.targets_for(subject, logits, targets), heatmaps
        )

    def features(self, z: Tensor) -> Tensor:
        """Return the x-features (classes, batch, features, cells) of the layer's activations."""
        with torch.no_grad():
            return self.heads_.encode(_channels_first(z, self.layout_).float().cpu())

    def heatmaps(self, subject: Subject, x: Tensor, target: int, z: Tensor | None = None) -> Heatmaps:
        """Return the heatmaps of all x-features of one class on pixels ``x``."""
        assert self.layer_ is not None
        engine = self._engine(subject, self._row(subject, target))
        stop = self.config.heatmap_layer or "input"
        neurons = list(range(self.heads_.n_features))
        inputs = subject.normalise(x)
        if self.layout_ == "vector":
            return engine.maps(inputs, neurons, stop=stop)
        if z is None:
            with torch.no_grad():
                z = subject.activations(x, [self.layer_])[self.layer_]
        return engine.maps(inputs, neurons, stop=stop, mass=self._cell_mass(z, self._row(subject, target)))

    def tensors(self) -> dict[str, Tensor]:
        """Return all weights of the heads."""
        return {k: v.detach().contiguous() for k, v in self.heads_.state_dict().items()}

    def state(self) -> dict[str, Any]:
        """Return classes, layout, dead x-features and what the weights' shapes do not say."""
        h = self.heads_
        return {
            "classes": self.classes_,
            "layout": self.layout_,
            "dead": self.dead_,
            "cells": h.cells,
            "activation": h.activation,
            "signed_output": h.signed_output,
        }

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any], files: dict[str, bytes]) -> None:
        """Take back stored heads."""
        self.classes_ = [int(k) for k in state["classes"]]
        self.layout_, self.dead_ = str(state["layout"]), state["dead"]
        widths = [tensors[f"encoder_w.{i}"].shape for i in range(sum(k.startswith("encoder_w.") for k in tensors))]
        self.heads_ = XHeads(
            len(self.classes_),
            widths[0][2],
            [w[1] for w in widths[:-1]],
            widths[-1][1],
            activation=state["activation"],
            cells=int(state["cells"]),
            signed_output=bool(state["signed_output"]),
        )
        self.heads_.load_state_dict(tensors)

    # inside

    def _requested_classes(self, subject: Subject) -> list[int] | None:
        cfg: XnnConfig = self.config
        if cfg.targets is not None and cfg.target is not None:
            raise OptionError("xnn: give either target or targets, not both.")
        requested = [cfg.target] if cfg.target is not None else cfg.targets
        return None if requested is None else list(dict.fromkeys(subject.class_index(t) for t in requested))

    def _present(self, subject: Subject, examples: Examples, requested: list[int] | None) -> list[int]:
        if requested is not None:
            return requested
        everything = list(range(subject.n_classes))
        n = examples.positives(everything).sum(1)
        present = [k for k in everything if 0 < int(n[k]) < len(examples.Z)]
        if not present:
            raise DataError(
                "xnn: no class has both positive and negative examples in this data; give images of several classes."
            )
        if len(present) < subject.n_classes:
            log.warning("xnn: %d classes have no examples and get no head", subject.n_classes - len(present))
        return present

    def _row(self, subject: Subject, k: int) -> int:
        if k not in self.classes_:
            names = ", ".join(subject.class_names[c] for c in self.classes_[:12])
            raise OptionError(
                f"xnn: this explainer has heads for {names}{', …' if len(self.classes_) > 12 else ''}, and class "
                f"{subject.class_names[k]!r} was asked for. Ask for one of these, or fit again with this target."
            )
        return self.classes_.index(k)

    def explain_features(
        self,
        subject: Subject,
        x: Tensor,
        logits: Tensor,
        z: Tensor,
        E: Tensor,
        targets: list[int],
        heatmaps: bool = True,
    ) -> list[Explanation]:
        """Explain from x-features E (classes, batch, features, cells) that are already known."""
        rows = [self._row(subject, k) for k in targets]
        with torch.no_grad():
            features = E[rows, list(range(len(rows)))].double()  # (batch, features, cells) of each image's own class
            parts = (features * self.heads_.v[rows].double()).sum(-1)
            biases = self.heads_.c[rows].double()
            sums: list[float] = (biases + parts.sum(1)).tolist()
        activations, contributions, bias = features.mean(-1).tolist(), parts.tolist(), biases.tolist()
        predictions, target_scores = class_scores(logits, subject, targets)
        pictures = self._pictures(subject, x, z, targets) if heatmaps else dict.fromkeys(targets, (None, "", []))
        explanations = []
        for i, (k, row) in enumerate(zip(targets, rows, strict=True)):
            ybar = sums[i]
            maps, note = pictures[k][0], pictures[k][1]
            j = 0 if maps is None else pictures[k][2].index(i)
            concepts = tuple(
                Concept(
                    index=f,
                    label=self.label(f),
                    activation=activations[i][f],
                    contribution=contributions[i][f],
                    heatmap=None if maps is None else maps.heatmap(j, f),
                    note=self._note(maps, j, f, row) or note,
                )
                for f in range(self.heads_.n_features)
            )
            explanations.append(
                Explanation(
                    kind=self.kind,
                    name=self.name,
                    prediction=predictions[i],
                    target=target_scores[i],
                    target_value=target_scores[i].logit,
                    bias=bias[i],
                    residual=target_scores[i].logit - ybar,
                    concepts=concepts,
                    extra={"ybar": ybar},
                )
            )
        return explanations

    def label(self, index: int) -> str:
        """Return the name a person gave to an x-feature, or a plain one."""
        return self.labels.get(index, f"x-feature {index + 1}")

    def _note(self, maps: Heatmaps | None, image: int, feature: int, row: int) -> str:
        if feature in self.dead_[row]:
            return "dead: never fired on held-out images"
        if maps is None:
            return ""
        if bool(maps.empty[image, feature]):
            return "no pixel counts for it more than against it"
        return "inactive: the map shows potential, not evidence" if bool(maps.inactive[image, feature]) else ""

    def _pictures(
        self, subject: Subject, x: Tensor, z: Tensor, targets: list[int]
    ) -> dict[int, tuple[Heatmaps | None, str, list[int]]]:
        pictures: dict[int, tuple[Heatmaps | None, str, list[int]]] = {}
        for k in dict.fromkeys(targets):
            rows = [i for i, t in enumerate(targets) if t == k]
            try:
                maps = self.heatmaps(subject, x[rows], k, z[rows])
                pictures[k] = (maps, "", rows)
            except (LayerError, ModelError) as err:  # numbers stand without pictures
                log.warning("xnn: no heatmaps: %s", err)
                pictures[k] = (None, f"no heatmap: {err}", rows)
        return pictures

    def _engine(self, subject: Subject, row: int) -> ExcitationBackprop:
        engines = self._engines.setdefault(subject, {})
        if row not in engines:
            p = subject.preprocessing
            floor = [-m / s for m, s in zip(p.mean, p.std, strict=True)]
            head: Any = self.heads_.encoder_of(row, self.layout_)
            traced = next((e.head for e in engines.values() if e.head is not None), None)
            if traced is not None:  # all heads are built alike: one is traced, the others lend it their weights
                head = traced.reweighted(head)
            engines[row] = ExcitationBackprop(graph_of(subject), head=head, layer=self.layer_ or "", floor=floor)
        return engines[row]

    def _cell_mass(self, z: Tensor, row: int) -> Tensor:
        with torch.no_grad():
            return self.heads_.cell_mass(self.features(z)[row], row)

    def _stamp(self, subject: Subject, data: Data, layer: str, parts: FittedImages) -> str:
        how_long = {"max_epochs", "patience"}  # a training may go on for longer than was first thought
        options = json.dumps(self.config.model_dump(mode="json", exclude=how_long), sort_keys=True)
        text = f"{subject.digest}|{data.digest}|{layer}|{options}|{parts.to_json()}"
        return hashlib.sha256(text.encode()).hexdigest()


def head_layer(subject: Subject, name: str | None = None) -> str:
    """Return the layer a head attaches to; default: the last non-negative vector below the logits, else a map.

    A dropout gives the very output of the layer before it and is nothing in the graph, so that layer is taken instead.
    """
    if name is not None:
        return source_of(subject, subject.layer(name).name)
    vectors = [
        item
        for item in subject.layers()[:-1]
        if item.explainable and item.layout is not None and item.layout.name == "vector" and item.shape[0] > 1
    ]
    vectors = [v for v in vectors if v.shape != (subject.n_classes,)] or vectors
    best = [v for v in vectors if v.nonnegative] or vectors
    return source_of(subject, best[-1].name if best else subject.default_layer())


def source_of(subject: Subject, name: str) -> str:
    """Return the nearest layer up to ``name`` that has an operation in eval mode (all between hand its output on)."""
    if not isinstance(_module_of(subject, name), (torch.nn.Identity, torch.nn.modules.dropout._DropoutNd)):
        return name
    items = subject.layers()
    at = [item.name for item in items].index(name)
    with torch.no_grad():
        x = torch.rand(1, *subject.input_shape, generator=torch.Generator().manual_seed(0))
        outputs = subject.activations(x, [name, *(i.name for i in items[max(0, at - 6) : at] if i.explainable)])
    for item in reversed(items[max(0, at - 6) : at]):
        same = item.explainable and outputs[item.name].shape == outputs[name].shape
        if same and torch.equal(outputs[item.name], outputs[name]):
            return source_of(subject, item.name)
    return name


def _module_of(subject: Subject, name: str) -> torch.nn.Module:
    return locate(subject.module, name)[0]


def read_examples(
    subject: Subject, data: Data, layer: str, layout: Layout, cfg: XnnConfig, progress: Progress = silent
) -> Examples:
    """Read activations, logits and labels of ``data``; each n-th image chooses or reports, in turn."""
    data.check_labels(subject)
    Z, logits, labels = [], [], []
    for batch, _, y, z in harvest(subject, data, layer, batch_size=cfg.batch_size, progress=progress):
        Z.append(_channels_first(z, layout.name).float().cpu())
        logits.append(y.float().cpu())
        labels.append(batch.labels)
    if not Z:
        raise DataError("xnn: the data has no images; give at least a few of every class.")
    parts = FittedImages.each(sum(len(z) for z in Z), cfg.held_out_every, choose=True)
    return Examples(torch.cat(Z), torch.cat(logits), torch.cat(labels), parts)


def make_heads(examples: Examples, n_classes: int, layout: Layout, cfg: XnnConfig) -> XHeads:
    """Make untrained heads that fit the layer: two hidden layers on a vector, none on a map."""
    dims = examples.Z.shape[1]
    spatial = layout.name != "vector"
    hidden = cfg.hidden
    if hidden is None:
        hidden = [] if spatial else [min(800, max(32, 2 * dims)), min(100, max(16, dims // 2))]
    return XHeads(
        n_classes,
        dims,
        hidden,
        cfg.n,
        activation=cfg.activation,
        cells=cfg.cells if spatial else 1,
        signed_output=bool((examples.Z < 0).any()),
        generator=torch.Generator().manual_seed(cfg.seed),
    )


def srae_config(cfg: XnnConfig) -> SraeConfig:
    """Return the part of the options that the training reads."""
    return SraeConfig(variant=cfg.variant, beta=cfg.beta, eta=cfg.eta, q=cfg.q, lr=cfg.lr, seed=cfg.seed)


def measure(trained: Trained, examples: Examples, classes: list[int]) -> dict[str, float]:
    """Return the mean over classes of every figure on the images to report on, and how the training went."""
    unseen = examples.reported
    with torch.no_grad():
        ybar = torch.cat([trained.heads.predict(trained.heads.encode(Z)) for Z in torch.split(unseen.Z, 1024)], 1)
    positive = unseen.positives(classes)
    each = [faithfulness_of(ybar[i], unseen.logits, k, positive[i]) for i, k in enumerate(classes)]
    alive = (~trained.dead).sum(1).double()
    together = with_heads(ybar, unseen.logits, classes).argmax(1) == unseen.logits.argmax(1)
    figures = mean_over(each) | {
        "f_cls": float(together.double().mean()),
        "pull_away": float(trained.pull_away.mean()),
        "pull_away_live": float(trained.live_pull_away.mean()),
        "alive": float(alive.mean()),
        "dead": float(trained.dead.sum()),
        "reseeded": float(trained.reseeded.sum()),
        "epochs": float(trained.epochs),
        "diverged": float(bool(trained.diverged)),
        "n_classes": float(len(classes)),
        "n_held_out": float(len(unseen.Z)),
    }
    return {k: v for k, v in figures.items() if not math.isnan(v)}


def _channels_first(z: Tensor, layout: str) -> Tensor:
    moved: Tensor = ChannelsFirst(layout)(z)
    return moved


def _refuse_logits(examples: Examples, layer: str, subject: Subject) -> None:
    """Refuse a layer that is the logits or comes after them: there is nothing left to explain."""
    Z, y = examples.Z, examples.logits
    if Z.dim() != 2 or Z.shape != y.shape:
        return
    if any(torch.allclose(Z, f, rtol=1e-4, atol=1e-5) for f in (y, y.softmax(1), y.log_softmax(1), y.sigmoid())):
        raise LayerError(
            f"xnn: layer {layer!r} is at or after the logits, so a head on it would explain nothing. Take an earlier "
            f"layer such as {head_layer(subject)!r}."
        )
