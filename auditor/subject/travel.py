"""Travel: how a subject gets to another process, where it is loaded once and must be the one that was sent.

A subject from a registry is loaded there again by its ``origin``; one that a program built travels as its module.
Subjects stay in the process that they came to, the last few of them, so that later work finds them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from auditor.errors import TamperError

if TYPE_CHECKING:
    from auditor.subject.subject import Subject

MOST = 6  # subjects that stay in a process
Origin = Callable[[], "Subject"]
_here: OrderedDict[str, Subject] = OrderedDict()
_lock = threading.Lock()


@dataclass(frozen=True)
class Built:
    """A subject that a program built: its module and what was said of it."""

    module: nn.Module
    options: Mapping[str, Any]

    def __call__(self) -> Subject:
        """Return it, built again."""
        from auditor.subject.subject import Subject

        return Subject(self.module, **self.options)


def arrive(origin: Origin, digest: str, device: str, is_exact: bool) -> Subject:
    """Return the subject of an origin in this process; one of another digest than was sent is refused.

    ``is_exact`` is false for a twin whose weights were changed on purpose: it keeps the digest of its original.
    """
    with _lock:
        subject = _here.get(digest) if is_exact else None
        if subject is not None:
            _here.move_to_end(digest)
            return subject
    subject = origin()
    if is_exact and subject.digest != digest:
        raise TamperError(
            f"the model was loaded with digest {subject.digest[:12]} on this machine, and the command that asks has "
            f"{digest[:12]}: another version of the model, or other bytes; give all machines the same registry."
        )
    if device != "cpu" and torch.cuda.is_available():
        subject = subject.to(device)
    with _lock:
        if is_exact:
            _here[digest] = subject
            while len(_here) > MOST:
                _here.popitem(last=False)
    return subject
