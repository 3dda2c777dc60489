"""Stability of one decision: how much the layer and the reasons move when the image moves a little.

With noise directions d on a sphere of a given radius around the image x:

    c1 = max |a(x + d) - a(x)| / |d|          zeroth order, a = activation of the explained layer
    c2 = max |g(x + d) - g(x)| / |d|          first order, g = gradient of the target logit by the pixels

Both are sampled, so they are lower estimates of the local constants. ``score`` in [0, 1] is the share of samples that
keep the predicted class, times the mean cosine between g(x + d) and g(x) (negative counts as 0): 1 says that within the
radius neither decision nor reasons change.

``full`` adds the worst directions: c1 is at least the largest singular value of the layer's Jacobian at x (power
iteration), and the image moved along that direction, both ways, is one more pair for c1 and c2. ``bound`` is the
certified global upper bound of c1 where the architecture gives one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from auditor.errors import OptionError
from auditor.kernels.networks.jacobian_norm import largest_singular_values
from auditor.network.graph_pass import graph_pass_of
from auditor.stability.certified_bound import certified_bound
from auditor.subject.subject import Subject

Mode = Literal["fast", "full"]
POWER_STEPS = 20
MOST_NUMBERS = 10_000_000  # pixels in one pass: 66 images of 3x224x224 with all their activations


@dataclass(frozen=True, slots=True)
class Stability:
    """Sampled local constants of one image; ``bound`` is a global upper bound of c1 where one is known."""

    c1: float
    c2: float
    radius: float
    samples: int
    bound: float | None
    score: float

    def to_json(self) -> dict[str, Any]:
        """Return plain Python for JSON."""
        return asdict(self)


def stabilities(
    subject: Subject,
    images: Tensor,
    layer: str,
    targets: Sequence[int],
    *,
    mode: Mode = "fast",
    noise_samples: int = 8,
    radius: float = 0.02,
    seed: int = 0,
) -> list[Stability]:
    """Return the stability of the decision on every image of a batch; the batch size never changes a result."""
    if len(targets) != len(images):
        raise OptionError(f"stabilities: want one target per image, got {len(targets)} for {len(images)} images.")
    sampler = make_sampler(subject, layer, mode=mode, noise_samples=noise_samples, radius=radius, seed=seed)
    return sampler.measure(images, targets)


def make_sampler(
    subject: Subject, layer: str, *, mode: Mode = "fast", noise_samples: int = 8, radius: float = 0.02, seed: int = 0
) -> Sampler:
    """Return the sampler of a mode.

    ``fast`` takes gradients at the image and at one in eight noisy copies, the others go through the network only:
    with 8 samples the cost of at most 11 forward passes per image. Noise in so many dimensions hardly differs in how
    it turns a gradient: on photos the cosines of eight copies spread by a tenth of their mean. ``full`` takes gradients
    at all copies and adds the worst directions by 20 power iterations.
    """
    if noise_samples < 1 or not radius > 0:
        raise OptionError(f"stability: want noise_samples >= 1 and radius > 0, got {noise_samples} and {radius}.")
    if mode not in ("fast", "full"):
        raise OptionError(f"stabilities: mode must be fast or full, got {mode!r}.")
    n_gradients = (noise_samples + 7) // 8 if mode == "fast" else noise_samples
    return Sampler(subject, layer, noise_samples, n_gradients, radius, seed, worst=mode == "full")


@dataclass(frozen=True, slots=True)
class SharedPass:
    """What a pass outside the sampler gave for images (n) and their copies without gradient (n, copies)."""

    activations: Tensor  # (n, 1 + copies, …) of the layer
    logits: Tensor  # (n, 1 + copies, classes)

    def rows(self, some: slice) -> SharedPass:
        """Return the same of some images."""
        return SharedPass(self.activations[some], self.logits[some])


class Sampler:
    """Moves images by the same noise, whatever batch they come in."""

    def __init__(
        self,
        subject: Subject,
        layer: str,
        noise_samples: int,
        n_gradients: int,
        radius: float,
        seed: int,
        worst: bool = False,
    ) -> None:
        self.subject, self.layer, self.noise_samples, self.n_gradients = subject, layer, noise_samples, n_gradients
        self.radius, self.worst = radius, worst
        generator = torch.Generator().manual_seed(seed)
        shape = subject.input_shape
        noise = torch.randn(noise_samples, *shape, generator=generator)
        self.size = radius * noise[0].numel() ** 0.5
        noise = noise * (self.size / noise.flatten(1).norm(dim=1).clamp_min(1e-12))[:, None, None, None]
        self.noise = noise.to(subject.device, subject.dtype)
        self.start = torch.randn(1, *shape, generator=generator).to(self.noise)
        certified = certified_bound(subject, layer)
        self.bound, self.bound_reason = certified.value, certified.reason

    def copies(self, images: Tensor) -> Tensor:
        """Return the noisy copies (images, copies, …) that need no gradient, for a ``SharedPass`` by any engine."""
        moved: Tensor = images.to(self.noise)[:, None] + self.noise[self.n_gradients :]
        return moved

    def measure(self, images: Tensor, targets: Sequence[int], shared: SharedPass | None = None) -> list[Stability]:
        """Return the stability of every image, as many at once as memory should hold."""
        at_once = max(1, MOST_NUMBERS // ((self.noise_samples + 3) * max(1, self.noise[0].numel())))
        measured: list[Stability] = []
        for start in range(0, len(images), at_once):
            some = slice(start, start + at_once)
            measured += self._measure(images[some], list(targets)[some], None if shared is None else shared.rows(some))
        return measured

    def _measure(self, images: Tensor, targets: Sequence[int], shared: SharedPass | None) -> list[Stability]:
        x = images.to(self.subject.device, self.subject.dtype)
        n, local = len(x), torch.zeros(len(x), dtype=torch.float64, device=x.device)
        with_gradient = x[:, None] + self.noise[: self.n_gradients]
        if self.worst:
            local, v = self._power(x)
            step = self.size * v
            with_gradient = torch.cat([with_gradient, (x + step)[:, None], (x - step)[:, None]], 1)
        a, logits, g = self._run(torch.cat([x[:, None], with_gradient], 1), targets)
        moved, same = _moved(a), _same(logits)
        if self.n_gradients < self.noise_samples:
            if shared is None:
                with torch.no_grad():
                    rest, activations = self.subject.run(self.copies(x).flatten(0, 1), [self.layer])
                a = torch.cat([a[:, :1], activations[self.layer].flatten(1).double().view(n, -1, a.shape[2])], 1)
                logits = torch.cat([logits[:, :1], rest.view(n, -1, logits.shape[2])], 1)
            else:  # compared with the image as the same engine sees it
                a, logits = shared.activations.to(x.device).flatten(2).double(), shared.logits.to(x.device)
            moved, same = torch.cat([moved, _moved(a)], 1), torch.cat([same, _same(logits)], 1)
        c1 = moved.amax(1) / self.size
        c2 = _moved(g).amax(1) / self.size
        cosine = torch.nn.functional.cosine_similarity(g[:, 1:], g[:, :1], dim=2).clamp_min(0).mean(1)
        cosine = torch.where(g.flatten(1).any(1), cosine, torch.ones_like(cosine))  # a constant model: nothing moves
        return [
            Stability(float(first), float(second), self.radius, self.noise_samples, self.bound, float(score))
            for first, second, score in zip(torch.maximum(c1, local), c2, same.mean(1) * cosine, strict=True)
        ]

    def _run(self, x: Tensor, targets: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return activations, logits and gradients of (images, copies, …), each (images, copies, numbers)."""
        n, copies = x.shape[:2]
        flat = x.flatten(0, 1).detach()
        if flat.dim() == 4:  # the way back through depthwise convolutions is faster with channels last
            flat = flat.contiguous(memory_format=torch.channels_last)
        flat.requires_grad_(True)
        classes = torch.tensor(list(targets), device=x.device).repeat_interleave(copies)
        with torch.enable_grad():
            logits, z = self._pass(flat)
            (g,) = torch.autograd.grad(logits.gather(1, classes[:, None]).sum(), flat)
        a = z.detach().flatten(1).double()
        return a.view(n, copies, -1), logits.detach().view(n, copies, -1), g.flatten(1).double().view(n, copies, -1)

    def _pass(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and the layer, by the network's graph where it is at hand."""
        by_graph = graph_pass_of(self.subject, self.layer)
        if by_graph is not None:
            return by_graph(x)
        logits, activations = self.subject.run(x, [self.layer])
        return logits, activations[self.layer]

    def _power(self, x: Tensor) -> tuple[Tensor, Tensor]:
        def layer_of(z: Tensor) -> Tensor:
            return self.subject.run(z, [self.layer])[1][self.layer]

        with self.subject.at_rest():
            values, v = largest_singular_values(layer_of, x, self.start.expand_as(x), POWER_STEPS)
        return values.double(), v


def _moved(a: Tensor) -> Tensor:
    """Return how far the copies (images, 1 + copies, numbers) are from their image, which comes first."""
    moved: Tensor = (a[:, 1:] - a[:, :1]).norm(dim=2)
    return moved


def _same(logits: Tensor) -> Tensor:
    """Return 1 for every copy with the class of its image."""
    return (logits[:, 1:].argmax(2) == logits[:, :1].argmax(2)).double()
