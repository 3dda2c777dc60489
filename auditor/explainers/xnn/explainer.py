"""Explanation heads of a classifier (kind ``xnn``): a few x-features whose weighted sum is the logit of a class.

[XNN]. Losses: `auditor.kernels.networks.reconstruction_losses`; training: `auditor.explainers.xnn.head_objective`;
heatmap of an x-feature: contrastive excitation backprop from its neuron to the pixels, on photos to
a layer with cells of 16 pixels (`auditor.explainers.xnn.heat_layer`).

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
from auditor.data.source import Data, open_data
from auditor.errors import DataError, LayerError, ModelError, OptionError
from auditor.explainers.base import Explainer, ExplainerConfig, HoldOutConfig, Reads
from auditor.explainers.explanation import Concept, Explanation, class_scores
from auditor.explainers.fitted_images import FittedImages
from auditor.explainers.layer_activations import check_varies, harvest
from auditor.explainers.predicted_classes import PredictedClasses
from auditor.explainers.xnn.examples import ActivationRows, Examples
from auditor.explainers.xnn.fit_remarks import remarks
from auditor.explainers.xnn.head_design import channels_first, make_heads
from auditor.explainers.xnn.head_layer import head_layer
from auditor.explainers.xnn.head_objective import SraeConfig, examples_at_once
from auditor.explainers.xnn.head_training import Trained, check_classes, check_size, fit_heads
from auditor.explainers.xnn.heads import XHeads
from auditor.explainers.xnn.heat_layer import PIXELS, heat_layer
from auditor.explainers.xnn.logit_faithfulness import faithfulness_of, mean_over, with_heads
from auditor.network.aten_graph import graph_of
from auditor.progress import Progress, silent
from auditor.subject.layers import Layout
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)

ENGINES = 64  # heads whose heatmap engines are kept per subject
CLASSES_SHOWN = 12
LOOKED_AT = 64  # images on which a layer is looked at


class XnnConfig(HoldOutConfig):
    """Options of kind ``xnn``."""

    n: int = Field(default=5, ge=1, le=256, description="x-features per class.")
    targets: list[int | str] | Literal["all"] | None = Field(
        default=None, description="Several classes, or all; default: those that have images."
    )
    variant: Literal["srae", "nn", "sae", "cae"] = Field(default="srae", description="srae, or a baseline.")
    beta: float = Field(default=0.05, ge=0, description="Weight of the sparse reconstruction (logit variance: 1).")
    eta: float = Field(default=0.05, ge=0, description="Weight of the pull-away term (logit variance: 1).")
    q: float = Field(default=10.0, gt=0, description="Steepness of the log penalty.")
    hidden: list[int] | None = Field(
        default=None,
        description="Widths of the encoder; default 800, 100 or less, and none where logits are affine in the layer.",
    )
    start: Literal["slopes", "random"] = Field(default="slopes", description="Where training without hidden starts.")
    activation: Literal["relu", "tanh"] = Field(default="relu", description="Of hidden units and x-features.")
    cells: int | None = Field(
        default=None,
        ge=1,
        description="Pooled cells per x-feature on a convolutional layer, a square; default 4, and 1 where the network "
        "treats all positions alike.",
    )
    pooling: Literal["mean", "max"] = Field(default="mean", description="How cells are pooled; the paper's is max.")
    lr: float = Field(default=5e-3, gt=0, description="First step size of Adam.")
    weight_decay: float = Field(default=1e-5, ge=0, description="Weight decay of Adam.")
    max_epochs: int = Field(default=60, ge=1, description="Epochs at most.")
    patience: int = Field(default=8, ge=1, description="Epochs without gain on trial images before a class is done.")
    max_images: int = Field(default=20_000, ge=2, description="Images read at most, spread over the classes.")
    held_out_every: int = Field(
        default=5,
        ge=2,
        description="Each n-th image is held out, in turn for the metrics and to choose the best epoch.",
    )
    heatmap_layer: str | None = Field(
        default=None,
        description="Where heatmaps stop; input: the pixels. Default: cells of 16 pixels on photos, else the pixels.",
    )
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
    heat_layer_: str  # where heatmaps stop
    dead_: list[list[int]]  # dead x-features of every class
    remarks_: list[str]  # what the fit has to say of its images

    def __init__(self, config: ExplainerConfig | None = None, /, **options: Any) -> None:
        super().__init__(config, **options)
        self._engines: WeakKeyDictionary[Subject, dict[int, ExcitationBackprop]] = WeakKeyDictionary()

    def fit(self, subject: Subject, data: Any, progress: Progress = silent) -> XnnExplainer:
        """Harvest the layer once and train the heads of all asked classes on it."""
        cfg: XnnConfig = self.config
        data = open_data(data)
        if cfg.cells is not None and math.isqrt(cfg.cells) ** 2 != cfg.cells:
            raise OptionError(f"xnn: cells must be a square number such as 1, 4 or 9, got {cfg.cells}.")
        layer = head_layer(subject, cfg.layer)
        layout = subject.layout(layer)
        classes = self._requested_classes(subject)
        drawn = data.spaced(cfg.max_images, cfg.seed)
        read = data.only(drawn)
        examples = read_examples(subject, read, layer, layout, cfg, progress)
        _refuse_logits(examples, layer, subject)
        some = examples.Z[:LOOKED_AT].float()
        check_varies(layer, some.T if some.dim() == 2 else some.flatten(2).transpose(0, 1).flatten(1))
        self.classes_ = self._present(subject, examples, classes)
        if cfg.targets == "all":
            check_size(examples, cfg.n)
        else:
            check_classes(examples, self.classes_, cfg.n, subject.class_names)
        examples.parts.warn_if_few(self.kind, "the best epoch")
        heads, slope = make_heads(subject, examples, self.classes_, layer, cfg)
        trained = fit_heads(
            heads,
            examples,
            self.classes_,
            srae_config(cfg, examples),
            max_epochs=cfg.max_epochs,
            patience=cfg.patience,
            slope=slope,
            checkpoint=Path(cfg.checkpoint) if cfg.checkpoint else None,
            stamp=self._stamp(subject, data, layer, examples.parts),
            progress=progress,
        )
        self.heads_, self.layout_ = heads, layout.name
        self.heat_layer_ = cfg.heatmap_layer or heat_layer(subject, layer)
        self._engines.clear()
        self.dead_ = [row.nonzero().flatten().tolist() for row in trained.dead]
        self.metrics = measure(trained, examples, self.classes_)
        predicted = PredictedClasses(subject)
        predicted.add(examples.logits, examples.parts.learn)
        self.remarks_ = [*predicted.doubts(), *remarks(self.metrics, examples, self.classes_)]
        if any(self.dead_):
            log.warning("xnn: %d of %d x-features are dead", int(trained.dead.sum()), trained.dead.numel())
        self.record_fit(subject, data, layer, examples.parts, read)
        self.remarks_ += self._lack_of_heatmaps(subject, read)
        return self

    def explain(self, subject: Subject, images: Any, target: int | str | None = None) -> list[Explanation]:
        """Explain each image by x-features; their contributions, bias and residual add up to the target's logit."""
        return self.explain_by_passes(subject, images, target)

    @property
    def n_concepts(self) -> int:
        """Number of x-features of a class; all heads have as many, and share their names."""
        return self.heads_.n_features

    def reads(self) -> Reads:
        """Return the layer that the heads read, and the one where heatmaps stop by default."""
        assert self.layer_ is not None
        chosen = self.config.heatmap_layer is None and self.heat_layer_ not in (PIXELS, self.layer_)
        return Reads((self.layer_, self.heat_layer_) if chosen else (self.layer_,))

    def remarks(self) -> list[str]:
        """Return which heads had no images, and what is missing where heads are not faithful."""
        return self.remarks_

    @property
    def concepts_are_of_class(self) -> bool:
        """Each class has a head of its own, and x-feature 1 of one is not that of another."""
        return True

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
                Z = channels_first(outputs[self.layer_], self.layout_).float().cpu()
                ybar = self.heads_.predict(self.heads_.encode(Z))
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
        return self.explain_activations(
            subject,
            images,
            logits,
            z,
            self.targets_for(subject, logits, targets),
            heatmaps,
            activations.get(self.heat_layer_),
        )

    def features(self, z: Tensor, rows: Sequence[int]) -> Tensor:
        """Return the x-features (batch, features, cells) of activations, each image's by the head of its own row."""
        with torch.no_grad():
            return self.heads_.encode_each(channels_first(z, self.layout_).float().cpu(), rows)

    def heatmaps(
        self, subject: Subject, x: Tensor, target: int, z: Tensor | None = None, at_stop: Tensor | None = None
    ) -> Heatmaps:
        """Return the heatmaps of all x-features of one class on pixels ``x``.

        ``z`` and ``at_stop`` are what a pass over them gave for the heads' layer and for the one where heatmaps stop.
        """
        assert self.layer_ is not None
        engine = self._engine(subject, self._row(subject, target))
        stop, neurons = self.heat_layer_, list(range(self.heads_.n_features))
        inputs = subject.normalise(x)
        if at_stop is not None and not engine.knows_from(stop):
            at_stop = None
        if self.layout_ == "vector":
            return engine.maps(inputs, neurons, stop=stop, at_stop=at_stop)
        if z is None:
            with torch.no_grad():
                z = subject.activations(x, [self.layer_])[self.layer_]
        mass = self._cell_mass(z, self._row(subject, target))
        return engine.maps(inputs, neurons, stop=stop, mass=mass, at_stop=at_stop)

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
            "pooling": h.pooling,
            "activation": h.activation,
            "signed_output": h.signed_output,
            "remarks": self.remarks_,
            "heat_layer": self.heat_layer_,
        }

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any], files: dict[str, bytes]) -> None:
        """Take back stored heads."""
        self.classes_ = [int(k) for k in state["classes"]]
        self.layout_, self.dead_ = str(state["layout"]), state["dead"]
        self.remarks_ = [str(remark) for remark in state.get("remarks", [])]
        # heads of earlier releases go to the pixels
        self.heat_layer_ = str(state.get("heat_layer") or self.config.heatmap_layer or PIXELS)
        widths = [tensors[f"encoder_w.{i}"].shape for i in range(sum(k.startswith("encoder_w.") for k in tensors))]
        self.heads_ = XHeads(
            len(self.classes_),
            widths[0][2],
            [w[1] for w in widths[:-1]],
            widths[-1][1],
            activation=state["activation"],
            cells=int(state["cells"]),
            pooling=str(state.get("pooling", "max")),  # heads of earlier releases know no other
            signed_output=bool(state["signed_output"]),
        )
        self.heads_.load_state_dict(tensors)

    # inside

    def _requested_classes(self, subject: Subject) -> list[int] | None:
        cfg: XnnConfig = self.config
        if cfg.targets is not None and cfg.target is not None:
            raise OptionError("xnn: give either target or targets, not both.")
        if cfg.targets == "all":
            return list(range(subject.n_classes))
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
            missing = [subject.class_names[k] for k in everything if k not in set(present)]
            named = ", ".join(missing[:CLASSES_SHOWN]) + (", …" if len(missing) > CLASSES_SHOWN else "")
            log.warning("xnn: no head for %s: no image of the data is of this class", named)
        return present

    def _lack_of_heatmaps(self, subject: Subject, data: Data) -> list[str]:
        """Return why there are no heatmaps, tried on an image; nothing where there are."""
        try:
            self.heatmaps(subject, next(iter(data.batches(subject, 1))).images[:1], self.classes_[0])
        except (LayerError, ModelError) as error:
            reason = str(error).split(". ")[0].rstrip(".")
            return [
                f"no heatmaps, numbers only: {reason}. Kinds nmf and coupled read theirs off a layer and rde hides "
                "parts of the image, which need no such rule"
            ]
        return []

    def _row(self, subject: Subject, k: int) -> int:
        if k not in self.classes_:
            names = ", ".join(subject.class_names[c] for c in self.classes_[:12])
            raise OptionError(
                f"xnn: this explainer has heads for {names}{', …' if len(self.classes_) > 12 else ''}, and class "
                f"{subject.class_names[k]!r} was asked for. Ask for one of these, or fit again with this target."
            )
        return self.classes_.index(k)

    def explain_activations(
        self,
        subject: Subject,
        x: Tensor,
        logits: Tensor,
        z: Tensor,
        targets: list[int],
        heatmaps: bool = True,
        at_stop: Tensor | None = None,
    ) -> list[Explanation]:
        """Explain from the layer's activations ``z``; only the heads of the targets are computed."""
        rows = [self._row(subject, k) for k in targets]
        with torch.no_grad():
            features = self.features(z, rows).double()  # (batch, features, cells) of each image's own class
            parts = (features * self.heads_.v[rows].double()).sum(-1)
            biases = self.heads_.c[rows].double()
            sums: list[float] = (biases + parts.sum(1)).tolist()
        activations, contributions, bias = features.mean(-1).tolist(), parts.tolist(), biases.tolist()
        predictions, target_scores = class_scores(logits, subject, targets)
        nothing: dict[int, tuple[Heatmaps | None, str, list[int]]] = dict.fromkeys(targets, (None, "", []))
        pictures = self._pictures(subject, x, z, targets, at_stop) if heatmaps else nothing
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
        self, subject: Subject, x: Tensor, z: Tensor, targets: list[int], at_stop: Tensor | None
    ) -> dict[int, tuple[Heatmaps | None, str, list[int]]]:
        pictures: dict[int, tuple[Heatmaps | None, str, list[int]]] = {}
        for k in dict.fromkeys(targets):
            rows = [i for i, t in enumerate(targets) if t == k]
            try:
                maps = self.heatmaps(subject, x[rows], k, z[rows], None if at_stop is None else at_stop[rows])
                pictures[k] = (maps.cpu(), "", rows)
            except (LayerError, ModelError) as err:  # numbers stand without pictures
                log.warning("xnn: no heatmaps: %s", err)
                pictures[k] = (None, f"no heatmap: {err}", rows)
        return pictures

    def _engine(self, subject: Subject, row: int) -> ExcitationBackprop:
        engines = self._engines.setdefault(subject, {})
        if row not in engines:
            p = subject.preprocessing
            floor = [-m / s for m, s in zip(p.mean, p.std, strict=True)]
            head: Any = self.heads_.encoder_of(row, self.layout_).to(subject.device, subject.dtype)
            traced = next((e.head for e in engines.values() if e.head is not None), None)
            if len(engines) >= ENGINES:
                engines.pop(next(iter(engines)))
            if traced is not None:  # all heads are built alike: one is traced, the others lend it their weights
                head = traced.reweighted(head)
            engines[row] = ExcitationBackprop(graph_of(subject), head=head, layer=self.layer_ or "", floor=floor)
        return engines[row]

    def _cell_mass(self, z: Tensor, row: int) -> Tensor:
        with torch.no_grad():
            return self.heads_.cell_mass(self.features(z, [row] * len(z)), row)

    def _stamp(self, subject: Subject, data: Data, layer: str, parts: FittedImages) -> str:
        how_long = {"max_epochs", "patience"}  # a training may go on for longer than was first thought
        options = json.dumps(self.config.model_dump(mode="json", exclude=how_long), sort_keys=True)
        text = f"{subject.digest}|{data.digest}|{layer}|{options}|{parts.to_json()}"
        return hashlib.sha256(text.encode()).hexdigest()


