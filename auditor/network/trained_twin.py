"""A subject with weights that were trained in blocks: the same module while a context lasts, then its own again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from auditor.errors import ModelError
from auditor.network.network_blocks import block_weights
from auditor.subject.subject import Subject


def trained_weights(blocks: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the parameters of all blocks of `split` by their names in the model.

    A tensor that the model uses in two blocks was trained as two; what cannot be one model again is refused.
    """
    weights: dict[str, Tensor] = {}
    for block in blocks:
        for name, value in block_weights(block).items():
            if name in weights and not torch.equal(weights[name], value):
                raise ModelError(
                    f"train: parameter {name!r} is used on both sides of a cut and was trained apart; cut elsewhere."
                )
            weights[name] = value
    return weights


class Whole(nn.Module):
    """A network as the only part of another: what came from a pt2 file takes any arguments and cannot be exported."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Return what the network gives."""
        out: Tensor = self.network(x)
        return out


@contextmanager
def with_weights(subject: Subject, weights: dict[str, Tensor]) -> Iterator[Subject]:
    """Give a subject of the same module with these weights in it; its own come back at the end.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    >>> subject = Subject(net, input_shape=(1, 2, 2))
    >>> with with_weights(subject, {"1.bias": torch.tensor([1.0, 2.0])}) as other:
    ...     float(other.logits(torch.zeros(1, 1, 2, 2))[0, 1])
    2.0
    >>> bool(subject.logits(torch.zeros(1, 1, 2, 2))[0, 1] == 2)
    False
    """
    with subject.at_rest(), torch.no_grad():
        parameters = {k: subject.module.get_parameter(k) for k in weights}
        before = {k: p.detach().clone() for k, p in parameters.items()}
        try:
            for k, p in parameters.items():
                p.copy_(weights[k])
            pre = subject.preprocessing
            yield Subject(
                Whole(subject.module).eval(),
                input_shape=subject.input_shape,
                class_names=subject.class_names,
                mean=pre.mean,
                std=pre.std,
                resize=pre.resize,
                output=subject.output.name,
            )
        finally:
            for k, p in parameters.items():
                p.copy_(before[k])
