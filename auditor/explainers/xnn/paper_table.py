"""The table of the XNN paper for any model and data: faithfulness, orthogonality and locality of heads and baselines.

Rows: SRAE, NN, SAE and CAE (heads trained by the same code), Lasso (single dimensions of the layer, weighed linearly)
and 1-Heatmap (contrastive excitation backprop of the logit itself). All share one harvest of the layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from auditor.attribution.excitation import ExcitationBackprop, Heatmaps
from auditor.data.source import Data
from auditor.errors import DataError, OptionError
from auditor.explainers.fitted_images import FittedImages
from auditor.explainers.xnn.examples import Examples
from auditor.explainers.xnn.explainer import XnnConfig, read_examples, srae_config
from auditor.explainers.xnn.head_design import make_heads
from auditor.explainers.xnn.head_layer import head_layer
from auditor.explainers.xnn.head_training import check_classes, fit_heads
from auditor.explainers.xnn.logit_faithfulness import faithfulness_of, mean_over
from auditor.metrics.locality import grid_parts, locality
from auditor.metrics.orthogonality import orthogonality
from auditor.network.aten_graph import graph_of
from auditor.progress import Progress, silent
from auditor.subject.layers import Layout
from auditor.subject.subject import Subject

METHODS = ("srae", "nn", "sae", "cae", "lasso", "1-heatmap")
Parts = Callable[[str, tuple[int, int]], Tensor]  # image id and size -> soft part masks (parts, height, width)


@dataclass(frozen=True, slots=True)
class Row:
    """One method's means over classes; NaN where a figure has no meaning for it."""

    method: str
    f_reg: float
    f_cls: float
    o1: float
    o2: float
    locality: float
    alive: float
    pull_away: float


@dataclass(frozen=True)
class Shown:
    """Positives of one class on which heatmaps are judged: pixels, activations and the parts of each."""

    x: Tensor
    Z: Tensor
    parts: list[Tensor]


def xnn_table(
    subject: Subject,
    data: Data,
    config: XnnConfig,
    *,
    methods: Sequence[str] = METHODS,
    images_per_class: int = 8,
    parts: Parts | None = None,
    lasso_alpha: float | None = None,
    judged_on: Data | None = None,
    progress: Progress = silent,
) -> list[Row]:
    """Fit every method to the asked classes and measure it on unseen images; parts default to a 4 x 4 grid.

    Unseen are all images of ``judged_on``; without it the part of ``data`` that neither trains the heads nor decides
    when they stop.
    """
    unknown = [m for m in methods if m not in METHODS]
    if unknown:
        raise OptionError(f"xnn table: unknown method {unknown[0]!r}; the methods are {', '.join(METHODS)}.")
    layer = head_layer(subject, config.layer)
    layout = subject.layout(layer)
    if layout.name != "vector":
        raise OptionError(f"xnn table: layer {layer!r} has positions; the table compares heads on a vector layer.")
    data = data.only(data.spaced(config.max_images, config.seed))
    if judged_on is not None:
        judged_on = judged_on.only(judged_on.spaced(config.max_images, config.seed))
    examples = read_examples(subject, data, layer, layout, config, progress)
    requested = [config.target] if config.target is not None else config.targets
    classes = [subject.class_index(t) for t in requested] if requested is not None else _present(subject, examples)
    check_classes(examples, classes, config.n, subject.class_names)
    unseen = examples.reported
    if judged_on is not None:
        unseen = read_examples(subject, judged_on, layer, layout, config, progress)
        n = len(unseen.Z)
        unseen = replace(unseen, parts=FittedImages.of_rows(n, report=torch.arange(n)))
    shown = _shown(
        subject, judged_on or data, unseen if judged_on else examples, classes, images_per_class, config, parts
    )
    if judged_on is not None and not shown:
        raise DataError(
            f"xnn table: the {len(unseen.Z)} images to measure on hold none of the asked classes. Give images of them."
        )
    rows = []
    for i, method in enumerate(methods):
        progress(f"method {method}", i, len(methods))
        rows.append(_row(subject, examples, unseen, classes, layer, layout, method, config, shown, lasso_alpha))
    progress("done", len(methods), len(methods))
    return rows


