"""Pixel flipping: judge a relevance map by what the network says when the least relevant cells turn into noise first.

Cells are ordered by relevance ascending, ties broken at random. At step j the first j*g cells are replaced by uniform
noise over [min(x), max(x)] and the rest kept; a good map keeps the class probability until few cells remain. The noise
here is not the obfuscation a map was optimised for, as published: a map that only fits its own noise does not win.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from auditor.errors import OptionError, ShapeError
from auditor.perturbation.cells import Partition
from auditor.perturbation.distortion import Network
from auditor.subject.outputs import Output

LOGITS = Output()


@dataclass(frozen=True, eq=False)
class FlipCurve:
    """What happened on the way from the whole image to noise, per image."""

    share_kept: Tensor  # (steps,) share of cells kept, 1 to 0
    distortion: Tensor  # (batch, steps) mean squared change of the target's probability
    accuracy: Tensor  # (batch, steps) share of draws that still predict the target

    def area(self) -> Tensor:
        """Return (batch,): the mean distortion over the steps; lower is better."""
        return self.distortion.mean(1)

    def mean(self) -> Tensor:
        """Return (steps,): the mean curve over images."""
        return self.distortion.mean(0)

    def standard_error(self) -> Tensor:
        """Return (steps,): the standard error of the mean curve."""
        return _standard_error(self.distortion)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How much more area one map leaves than another on the same images: mean difference and its standard error."""

    difference: float
    standard_error: float

    @property
    def is_beyond_two_errors(self) -> bool:
        """Whether the first map is better (smaller area) by more than two standard errors."""
        return self.difference > 2 * self.standard_error


def pixel_flip(
    network: Network,
    images: Tensor,
    targets: Tensor,
    scores: Tensor,
    partition: Partition,
    *,
    group: int = 1,
    draws: int = 64,
    seed: int = 0,
    chunk: int = 512,
    output: Output = LOGITS,
) -> FlipCurve:
    """Flip ``group`` cells per step by the relevance ``scores`` (batch, m); ``output`` makes logits probabilities.

    Noise depends on ``seed`` and the image's index in the batch alone, so two maps are compared under the same noise,
    and the last step is the same for every map.
    """
    m = partition.size
    if scores.shape != (len(images), m):
        raise ShapeError(
            f"pixel flip: scores must be (batch, cells) = {(len(images), m)}, got {tuple(scores.shape)}; "
            f"give one number per cell of the partition."
        )
    if not 1 <= group <= m:
        raise OptionError(f"pixel flip: the group must be 1 to {m} cells, got {group}.")
    if not bool(scores.isfinite().all()):
        bad = int((~scores.isfinite().all(1)).sum())
        raise OptionError(f"pixel flip: {bad} of {len(scores)} maps hold NaN or infinite scores; leave them out.")
    flipped = torch.tensor([*range(0, m, group), m])
    distortion, accuracy = [], []
    for i in range(len(images)):
        x, index = images[i], torch.tensor([i])
        random = torch.Generator().manual_seed(seed * 1_000_003 + i)
        noise = x.min() + (x.max() - x.min()) * torch.rand(draws, *x.shape, generator=random)
        shuffled = torch.randperm(m, generator=random)
        ascending = shuffled[scores[i][shuffled].argsort(stable=True)]
        rank = torch.empty(m, dtype=torch.long).scatter_(0, ascending, torch.arange(m))
        keep = (rank[None] >= flipped[:, None]).to(x)  # (steps, m)
        with torch.no_grad():
            clean = output.probabilities(network(x[None])).to(x)[0, targets[i]]
            changes, hits = [], []
            for part in torch.split(keep, max(1, chunk // draws)):
                mask = partition.expand(part, index.expand(len(part)))[:, None]
                y = torch.where(mask > 0, x, noise).flatten(0, 1)
                p = output.probabilities(network(y)).to(x).view(len(part), draws, -1)
                changes.append((p[..., targets[i]] - clean).square().mean(1))
                hits.append((p.argmax(2) == targets[i]).float().mean(1))
        curve = torch.cat(changes)
        curve[0] = 0.0  # nothing was flipped: what is left is the rounding of another batch size
        distortion.append(curve)
        accuracy.append(torch.cat(hits))
    return FlipCurve(1 - flipped / m, torch.stack(distortion), torch.stack(accuracy))


def compare(better: FlipCurve, worse: FlipCurve) -> Comparison:
    """Return how much smaller the area of ``better`` is, paired by image."""
    difference = worse.area() - better.area()
    return Comparison(float(difference.mean()), float(_standard_error(difference[:, None])[0]))


def plot_curves(curves: dict[str, FlipCurve], path: str | Path, title: str = "") -> None:
    """Write a PNG: mean distortion with standard errors against the share kept, one line per map."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    best_first = sorted(curves.items(), key=lambda item: float(item[1].area().mean()))
    for i, (name, curve) in enumerate(best_first):
        x, mean, error = curve.share_kept.numpy(), curve.mean().numpy(), curve.standard_error().numpy()
        style = ("-", "--", ":")[i // 10 % 3]  # matplotlib has ten colours
        (line,) = axes.plot(x, mean, style, label=f"{name} ({float(curve.area().mean()):.4f})", linewidth=1.6)
        axes.fill_between(x, mean - error, mean + error, alpha=0.15, color=line.get_color(), linewidth=0)
    axes.set_xlabel("share of cells kept")
    axes.set_ylabel("mean squared change of the class probability")
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.legend(title="map (area)", fontsize="small")
    figure.savefig(path, dpi=130)


def _standard_error(values: Tensor) -> Tensor:
    if len(values) < 2:
        return torch.full(values.shape[1:], torch.nan)
    return values.std(0) / math.sqrt(len(values))
