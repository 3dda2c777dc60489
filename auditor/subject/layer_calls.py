"""Calls of a layer: a module that runs several times in one pass is as many layers, ``name#1``, ``name#2``, ….

A model that came back from a pt2 file has a module of its own for every call (``name``, ``name@1``, …); both spellings
mean the same layer on either.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

_COPY = re.compile(r"@(\d+)")


def split_call(layer: str) -> tuple[str, int | None]:
    """Return a layer's module and the number of the call, from 1; None where no call is named.

    >>> split_call("_swish#2"), split_call("block@1.conv"), split_call("layer4")
    (('_swish', 2), ('block.conv', 2), ('layer4', None))
    """
    name, mark, number = layer.rpartition("#")
    if mark and number.isdigit():
        return name, int(number)
    copies = [int(n) for n in _COPY.findall(layer)]
    return _COPY.sub("", layer), 1 + sum(copies) if copies else None


def named_call(path: str, number: int | None) -> str:
    """Return the layer's name of one call of a module; None where it is called once.

    >>> named_call("_swish", 2), named_call("_swish@1", None), named_call("layer4", None)
    ('_swish#2', '_swish#2', 'layer4')
    """
    name, copy = split_call(path)
    if number is None and copy is None:
        return path
    return f"{name}#{(number or 1) + (copy or 1) - 1}"


def locate(root: nn.Module, layer: str) -> tuple[nn.Module, int | None]:
    """Return the module behind a layer's name and which of its calls is meant; None where it must be called once.

    Raises AttributeError where there is no such module.
    """
    try:
        return root.get_submodule(layer), None
    except AttributeError:
        name, call = split_call(layer)
        if call is None:
            raise
    copies = [path for path, _ in root.named_modules() if _COPY.sub("", path) == name]
    if len(copies) > 1:  # each call has a module of its own
        copies.sort(key=lambda path: split_call(path)[1] or 1)
        if call > len(copies):
            raise AttributeError(layer)
        return root.get_submodule(copies[call - 1]), None
    return root.get_submodule(name), call


def on_call(root: nn.Module, layer: str, action: Callable[[Any], Any]) -> RemovableHandle:
    """Let ``action`` see the output of a layer in the next pass; what it returns, if anything, replaces the output.

    Without a call in the layer's name it sees every call. Calls are counted from here, so remove it after the pass.
    """
    module, call = locate(root, layer)
    n = 0

    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        nonlocal n
        n += 1
        return action(output) if call is None or n == call else None

    return module.register_forward_hook(hook)
