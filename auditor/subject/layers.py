"""Layers of a network that can be explained: where they stand, what they hold, how their numbers are laid out.

A layer's output is read as a matrix of **channels by positions**: a feature map has one position per cell, a
transformer block one per patch token (class and register tokens stand apart), a fully connected layer one in all.
A signed layer can be read as deviations from its mean (`Deviations`), class and register tokens among them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from auditor.errors import ShapeError

_PASSIVE = re.compile(r"(\w*Dropout\w*|DropPath|StochasticDepth|Identity|\w*Pad(ding)?\d?d?|Flatten|Unflatten)")
SIGNED = 0.2  # share of the energy below zero from which on zero is no emptiness
LayoutName = Literal["map", "map-last", "tokens", "vector"]


@dataclass(frozen=True, slots=True)
class Layout:
    """How one layer's output (without the batch) is laid out.

    >>> layout_of((512, 7, 7), (224, 224))
    Layout(name='map', channels=512, grid=(7, 7), prefix=0)
    >>> layout_of((197, 768), (224, 224))
    Layout(name='tokens', channels=768, grid=(14, 14), prefix=1)
    """

    name: LayoutName
    channels: int
    grid: tuple[int, int]
    prefix: int = 0  # tokens before the first patch: class token, registers

    @property
    def n_positions(self) -> int:
        """Cells of the grid."""
        return self.grid[0] * self.grid[1]

    def to_positions(self, z: Tensor) -> Tensor:
        """Return the activation ``z`` as (batch, channels, positions), without class or register tokens."""
        if self.name == "map":
            return z.flatten(2)
        if self.name == "map-last":
            return z.flatten(1, 2).transpose(1, 2)
        if self.name == "tokens":
            return z[:, self.prefix :].transpose(1, 2)
        return z.unsqueeze(-1)

    def from_positions(self, p: Tensor, like: Tensor) -> Tensor:
        """Put (batch, channels, positions) back into the shape of ``like``, which lends its class token."""
        if self.name == "map":
            return p.reshape(p.shape[0], *like.shape[1:])
        if self.name == "map-last":
            return p.transpose(1, 2).reshape(p.shape[0], *like.shape[1:])
        if self.name == "tokens":
            head = like[:, : self.prefix]
            if head.shape[0] != p.shape[0]:
                head = head.repeat(p.shape[0] // head.shape[0], 1, 1)
            return torch.cat([head, p.transpose(1, 2)], dim=1)
        return p.squeeze(-1)

    @property
    def keeps_tokens(self) -> bool:
        """Whether class or register tokens stand apart, so that an empty layer differs by image."""
        return self.name == "tokens" and self.prefix > 0

    @property
    def has_start(self) -> bool:
        """Whether positions are deviations, so that zeros stand for a mean activation."""
        return False

    def gradient_to_positions(self, g: Tensor) -> Tensor:
        """Return a gradient by the layer's output as (batch, channels, positions)."""
        return self.to_positions(g)

    def on_grid(self, scores: Tensor) -> Tensor:
        """Return scores (batch, concepts, positions) of the grid's cells alone."""
        return scores


@dataclass(frozen=True, slots=True, eq=False)
class Deviations(Layout):
    """A layer read as deviations from ``start``, a mean activation (channels, positions or 1).

    Class and register tokens are positions like the patches, before them. Zeros stand for the mean activation and not
    for none: a signed layer has no other emptiness, and behind a layer norm an activation of zero is no such thing.
    """

    start: Tensor = field(default_factory=lambda: torch.zeros(1, 1))

    @classmethod
    def of(cls, layout: Layout, start: Tensor) -> Deviations:
        """Return how ``layout`` is read from ``start`` on."""
        return cls(layout.name, layout.channels, layout.grid, layout.prefix, start)

    @classmethod
    def from_mean(cls, layout: Layout, z: Tensor) -> Deviations:
        """Return how ``layout`` is read from the mean of some activations: of every token, of a map by channel."""
        p = _all_positions(layout, z).double()
        mean = p.mean(0) if layout.name == "tokens" else p.mean((0, 2))[:, None]
        return cls.of(layout, mean.to(z.dtype).cpu())

    @property
    def keeps_tokens(self) -> bool:
        """No token stands apart."""
        return False

    @property
    def has_start(self) -> bool:
        """Zeros stand for ``start``."""
        return True

    def to_positions(self, z: Tensor) -> Tensor:
        """Return what the activation ``z`` adds to the start, (batch, channels, tokens and positions)."""
        return _all_positions(self, z) - self.start.to(z)

    def from_positions(self, p: Tensor, like: Tensor) -> Tensor:
        """Put deviations back into the shape of ``like``."""
        p = p + self.start.to(p)
        if self.name == "tokens":
            return p.transpose(1, 2)
        return Layout(self.name, self.channels, self.grid).from_positions(p, like)

    def gradient_to_positions(self, g: Tensor) -> Tensor:
        """Return a gradient as it is: it has no start."""
        return _all_positions(self, g)

    def on_grid(self, scores: Tensor) -> Tensor:
        """Return the scores of the patches, without those of the tokens before them."""
        return scores[..., self.prefix :]


