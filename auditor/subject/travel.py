"""Travel: how a subject gets to another process, where it is loaded once and must be the one that was sent.

A subject from a registry is loaded there again by its ``origin``; one that a program built travels as its module.
What arrived stays in the process, the last few of each, so that later work finds it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from auditor.errors import AuditError, TamperError

if TYPE_CHECKING:
    from auditor.subject.subject import Subject

T = TypeVar("T")
MOST = 64  # subjects and explainers that stay in a process
_here: OrderedDict[str, Any] = OrderedDict()
_refusals: list[AuditError] = []
_lock = threading.RLock()


@dataclass(frozen=True)
class Built:
    """A subject that a program built: its module and what was said of it."""

    module: nn.Module
    options: Mapping[str, Any]

    def __call__(self) -> Subject:
        """Return it, built again."""
        from auditor.subject.subject import Subject

        return Subject(self.module, **self.options)


def once(key: str, load: Callable[[], T]) -> T:
    """Return what is kept under a key in this process; it is loaded at the first call."""
    with _lock:
        if key not in _here:
            try:
                _here[key] = load()
            except AuditError as error:
                _refusals[:] = [error]
                raise
            while len(_here) > MOST:
                _here.popitem(last=False)
        _here.move_to_end(key)
        arrived: T = _here[key]
        return arrived


def refusal() -> AuditError | None:
    """Return why the last thing did not arrive, and forget it; who carried it may have put it in other words."""
    return _refusals.pop() if _refusals else None


def arrive(origin: Callable[[], Subject], digest: str, device: str, layers: Any) -> Subject:
    """Return the subject of an origin, loaded once in this process; one of another digest than was sent is refused."""

    def load() -> Subject:
        subject = origin()
        if subject.digest != digest:
            raise TamperError(
                f"the model that a worker loaded has digest {subject.digest[:12]}, and the command that asks has "
                f"{digest[:12]}: another version of the model, or other bytes; give all machines the same registry."
            )
        subject.origin = origin
        return subject.arrived(_device(device), layers)

    return once(f"subject {digest} {device}", load)


def arrive_changed(
    origin: Callable[[], Subject], weights: Mapping[str, Tensor], identity: Any, device: str, layers: Any
) -> Subject:
    """Return a twin whose weights were changed on purpose: it goes by the digest of its original.

    It is loaded each time, since it must share its weights with no other.
    """
    subject = origin()
    with torch.no_grad():
        subject.module.load_state_dict(weights)
    subject.goes_by(identity)
    return subject.arrived(_device(device), layers)


def _device(device: str) -> str:
    return device if device == "cpu" or torch.cuda.is_available() else "cpu"
