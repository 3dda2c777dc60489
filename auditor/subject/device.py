"""Where models run that are loaded by name: the CPU, unless somebody names another device for a command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from auditor.errors import OptionError

_CHOSEN: ContextVar[str] = ContextVar("device", default="cpu")


def chosen_device() -> torch.device:
    """Return the device of models that are loaded now."""
    return torch.device(_CHOSEN.get())


@contextmanager
def running_on(name: str) -> Iterator[None]:
    """Load models to a device while it lasts: cpu, cuda, cuda:1, or auto, a GPU where there is one.

    >>> with running_on("auto"):
    ...     chosen_device().type in ("cpu", "cuda")
    True
    """
    before = _CHOSEN.set(checked_device(name))
    try:
        yield
    finally:
        _CHOSEN.reset(before)


def checked_device(name: str) -> str:
    """Return the device that a name means; one that is not there, or is none of ours, is an error."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise OptionError(f"device {name}: want cpu, cuda, cuda:1 or auto.") from None
    if device.type not in ("cpu", "cuda"):
        raise OptionError(f"device {name}: want cpu, cuda, cuda:1 or auto.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(f"device {name}: torch finds no GPU here; take --device cpu.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise OptionError(f"device {name}: there are {torch.cuda.device_count()} GPUs here, numbered from 0.")
    return name
