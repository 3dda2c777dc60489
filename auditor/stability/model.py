"""Stability of the model: how fast the last hidden activation a and its Jacobian J can change, from three sides.

    C1 = max |a(x'') - a(x')| / |x'' - x'|         C2 = max |J(x'') - J(x')| / |x'' - x'|

- ``sampled``   the largest ratio of pairs: images with each other, and each image with copies moved by noise and along
                the steepest direction found. Of a Jacobian the pairs are compared along several directions u of the
                layer, |J(x'')^T u - J(x')^T u| with |u| = 1. A lower bound.
- ``local``     the largest singular value of J at the images by power iteration (C2: of J(x'') - J(x') of the
                worst of its pairs, over their distance).
                By the mean value theorem some point between the two of a pair has a Jacobian at least as large as
                their ratio, so the sampled value counts here too: sampled <= local <= truth.
- ``certified`` a proof from the weights that holds for all images (`lipschitz`). Where the gradient jumps (ReLU) there
                is none for C2.

Each has its null model: the same number for the network with random weights. The ratio of the power iteration's cost
to a forward pass is 100, so on large networks fewer images are taken; ``n`` says how many.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from auditor.errors import AuditError, ModelError
from auditor.kernels.networks.jacobian_norm import largest_singular_values, pull_each, unit
from auditor.metrics.measure import Measure, skipped
from auditor.network.aten_graph import Node, graph_of
from auditor.network.untrained_twin import untrained, untrained_graph
from auditor.network.weight_layers import WeightLayer, weight_layers
from auditor.progress import Progress, silent
from auditor.stability.certified_bound import Bound, bounds_at
from auditor.subject.subject import Subject

NAMES = ("c1_sampled", "c1_local", "c1_certified", "c2_sampled", "c2_local", "c2_certified")
RADIUS = 0.02  # root mean square per pixel component, as in `stability`
SAMPLES = 4
DIRECTIONS = 4  # of the layer's output, along which Jacobians are compared
POWER_STEPS = 20
MOST_IMAGES = 64
BUDGET = 6e11  # multiplications spent on one model
NULL_IMAGES = 2
PASSES = POWER_STEPS * 2 * 5  # of one image, gradients counted as the forward passes they cost
NULL_CERTIFIED = 2e8  # multiplications of a forward pass up to which the null model is certified too


@dataclass(frozen=True, slots=True)
class Constants:
    """Sampled and local constants of images, one number each per image."""

    c1_sampled: Tensor
    c1_local: Tensor
    c2_sampled: Tensor
    c2_local: Tensor


def images_within(budget: float, cost: int, n: int) -> int:
    """Return on how many of ``n`` images the constants are taken when a pass of one costs so many multiplications."""
    return int(min(MOST_IMAGES, n, max(2, budget // (cost * PASSES + 1))))


def model_stability(
    subject: Subject, images: Tensor, *, seed: int = 0, budget: float = BUDGET, progress: Progress = silent
) -> dict[str, Measure]:
    """Return the six measures by name; ``per_image`` has the largest ratio at each image.

    ``budget`` is how many multiplications may be spent; it decides on how many images.
    """
    try:
        layers = weight_layers(graph_of(subject))
        top = last_hidden(subject, layers)
    except AuditError as error:
        return {name: skipped(str(error), "down") for name in NAMES}
    cost = multiplications(layers)
    n = images_within(budget, cost, len(images))
    if not len(images):
        return {name: skipped("there are no images", "down") for name in NAMES}
    progress("stability", 0, 3)
    ours = measured(subject, top, images[:n], seed=seed)
    progress("stability", 1, 3)
    graph, std = graph_of(subject), subject.preprocessing.std
    bounds = bounds_at(graph, input_node(layers[-1]), std)
    progress("stability", 2, 3)
    below = input_node(layers[-1])
    proofs: tuple[Bound, Bound] = (Bound(None), Bound(None))
    with untrained(subject, seed) as new:
        null = measured(subject, top, images[: min(n, NULL_IMAGES)], seed=seed)
        if cost <= NULL_CERTIFIED:
            proofs = bounds_at(untrained_graph(graph, new), below, std)
    progress("stability", 3, 3)
    measures = {}
    for name in ("c1_sampled", "c1_local", "c2_sampled", "c2_local"):
        values: Tensor = getattr(ours, name)
        measures[name] = _largest(values, float(getattr(null, name).max()))
    for name, bound, proof in zip(("c1_certified", "c2_certified"), bounds, proofs, strict=True):
        if bound.value is None:
            measures[name] = skipped(bound.reason, "down")
        else:
            measures[name] = Measure(bound.value, null=proof.value, direction="down")
    return {name: measures[name] for name in NAMES}


def measured(
    subject: Subject, top: str, images: Tensor, *, seed: int = 0, n_steps: int = POWER_STEPS, samples: int = SAMPLES
) -> Constants:
    """Return sampled and local constants of the input of the layer ``top`` at every image."""
    f = input_of(subject, top)
    generator = torch.Generator().manual_seed(seed)
    x = images.to(subject.device, subject.dtype)
    size = RADIUS * x[0].numel() ** 0.5

    def noise() -> Tensor:  # the same for every image, so that a batch equals its images one by one
        return unit(torch.randn(1, *x.shape[1:], generator=generator)).to(x).expand_as(x)

    with subject.at_rest(), torch.no_grad():
        chunks = torch.split(torch.arange(len(x)), 16)
        start, steps = noise(), [size * noise() for _ in range(samples)]
        a = torch.cat([f(x[rows]).flatten(1).double() for rows in chunks])
        directions = unit(torch.randn(DIRECTIONS, a.shape[1], generator=generator)).to(x)
        slopes = torch.cat([pull_each(f, x[rows], directions) for rows in chunks], 1)
        c1, _ = _between(x, a[None])
        c2, partner = _between(x, slopes.flatten(2))
        parts = []
        for r in chunks:
            pair = (x[partner[r]] - x[r], c2[r])
            moved = [d[r] for d in steps]
            parts.append(_at(f, x[r], a[r], start[r], moved, directions, slopes[:, r], pair, size, n_steps))
        sampled, local, c2_sampled, c2_local = (torch.cat(column) for column in zip(*parts, strict=True))
    sampled = torch.maximum(sampled, c1)
    return Constants(sampled, torch.maximum(local, sampled), c2_sampled, torch.maximum(c2_local, c2_sampled))


def _at(
    f: Callable[[Tensor], Tensor],
    x: Tensor,
    a: Tensor,
    v: Tensor,
    steps: list[Tensor],
    directions: Tensor,
    slopes: Tensor,
    pair: tuple[Tensor, Tensor],
    size: float,
    n: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four constants at each of a few images.

    ``slopes`` (directions, images, …) are J(x)^T u; ``pair`` is the way to the image with which the Jacobian changes
    most for its distance, and that ratio.
    """
    local, steepest = largest_singular_values(f, x, v, n)
    steps = [*steps, size * steepest]
    ratios, changes, starts = [], [pair[1]], [v]
    rows = torch.arange(len(x))
    for d in steps:
        moved = (x + d) - x  # what is left of d after rounding
        ratios.append((f(x + d).flatten(1).double() - a).norm(dim=1) / moved.flatten(1).double().norm(dim=1))
        turned = pull_each(f, x + d, directions) - slopes
        lengths = turned.flatten(2).double().norm(dim=2)
        changes.append(lengths.amax(0) / size)
        starts.append(turned[lengths.argmax(0), rows])
    ways = torch.stack([pair[0], *steps])
    worst = torch.stack([*changes[1:], changes[0]]).argmax(0)  # a step where all are alike: the pair may be no pair
    worst = torch.where(worst == len(steps), 0, worst + 1)
    d, start = ways[worst, rows], torch.stack(starts)[worst, rows]
    start = torch.where((start.flatten(1).norm(dim=1) > 0).view(-1, *[1] * (x.dim() - 1)), start, v)
    # a power iteration on J(x + d) - J(x), the Jacobian of z -> a(z + d) - a(z)
    c2, _ = largest_singular_values(lambda z: f(z + d) - f(z), x, start, max(1, n // 2))
    length = d.flatten(1).double().norm(dim=1)
    return torch.stack(ratios).amax(0), local.double(), torch.stack(changes).amax(0), c2.double() / length


def _between(x: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return each image's largest ratio with another, over all of (directions, images, numbers), and which that is.

    Equal images are no pair.
    """
    far = _distances(x.flatten(1))
    ratios = torch.stack([torch.where(far > 1e-8, _distances(v) / far, 0.0) for v in values]).amax(0)
    largest = ratios.max(1)
    return largest.values, largest.indices


def _distances(rows: Tensor) -> Tensor:
    rows = rows.double()[None]
    return torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")[0]


def last_hidden(subject: Subject, layers: list[WeightLayer]) -> str:
    """Return the name of the module whose input is the last hidden activation: the top weight layer."""
    if not layers:
        raise ModelError("the network has no layer with weights.")
    top = layers[-1]
    try:
        weight = subject.module.get_submodule(top.name).weight
    except AttributeError:
        weight = None
    if not isinstance(weight, Tensor) or weight.numel() != top.rows.numel() or len(top.nodes) > 1:
        raise ModelError(
            f"the input of the last layer with weights ({top.name}) cannot be read: it is no module of its own."
        )
    return top.name


def input_of(subject: Subject, name: str) -> Callable[[Tensor], Tensor]:
    """Return the function from pixels to the input of a module."""
    module = subject.module.get_submodule(name)

    def run(x: Tensor) -> Tensor:
        inputs: list[Tensor] = []

        def keep(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            inputs.append(args[0].clone())

        handle = module.register_forward_pre_hook(keep)
        try:
            for part in [x] if subject.max_batch is None else torch.split(x, subject.max_batch):
                subject.forward(part)
        finally:
            handle.remove()
        return torch.cat(inputs)

    return run


def input_node(layer: WeightLayer) -> Node:
    """Return the node whose value a weight layer takes in."""
    node = layer.nodes[-1]
    is_addmm = node.target is torch.ops.aten.addmm.default
    below = node.args[1 if is_addmm else 0]
    assert isinstance(below, Node)
    return below


def multiplications(layers: list[WeightLayer]) -> int:
    """Return how many multiplications a forward pass of one image takes in the weight layers."""
    total = 0
    for layer in layers:
        for node in layer.nodes:
            outputs = math.prod(int(n) for n in node.meta["val"].shape[1:])
            total += outputs * layer.rows.shape[1]
    return total


def _largest(values: Tensor, null: float | None) -> Measure:
    if not bool(torch.isfinite(values).all()):
        return Measure(math.nan, n=len(values), null=null, direction="down", status="failed",
                       reason="the network's activations are not finite")  # fmt: skip
    return Measure(
        float(values.max()), n=len(values), null=null, direction="down", per_image=tuple(float(v) for v in values)
    )
