"""Probe: one forward and one backward pass show which layers of a network can be explained.

A layer can be explained when its output is one tensor and **every path from the image to the logits runs through it**:
then the rest of the network is a function of its output alone. That is a question about the autograd graph of one pass:
with the layer's node taken out, the image must not be reachable from the logits. Each call of a module that runs
several times is a layer of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from auditor.errors import ModelError
from auditor.subject.layer_calls import named_call
from auditor.subject.layers import Layer, Layout, layout_of

if TYPE_CHECKING:
    from auditor.subject.subject import Subject

N_IMAGES = 3


@dataclass(slots=True)
class _Output:
    """What is known of one call's output; taken at once, since an in-place successor may change the tensor later."""

    shape: tuple[int, ...]  # with the batch
    is_number: bool  # floating point
    is_nonnegative: bool
    mark: tuple[Any, ...]  # equal for equal outputs
    node: Any  # autograd node, or None where nothing depends on the image
    number: int  # which of the node's outputs
    hands_on: tuple[Any, ...] | None = None  # mark of its first input, where the call only moved these numbers


def probe(subject: Subject) -> list[Layer]:
    """Return every named layer in the order in which they finish, and whether it can be explained."""
    generator = torch.Generator().manual_seed(0)
    n = N_IMAGES if subject.max_batch is None else subject.max_batch
    x = torch.rand(n, *subject.input_shape, generator=generator).to(subject.device, subject.dtype).requires_grad_(True)
    outputs: dict[str, list[_Output | None]] = {}
    order: list[tuple[str, int, _Output | None]] = []  # module, number of the call, what it put out
    inputs: list[Tensor] = []  # of every module, in the order in which they finish

    versions: dict[str, int] = {}  # of the first input, by which a change in place is seen

    def begin(name: str) -> Any:
        def hook(_module: nn.Module, args: Any) -> None:
            if args and isinstance(args[0], Tensor):
                versions[name] = args[0]._version

        return hook

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            given = args[0] if args and isinstance(args[0], Tensor) else None
            if given is not None and given.requires_grad:
                inputs.append(given)
            value = _output(output) if isinstance(output, Tensor) else None
            if value is not None and given is not None and versions.get(name) == given._version:
                value.hands_on = _moved(module, given, output)
            outputs.setdefault(name, []).append(value)
            order.append((name, len(outputs[name]), value))

        return hook

    with subject.at_rest(), torch.enable_grad():
        handles = [m.register_forward_hook(keep(k)) for k, m in subject.module.named_modules() if k]
        handles += [m.register_forward_pre_hook(begin(k)) for k, m in subject.module.named_modules() if k]
        try:
            logits = subject.forward(x)
        finally:
            for handle in handles:
                handle.remove()
        if logits.grad_fn is None:
            raise ModelError(
                "the model's logits do not depend on the image in a differentiable way; it cannot be explained."
            )
        gradients = _gradients(x, [logits, *reversed(inputs)], outputs, generator)
    root, leaf = logits.grad_fn, _leaf_of(x)
    first: dict[Any, str] = {}  # the outermost name of each output
    marks: set[Any] = set()  # of what has a name before
    layers = []
    for name, number, output in order:
        kind, n_calls = _type_name(subject.module.get_submodule(name)), len(outputs[name])
        if n_calls > 1 and number == 1:
            layers.append(_not_one(name, kind, output, n_calls))
        layer = named_call(name, number if n_calls > 1 else None)
        layers.append(_judge(layer, kind, output, n, subject.input_shape[1:], root, leaf, gradients, first, marks))
        if output is not None:
            marks.add(output.mark)
    return layers


def _output(output: Tensor) -> _Output:
    """Look at an output; copies of all of them would be most of the memory of a pass."""
    z = output.detach()
    shape, is_number = tuple(int(k) for k in z.shape), z.is_floating_point()
    return _Output(shape, is_number, bool((z >= 0).all()), _mark(z), output.grad_fn, output.output_nr)


def _mark(z: Tensor) -> tuple[Any, ...]:
    shape = tuple(int(k) for k in z.shape)
    if not z.is_floating_point() or not z.numel():
        return (shape,)
    flat = z.detach().reshape(-1)
    sums = (flat.sum(), flat.square().sum(), flat[::7].sum(), flat[::31].sum(), flat[:1].sum(), flat[-1:].sum())
    return (shape, *(float(value) for value in sums))


