"""Pixel flipping: judge a relevance map by what the network says when its least relevant cells turn into noise.

After [PixelFlipping], in the other direction: cells are ordered by relevance ascending, ties broken at random. At step
j the first j*g cells are replaced by uniform noise over [min(x), max(x)] and the rest kept; a good map keeps the class
probability until few cells remain. The noise here is not the obfuscation a map was optimised for, as published: a map
that only fits its own noise does not win.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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


class MaskedImages:
    """Images some of whose cells turn into noise, and what the network says of them; equal masks are run once.

    The noise of an image depends on the seed and its index alone. So two maps are compared under the same noise, and
    masks that maps have in common (all cells, none, the cells of a random order) cost one pass for all of them.
    """

    def __init__(
        self,
        network: Network,
        partition: Partition,
        *,
        draws: int = 64,
        seed: int = 0,
        chunk: int = 512,
        output: Output = LOGITS,
    ) -> None:
        self.network, self.partition, self.output = network, partition, output
        self.draws, self.seed, self.chunk = draws, seed, chunk
        self._said: dict[tuple[int, bytes], Tensor] = {}  # (draws, classes), or (1, classes) where nothing is noise

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_said": {}}  # what another process needs, it asks the network itself

    def order(self, index: int, scores: Tensor) -> Tensor:
        """Return the cells (m,) of an image by ascending relevance, ties broken at random."""
        shuffled = torch.randperm(len(scores), generator=self._random(index, 1))
        return shuffled[scores[shuffled].argsort(stable=True)]

    def random_scores(self, index: int) -> Tensor:
        """Return a random map (m,) of an image: the same for everything it is compared with."""
        return torch.rand(self.partition.size, generator=self._random(index, 2))

    def probabilities(self, index: int, x: Tensor, keep: Tensor) -> Tensor:
        """Return (masks, draws, classes) of image ``x`` with the cells of ``keep`` (masks, m), the rest being noise."""
        names = [(index, row.numpy().tobytes()) for row in keep]
        todo = [k for k, name in enumerate(names) if name not in self._said and names.index(name) == k]
        whole = [k for k in todo if bool(keep[k].all())]
        noisy = [k for k in todo if k not in whole]
        if whole:
            self._said[names[whole[0]]] = self._run(x[None])
        if noisy:
            noise = self._noise(index, x)
            for part in torch.split(torch.tensor(noisy), max(1, self.chunk // self.draws)):
                mask = self.partition.expand(keep[part].to(x), torch.full((len(part),), index))[:, None]
                p = self._run(torch.where(mask > 0, x, noise).flatten(0, 1))
                for k, rows in zip(part.tolist(), p.view(len(part), self.draws, -1), strict=True):
                    self._said[names[k]] = rows
        return torch.stack([self._said[name].expand(self.draws, -1) for name in names])

    def _run(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.output.probabilities(self.network(x)).to(x)

    def _noise(self, index: int, x: Tensor) -> Tensor:
        return x.min() + (x.max() - x.min()) * torch.rand(self.draws, *x.shape, generator=self._random(index, 0))

    def _random(self, index: int, use: int) -> torch.Generator:
        return torch.Generator().manual_seed((self.seed * 1_000_003 + index) * 3 + use)


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
    masked = MaskedImages(network, partition, draws=draws, seed=seed, chunk=chunk, output=output)
    return flip_curve(masked, images, targets, scores, range(len(images)), group=group)


def flip_curve(
    masked: MaskedImages, images: Tensor, targets: Tensor, scores: Tensor, index: Sequence[int], *, group: int = 1
) -> FlipCurve:
    """Flip ``group`` cells per step by ``scores`` (batch, m); ``index`` says which images of ``masked`` these are."""
    m = masked.partition.size
    _check(scores, len(images), m, group)
    flipped = torch.tensor([*range(0, m, group), m])
    distortion, accuracy = [], []
    for i, k in enumerate(index):
        ascending = masked.order(k, scores[i])
        rank = torch.empty(m, dtype=torch.long).scatter_(0, ascending, torch.arange(m))
        p = masked.probabilities(k, images[i], rank[None] >= flipped[:, None])
        distortion.append((p[..., targets[i]] - p[0, 0, targets[i]]).square().mean(1))
        accuracy.append((p.argmax(2) == targets[i]).float().mean(1))
    return FlipCurve(1 - flipped / m, torch.stack(distortion), torch.stack(accuracy))


def _check(scores: Tensor, n: int, m: int, group: int) -> None:
    if scores.shape != (n, m):
        raise ShapeError(
            f"pixel flip: scores must be (batch, cells) = {(n, m)}, got {tuple(scores.shape)}; "
            f"give one number per cell of the partition."
        )
    if not 1 <= group <= m:
        raise OptionError(f"pixel flip: the group must be 1 to {m} cells, got {group}.")
    if not bool(scores.isfinite().all()):
        bad = int((~scores.isfinite().all(1)).sum())
        raise OptionError(f"pixel flip: {bad} of {len(scores)} maps hold NaN or infinite scores; leave them out.")


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
