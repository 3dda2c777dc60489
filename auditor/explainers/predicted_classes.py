"""Predicted classes: what the model makes of the images of a fit, and what must be said of it.

The classes of a fit are the model's predictions, whatever labels the data has: bird folders before an ImageNet model
are photos of the classes the model sees in them.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from auditor.subject.subject import Subject

UNSURE = 0.25  # of the way from chance to certainty: below it a prediction says little
MOSTLY = 0.9  # share of the images
SHOWN = 6  # names of classes in a sentence


class PredictedClasses:
    """Predictions of the images that a fit learned from and of those it holds out, counted while batches stream by."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.learned: Counter[int] = Counter()
        self.held_out: Counter[int] = Counter()
        self._sure: list[Tensor] = []
        self._n_outputs = 0
        self._logits: dict[int, Tensor] = {}  # summed over the images of a class that are learned from

    def add(self, logits: Tensor, learned: Tensor) -> Tensor:
        """Count a batch; ``learned`` (batch,) says which images are learned from. Return its classes."""
        classes, self._n_outputs = logits.argmax(1).cpu(), logits.shape[1]
        self.learned.update(classes[learned].tolist())
        self.held_out.update(classes[~learned].tolist())
        for k in set(classes[learned].tolist()):
            some = logits[((classes == k) & learned).to(logits.device)].double().sum(0).cpu()
            self._logits[k] = self._logits[k] + some if k in self._logits else some
        p = self.subject.probabilities(logits).cpu()
        top = torch.maximum(p, 1 - p).amax(1) if logits.shape[1] == 1 else p.amax(1)
        chance = 1 / max(2, logits.shape[1])
        self._sure.append((top - chance) / (1 - chance))
        return classes

    def nearest(self, index: int) -> list[int]:
        """Return the other classes that are learned from, those first that the model finds likeliest in its images."""
        mean = self._logits[index]
        return sorted((k for k in self.learned if k != index), key=lambda k: (-float(mean[k]), k))

    @property
    def unmet(self) -> float:
        """Share of the held-out images whose class the fit has no image of."""
        total = sum(self.held_out.values())
        return sum(n for k, n in self.held_out.items() if not self.learned[k]) / total if total else 0.0

    @property
    def unsure(self) -> float:
        """Share of all images of which the model is hardly surer than chance."""
        sure = torch.cat(self._sure)
        return float((sure < UNSURE).double().mean())

    def remarks(self) -> list[str]:
        """Return what a reader should know of the images before believing figures measured on them."""
        return [*self.doubts(), *self._without_images()]

    def doubts(self) -> list[str]:
        """Return that the model is unsure of nearly every image, where it is."""
        if self.unsure < MOSTLY:
            return []
        return [
            f"the model is unsure of {self.unsure:.0%} of these images (nearer to chance than to certainty): they may "
            "be of another domain than its own, and concepts fitted to them explain guesses; check size, mean and std "
            "(auditor describe), or give images of its classes"
        ]

    def _without_images(self) -> list[str]:
        """Say which classes the model sees in no image; nothing of a model with one logit, which has two in one."""
        names, predicted = self.subject.class_names, set(self.learned) | set(self.held_out)
        missing = [name for k, name in enumerate(names) if k not in predicted]
        if self._n_outputs != len(names) or not missing:
            return []
        named = ", ".join(missing[:SHOWN]) + (", …" if len(missing) > SHOWN else "")
        return [
            f"the model sees {len(missing)} of its {len(names)} classes in none of these images ({named}): what is "
            "explained of such a class uses concepts of the others"
        ]

    def too_thin(self) -> str:
        """Return, where most held-out images are of classes without an image to learn from, why no basis can help."""
        if self.unmet <= 0.5:
            return ""
        n = sum(self.learned.values()) + sum(self.held_out.values())
        classes = len(set(self.learned) | set(self.held_out))
        return (
            f"{self.unmet:.0%} of the held-out images are of classes that the fit has no image of ({n} images, "
            f"{classes} predicted classes), so no basis can stand in for them"
        )
