"""A network cut into blocks at layers: modules that hold copies of their weights and can be trained on their own.

Cut at layers a and b, a network f is  f_3(f_2(f_1(x))): image to a, a to b, b to logits. The blocks are read off the
network's graph, so they are there whatever classes it was written with, and for a model from a pt2 file too. Batch
norms use their stored statistics and dropouts do nothing, as in evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from auditor.errors import AuditError, LayerError, ModelError
from auditor.network.aten_graph import AtenGraph, Node, Values, call, graph_of
from auditor.subject.preprocessing import Preprocessing
from auditor.subject.subject import Subject

N_TRIALS = 3
CLOSE = 1e-4  # relative: what other orders of float32 sums may change


class NetworkBlock(nn.Module):
    """The operations of a network between two layers, native shapes, with weights of its own.

    ``names`` says which tensor of the model each of its parameters and buffers is a copy of. A tensor that the model
    uses in two blocks is copied into both.
    """

    def __init__(self, graph: AtenGraph, start: Node, end: Node, parameters: frozenset[str]) -> None:
        super().__init__()
        self.start, self.end, self.shape, self.rows = start, end, graph.shape, graph.batch
        needed = graph.before(end, given={start})
        self.input = graph.input
        self.steps = [node for node in graph.steps if node in needed and node is not start]
        self.asks_shape = start is not graph.input and graph.input in needed
        self.names: dict[str, str] = {}
        self._slots: dict[Node, str] = {}
        for i, (node, value) in enumerate(graph.constants.items()):
            if node not in needed:
                continue
            name, model_name = f"w{i}", graph.names.get(node, "")
            self._slots[node], self.names[name] = name, model_name
            if model_name in parameters and value.is_floating_point():
                self.register_parameter(name, nn.Parameter(value.detach().clone()))
            else:
                self.register_buffer(name, value.detach().clone())

    def forward(self, z: Tensor) -> Tensor:
        """Return what the block's last layer puts out when its first gets ``z``; any number of rows."""
        if self.rows is None:
            return self._run(z)
        parts = []  # the graph was exported for so many rows and takes no others
        for part in torch.split(z, self.rows):
            missing = self.rows - len(part)
            whole = part if not missing else torch.cat([part, part[-1:].expand(missing, *part.shape[1:])])
            parts.append(self._run(whole)[: len(part)])
        return torch.cat(parts)

    def _run(self, z: Tensor) -> Tensor:
        values: Values = {self.start: z}
        if self.asks_shape:  # only the shape of an image is asked for above the first layer
            values[self.input] = torch.empty(z.shape[0], *self.shape, device="meta")
        values.update({node: getattr(self, name) for node, name in self._slots.items()})
        for node in self.steps:
            values[node] = call(node, values.__getitem__)
        out: Tensor = values[self.end]
        return out


class FromPixels(nn.Module):
    """A block that takes pixels in [0, 1]: mean and std of the model, then the block."""

    def __init__(self, preprocessing: Preprocessing, block: NetworkBlock) -> None:
        super().__init__()
        self.preprocessing, self.block = preprocessing, block

    def forward(self, x: Tensor) -> Tensor:
        """Return what the block's layer puts out for pixels."""
        out: Tensor = self.block(self.preprocessing.normalise(x))
        return out


class LogitsOf(nn.Module):
    """The last block: a model of one output gives a column of logits."""

    def __init__(self, block: NetworkBlock) -> None:
        super().__init__()
        self.block = block

    def forward(self, z: Tensor) -> Tensor:
        """Return the logits (rows, classes)."""
        out: Tensor = self.block(z)
        return out[:, None] if out.ndim == 1 else out


def network_block(block: nn.Module) -> NetworkBlock:
    """Return the part of the graph that a block of `split` wraps."""
    while isinstance(block, FromPixels | LogitsOf):
        block = block.block
    assert isinstance(block, NetworkBlock)
    return block


def block_weights(block: nn.Module) -> dict[str, Tensor]:
    """Return a block's parameters by their names in the model."""
    part = network_block(block)
    return {part.names[name]: p.detach().clone() for name, p in part.named_parameters()}


