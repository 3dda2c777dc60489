"""A network as a functional ATen graph: what it computes, whatever classes it was written with.

`AtenGraph.trace` exports any module that ``torch.export`` can follow (an in-memory model, or one that came back from a
pt2 file through ``torch.export.unflatten``), makes it functional, and keeps for every node the layer it came from.
Batch norm that follows a convolution or a linear map directly is folded into it when the graph runs.
"""

from __future__ import annotations

import functools
import logging
import operator
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.node import map_arg

from auditor.errors import LayerError, ModelError, ShapeError
from auditor.network.pointwise_convolution import conv2d
from auditor.subject.layer_calls import split_call
from auditor.subject.subject import Subject

if TYPE_CHECKING:

    class Node:
        """A node of torch.fx, whose own annotations are too wide to say what an argument is."""

        op: str
        name: str
        target: Any
        args: tuple[Any, ...]
        kwargs: dict[str, Any]
        meta: dict[str, Any]
        users: dict[Node, None]
        all_input_nodes: list[Node]
else:
    from torch.fx import Node

log = logging.getLogger(__name__)
aten = torch.ops.aten
Values = dict[Node, Any]

CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
BATCH_NORM = aten._native_batch_norm_legit_no_training.default
# written out in simpler operations when a graph is read, so that fewer need a rule
COMPOSITE = (aten.einsum.default, aten.stack.default, aten.addcmul.default, aten.avg_pool1d.default,
             aten.adaptive_avg_pool1d.default, aten.pixel_shuffle.default, aten.pixel_unshuffle.default,
             aten.channel_shuffle.default, aten.glu.default, aten.baddbmm.default)  # fmt: skip


_KEEP_CHANNELS = (aten.permute.default, aten.transpose.int, aten.dropout.default, aten.clone.default,
                  aten.contiguous.default, aten.alias.default)  # fmt: skip


