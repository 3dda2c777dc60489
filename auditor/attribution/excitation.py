"""Excitation backprop (MWP) and its contrastive form (c-MWP) for any neurons of any model.

One forward pass and one pass with clipped weights are shared by all neurons; the masses of all neurons of all images
then walk down together, without autograd. How mass passes each operation: `auditor.attribution.excitation_rules`.

    c-MWP = max(0, MWP(o) - MWP(dual of o)),   the dual having the weights  -w_o  in the first linear map below  o.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from auditor.attribution.excitation_walk import OnStep, Walk, knows_its_excitation, lower_bound
from auditor.errors import NumericsError, OptionError, ShapeError
from auditor.network.aten_graph import AtenGraph, Node, is_signal

log = logging.getLogger(__name__)
BYTES_AT_ONCE = 128 * 2**20  # of the largest mass; more images than fit take turns


@dataclass(frozen=True, slots=True)
class Heatmaps:
    """Heatmaps of several neurons on several images.

    ``maps`` is (batch, neurons, height, width), non-negative, each summing to 1 unless it is empty; ``mass`` is the sum
    before scaling; ``inactive`` marks neurons that did not fire, whose map shows potential and not evidence.
    """

    maps: Tensor
    mass: Tensor
    inactive: Tensor
    notes: tuple[str, ...] = ()

    @property
    def empty(self) -> Tensor:
        """Which maps have no positive mass at all, (batch, neurons)."""
        return self.mass <= 0

    def heatmap(self, image: int, neuron: int) -> Tensor | None:
        """Return one map as probabilities, or None when it is empty."""
        return None if self.empty[image, neuron] else self.maps[image, neuron]

    def cpu(self) -> Heatmaps:
        """Return them on the CPU."""
        return Heatmaps(self.maps.cpu(), self.mass.cpu(), self.inactive.cpu(), self.notes)


class ExcitationBackprop:
    """Excitation backprop on the graph of a model, optionally with a head attached to one of its layers.

    ``example`` is a batch of at least two inputs of the model (a pt2 program needs none), ``floor`` the lowest value
    an input can have, one number or one per channel: for images in [0, 1] normalised by mean and std it is
    ``-mean / std``, which is the same as folding the normalisation into the first layer.

    >>> net = nn.Sequential(nn.Linear(4, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False))
    >>> net[0].weight.data = torch.tensor([[1.0, -1, 2, 1], [2, 1, 1, -1]])
    >>> net[2].weight.data = torch.tensor([[3.0, -1], [1, 2]])
    >>> x = torch.tensor([[1.0, 2, 0, 3]])
    >>> engine = ExcitationBackprop(net, torch.zeros(2, 4))
    >>> engine.masses(x, [0, 1], contrastive=False)[0].tolist()
    [[0.25, 0.0, 0.0, 0.75], [0.375, 0.25, 0.0, 0.375]]
    """

    def __init__(
        self,
        model: nn.Module | ExportedProgram | AtenGraph,
        example: Tensor | None = None,
        *,
        head: nn.Module | AtenGraph | None = None,
        layer: str = "",
        floor: float | Sequence[float] = 0.0,
    ) -> None:
        if isinstance(model, AtenGraph):
            self.graph = model
        elif isinstance(model, nn.Module) and example is None:
            raise OptionError("ExcitationBackprop: a module needs example inputs to be traced with; pass `example`.")
        else:
            self.graph = AtenGraph.trace(model, example if example is not None else torch.empty(0))
        self.layer = layer
        self.head = self._trace_head(head) if isinstance(head, nn.Module) else head
        bound = torch.as_tensor(floor, dtype=torch.float32)
        self._floor = bound.view(1, -1, *[1] * (len(self.graph.shape) - 1)) if bound.dim() else bound

    def _trace_head(self, head: nn.Module) -> AtenGraph:
        z = self.graph.layer(self.layer).meta["val"]
        where = next((p.device for p in head.parameters()), torch.device("cpu"))
        like = torch.zeros((self.graph.batch or 2, *[int(s) for s in z.shape[1:]]), dtype=z.dtype, device=where)
        return AtenGraph.trace(head, like)

    def maps(
        self,
        images: Tensor,
        neurons: Sequence[int] | Tensor,
        *,
        start: str = "",
        stop: str = "input",
        contrastive: bool = True,
        mass: Tensor | None = None,
        at_stop: Tensor | None = None,
    ) -> Heatmaps:
        """Return the heatmaps of ``neurons`` on ``images`` (inputs of the graph), at the resolution of ``stop``.

        ``start`` names the layer of the neurons (the logits, or the head's output if there is a head). ``neurons`` is
        one list for all images or (batch, neurons); in a layer with positions an index means the whole channel, its
        mass spread over the positions by their activation, and a triple (channel, row, column) one unit.
        ``stop`` is ``"input"`` for the pixels or a layer name. ``mass`` (batch, neurons, *shape of start) sets the
        start masses by hand instead of 1 on every neuron. ``at_stop`` is the activation of the layer ``stop`` from an
        earlier pass over these images: the network below it is then not run again. See `knows_from`.
        """
        mass, inactive, notes = self._masses(images, neurons, start, stop, contrastive, mass, at_stop=at_stop)
        if mass.dim() == 4 and stop != "input":
            mass = mass.movedim(-1, 2)  # tokens: (batch, neurons, position, channel) -> channels first
        if mass.dim() == 3:
            mass = mass[:, :, None]  # a vector has no channels to sum over: its units are the positions
        while mass.dim() < 5:
            mass = mass.unsqueeze(3)
        heat = mass.sum(2).clamp_(min=0)
        total = heat.sum((-1, -2))
        maps = heat / total.where(total > 0, 1.0)[..., None, None]
        return Heatmaps(maps, total, inactive, notes)

    def masses(
        self,
        images: Tensor,
        neurons: Sequence[int] | Tensor,
        *,
        start: str = "",
        stop: str = "input",
        contrastive: bool = True,
    ) -> Tensor:
        """Return the signed mass on every unit of ``stop``, (batch, neurons, *shape of stop), nothing clipped."""
        return self._masses(images, neurons, start, stop, contrastive)[0]

    def lost(
        self, images: Tensor, neurons: Sequence[int] | Tensor, *, start: str = "", stop: str = "input"
    ) -> dict[str, float]:
        """Return the share of the (not contrastive) mass that each layer loses on the way down; {} if none does.

        A parent without an excitatory child hands nothing on. That is rare after ReLU and common in depthwise
        convolutions after SiLU or hardswish (EfficientNet, MobileNet v3): all positive weights of the one filter may
        lie on units with a small negative value, which count as 0. In a model with a class token, the mass that ends
        in the token's start is lost as well, at the layer that puts it before the patches: it comes from no pixel.
        """
        losses: dict[str, float] = {}
        live = self.graph.live | (self.head.live if self.head is not None else frozenset())

        def on_step(node: Node, p: Tensor, children: list[tuple[Node, Tensor]]) -> None:
            handed_on = [m for child, m in children if child in live]
            lost_mass = float(p.sum(dtype=torch.float64)) - sum(float(m.sum(dtype=torch.float64)) for m in handed_on)
            layer = max(node.meta.get("layers", ()), key=len, default="") or node.name
            losses[layer] = losses.get(layer, 0.0) + lost_mass

        total = self._masses(images, neurons, start, stop, False, on_step=on_step)[0]
        n_walked = -(-len(images) // (self.graph.batch or 1)) * (self.graph.batch or 1)  # the last turn is filled up
        n = n_walked * total.shape[1]
        return {layer: lost_mass / n for layer, lost_mass in losses.items() if lost_mass / n > 1e-5}

    def _masses(
        self,
        images: Tensor,
        neurons: Sequence[int] | Tensor,
        start: str,
        stop: str,
        contrastive: bool,
        start_mass: Tensor | None = None,
        on_step: OnStep | None = None,
        at_stop: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, tuple[str, ...]]:
        self._check(images)
        chosen = torch.as_tensor(neurons, device=images.device)
        turns, notes = [], {}
        with torch.no_grad():
            for i in range(0, len(images), step := self._images_at_once(chosen)):
                x = images[i : i + step]
                n_real = len(x)
                if self.graph.batch and n_real < self.graph.batch:  # the last turn of a graph with a fixed batch
                    x = _filled(x, self.graph.batch)
                own_neurons = chosen if chosen.dim() < 2 or chosen.shape[-1] == 3 else chosen[i : i + step]
                if chosen.dim() == 2 and own_neurons is not chosen and len(own_neurons) < len(x):
                    own_neurons = _filled(own_neurons, len(x))
                begin = None if start_mass is None else _filled(start_mass[i : i + step], len(x))
                stop_values = None if at_stop is None else _filled(at_stop[i : i + step], len(x))
                mass, inactive, new_notes = self._walk(
                    x, own_neurons, start, stop, contrastive, begin, on_step, stop_values
                )
                turns.append((mass.transpose(0, 1)[:n_real], inactive.T[:n_real]))
                notes.update(dict.fromkeys(new_notes))
        for note in notes:
            log.debug("excitation backprop: %s", note)
        return torch.cat([m for m, _ in turns]), torch.cat([f for _, f in turns]), tuple(notes)

    def _walk(
        self,
        x: Tensor,
        neurons: Tensor,
        start: str,
        stop: str,
        contrastive: bool,
        begin: Tensor | None,
        on_step: OnStep | None,
        at_stop: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, list[str]]:
        below = self.graph.layer(self.layer if self.head is not None else start)
        end = self.graph.layer(stop)
        pinned = frozenset({below, end})
        floor = self._floor.to(x)
        if x.dim() == 4 and self.graph.any_strides:
            x = x.contiguous(memory_format=torch.channels_last)  # convolutions need no reordering then
            if at_stop is not None and at_stop.dim() == 4:
                at_stop = at_stop.contiguous(memory_format=torch.channels_last)
        given = {} if at_stop is None else {end: at_stop.to(x)}
        values = self.graph.run(x, below, pinned, given)
        walk = Walk(self.graph, values, pinned, floor, self.graph.clipped, on_step=on_step)
        if self.head is None:
            p, dual, inactive = start_mass(walk, below, neurons, contrastive, begin)
            return walk.down(below, p, end, dual), inactive, list(walk.notes)
        z = walk.values[below]
        top = self.head.layer(start)
        pins = frozenset({top})
        least = z.new_zeros(()) if bool((z >= 0).all()) else z - walk.excitation(below)
        upper = Walk(self.head, self.head.run(z, top, pins), pins, least, self.head.clipped, on_step=on_step)
        p, dual, inactive = start_mass(upper, top, neurons, contrastive, begin)
        mass = walk.down(below, upper.down(top, p, self.head.input, dual), end)
        return mass, inactive, [*upper.notes, *walk.notes]

    def knows_from(self, stop: str) -> bool:
        """Whether the activation of the layer ``stop`` is all that a walk down to it needs of the network below."""
        return knows_its_excitation(self.graph.layer(stop))

    def _check(self, images: Tensor) -> None:
        if tuple(images.shape[1:]) != self.graph.shape:
            raise ShapeError(
                f"ExcitationBackprop: images must be (batch, {', '.join(map(str, self.graph.shape))}) like the example "
                f"the model was traced with, got {tuple(images.shape)}. Resize them, or make another engine."
            )
        if not bool(torch.isfinite(images).all()):
            raise NumericsError("ExcitationBackprop: the images hold NaN or infinite values; clean them first.")
        if bool((images - self._floor.to(images) < -1e-4).any()):
            raise NumericsError(
                "ExcitationBackprop: some pixels are below `floor`, the lowest value an input can have, so mass on "
                "them has no meaning. Pass floor=-mean/std per channel for normalised images."
            )

    def _images_at_once(self, neurons: Tensor) -> int:
        if self.graph.batch:
            return self.graph.batch
        return max(1, BYTES_AT_ONCE // (4 * self._largest_signal * max(1, neurons.shape[-1])))

    @cached_property
    def _largest_signal(self) -> int:
        """Numbers of the largest signal of one image; once, because sizes of a traced graph are symbols and slow."""
        signals = [n for n in self.graph.steps if n in self.graph.live and is_signal(n)]
        return max((math.prod(int(s) for s in n.meta["val"].shape[1:]) for n in signals), default=1)


def start_mass(
    walk: Walk, node: Node, neurons: Tensor, contrastive: bool, begin: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return mass 1 on each chosen neuron, the mass of its dual, and which neurons are inactive, (neurons, batch).

    A neuron of tanh that is negative stands for its own dual, so the two swap roles.
    """
    value: Tensor = walk.values[node]
    n_images = len(value)
    if begin is not None:
        p = begin.transpose(0, 1).to(value)
        silent = (p * value).flatten(2).abs().sum(-1) <= 0
        return p, p if contrastive else None, silent
    single = neurons.dim() == 2 and neurons.shape[-1] == 3 and value.dim() == 4
    chosen = neurons if single or neurons.dim() == 2 else neurons.view(1, -1).expand(n_images, -1)
    limit = value.shape[1] if value.dim() != 3 else value.shape[2]
    index = chosen[:, 0] if single else chosen
    if index.numel() == 0 or int(index.min()) < 0 or int(index.max()) >= limit:
        raise OptionError(
            f"ExcitationBackprop: neurons must be indices from 0 to {limit - 1} of '{node.name}', "
            f"got {index.flatten().tolist()[:8]}."
        )
    n_neurons = len(chosen) if single else chosen.shape[1]
    p = value.new_zeros((n_neurons, *value.shape))
    images = torch.arange(n_images, device=value.device)
    for k in range(n_neurons):
        if single:
            c, row, column = (int(i) for i in chosen[k])
            p[k, :, c, row, column] = 1
        elif value.dim() == 2:
            p[k, images, chosen[:, k]] = 1
        else:
            channel = value[images, chosen[:, k]] if value.dim() == 4 else value[images, :, chosen[:, k]]
            share = _share(channel)
            if value.dim() == 4:
                p[k, images, chosen[:, k]] = share
            else:
                p[k, images, :, chosen[:, k]] = share
    weight = (p * value).flatten(2).sum(-1)  # activation of the neuron, (neurons, batch)
    bound = lower_bound(node)
    inactive = weight <= 0 if bound == 0 else torch.zeros_like(weight, dtype=torch.bool)
    swapped = (weight < 0) if bound is not None and bound < 0 else torch.zeros_like(inactive)
    flip = swapped.view(*swapped.shape, *[1] * (value.dim() - 1))
    if contrastive:
        p = torch.where(flip, -p, p)
        return p, p, inactive
    return p * ~flip, (-p * flip if bool(flip.any()) else None), inactive


def _filled(rows: Tensor, n: int) -> Tensor:
    """Return at least ``n`` rows, the last one repeated: a graph with a fixed batch takes no fewer."""
    return rows if len(rows) >= n else torch.cat([rows, rows[-1:].expand(n - len(rows), *rows.shape[1:])])


def _share(channel: Tensor) -> Tensor:
    """Spread mass 1 over the positions of a channel by positive activation, by magnitude if there is none."""
    flat = channel.flatten(1)
    weight = flat.clamp(min=0)
    silent = weight.sum(1, keepdim=True) <= 0
    weight = torch.where(silent, flat.abs(), weight)
    weight = torch.where(weight.sum(1, keepdim=True) <= 0, torch.ones_like(flat), weight)
    return (weight / weight.sum(1, keepdim=True)).view_as(channel)
