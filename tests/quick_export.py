"""What every trace by torch.export does again, done once: a third of the time of tracing a small network.

The suite traces several hundred small networks. For each, torch lists all its composite operations twice, and gives
each of them some twenty kernels one by one, only to take them away afterwards. Here the list is made once, and the
kernels of an operation are kept and put in at once. What is traced is the same.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch._subclasses import fake_impls
from torch.export import exported_program

Kernels = dict[Any, Any]


def install() -> None:
    """Replace the two functions for this process."""
    exported_program._collect_all_valid_cia_ops = functools.cache(exported_program._collect_all_valid_cia_ops)
    exported_program._override_composite_implicit_decomp = kept(exported_program._override_composite_implicit_decomp)


def kept(override: Callable[[dict[Any, Any]], Any]) -> Callable[[dict[Any, Any]], Any]:
    """Return torch's function with a memory of the kernels that it gives an operation for a rule."""
    made: dict[tuple[Any, Any], tuple[Kernels, Kernels, Any]] = {}

    @contextmanager
    def overridden(rules: dict[Any, Any]) -> Iterator[None]:
        with ExitStack() as stack:
            for operation, rule in rules.items():
                before, after, fake = made.get((operation, rule), (None, None, None))
                if after is not None and before == operation.py_kernels:
                    stack.callback(put, operation, operation.py_kernels.copy(), None)
                    put(operation, after, fake)
                else:
                    before = operation.py_kernels.copy()
                    stack.enter_context(override({operation: rule}))
                    fake = fake_impls.op_implementations_dict.get(operation)
                    made[operation, rule] = before, operation.py_kernels.copy(), fake
            yield

    return overridden


def put(operation: Any, kernels: Kernels, fake: Any) -> None:
    """Give an operation its kernels, and the rule by which it runs on fake tensors; None takes that rule away."""
    operation.py_kernels.clear()
    operation.py_kernels.update(kernels)
    operation._dispatch_cache.clear()
    if fake is None:
        fake_impls._deregister_op_impl(operation)
    elif operation not in fake_impls.op_implementations_dict:
        fake_impls.register_op_impl(operation)(fake)