def set_block_weights(block: nn.Module, weights: dict[str, Tensor]) -> None:
    """Put stored parameters into a block of the same cut."""
    part = network_block(block)
    with torch.no_grad():
        for name, p in part.named_parameters():
            p.copy_(weights[part.names[name]])


def split(subject: Subject, cuts: str | Sequence[str], *, pixels: bool = True) -> list[nn.Module]:
    """Return the network in blocks that end at the named layers, and the one from there to the logits.

    Chained, they give the subject's logits of ``pixels`` (of normalised images without). They are copies: training
    them changes nothing in the subject. Every path from image to logits must run through each cut, as `Subject.layers`
    says, and cuts go from the image to the logits.

    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 3))
    >>> subject = Subject(net, input_shape=(1, 8, 8))
    >>> below, above = split(subject, "1")
    >>> x = torch.rand(5, 1, 8, 8)
    >>> bool(torch.allclose(above(below(x)), subject.logits(x), atol=1e-5)), tuple(below(x).shape)
    (True, (5, 4, 6, 6))
    """
    names = [cuts] if isinstance(cuts, str) else list(cuts)
    if not names:
        raise LayerError("split: no layer is named; name one or more, in the order from image to logits.")
    names = [subject.layer(name).name for name in names]
    try:
        graph = graph_of(subject)
    except ModelError as error:
        raise ModelError(f"split: the network's graph cannot be had, so it has no blocks: {error}") from error
    nodes = [graph.layer(name) for name in names]
    _check_order(graph, names, nodes)
    parameters = frozenset(name for name, _ in subject.module.named_parameters())
    ends = [*nodes, graph.output]
    starts = [graph.input, *nodes]
    parts = [NetworkBlock(graph, start, end, parameters) for start, end in zip(starts, ends, strict=True)]
    for name, part in zip(names, parts[1:], strict=True):
        if graph.input in graph.before(part.end, given={part.start}) and _reads_image(graph, part):
            raise LayerError(f"split: part of the image reaches the logits past layer {name!r}; cut at another layer.")
    blocks: list[nn.Module] = [*parts[:-1], LogitsOf(parts[-1])]
    _check_composed(subject, names, blocks)
    if pixels:
        blocks[0] = FromPixels(subject.preprocessing, parts[0])
    return [block.eval() for block in blocks]


def _check_order(graph: AtenGraph, names: list[str], nodes: list[Node]) -> None:
    order = {node: i for i, node in enumerate(graph.steps)}
    positions = [order.get(node, -1) for node in nodes]
    for (a, i), (b, j) in zip(
        zip(names, positions, strict=True), list(zip(names, positions, strict=True))[1:], strict=False
    ):
        if i == j:
            raise LayerError(f"split: layers {a!r} and {b!r} give the same output, so nothing is between; name one.")
        if i > j:
            ordered = [name for _, name in sorted(zip(positions, names, strict=True))]
            raise LayerError(
                f"split: layer {b!r} runs before {a!r}, so the cuts do not compose; name them from the image to the "
                f"logits: {', '.join(ordered)}."
            )


def _reads_image(graph: AtenGraph, part: NetworkBlock) -> bool:
    """Whether the block needs numbers of the image and not its shape only."""
    depends = {part.start}
    for node in part.steps:
        if any(n in depends for n in node.all_input_nodes):
            depends.add(node)
    return any(node in graph.live and node not in depends for node in part.steps)


def _check_composed(subject: Subject, names: list[str], blocks: list[nn.Module]) -> None:
    """Compare the chained blocks with the model on noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(N_TRIALS, *subject.input_shape, generator=generator).to(subject.device)
    with torch.no_grad():
        expected = subject.logits(x)
        z = subject.normalise(x)
        for block in blocks:
            z = block(z)
    if z.shape != expected.shape:
        raise AuditError(
            f"split: the blocks at {', '.join(names)} give {tuple(z.shape)} where the model gives "
            f"{tuple(expected.shape)}; cut at another layer."
        )
    scale = max(1.0, float(expected.abs().max()))
    gap = float((z.float() - expected).abs().max())
    if not gap <= CLOSE * scale:
        raise AuditError(
            f"split: the blocks at {', '.join(names)} differ from the model's logits by {gap:.2g}; cut at another "
            "layer."
        )