class _Outer(nn.Module):
    """One tensor in, one tensor out: hides how the inner module spells its arguments."""

    def __init__(self, subject: nn.Module, forward: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.subject, self.of_subject = subject, forward

    def forward(self, x: Tensor) -> Any:
        out = self.subject(x) if self.of_subject is None else self.of_subject(x)
        return out[0] if isinstance(out, (tuple, list)) else out


@contextmanager
def as_evaluated(module: nn.Module) -> Iterator[None]:
    """Put ``module`` in eval mode and give every submodule its own mode back afterwards."""
    modes = {m: m.training for m in module.modules()}
    try:
        for m in modes:
            m.training = False
        yield
    finally:
        for m, training in modes.items():
            m.training = training


@dataclass
class AtenGraph:
    """Nodes in order of execution, the tensors of the model by node, and the node of each layer.

    >>> graph = AtenGraph.trace(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.zeros(2, 4))
    >>> [str(n.target) for n in graph.steps]
    ['aten.linear.default', 'aten.relu.default']
    >>> graph.layer("1").name, graph.batch
    ('relu', None)
    """

    steps: list[Node]
    constants: dict[Node, Tensor]
    input: Node
    output: Node
    batch: int | None  # the only batch size the graph accepts, or None
    shape: tuple[int, ...]  # of one image
    live: frozenset[Node] = field(default_factory=frozenset, repr=False)  # nodes that depend on the image
    find_layer: Callable[[str], Node | None] | None = field(default=None, repr=False)  # for layers without operation
    clipped: dict[Any, Any] = field(default_factory=dict, repr=False)  # kept for the next walk, see linear_maps
    names: dict[Node, str] = field(default_factory=dict, repr=False)  # of the constants in the module's state
    _folded: dict[Node, tuple[tuple[int, ...], Tensor, Tensor | None]] = field(default_factory=dict, repr=False)
    _derived: dict[Node, tuple[tuple[int, ...], Any]] = field(default_factory=dict, repr=False)
    _turned: dict[Node, tuple[tuple[int, ...], Tensor | None]] = field(default_factory=dict, repr=False)
    _located: dict[str, Node | None] = field(default_factory=dict, repr=False)  # layers without operation

    def __post_init__(self) -> None:
        live = {self.input}
        for node in self.steps:
            if is_signal(node, or_several=True) and any(n in live for n in node.all_input_nodes):
                live.add(node)
        self.live = frozenset(live)

    @classmethod
    def trace(
        cls, module: nn.Module | ExportedProgram, example: Tensor, forward: Callable[[Tensor], Tensor] | None = None
    ) -> AtenGraph:
        """Export ``module`` for inputs like ``example`` (batch first, at least two of them) and read its graph.

        ``forward`` runs the module where that is more than a call: a subject leaves a softmax at the end out.
        """
        if isinstance(module, ExportedProgram):
            return cls._read(module, "")
        with warnings.catch_warnings(), torch.no_grad(), as_evaluated(module):
            warnings.simplefilter("ignore")  # export warns about its own internals
            try:
                program = torch.export.export(
                    _Outer(module, forward), (example,), dynamic_shapes=({0: Dim.AUTO},), strict=False
                )
            except Exception as err:
                raise ModelError(
                    f"AtenGraph.trace: torch.export could not follow {type(module).__name__} on an input of shape "
                    f"{tuple(example.shape)} ({_first_line(err)}). Excitation backprop needs the graph; use another "
                    f"heatmap method, or remove the data-dependent control flow."
                ) from err
            graph = cls._read(program, "subject")
            if graph.batch is None and not graph._takes(example[:1]):
                graph.batch = len(example)  # the code reads len(x), which export takes for a constant
            return graph

    def _takes(self, x: Tensor) -> bool:
        try:
            self.run(x)
        except (IndexError, RuntimeError):  # an operation that asks for the second image, or for all of the example
            return False
        return True

    @classmethod
    def _read(cls, program: ExportedProgram, prefix: str) -> AtenGraph:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # functional: no operation writes into its input
            program = program.run_decompositions(dict(_decompositions()))
        nodes = list(program.graph.nodes)
        by_name = {node.name: node for node in nodes if node.op == "placeholder"}
        constants: dict[Node, Tensor] = {}
        names: dict[Node, str] = {}
        inputs = []
        for spec in program.graph_signature.input_specs:
            node = by_name[spec.arg.name]
            if spec.kind == InputKind.USER_INPUT:
                inputs.append(node)
            elif spec.target is not None:
                state = program.state_dict if spec.target in program.state_dict else program.constants
                constants[node] = state[spec.target].detach()
                names[node] = spec.target.removeprefix(f"{prefix}.")
        if len(inputs) != 1:
            raise ModelError(f"AtenGraph.trace: wanted a model with one image input, got {len(inputs)} inputs.")
        outputs = [n for n in nodes[-1].args[0] if isinstance(n, Node)]
        n_batch, *shape = inputs[0].meta["val"].shape
        for node in nodes:
            _remember_layers(node, prefix)
        return cls(
            steps=[n for n in nodes if n.op == "call_function"],
            constants=constants,
            input=inputs[0],
            output=outputs[0],
            batch=int(n_batch) if isinstance(n_batch, int) else None,
            shape=tuple(int(s) for s in shape),
            names=names,
        )

    def reweighted(self, module: nn.Module) -> AtenGraph:
        """Return the graph of another module of the same build, with its weights, without tracing again."""
        state = module.state_dict()
        replaced = {node: state[name].detach() for node, name in self.names.items() if name in state}
        return replace(self, constants={**self.constants, **replaced}, clipped={}, _folded={}, _derived={}, _turned={})

    def on_cpu(self) -> AtenGraph:
        """Return the graph with its tensors on the CPU; where they are there already it is the same."""
        if all(tensor.device.type == "cpu" for tensor in self.constants.values()):
            return self
        moved = {node: tensor.cpu() for node, tensor in self.constants.items()}
        return replace(self, constants=moved, clipped={}, _folded={}, _derived={}, _turned={})

    @property
    def any_strides(self) -> bool:
        """Whether the graph computes the same for an input in any memory format (nothing in it reads strides)."""
        return not any("as_strided" in str(node.target) for node in self.steps)

    @property
    def layers(self) -> list[str]:
        """Names of all layers that do something in eval mode, in order of execution."""
        return list(dict.fromkeys(name for node in self.steps for name in node.meta["layers"] if name))

    def layer(self, name: str) -> Node:
        """Return the node that leaves layer ``name``; ``""`` is the whole model, ``"input"`` its input."""
        if name == "input":
            return self.input
        if name == "":
            return self.output
        module, call = split_call(name)
        inside = [n for n in self.steps if module in n.meta["layers"]]
        calls = {n.meta["calls"][module] for n in inside}
        if call is not None or len(calls) > 1:
            inside = [n for n in inside if n.meta["calls"][module] == (call or 1)]
        if not inside and self.find_layer is not None:
            if name not in self._located:  # it runs the model, so once is enough
                self._located[name] = self.find_layer(name)
            node = self._located[name]
            if node is not None:
                return node
        if not inside:
            close = ", ".join(self.layers[:40])
            raise LayerError(
                f"AtenGraph.layer: no operation belongs to layer '{name}' (a dropout or identity has none in eval "
                f"mode). Take one of: {close}{', …' if len(self.layers) > 40 else ''}."
            )
        members = set(inside)
        leaving = [n for n in inside if is_signal(n) and any(user not in members for user in n.users)]
        return (leaving or inside)[-1]

    def before(self, node: Node, given: Collection[Node] = ()) -> set[Node]:
        """Every node that ``node`` is computed from, and ``node`` itself; not what only ``given`` nodes need."""
        needed: set[Node] = set()
        todo = [node]
        while todo:
            n = todo.pop()
            if n not in needed:
                needed.add(n)
                todo.extend(() if n in given else n.all_input_nodes)
        return needed

    def run(
        self,
        x: Tensor,
        until: Node | None = None,
        pinned: frozenset[Node] = frozenset(),
        given: Mapping[Node, Tensor] | None = None,
    ) -> Values:
        """Return the value of every node that ``until`` (the output) needs; ``pinned`` nodes are never folded away.

        ``given`` are values of an earlier pass over the same images: what only they need is not computed again.
        """
        with torch.no_grad():
            return self.evaluate(x, until, pinned, given)

    def evaluate(
        self,
        x: Tensor,
        until: Node | None = None,
        pinned: frozenset[Node] = frozenset(),
        given: Mapping[Node, Tensor] | None = None,
    ) -> Values:
        """Return what ``run`` does, differentiable where gradients are enabled."""
        if tuple(x.shape[1:]) != self.shape:
            raise ShapeError(
                f"AtenGraph.run: the graph was traced for images of shape {self.shape}, got {tuple(x.shape[1:])}. "
                f"Resize them, or trace again."
            )
        if self.batch is not None and len(x) != self.batch:
            raise ShapeError(f"AtenGraph.run: this graph accepts {self.batch} images at a time only, got {len(x)}.")
        values: Values = {self.input: x, **self.constants, **(given or {})}
        needed = self.before(until or self.output, given or ())
        fold = {n.args[0]: n for n in needed if self.folds(n, pinned)}
        for node in self.steps:
            if node not in needed or node in fold or node in values:
                continue  # a folded convolution is run by its batch norm
            values[node] = self.compute(node, values, pinned)
        return values

    def compute(self, node: Node, values: Values, pinned: frozenset[Node] = frozenset()) -> Any:
        """Return the value of one node from those of its inputs; a batch norm that folds runs its linear map too."""
        if self.folds(node, pinned):
            linear = node.args[0]
            weight, bias = self.weights(node, pinned)
            x, _, _, *rest = _padded_args(linear)
            convolve = conv2d if linear.target is aten.conv2d.default else linear.target
            return (convolve(values[x], weight, bias, *rest),)
        if node.target is aten.conv2d.default and not node.kwargs:
            x, weight, bias, *rest = map_arg(_padded_args(node), values.__getitem__)  # type: ignore[arg-type]
            return conv2d(x, weight, bias, *rest)
        return call(node, values.__getitem__)

    def folds(self, node: Node, pinned: frozenset[Node] = frozenset()) -> bool:
        """Whether ``node`` is a batch norm that disappears into the convolution or linear map before it."""
        if node.target is not BATCH_NORM:
            return False
        before = node.args[0]
        return (
            isinstance(before, Node)
            and before.target in (*CONVOLUTIONS, aten.linear.default)
            and before.args[1] in self.constants
            and len(before.users) == 1
            and before not in pinned
        )

    def constant(self, node: Any) -> Any:
        """Return the value of an argument that depends neither on the image nor on the batch, else None.

        Weights are often made of parameters on the way: a bias put together from parts, a standardised kernel.
        """
        if not isinstance(node, Node):
            return node
        if node in self.constants:
            return self.constants[node]
        if node in self.live or node.op != "call_function":
            return None
        stamp = tuple(self.constants[n]._version for n in self.before(node) if n in self.constants)
        if node not in self._derived or self._derived[node][0] != stamp:
            inputs = {n: self.constant(n) for n in node.all_input_nodes}
            with torch.no_grad():
                is_constant = all(value is not None for value in inputs.values())
                self._derived[node] = (stamp, call(node, inputs.__getitem__) if is_constant else None)
        return self._derived[node][1]

    def turned_channels(self, linear: Node, pinned: frozenset[Node] = frozenset()) -> Tensor | None:
        """Return +1 or -1 per output channel by the sign of a layer scale behind ``linear``; None where all are +1.

        A layer scale is a product with one constant per channel, with at most moves between it and the linear map. A
        negative one turns the channel round: folded into the map it changes the sign of a row of weights.
        """
        scale = self._layer_scale(linear, pinned)
        if scale is None:
            return None
        chain, factor = scale
        stamp = (factor._version,)
        if linear not in self._turned or self._turned[linear][0] != stamp:
            self._turned[linear] = (stamp, _signs(linear, chain, factor))
        return self._turned[linear][1]

    def _layer_scale(self, node: Node, pinned: frozenset[Node]) -> tuple[list[Node], Tensor] | None:
        if node.target not in (*CONVOLUTIONS, aten.linear.default) or self.constant(node.args[1]) is None:
            return None
        chain = [node]
        while len(node.users) == 1 and node not in pinned:
            (user,) = node.users
            if user.target is aten.mul.Tensor:
                factor = self.constant(user.args[1] if user.args[0] is node else user.args[0])
                return (chain, factor) if isinstance(factor, Tensor) and bool((factor < 0).any()) else None
            if user.target not in _KEEP_CHANNELS:
                return None
            chain.append(node := user)
        return None

    def scale(self, node: Node) -> tuple[Tensor, Tensor]:
        """Slope and offset per channel of a batch norm in eval mode."""
        _, gamma, beta, mean, var, _, eps = node.args
        mean, var = self.constants[mean], self.constants[var]
        slope = (var + eps).rsqrt()
        if gamma is not None:
            slope = slope * self.constants[gamma]
        offset = -mean * slope
        return slope, offset if beta is None else offset + self.constants[beta]

    def weights(self, node: Node, pinned: frozenset[Node] = frozenset()) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of a linear node, or of the linear map that a batch norm folds into."""
        if not self.folds(node, pinned):
            return self.constant(node.args[1]), self.constant(_padded_args(node)[2])
        _, w, b, *_ = _padded_args(node.args[0])
        sources = [self.constants[n] for n in (w, b, *node.args[1:5]) if isinstance(n, Node)]
        stamp = tuple(t._version for t in sources)
        cached = self._folded.get(node)
        if cached is None or cached[0] != stamp:  # weights trained on since then
            slope, offset = self.scale(node)
            weight = self.constants[w] * slope.view(-1, *[1] * (self.constants[w].dim() - 1))
            bias = offset if b is None else offset + slope * self.constant(b)
            cached = self._folded[node] = (stamp, weight, bias)
        return cached[1], cached[2]


_GRAPHS: WeakKeyDictionary[Subject, tuple[Any, AtenGraph]] = WeakKeyDictionary()


def graph_of(subject: Subject) -> AtenGraph:
    """Return the graph of a subject's module, traced once while the subject stays on its device in its precision."""
    where = subject.device, subject.dtype
    if subject not in _GRAPHS or _GRAPHS[subject][0] != where:
        with subject.at_rest():
            example = subject.normalise(torch.full((subject.max_batch or 2, *subject.input_shape), 0.5))
            graph = AtenGraph.trace(subject.module, example, subject.forward_normalised)
        graph.find_layer = functools.partial(_node_of_equal_value, weakref.ref(subject), weakref.ref(graph))
        _GRAPHS[subject] = where, graph
    return _GRAPHS[subject][1]


def is_traced(subject: Subject) -> bool:
    """Whether ``graph_of`` has the graph at hand."""
    return subject in _GRAPHS and _GRAPHS[subject][0] == (subject.device, subject.dtype)


def _node_of_equal_value(
    subject_ref: weakref.ref[Subject], graph_ref: weakref.ref[AtenGraph], name: str
) -> Node | None:
    """Return the node that puts out what a layer does: a dropout has no operation, but what feeds it has."""
    subject, graph = subject_ref(), graph_ref()
    if subject is None or graph is None or name not in {item.name for item in subject.layers()}:
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(graph.batch or 2, *subject.input_shape, generator=generator).to(subject.device)
    with torch.no_grad(), subject.at_rest():
        z = subject.activations(x, [name])[name]
        values = graph.run(subject.normalise(x))
    scale = float(z.abs().max()) or 1.0
    for node in reversed(graph.steps):
        value = values.get(node)
        if not isinstance(value, Tensor) or value.shape != z.shape or not value.is_floating_point():
            continue
        if float((value.to(z) - z).abs().max()) <= 1e-5 * scale:
            return node
    return None


def _signs(linear: Node, chain: list[Node], factor: Tensor) -> Tensor | None:
    """Return the sign that ``factor`` gives to each output channel of ``linear``; None if it differs inside one."""
    shape = [1, *(int(n) for n in linear.meta["val"].shape[1:])]
    dim = len(shape) - 1 if linear.target is aten.linear.default else 1
    channel = torch.arange(shape[dim]).view(*[-1 if d == dim else 1 for d in range(len(shape))]).expand(shape)
    for step in chain[1:]:
        moved = {step.args[0]: channel}
        channel = call(step, moved.__getitem__)
    if torch.broadcast_shapes(factor.shape, channel.shape) != channel.shape:  # type: ignore[no-untyped-call]
        return None
    sign = torch.where(factor < 0, -1.0, 1.0).to("cpu").expand(channel.shape).flatten()
    by_channel = torch.empty(shape[dim]).scatter_(0, channel.flatten(), sign)
    return by_channel.to(factor) if torch.equal(by_channel[channel.flatten()], sign) else None


def call(node: Node, value_of: Callable[[Node], Any]) -> Any:
    """Run the operation of a node on the values that ``value_of`` gives for its input nodes."""
    args, kwargs = map_arg((node.args, node.kwargs), value_of)  # type: ignore[arg-type]
    target = aten.reshape.default if node.target is aten.view.default else node.target  # whatever the strides are
    return target(*args, **kwargs)


def is_signal(node: Node, or_several: bool = False) -> bool:
    """Whether the node's value is a floating tensor, or a tuple that begins with one (not a size or an index)."""
    value = node.meta.get("val")
    if or_several and isinstance(value, (tuple, list)) and value:
        value = value[0]
    return isinstance(value, Tensor) and value.is_floating_point()


def source(node: Node, skip: Callable[[Node], bool]) -> Node:
    """Follow first arguments upwards while ``skip`` says so."""
    while skip(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def is_getitem(node: Node) -> bool:
    """Whether the node picks one output of an operation with several."""
    return node.target is operator.getitem


def _padded_args(node: Any) -> list[Any]:
    """Return ``(x, weight, bias, ...)`` of a linear node with a bias that may be left out filled in as None."""
    args = list(node.args)
    return args if len(args) > 2 else [*args, None]


def _remember_layers(node: Node, prefix: str) -> None:
    stack = node.meta.get("nn_module_stack") or {}
    calls: dict[str, int] = {}
    for key, (path, _) in stack.items():
        name, copy = split_call(path)
        again = key.rpartition(path)[2] if path else ""  # "@1" at the second call
        call = (copy or 1) + (int(again[1:]) if again[:1] == "@" and again[1:].isdigit() else 0)
        if name == prefix or name.startswith(f"{prefix}."):
            calls[name[len(prefix) + 1 :]] = call
        elif not prefix:
            calls[name] = call
    node.meta["layers"], node.meta["calls"] = tuple(calls), calls


@functools.cache
def _decompositions() -> dict[Any, Any]:
    """Return what torch makes of the composite operations; its table is filled anew, slowly, for each who asks."""
    rules = torch.export.default_decompositions()
    return {op: rules[op] for op in COMPOSITE if op in rules}


def _first_line(err: Exception) -> str:
    return (str(err).strip().splitlines() or [type(err).__name__])[0][:200]
