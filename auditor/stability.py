"""Stability of one decision: how much the layer and the reasons move when the image moves a little.

With noise directions d on a sphere of a given radius around the image x:

    c1 = max |a(x + d) - a(x)| / |d|          zeroth order, a = activation of the explained layer
    c2 = max |g(x + d) - g(x)| / |d|          first order, g = gradient of the target logit by the pixels

Both are sampled, so they are lower estimates of the local constants. ``score`` in [0, 1] is the share of samples that
keep the predicted class, times the mean cosine between g(x + d) and g(x) (negative counts as 0): 1 says that within the
radius neither decision nor reasons change.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from auditor.errors import OptionError
from auditor.subject import Subject


@dataclass(frozen=True, slots=True)
class Stability:
    """Sampled local constants of one image; ``bound`` is a global upper bound where one is known."""

    c1: float
    c2: float
    radius: float
    samples: int
    bound: float | None
    score: float

    def to_json(self) -> dict[str, Any]:
        """Return plain Python for JSON."""
        return asdict(self)


def stability(
    subject: Subject, image: Tensor, layer: str, target: int, *, samples: int = 8, radius: float = 0.02, seed: int = 0
) -> Stability:
    """Return the stability of the decision on one image (channels, height, width).

    ``radius`` is the root mean square change per pixel component: 0.02 is five grey levels of 255.
    """
    if samples < 1 or not radius > 0:
        raise OptionError(f"stability: want samples >= 1 and radius > 0, got {samples} and {radius}.")
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(samples, *image.shape, generator=generator)
    size = radius * image.numel() ** 0.5
    noise = noise * (size / noise.flatten(1).norm(dim=1).clamp_min(1e-12))[:, None, None, None]
    x = torch.cat([image[None], image[None] + noise]).to(subject.device, subject.dtype).requires_grad_(True)
    with torch.enable_grad():
        logits, found = subject.run(x, [layer])
        (g,) = torch.autograd.grad(logits[:, target].sum(), x)
    a, g = found[layer].detach().flatten(1).double(), g.flatten(1).double()
    same = (logits[1:].argmax(1) == logits[0].argmax()).double().mean()
    cosine = torch.nn.functional.cosine_similarity(g[1:], g[:1], dim=1).clamp_min(0).mean()
    if not bool(g.any()):  # a constant model: nothing moves
        cosine = torch.ones(())
    return Stability(
        c1=float((a[1:] - a[0]).norm(dim=1).max() / size),
        c2=float((g[1:] - g[0]).norm(dim=1).max() / size),
        radius=radius,
        samples=samples,
        bound=None,
        score=float(same * cosine),
    )