def read_examples(
    subject: Subject, data: Data, layer: str, layout: Layout, cfg: XnnConfig, progress: Progress = silent
) -> Examples:
    """Read activations, logits and labels of ``data``; each n-th image chooses or reports, in turn."""
    data.check_labels(subject)
    store, logits, labels = ActivationRows(len(data)), [], []
    passes = harvest(subject, data, layer, batch_size=cfg.batch_size, progress=progress, with_images=False)
    for batch, _, y, z in passes:
        store.put(channels_first(z, layout.name).float().cpu())
        logits.append(y.float().cpu())
        labels.append(batch.labels)
    if not logits:
        raise DataError("xnn: the data has no images; give at least a few of every class.")
    Z = store.tensor()
    return Examples(Z, torch.cat(logits), torch.cat(labels), FittedImages.each(len(Z), cfg.held_out_every, choose=True))


def srae_config(cfg: XnnConfig, examples: Examples) -> SraeConfig:
    """Return the part of the options that the training reads; a batch is a tenth of the examples, 32 to 256."""
    batch = min(256, max(32, examples.parts.counts["learn"] // 10))
    names = ("variant", "beta", "eta", "q", "lr", "weight_decay", "seed")
    return SraeConfig(batch=batch, **{name: getattr(cfg, name) for name in names})


def measure(trained: Trained, examples: Examples, classes: list[int]) -> dict[str, float]:
    """Return the mean over classes of every figure on the images to report on, and how the training went."""
    rows, heads = examples.report_rows.nonzero().flatten(), trained.heads
    parts = torch.split(rows, examples_at_once(examples.Z))
    with torch.no_grad():
        ybar = torch.cat([heads.predict(heads.encode(examples.Z[part].float())) for part in parts], 1)
    logits, positive = examples.logits[rows], examples.positives(classes)[:, rows]
    each = [faithfulness_of(ybar[i], logits, k, positive[i]) for i, k in enumerate(classes)]
    alive = (~trained.dead).sum(1).double()
    together = with_heads(ybar, logits, classes).argmax(1) == logits.argmax(1)
    figures = mean_over(each) | {
        "f_cls": float(together.double().mean()),
        "pull_away": float(trained.pull_away.mean()),
        "pull_away_live": float(trained.live_pull_away.mean()),
        "alive": float(alive.mean()),
        "dead": float(trained.dead.sum()),
        "reseeded": float(trained.reseeded.sum()),
        "epochs": float(trained.epochs.double().mean()),
        "diverged": float(bool(trained.diverged)),
        "n_classes": float(len(classes)),
        "n_held_out": float(len(rows)),
    }
    return {k: v for k, v in figures.items() if not math.isnan(v)}


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
