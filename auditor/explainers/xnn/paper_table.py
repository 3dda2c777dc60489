"""The table of the XNN paper for any model and data: faithfulness, orthogonality and locality of heads and baselines.

All methods (`auditor.explainers.xnn.table_methods`) share one harvest of the layer. Each row has the training images
beside unseen ones; with ``masking`` also the share of unseen positives that are still right when all but so many pixels
of the union of their heatmaps are painted over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from auditor.data.source import Data
from auditor.errors import DataError, OptionError
from auditor.explainers.fitted_images import FittedImages
from auditor.explainers.xnn.cross_validation import tuned
from auditor.explainers.xnn.examples import Examples
from auditor.explainers.xnn.explainer import XnnConfig, XnnExplainer, read_examples
from auditor.explainers.xnn.head_layer import head_layer
from auditor.explainers.xnn.head_training import check_classes
from auditor.explainers.xnn.logit_faithfulness import faithfulness_of, mean_over
from auditor.explainers.xnn.part_figures import write_part_figure
from auditor.explainers.xnn.table_methods import METHODS, FittedMethod, Heat, Shown, fit_method
from auditor.metrics.locality import grid_parts, locality
from auditor.metrics.orthogonality import orthogonality
from auditor.perturbation.inpainting_test import masking_test
from auditor.progress import Progress, silent
from auditor.subject.subject import Subject

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
    alive: float  # per class: x-features that fire, or dimensions that Lasso chose
    pull_away: float
    f_reg_train: float = math.nan
    f_cls_train: float = math.nan
    settings: str = ""  # chosen by cross-validation
    masked: dict[int, float] = field(default_factory=dict)  # pixels kept -> share still right

    def to_json(self) -> dict[str, Any]:
        """Return plain Python, a column per number of pixels kept."""
        masked = {f"kept_{m}": share for m, share in self.masked.items()}
        return {k: v for k, v in asdict(self).items() if k != "masked"} | masked


@dataclass(frozen=True, slots=True)
class TableOptions:
    """What the table has beyond its defaults."""

    images_per_class: int = 8
    lasso_alphas: tuple[float, ...] = ()  # a row of Lasso for each; none: one that keeps about n dimensions
    folds: int = 0  # of the cross-validation of every method's hyper-parameters; 0: those of the configuration
    masking: tuple[int, ...] = ()  # pixels kept
    figures: Path | None = None  # folder for a picture per class and method
    part_names: tuple[str, ...] = ()  # of the parts on these pictures


def xnn_table(
    subject: Subject,
    data: Data,
    config: XnnConfig,
    *,
    methods: Sequence[str] = METHODS,
    parts: Parts | None = None,
    judged_on: Data | None = None,
    options: TableOptions | None = None,
    progress: Progress = silent,
) -> list[Row]:
    """Fit every method to the asked classes and measure it on unseen images; parts default to a 4 x 4 grid.

    Unseen are all images of ``judged_on``; without it the part of ``data`` that neither trains the heads nor decides
    when they stop.
    """
    options = options or TableOptions()
    unknown = [m for m in methods if m not in METHODS]
    if unknown:
        raise OptionError(f"xnn table: unknown method {unknown[0]!r}; the methods are {', '.join(METHODS)}.")
    size = subject.input_shape[1] * subject.input_shape[2]
    wrong = [m for m in options.masking if not 1 <= m <= size]
    if wrong:
        raise OptionError(f"xnn table: pixels kept must be 1 to {size}, the size of an image, got {wrong[0]}.")
    harvest = _harvest(subject, data, config, judged_on, options.images_per_class, parts, progress)
    alphas = options.lasso_alphas or (None,)
    wanted = [(m, alpha) for m in methods for alpha in (alphas if m == "lasso" else (None,))]
    rows = []
    for i, (method, alpha) in enumerate(wanted):
        progress(f"method {method}", i, len(wanted))
        rows.append(_fitted_row(subject, harvest, method, alpha, config, options))
    progress("done", len(wanted), len(wanted))
    return rows


@dataclass(frozen=True)
class _Harvest:
    """What all methods share: the layer's activations to learn from and to judge on, and the images shown."""

    layer: str
    classes: list[int]
    examples: Examples
    unseen: Examples
    shown: dict[int, Shown]


def _harvest(
    subject: Subject,
    data: Data,
    config: XnnConfig,
    judged_on: Data | None,
    per_class: int,
    parts: Parts | None,
    progress: Progress,
) -> _Harvest:
    layer = head_layer(subject, config.layer)
    layout = subject.layout(layer)
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
    judged = (data, examples) if judged_on is None else (judged_on, unseen)
    shown = _shown(subject, *judged, classes, per_class, config, parts)
    if judged_on is not None and not shown:
        raise DataError(
            f"xnn table: the {len(unseen.Z)} images to measure on hold none of the asked classes. Give images of them."
        )
    return _Harvest(layer, classes, examples, unseen, shown)


