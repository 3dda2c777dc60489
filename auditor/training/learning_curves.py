"""Learning curves: accuracy and residuals of several optimizers on one network, against epochs and wall clock."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from auditor.data.source import open_data
from auditor.errors import NumericsError, OptionError
from auditor.progress import Progress, silent
from auditor.subject.preprocessing import Preprocessing
from auditor.training.cycle import Cycle, accuracy
from auditor.training.optimizers import METHODS, cycles

COLOURS = ("#1f5ac8", "#d62728", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#ff7f0e", "#4d4d4d")
STYLES = ("-", "--", "-.", ":")


@dataclass
class Curve:
    """One optimizer's run: what was measured after every epoch. ``seconds`` is training only, without measuring."""

    method: str
    accuracy: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    residuals: list[list[float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    stopped: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain Python."""
        return asdict(self)


def learning_curves(
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    *,
    methods: Sequence[str] = tuple(METHODS),
    hidden: Sequence[int] = (64, 64),
    epochs: int = 20,
    loss: str = "squared",
    seed: int = 0,
    progress: Progress = silent,
) -> list[Curve]:
    """Train one network per method from the same weights; a run that breaks down keeps what it has, with the reason."""
    unknown = [m for m in methods if m not in METHODS]
    if unknown:
        raise OptionError(f"curves: optimizer {unknown[0]!r} is not known; choose from {', '.join(METHODS)}.")
    (x, y), widths = train, [train[0].flatten(1).shape[1], *hidden, int(max(train[1].max(), test[1].max())) + 1]
    x, held = x.flatten(1), (test[0].flatten(1), test[1])
    done = []
    for method in methods:
        blocks, curve = stack(widths, seed), Curve(method)
        settings: dict[str, Any] = {} if method == "bcd" else {"loss": loss}  # bcd knows the squared loss only
        if "batch" in METHODS[method][1].model_fields:
            settings["batch"] = max(16, min(128, len(x) // 50))  # small sets need their steps
        run = cycles(method, blocks, x, y, epochs=epochs, seed=seed, **settings)
        follow(run, curve, blocks, held, epochs, progress)
        done.append(curve)
    return done


def follow(
    run: Iterator[Cycle],
    curve: Curve,
    blocks: Sequence[nn.Module],
    held: tuple[Tensor, Tensor],
    epochs: int,
    progress: Progress = silent,
) -> None:
    """Take so many cycles of a run and measure after each; where it breaks down, the curve says why."""
    spent = cpu = 0.0
    try:
        for epoch in range(1, epochs + 1):
            began = perf_counter(), process_time()
            cycle = next(run)
            spent, cpu = spent + perf_counter() - began[0], cpu + process_time() - began[1]
            curve.accuracy.append(accuracy(blocks, *held))
            curve.loss.append(cycle.loss)
            curve.residuals.append(list(cycle.residuals))
            curve.seconds.append(spent)
            curve.cpu_seconds.append(cpu)
            progress(f"training by {curve.method}", epoch, epochs)
    except NumericsError as error:
        curve.stopped = str(error)


def band(curves: Sequence[Curve]) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of the accuracies of several seeds, as long as all of them run.

    >>> band([Curve("sgd", [0.5, 0.8]), Curve("sgd", [0.7, 0.8, 0.9])])
    ([0.6, 0.8], [0.1, 0.0])
    """
    length = min(len(curve.accuracy) for curve in curves)
    rows = torch.tensor([curve.accuracy[:length] for curve in curves], dtype=torch.float64)
    mean, spread = rows.mean(0), rows.std(0, unbiased=False)
    return [round(v, 9) for v in mean.tolist()], [round(v, 9) for v in spread.tolist()]


def band_picture(curves: Sequence[Curve], path: str | Path, title: str = "") -> Path:
    """Draw the mean accuracy of several seeds with a band of one standard deviation; return the path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    mean, spread = (np.array(values) * 100 for values in band(curves))
    epochs = np.arange(1, len(mean) + 1)
    for curve in curves:
        axes.plot(range(1, len(curve.accuracy) + 1), [100 * a for a in curve.accuracy], color="#999999", linewidth=0.8)
    axes.fill_between(epochs, mean - spread, mean + spread, color=COLOURS[0], alpha=0.25)
    axes.plot(epochs, mean, color=COLOURS[0], label=f"{curves[0].method}, mean of {len(curves)} seeds")
    axes.set(xlabel="epoch (pass over the samples)", ylabel="test accuracy, %", title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def stack(widths: Sequence[int], seed: int) -> list[nn.Module]:
    """Return affine layers with ReLU between, normal weights of He's size."""
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for a, b in itertools.pairwise(widths):
        lin = nn.Linear(a, b)
        with torch.no_grad():
            lin.weight.copy_(torch.randn(b, a, generator=generator) * (2 / a) ** 0.5)
            lin.bias.zero_()
        layers.append(lin)
    return [*(nn.Sequential(lin, nn.ReLU()) for lin in layers[:-1]), layers[-1]]


def open_arrays(
    spec: str, test: str | None, limit: int | None, size: int | None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return training and test images as grey pixels with their labels.

    Without ``test`` a named data set gives its own test split, any other source its last fifth.
    """
    side = size or (8 if spec.startswith("sklearn:digits") else 28)
    pre = Preprocessing.of((1, side, side), None, None, "stretch")

    def read(source: str, most: int | None) -> tuple[Tensor, Tensor]:
        batches = list(open_data(source, limit=most).batches(pre, 1024))
        return torch.cat([b.images for b in batches]), torch.cat([b.labels for b in batches])

    named = spec.startswith(("sklearn:", "torchvision:")) and "split=" not in spec
    if test is None and named:
        join = "&" if "?" in spec else "?"
        spec, test = f"{spec}{join}split=train", f"{spec}{join}split=test"
    x, y = read(spec, limit)
    if test is not None:
        return (x, y), read(test, None)
    cut = len(x) - max(1, len(x) // 5)
    return (x[:cut], y[:cut]), (x[cut:], y[cut:])


def curves_picture(curves: Sequence[Curve], path: str | Path, title: str = "") -> Path:
    """Draw accuracy and residuals against epochs and against wall clock; return the path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    figure = Figure(figsize=(13, 9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    for i, curve in enumerate(curves):
        colour, style = COLOURS[i % len(COLOURS)], STYLES[i % len(STYLES)]
        scales: list[list[float]] = [[float(e) for e in range(1, len(curve.accuracy) + 1)], curve.seconds]
        last = f"{100 * curve.accuracy[-1]:.1f}%" if curve.accuracy else "no epoch"
        label = f"{curve.method}  {last}{'  (broke down)' if curve.stopped else ''}"
        for column, at in enumerate(scales):
            drawn = [100 * a for a in curve.accuracy]
            axes[0][column].plot(at, drawn, color=colour, linestyle=style, label=label, linewidth=1.6)
            if curve.residuals and curve.residuals[0]:
                total = [sum(r * r for r in row) ** 0.5 for row in curve.residuals]
                axes[1][column].plot(at, total, color=colour, linestyle=style, label=curve.method, linewidth=1.6)
                if curve.stopped:
                    axes[1][column].plot(at[-1:], total[-1:], "x", color=colour)
            if curve.stopped and drawn:
                axes[0][column].plot(at[-1:], drawn[-1:], "x", color=colour)
    for column, name in enumerate(("epoch (pass over the samples)", "wall clock of training, seconds (log)")):
        axes[0][column].set(xlabel=name, ylabel="test accuracy, %")
        axes[1][column].set(xlabel=name, ylabel="consensus residual of all blocks (log)", yscale="log")
        for row in (0, 1):
            axes[row][column].grid(alpha=0.3)
            if column:
                axis = axes[row][column]
                axis.set_xscale("log")
                axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axis.xaxis.set_minor_locator(NullLocator())  # its labels would run into each other
                axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
            else:
                axes[row][column].xaxis.set_major_locator(MaxNLocator(integer=True))
    # below the axes, where no curve is: method and last accuracy
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(title)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path
