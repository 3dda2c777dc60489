"""Two-dimensional convolutions, those of one pixel by the library that is faster for them on one thread.

On one thread torch gives a convolution with a kernel of one pixel, and fewer than 16 images, to its matrix product
instead of oneDNN. On the processors tried (AMD EPYC) that takes twice the time, and half of the time of a MobileNet or
an EfficientNet goes there. A worker of the service has one thread and few images, so this is its usual case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ENOUGH_IMAGES = 16  # from here on torch takes oneDNN by itself


def conv2d(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    stride: Sequence[int] = (1, 1),
    padding: Any = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """Return what ``F.conv2d`` gives; differentiable by ``x`` alone where the kernel is one pixel.

    >>> x, w = torch.rand(2, 3, 4, 5), torch.rand(6, 3, 1, 1)
    >>> bool(torch.allclose(conv2d(x, w, None), F.conv2d(x, w), atol=1e-6))
    True
    """
    if not _is_pointwise(x, w, stride, padding, groups) or not _takes_the_slow_way(x, w):
        return F.conv2d(x, w, b, stride, padding, dilation, groups)
    if torch.is_grad_enabled() and x.requires_grad:
        product: Tensor = _Pointwise.apply(x, w, b)
        return product
    return _by_library(x, w, b)


def _is_pointwise(x: Tensor, w: Tensor, stride: Sequence[int], padding: Any, groups: int) -> bool:
    plain = all(int(s) == 1 for s in stride) and not isinstance(padding, str) and not any(padding)
    return plain and x.dim() == 4 and groups == 1 and w.shape[2:] == (1, 1)


def _takes_the_slow_way(x: Tensor, w: Tensor) -> bool:
    """Whether torch would not take oneDNN though it is there."""
    on_cpu = x.device.type == "cpu" and x.dtype == w.dtype == torch.float32 and type(x) is Tensor
    if not on_cpu or len(x) >= ENOUGH_IMAGES or x.numel() == 0 or torch.get_num_threads() > 1:
        return False
    return bool(torch.backends.mkldnn.is_available()) and not w.requires_grad  # type: ignore[no-untyped-call]


def _by_library(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.aten.mkldnn_convolution(x, w, b, [0, 0], [1, 1], [1, 1], 1)
    return product


class _Pointwise(torch.autograd.Function):
    """The convolution with its gradient by the same library: a convolution with the transposed weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        ctx.save_for_backward(w)
        return _by_library(x, w, b)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (w,) = ctx.saved_tensors
        return conv2d(g, w.transpose(0, 1).contiguous(memory_format=torch.channels_last), None), None, None
