"""A second device on a machine that has one: tensors that hold numbers of the CPU and say they are elsewhere.

``FakeTensorMode`` knows shapes alone, so it stops at the first decision that hangs on a value, and it cannot run a
backward pass on CUDA. Here every operation is computed, on the CPU; a tensor of the second device that meets one of the
CPU in an operation is the error that a GPU would raise, and so is ``.numpy()``. What a GPU's own kernels do differently
(Triton, streams, pinned memory) is not seen by this.

    with other_device():
        subject.to(ELSEWHERE).logits(images)
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

ELSEWHERE = torch.device("meta")  # autograd knows this device on every machine


class Elsewhere(Tensor):
    """A tensor of the second device; ``here`` holds its numbers."""

    @staticmethod
    def __new__(cls, here):
        return Tensor._make_wrapper_subclass(
            cls, here.shape, here.stride(), here.storage_offset(), dtype=here.dtype, device=ELSEWHERE
        )

    def __init__(self, here):
        self.here = here

    def __repr__(self, **_):
        return f"Elsewhere({self.here!r})"

    def numpy(self, **_):
        raise TypeError("can't convert a tensor of the second device to numpy. Use Tensor.cpu() first.")

    def __array__(self, *_):
        return self.numpy()

    def tolist(self):
        return self.here.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return computed(func, args, kwargs or {})


def computed(func, args, kwargs):
    """Run an operation on the CPU; its results are where its operands are, or where it was told to put them."""
    flat = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, Tensor)]
    if any(isinstance(a, FakeTensor | FunctionalTensor) or torch._is_functional_tensor(a) for a in flat):  # an export
        return func(*args, **kwargs)
    there = [a for a in flat if isinstance(a, Elsewhere)]
    assert all(isinstance(a, Elsewhere) or a.device.type == "cpu" for a in flat), f"{func} got numbers of nothing"
    device = kwargs.get("device")
    copies = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
    moves_index = func in (
        torch.ops.aten.index.Tensor,
        torch.ops.aten.index_put_.default,
        torch.ops.aten.index_put.default,
    )
    first = flat[0] if flat else None
    strangers = [a for a in flat if not isinstance(a, Elsewhere) and a.dim() > 0]
    if there and strangers and not copies and not (moves_index and isinstance(first, Elsewhere)):
        shapes = [("elsewhere" if isinstance(a, Elsewhere) else "cpu", tuple(a.shape)) for a in flat]
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got {shapes}")
    if device is not None:
        is_there = torch.device(device) == ELSEWHERE
        kwargs = {**kwargs, "device": torch.device("cpu")}
    else:
        is_there = isinstance(first, Elsewhere) if copies else bool(there)
    plain = tree_map(lambda a: a.here if isinstance(a, Elsewhere) else a, (args, kwargs))
    result = func(*plain[0], **plain[1])
    if not is_there:
        return result
    owners = {id(a.here): a for a in there}  # operations in place give back what they were given

    def wrapped(value):
        return owners[id(value)] if id(value) in owners else Elsewhere(value) if isinstance(value, Tensor) else value

    return tree_map(wrapped, result)


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return computed(func, args, kwargs or {})


class _Factories(TorchFunctionMode):
    """What fills a tensor below all dispatch is made here and moved: ``torch.tensor``, and a list as an index."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            index = tuple(torch.tensor(i) if isinstance(i, list) else i for i in index)
            return func(args[0], index, *args[2:])
        device = kwargs.get("device")
        if func not in (torch.tensor, torch.as_tensor) or device is None or torch.device(device) != ELSEWHERE:
            return func(*args, **kwargs)
        if isinstance(args[0], Tensor):
            return args[0].to(ELSEWHERE, kwargs.get("dtype"))
        made = func(*args, **{**kwargs, "device": "cpu"})
        return made.to(ELSEWHERE)


@contextmanager
def other_device():
    """While it lasts the second device is there: tensors can be made on it and modules moved to it."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with _Factories(), _Operations():
            yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