def _fitted_row(
    subject: Subject, harvest: _Harvest, method: str, alpha: float | None, config: XnnConfig, options: TableOptions
) -> Row:
    examples, classes, words = harvest.examples, harvest.classes, ""
    if options.folds and alpha is None:
        config, alpha, words = tuned(subject, examples, classes, harvest.layer, method, config, options.folds)
    fitted = fit_method(subject, examples, classes, harvest.layer, method, config, harvest.shown, alpha)
    row = _row(fitted, examples.learned, harvest.unseen, classes, harvest.shown)
    for heat in fitted.heat if options.figures is not None else ():
        label, images = subject.class_names[heat.k], harvest.shown[heat.k]
        write_part_figure(heat, images, options.figures or Path(), fitted.name, label, options.part_names)
    row = replace(row, method=method) if words else row
    return replace(row, settings=words, masked=_masked(subject, fitted, harvest.shown, options.masking))


def layer_rows(
    subject: Subject, data: Data, config: XnnConfig, layers: Sequence[str], progress: Progress = silent
) -> list[Row]:
    """Return a row per layer: heads of 1 x 1 convolutions on it, as table 3.3 has for every pooling layer.

    Figures are of the images that the fit holds out; `XnnConfig.hidden` sets the widths of the encoder.
    """
    rows = []
    for name in layers:
        fitted = XnnExplainer(config.model_copy(update={"layer": subject.layer(name).name})).fit(
            subject, data, progress
        )
        m = fitted.metrics
        given = {k: m.get(v, math.nan) for k, v in {"f_reg": "f_reg", "f_cls": "f_cls", "alive": "alive"}.items()}
        nan = math.nan
        rows.append(
            Row(f"{config.variant} on {name}", given["f_reg"], given["f_cls"], nan, nan, nan, given["alive"],
                m.get("pull_away", nan))
        )  # fmt: skip
    return rows


def _row(fitted: FittedMethod, learned: Examples, unseen: Examples, classes: list[int], shown: dict[int, Shown]) -> Row:
    nan = math.nan
    train, test = (nan, nan), (nan, nan)
    if fitted.predict is not None:
        train, test = (_faithfulness(fitted, examples, classes) for examples in (learned, unseen))
    o1, o2 = _orthogonality(fitted.heat)
    spread = _locality(fitted.heat, shown)
    return Row(fitted.name, *test, o1, o2, spread, fitted.features, fitted.pull_away, *train)


def _faithfulness(fitted: FittedMethod, examples: Examples, classes: list[int]) -> tuple[float, float]:
    assert fitted.predict is not None
    predicted, positive = fitted.predict(examples.Z), examples.positives(classes)
    each = [faithfulness_of(predicted[i], examples.logits, k, positive[i]) for i, k in enumerate(classes)]
    return mean_over(each)["f_reg"], mean_over(each)["f_cls"]


def _masked(subject: Subject, fitted: FittedMethod, shown: dict[int, Shown], pixels: Sequence[int]) -> dict[int, float]:
    """Return the share of shown images that are still of their class with so many pixels kept, the rest inpainted."""
    if not pixels or not fitted.heat:
        return dict.fromkeys(pixels, math.nan)
    x = torch.cat([shown[h.k].x for h in fitted.heat])
    labels = torch.cat([torch.full((len(shown[h.k].x),), h.k) for h in fitted.heat])
    size = x.shape[2:]
    unions = [torch.nn.functional.interpolate(h.union()[:, None], size, mode="bilinear")[:, 0] for h in fitted.heat]
    return {m: masking_test(subject, x, torch.cat(unions), labels, m).accuracy for m in pixels}


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
                    by_class[k].append((batch.images[i], examples.Z[row + i].float(), image_parts))
        row += len(batch)
        if row >= len(examples.Z):
            break
    return {
        k: Shown(torch.stack([x for x, _, _ in items]), torch.stack([z for _, z, _ in items]), [p for _, _, p in items])
        for k, items in by_class.items()
        if items
    }


def _orthogonality(heat: list[Heat]) -> tuple[float, float]:
    """Mean over classes; where a feature is inactive it has no heat, as for the locality."""
    measured = [o for h in heat if (o := orthogonality(h.counted)) is not None]
    if not measured:
        return math.nan, math.nan
    return sum(o.o1 for o in measured) / len(measured), sum(o.o2 for o in measured) / len(measured)


def _locality(heat: list[Heat], shown: dict[int, Shown]) -> float:
    """Mean over classes and features of the entropy over parts; inactive and empty maps are left out."""
    values = []
    for h in heat:
        for f in range(h.maps.maps.shape[1]):
            n = len(h.maps.maps)
            one: list[Any] = [h.maps.maps[i, f] if bool(h.counts[i, f]) else None for i in range(n)]
            measured = locality(one, shown[h.k].parts)
            if measured is not None:
                values.append(measured.entropy)
    return sum(values) / len(values) if values else math.nan