def _moved(module: nn.Module, given: Tensor, output: Tensor) -> tuple[Any, ...] | None:
    """Return the mark of the input of a call that computes nothing: its numbers come out again, zeros perhaps between.

    Only a module without weights can; one that was given something else, or changed it, gives None.
    """
    if any(True for _ in module.parameters()) or not (given.is_floating_point() and output.is_floating_point()):
        return None
    if given.ndim < 2 or given.shape[:1] != output.shape[:1]:
        return None
    x, z = given.detach().reshape(-1), output.detach().reshape(-1)
    if z.numel() < x.numel():
        return None
    if given.shape == output.shape and bool((x == z).all()):
        return _mark(given)
    if not torch.allclose(x.double().square().sum(), z.double().square().sum(), rtol=1e-9):
        return None  # most layers, and cheaper than sorting
    before, after = (values[values != 0].sort().values for values in (x, z))
    return _mark(given) if len(before) == len(after) and bool((before == after).all()) else None


def _not_one(name: str, kind: str, output: _Output | None, n_calls: int) -> Layer:
    shape = () if output is None else output.shape[1:]
    reason = f"it is called {n_calls} times in one pass; each call is a layer, {name}#1 to {name}#{n_calls}"
    return Layer(name, kind, shape, None, False, False, reason)


def _judge(
    name: str,
    kind: str,
    output: _Output | None,
    n: int,
    size: tuple[int, int],
    root: Any,
    leaf: Any,
    gradients: dict[tuple[Any, int], Tensor],
    first: dict[Any, str],
    marks: set[Any],
) -> Layer:
    if output is None:
        return Layer(name, kind, (), None, False, False, "its output is not one tensor")
    shape, positive = output.shape[1:], output.is_nonnegative

    def refuse(reason: str, layout: Layout | None = None) -> Layer:
        return Layer(name, kind, shape, layout, positive, False, reason)

    if not 1 <= len(shape) <= 3 or output.shape[0] != n or not output.is_number:
        return refuse(f"its output {output.shape} is not (batch, …) with one to three dimensions per image")
    layout = layout_of(shape, size)
    if output.node is None:
        return refuse("it does not depend on the image", layout)
    if _reaches(root, leaf, without=output.node):
        return refuse("part of the image reaches the logits past it (a skip connection)", layout)
    slope = gradients.get((output.node, output.number))
    if layout.name == "tokens" and (slope is None or not bool(layout.to_positions(slope).any())):
        return refuse("its positions do not reach the logits, only its class token does", layout)
    mark = output.mark
    outer = first.get(mark)
    if outer is None or name.count(".") < outer.count("."):
        first[mark] = name
    same = first[mark] if first[mark] != name else ""
    return Layer(name, kind, shape, layout, positive, True, "", same, output.hands_on in marks)


def _gradients(
    x: Tensor, roots: list[Tensor], outputs: dict[str, list[_Output | None]], generator: torch.Generator
) -> dict[tuple[Any, int], Tensor]:
    """Return the gradient of a random mix of logits by every output, from one backward pass.

    A head that is still all zero (torchvision's untrained transformers) passes no gradient on; then the input of the
    last module that does stands in for the logits.
    """
    by_output: dict[tuple[Any, int], Tensor] = {}

    def catch(node: Any) -> Any:
        def hook(gradients: tuple[Tensor | None, ...]) -> None:
            for number, gradient in enumerate(gradients):
                if gradient is not None:
                    by_output[node, number] = gradient.detach()

        return hook

    nodes = {
        output.node for calls in outputs.values() for output in calls if output is not None and output.node is not None
    }
    handles = [node.register_prehook(catch(node)) for node in nodes]
    try:
        for root in roots:
            by_output.clear()
            mix = torch.randn(root.shape, generator=generator).to(root)
            (slope,) = torch.autograd.grad((root * mix).sum(), x, retain_graph=True)
            if bool(slope.any()):
                break
    finally:
        for handle in handles:
            handle.remove()
    return by_output


def _leaf_of(x: Tensor) -> Any:
    """Return the autograd node at which the image enters the graph."""
    with torch.enable_grad():  # the caller may have gradients off
        return x.view_as(x).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _reaches(root: Any, leaf: Any, *, without: Any) -> bool:
    """Whether the leaf can be reached from the root when one node is taken out."""
    if root is without:
        return False
    stack, visited = [root], {root, without}
    while stack:
        node = stack.pop()
        if node is leaf:
            return True
        for child, _ in node.next_functions:
            if child is not None and child not in visited:
                visited.add(child)
                stack.append(child)
    return False


def _type_name(module: nn.Module) -> str:
    """Return the class name; an unflattened graph remembers the original class."""
    original = getattr(module, "type_name", None)
    name = original() if callable(original) else original
    return str(name).rsplit(".", 1)[-1] if name else type(module).__name__