def _all_positions(layout: Layout, z: Tensor) -> Tensor:
    return Layout(layout.name, layout.channels, layout.grid).to_positions(z)


def reading_of(layout: Layout, z: Tensor) -> Layout:
    """Return how a layer is read whose activations are like ``z``: signed ones as deviations from their mean.

    Signed is what has much of its energy below zero (a residual stream, a batch norm); SiLU and its like rest at zero.

    >>> layout = Layout("tokens", 2, (1, 3), 1)
    >>> reading_of(layout, torch.ones(1, 4, 2)) is layout, reading_of(layout, -torch.ones(1, 4, 2)).has_start
    (True, True)
    """
    energy = z.double().square()
    below = float(energy[z < 0].sum() / energy.sum().clamp_min(1e-30))
    return Deviations.from_mean(layout, z) if below >= SIGNED else layout


def layout_of(shape: Sequence[int], image_size: tuple[int, int]) -> Layout:
    """Read the layout off a layer's output shape (without the batch) for images of ``image_size`` (height, width)."""
    shape = tuple(int(n) for n in shape)
    if len(shape) == 1:
        return Layout("vector", shape[0], (1, 1))
    if len(shape) == 2:
        prefix, grid = _token_grid(shape[0], image_size)
        return Layout("tokens", shape[1], grid, prefix)
    if len(shape) == 3:
        a, b, c = shape
        # Swin and other windowed transformers keep channels last; with square maps the equal pair shows which.
        if a == b and b != c and a <= image_size[0]:
            return Layout("map-last", c, (a, b))
        return Layout("map", a, (b, c))
    raise ShapeError(
        f"a layer with output shape {shape} per image cannot be read as channels by positions; "
        "take a layer with 1, 2 or 3 dimensions per image (auditor layers MODEL lists them)."
    )


def _token_grid(n_tokens: int, image_size: tuple[int, int]) -> tuple[int, tuple[int, int]]:
    """Split ``n_tokens`` into leading special tokens and a patch grid with the image's proportions."""
    for prefix in (1, 0, 2, 5):
        rest = n_tokens - prefix
        if rest < 1:
            continue
        h = round(math.sqrt(rest * image_size[0] / image_size[1]))
        if h >= 1 and rest % h == 0 and abs((rest // h) / h - image_size[1] / image_size[0]) < 1e-6:
            return prefix, (h, rest // h)
    return 0, (1, n_tokens)


@dataclass(frozen=True, slots=True)
class Layer:
    """One named layer as seen by running the model: shape, layout, sign, and whether it can be explained."""

    name: str
    type: str
    shape: tuple[int, ...]
    layout: Layout | None
    nonnegative: bool
    explainable: bool
    reason: str = ""  # why not, when not explainable
    same_as: str = ""  # an earlier, outer name of the very same output
    hands_on: bool = False  # whether a pass showed that it only moves the numbers of a layer before it

    @property
    def is_passive(self) -> bool:
        """Whether it computes nothing of its own: a dropout, an identity, padding, a change of shape."""
        return self.hands_on or bool(_PASSIVE.fullmatch(self.type))

    @property
    def is_spatial(self) -> bool:
        """Whether it has more than one position."""
        return self.layout is not None and self.layout.n_positions > 1


def suggest(layers: Sequence[Layer], n_classes: int) -> Layer | None:
    """Return the layer to explain by default: the last spatial one with non-negative output.

    Two refinements keep the rule useful on real families. A map with one channel per class (SqueezeNet's last
    convolution) is already an answer, not a reason, so it is passed over. And when the only non-negative layers stand
    in the first half of the network (MobileNetV3 turns to hardswish) the last signed spatial layer is better: semi-NMF
    explains it. Of several names for the same output the first and outermost wins (``layer4``, not ``layer4.1``).
    """
    layers = [x for x in layers if not x.is_passive] or layers  # what feeds them is there under its own name
    spatial = [x for x in layers if x.explainable and x.is_spatial]
    features = [x for x in spatial if x.layout is not None and x.layout.channels != n_classes] or spatial
    late = {x.name for x in layers[len(layers) // 2 :]}
    best = [x for x in features if x.nonnegative and x.name in late] or features
    if not best:  # no spatial layer at all: a multilayer perceptron
        best = [x for x in layers if x.explainable and x.layout is not None and x.layout.channels != n_classes]
    if not best:
        return None
    by_name = {x.name: x for x in layers}
    return by_name.get(best[-1].same_as, best[-1])