def _row(
    subject: Subject,
    examples: Examples,
    unseen: Examples,
    classes: list[int],
    layer: str,
    layout: Layout,
    method: str,
    config: XnnConfig,
    shown: dict[int, Shown],
    lasso_alpha: float | None,
) -> Row:
    floor = [-m / s for m, s in zip(subject.preprocessing.mean, subject.preprocessing.std, strict=True)]
    engine = ExcitationBackprop(graph_of(subject), floor=floor)
    nan, alive, pull = math.nan, math.nan, math.nan
    predicted: list[Tensor] = []
    heat: list[tuple[int, Heatmaps, Tensor]] = []  # class, maps, which features count (batch, features)
    if method == "1-heatmap":
        for k, images in shown.items():
            maps = engine.maps(subject.normalise(images.x), [k])
            heat.append((k, maps, ~maps.empty))
    elif method == "lasso":
        for k in classes:
            w, c = lasso(examples.learned, k, lasso_alpha, config.n)
            predicted.append(unseen.Z @ w + c)
            s = shown.get(k)
            chosen = w.nonzero().flatten()
            if s is not None and len(chosen):
                maps = engine.maps(subject.normalise(s.x), chosen.tolist(), start=layer)
                heat.append((k, maps, ~maps.empty & (s.Z[:, chosen] > 0)))
    else:
        cfg = config.model_copy(update={"variant": method})
        heads, slope = make_heads(subject, examples, classes, layer, cfg)
        trained = fit_heads(
            heads,
            examples,
            classes,
            srae_config(cfg, examples),
            max_epochs=cfg.max_epochs,
            patience=cfg.patience,
            slope=slope,
        )
        with torch.no_grad():
            predicted = list(torch.cat([heads.predict(heads.encode(Z)) for Z in torch.split(unseen.Z, 1024)], 1))
        alive, pull = float((~trained.dead).sum(1).double().mean()), float(trained.pull_away.mean())
        for i, k in enumerate(classes):
            s = shown.get(k)
            if s is not None:
                headed = ExcitationBackprop(engine.graph, head=heads.encoder_of(i), layer=layer, floor=floor)
                maps = headed.maps(subject.normalise(s.x), list(range(heads.n_features)))
                heat.append((k, maps, ~maps.empty & ~maps.inactive))
    f_reg = f_cls = nan
    if predicted:
        positive = unseen.positives(classes)
        each = [faithfulness_of(predicted[i], unseen.logits, k, positive[i]) for i, k in enumerate(classes)]
        f_reg, f_cls = mean_over(each)["f_reg"], mean_over(each)["f_cls"]
    o1, o2 = _orthogonality(heat)
    return Row(method, f_reg, f_cls, o1, o2, _locality(heat, shown), alive, pull)


def lasso(examples: Examples, k: int, alpha: float | None, n: int) -> tuple[Tensor, float]:
    """Return weights and intercept of  min 1/(2M) |Zw + c - y|^2 + alpha |w|_1;  default alpha keeps about n dims."""
    import numpy as np
    from sklearn.linear_model import Lasso, lasso_path

    Z, y = examples.Z.double().numpy(), examples.logits[:, k].double().numpy()
    if alpha is None:
        centred = Z - Z.mean(0)
        largest = float(abs(centred.T @ (y - y.mean())).max()) / len(y)
        alphas, coefs, _ = lasso_path(centred, y - y.mean(), alphas=np.geomspace(largest, largest / 100, 60))
        counts = (abs(coefs) > 1e-9).sum(0)
        alpha = float(alphas[max((i for i in range(len(alphas)) if counts[i] <= n), default=0)])
    model = Lasso(alpha=alpha, max_iter=5000).fit(Z, y)
    return torch.as_tensor(model.coef_, dtype=torch.float32), float(model.intercept_)


def _present(subject: Subject, examples: Examples) -> list[int]:
    n = examples.positives(range(subject.n_classes)).sum(1)
    return [k for k in range(subject.n_classes) if 0 < int(n[k]) < len(examples.Z)]


def _shown(
    subject: Subject,
    data: Data,
    examples: Examples,
    classes: list[int],
    per_class: int,
    config: XnnConfig,
    parts: Parts | None,
) -> dict[int, Shown]:
    """Collect the first unseen positives of every class for the heatmap figures, reading the data once more."""
    positive = examples.positives(classes) & examples.parts.report
    by_class: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {k: [] for k in classes}
    row = 0
    size = (subject.input_shape[1], subject.input_shape[2])
    plain = grid_parts(size)
    for batch in data.batches(subject, config.batch_size):
        for i in range(len(batch)):
            if row + i >= len(examples.Z):
                break
            for j, k in enumerate(classes):
                if bool(positive[j, row + i]) and len(by_class[k]) < per_class:
                    image_parts = plain if parts is None else parts(batch.ids[i], size)
                    by_class[k].append((batch.images[i], examples.Z[row + i], image_parts))
        row += len(batch)
        if row >= len(examples.Z):
            break
    return {
        k: Shown(torch.stack([x for x, _, _ in items]), torch.stack([z for _, z, _ in items]), [p for _, _, p in items])
        for k, items in by_class.items()
        if items
    }


def _orthogonality(heat: list[tuple[int, Heatmaps, Tensor]]) -> tuple[float, float]:
    measured = [o for _, maps, _ in heat if (o := orthogonality(maps.maps)) is not None]
    if not measured:
        return math.nan, math.nan
    return sum(o.o1 for o in measured) / len(measured), sum(o.o2 for o in measured) / len(measured)


def _locality(heat: list[tuple[int, Heatmaps, Tensor]], shown: dict[int, Shown]) -> float:
    """Mean over classes and features of the entropy over parts; inactive and empty maps are left out."""
    values = []
    for k, maps, counts in heat:
        for f in range(maps.maps.shape[1]):
            one: list[Any] = [maps.maps[i, f] if bool(counts[i, f]) else None for i in range(len(maps.maps))]
            measured = locality(one, shown[k].parts)
            if measured is not None:
                values.append(measured.entropy)
    return sum(values) / len(values) if values else math.nan
