"""Patterns: what is always at the same place in the images of one class, whatever the model looks at.

Mean and deviation of every pixel over the class's images are compared with those over the others. A mark at a fixed
place, opaque or not, has another mean and a smaller deviation there. Giving it to another image means moving that
image's pixels from the others' mean and deviation to the class's: an opaque mark replaces them, a half transparent one
is laid over them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from auditor.reliance.regions import hottest

SHARE = 0.03
LEAST_DEVIATION = 0.02  # of pixels in 0 to 1: below the noise of compression


@dataclass(frozen=True)
class Pattern:
    """Mean and deviation (channels, height, width) over a class and over the others, and where these differ most.

    ``divergence`` (height, width) is how far the two are apart, ``mask`` (1, height, width) its largest 3%.
    """

    mean: Tensor
    deviation: Tensor
    mean_others: Tensor
    deviation_others: Tensor
    divergence: Tensor
    mask: Tensor

    def given_to(self, images: Tensor) -> Tensor:
        """Return images with the class's pattern at its mask."""
        ratio = (self.deviation / self.deviation_others).clamp_max(1)
        return torch.where(self.mask > 0, (self.mean + ratio * (images - self.mean_others)).clamp(0, 1), images)

    def score(self, images: Tensor) -> Tensor:
        """Return per image how much more likely its pixels at the mask are under the class than under the others."""

        def log_density(mean: Tensor, deviation: Tensor) -> Tensor:
            return -((images - mean) / deviation).square().clamp_max(25) / 2 - deviation.log()

        ratio = log_density(self.mean, self.deviation) - log_density(self.mean_others, self.deviation_others)
        return (ratio * self.mask).sum((1, 2, 3)) / self.mask.sum()


def pattern_of(images: Tensor, is_class: Tensor) -> Pattern:
    """Return the pattern of a class: symmetric Kullback-Leibler divergence of normal pixels, averaged over 3 x 3.

    >>> x = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    >>> x[:10, :, 2, 5] = 1.0
    >>> divmod(int(pattern_of(x, torch.arange(20) < 10).divergence.argmax()), 8)
    (2, 5)
    """
    a, b = images[is_class], images[~is_class]
    mean, mean_others = a.mean(0), b.mean(0)
    deviation, deviation_others = (part.std(0, unbiased=False).clamp_min(LEAST_DEVIATION) for part in (a, b))
    apart, va, vb = (mean - mean_others).square(), deviation.square(), deviation_others.square()
    divergence = ((va + apart) / vb + (vb + apart) / va).mean(0) / 2 - 1
    smooth = F.avg_pool2d(divergence[None, None], 3, stride=1, padding=1, count_include_pad=False)[0, 0]
    divergence = smooth + 1e-3 * divergence  # of a single pixel's neighbours the pixel itself comes first
    return Pattern(mean, deviation, mean_others, deviation_others, divergence, hottest(divergence[None], SHARE)[0])


def shuffled_pattern(images: Tensor, is_class: Tensor, generator: torch.Generator) -> Pattern:
    """Return the pattern of classes drawn at random."""
    return pattern_of(images, is_class[torch.randperm(len(is_class), generator=generator)])
