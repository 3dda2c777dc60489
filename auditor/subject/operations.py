"""Operations: what a pass of a network costs, counted by torch and not timed, so that it is the same on every machine.

What is decided by it (a layer, how long a fit works) is then the same wherever the fit runs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from auditor.subject.layer_calls import on_call
from auditor.subject.subject import Subject


class _Reached(Exception):
    """The layer has put out its value; what comes after it is not counted."""


def operations(subject: Subject, image: Tensor, up_to: str | None = None) -> int:
    """Return the operations of one image's pass, two for a multiplication; up to a layer where one is named.

    >>> from torch import nn
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 2)).eval()
    >>> model = Subject(net, input_shape=(1, 3, 4))
    >>> operations(model, torch.zeros(1, 1, 3, 4)), operations(model, torch.zeros(1, 1, 3, 4), up_to="1")
    (140, 120)
    """

    def stop(_output: object) -> None:
        raise _Reached

    counter = FlopCounterMode(display=False)
    handle = on_call(subject.module, up_to, stop) if up_to is not None else None
    try:
        with torch.no_grad(), counter:
            subject.logits(image)
    except _Reached:
        pass
    finally:
        if handle is not None:
            handle.remove()
    return int(counter.get_total_flops())
