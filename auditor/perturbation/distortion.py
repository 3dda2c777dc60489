"""Distortion: how far the target logit moves when everything a mask does not keep is replaced by noise.

    y(s) = s x + (1 - s) n,      D(s) = 1/2 E_n (Phi(y) - Phi(x))^2 = 1/2 [ (E Phi - Phi(x))^2 + Var Phi ]

Two objectives for Frank-Wolfe over the same problems: `MonteCarlo` with a fixed set of draws (common random numbers:
the same function at every step, any network), and `AssumedDensity`, which is fast and smooth but a surrogate: an
optimiser finds its errors, so judge its masks by `MonteCarlo` with fresh draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from auditor.errors import NumericsError, ShapeError
from auditor.perturbation.cells import Partition
from auditor.perturbation.gaussian_moments import ClosedFormError, Moments
from auditor.perturbation.replacement import Obfuscation

Network = Callable[[Tensor], Tensor]  # images (N, C, H, W) in [0, 1] -> logits (N, classes); differentiable


@dataclass(frozen=True, eq=False)
class Problems:
    """A batch of masks to find: ``images`` and their ``targets``, and which image each problem (row) is about."""

    network: Network
    images: Tensor  # (batch, C, H, W)
    targets: Tensor  # (batch,) class indices
    partition: Partition
    image_of: Tensor  # (problems,)
    target_values: Tensor  # (batch,) the logits on the untouched images

    @classmethod
    def of(
        cls, network: Network, images: Tensor, targets: Tensor, partition: Partition, image_of: Tensor | None = None
    ) -> Problems:
        """Return the problems, one per image unless ``image_of`` says otherwise, with the target logits measured."""
        if tuple(images.shape[1:]) != partition.shape:
            raise ShapeError(
                f"distortion: images must be (batch, {', '.join(map(str, partition.shape))}) like the partition, "
                f"got {tuple(images.shape)}; resize them or cut a new partition."
            )
        with torch.no_grad():
            logits = network(images)
        if not bool(logits.isfinite().all()):
            bad = int((~logits.isfinite().all(1)).sum())
            raise NumericsError(
                f"distortion: the network's logits are NaN or infinite for {bad} of {len(images)} images; "
                f"check the weights and the preprocessing."
            )
        values = logits.gather(1, targets[:, None]).squeeze(1)
        return cls(
            network, images, targets, partition, torch.arange(len(images)) if image_of is None else image_of, values
        )


@dataclass(frozen=True, eq=False)
class MonteCarlo:
    """D by ``noise`` (1 or batch, K, C, H, W), held fixed; passes of at most ``chunk`` images through the network."""

    problems: Problems
    noise: Tensor
    chunk: int = 256

    @classmethod
    def drawn(
        cls, problems: Problems, obfuscation: Obfuscation, draws: int, generator: torch.Generator, chunk: int = 256
    ) -> MonteCarlo:
        """Return the distortion under ``draws`` replacements drawn now and kept."""
        return cls(problems, obfuscation.draw(problems.images, draws, generator), chunk)

    def logits(self, s: Tensor, rows: Tensor) -> Tensor:
        """Return the logits (rows, K, classes) of the obfuscated images, without gradient."""
        out = []
        with torch.no_grad():
            for _, x, n, mask in self._blocks(s, rows):
                out.append(self.problems.network((n + mask * (x - n)).flatten(0, 1)).view(*n.shape[:2], -1))
        return _joined(out, len(rows), self.noise.shape[1])

    def value(self, s: Tensor, rows: Tensor) -> Tensor:
        """Return D(s) as (rows,), without gradient."""
        p = self.problems
        images = p.image_of[rows]
        at_target = self.logits(s, rows).gather(2, p.targets[images][:, None, None].expand(-1, self.noise.shape[1], 1))
        return 0.5 * (at_target.squeeze(2) - p.target_values[images][:, None]).square().mean(1)

    def gradient(self, s: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return D(s) as (rows,) and dD/ds as (rows, m)."""
        p, draws = self.problems, self.noise.shape[1]
        value = s.new_zeros(len(rows))
        grad = s.new_zeros(len(rows), *p.partition.shape)
        for i, x, n, mask in self._blocks(s, rows):
            image = p.image_of[rows[i]]
            away = x - n  # (block, draws, C, H, W)
            y = (n + mask * away).flatten(0, 1).requires_grad_()
            with torch.enable_grad():
                logits = p.network(y).view(*n.shape[:2], -1)
                target = p.targets[image][:, None, None].expand(-1, n.shape[1], 1)
                error = logits.gather(2, target).squeeze(2) - p.target_values[image][:, None]
                loss = 0.5 * error.square().sum(1) / draws
                (dy,) = torch.autograd.grad(loss.sum(), y)
            value[i] += loss.detach()
            grad[i] += (dy.view_as(away) * away).sum(1)
        return value, p.partition.gather(grad, p.image_of[rows])

    def _blocks(self, s: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield (rows in the block, x, n, mask), at most ``chunk`` images at once: whole rows, or draws of one row."""
        p, draws = self.problems, self.noise.shape[1]
        for i in torch.split(torch.arange(len(rows)), max(1, self.chunk // draws)):
            images = p.image_of[rows[i]]
            noise = self.noise if len(self.noise) == 1 else self.noise[images]
            mask = p.partition.expand(s[i], images)[:, None]
            for n in torch.split(noise, self.chunk, 1):
                yield i, p.images[images][:, None], n.expand(len(i), *n.shape[1:]), mask


@dataclass(frozen=True, eq=False)
class Resampled:
    """D with new draws at every call, for stochastic Frank-Wolfe; certificates come from the ``fixed`` draws.

    A search on fixed draws fits those draws in the end; one that never sees a draw twice cannot.
    """

    fixed: MonteCarlo
    obfuscation: Obfuscation
    generator: torch.Generator

    def gradient(self, s: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return an unbiased estimate of D(s) and dD/ds."""
        draws = self.fixed.noise.shape[1]
        noise = self.obfuscation.draw(self.fixed.problems.images, draws, self.generator)
        return replace(self.fixed, noise=noise).gradient(s, rows)

    def full_gradient(self, s: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return D(s) and dD/ds on the fixed draws."""
        return self.fixed.gradient(s, rows)


def _joined(parts: list[Tensor], rows: int, draws: int) -> Tensor:
    """Put blocks (block rows, block draws, classes) together: they come row block by row block."""
    if all(part.shape[1] == draws for part in parts):
        return torch.cat(parts)
    return torch.cat([part.flatten(0, 1) for part in parts]).view(rows, draws, -1)


@dataclass(frozen=True, eq=False)
class AssumedDensity:
    """The surrogate of D by Gaussian moments: diagonal, or with the obfuscation's covariance factor."""

    problems: Problems
    mean: Tensor
    var: Tensor
    factor: Tensor | None = None
    chunk: int = 256

    @classmethod
    def of(cls, problems: Problems, obfuscation: Obfuscation, *, low_rank: bool, chunk: int = 256) -> AssumedDensity:
        """Return the surrogate under this obfuscation; raises `ClosedFormError` at once when the network has none."""
        mean, var, factor = obfuscation.moments(problems.images)
        if low_rank and factor is None:  # independent components: the factor would be diagonal and as long as the image
            factor = torch.diag(var[0].flatten().sqrt()).view(-1, *problems.partition.shape)
        surrogate = cls(problems, mean, var, factor if low_rank else None, chunk)
        try:
            with torch.no_grad():
                surrogate.value(torch.ones(1, problems.partition.size), torch.zeros(1, dtype=torch.long))
        except ClosedFormError as error:
            # An exported graph appends where it was, over many lines.
            raise ClosedFormError(str(error).partition("\n")[0]) from error
        return surrogate

    def moments(self, s: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of the target logit, (rows,) each; differentiable in ``s``."""
        p = self.problems
        images = p.image_of[rows]
        x, mask = p.images[images], p.partition.expand(s, images)
        mu, var = (part if len(part) == 1 else part[images] for part in (self.mean, self.var))
        mean = mask * x + (1 - mask) * mu
        if self.factor is None:
            out = p.network(Moments.of(mean, (1 - mask).square() * var))
        else:
            out = p.network(Moments.of(mean, factor=self.factor[:, None] * (1 - mask)))
        assert isinstance(out, Moments)
        target = p.targets[images][:, None]
        mean, var = (part.to(s).gather(1, target).squeeze(1) for part in (out.mean_, out.variance()))
        return mean, var

    def value(self, s: Tensor, rows: Tensor) -> Tensor:
        """Return D(s) as (rows,); part of the graph of ``s`` where that has one."""
        mean, var = self.moments(s, rows)
        return 0.5 * ((mean - self.problems.target_values[self.problems.image_of[rows]]).square() + var)

    def gradient(self, s: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return D(s) as (rows,) and dD/ds as (rows, m)."""
        rank = 1 if self.factor is None else len(self.factor)
        values, grads = [], []
        for i in torch.split(torch.arange(len(rows)), max(1, self.chunk // rank)):
            with torch.enable_grad():
                leaf = s[i].detach().requires_grad_()
                value = self.value(leaf, rows[i])
                (g,) = torch.autograd.grad(value.sum(), leaf)
            values.append(value.detach())
            grads.append(g)
        return torch.cat(values), torch.cat(grads)
