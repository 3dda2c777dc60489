"""Kind ``superpixel-ig``: what each superpixel adds to the logit, by integrated gradients [IG].

The path from a baseline image b to the image x is walked in a straight line; pixel i gathers

    c_i = (x_i - b_i) * integral_0^1  d logit / d x_i (b + t (x - b)) dt,        sum_i c_i = logit(x) - logit(b).

Contributions of a region are the sums over its pixels and channels. The integral is a sum over a few points, so the
parts miss the logit by a completeness error; it is reported as the residual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from captum.attr import IntegratedGradients
from pydantic import Field
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

# [imports]
from auditor import (
    Batch,
    Concept,
    Data,
    Explainer,
    ExplainerConfig,
    Explanation,
    FittedImages,
    Gallery,
    Subject,
    class_scores,
)
from auditor.errors import DataError, OptionError
from auditor.progress import Progress, silent

# [/imports]
from superpixel_ig.regions import grid_of, superpixels

ROWS_AT_ONCE = 256  # images on the paths of a batch that go through the model together
FINEST = 64  # pixels of a heatmap's side at most


# [config]
class SuperpixelConfig(ExplainerConfig):
    """Options of kind ``superpixel-ig``."""

    n_regions: int = Field(default=16, ge=1, le=400, description="Superpixels per image, about.")
    compactness: float = Field(default=2.0, gt=0, description="Large: regions stay square; small: they follow colours.")
    steps: int = Field(default=32, ge=2, description="Points of the path integral.")
    baseline: Literal["mean", "black", "grey"] = Field(default="mean", description="Image where the path begins.")
    held_out_every: int = Field(default=5, ge=2, description="Each n-th image is held out for the metrics.")
    max_eval: int = Field(default=60, ge=1, description="Held-out images at most on which metrics are measured.")
    top_images: int = Field(default=4, ge=1, le=64, description="Images kept per region.")


# [/config]


# [class]
class SuperpixelExplainer(Explainer):
    """Integrated gradients summed over superpixels.

    ``SuperpixelExplainer(n_regions=9).fit(subject, data).explain(subject, images)``
    """

    kind: ClassVar[str] = "superpixel-ig"
    Config: ClassVar[type[ExplainerConfig]] = SuperpixelConfig
    headline: ClassVar[tuple[str, ...]] = ("completeness_error", "top_region_share")

    baseline_: Tensor  # (channels, height, width)
    by_class_: Tensor  # (regions, classes) mean contribution when the class is predicted
    gallery_: Gallery
    # [/class]

    # [fit]
    def fit(self, subject: Subject, data: Data, progress: Progress = silent) -> SuperpixelExplainer:
        """Take the baseline from the data, then explain held-out images to measure."""
        cfg: SuperpixelConfig = self.config
        if cfg.layer is not None:
            raise OptionError(f"superpixel-ig: it explains pixels and takes no layer, got {cfg.layer!r}; leave it out.")
        if cfg.target is not None:
            subject.class_index(cfg.target)
        parts = FittedImages.each(len(data), cfg.held_out_every)
        total, n_learned, n_read = torch.zeros(subject.input_shape, dtype=torch.float64), 0, 0
        held: list[Batch] = []
        for batch in data.batches(subject, cfg.batch_size):
            learn = parts.learn[n_read : n_read + len(batch)]
            total += batch.images[learn].double().sum(0)
            n_learned += int(learn.sum())
            n_read += len(batch)
            if sum(map(len, held)) < cfg.max_eval:
                held.append(batch.take(~learn))
            progress("averaging images", n_read, len(data))
        if n_learned == 0:
            raise DataError("superpixel-ig: the data has no images; give at least one.")
        constant = {"black": 0.0, "grey": 0.5}.get(cfg.baseline)
        mean = (total / n_learned).float()
        self.baseline_ = mean if constant is None else torch.full_like(mean, constant)
        self._measure(subject, held, progress)
        self.record_fit(subject, data, None, parts.first(n_read))
        return self

    # [/fit]

    # [explain]
    def explain(self, subject: Subject, images: Any, target: int | str | None = None) -> list[Explanation]:
        """Explain each image by its superpixels; contributions, bias and residual add up to the target's logit."""
        return self.explain_by_passes(subject, images, target)

    def explain_from(
        self,
        subject: Subject,
        images: Tensor,
        logits: Tensor,
        activations: Mapping[str, Tensor],
        targets: Sequence[int | None],
        *,
        heatmaps: bool = True,
        **options: Any,
    ) -> list[Explanation]:
        """Explain pixels whose logits a shared pass has already given; only gradients are computed here."""
        chosen = self.targets_for(subject, logits, targets)
        regions = [superpixels(image, self.config.n_regions, self.config.compactness) for image in images]
        parts = self._contributions(subject, images, regions, chosen)
        with torch.no_grad():
            at_baseline = subject.logits(self.baseline_[None])[0].double().cpu()
        predictions, scores = class_scores(logits, subject, chosen)
        return [
            Explanation(
                kind=self.kind,
                name=self.name,
                prediction=predictions[i],
                target=scores[i],
                target_value=scores[i].logit,
                bias=float(at_baseline[k]),
                residual=scores[i].logit - float(at_baseline[k]) - float(parts[i].sum()),
                concepts=tuple(
                    Concept(
                        index=r,
                        label=self.label(r),
                        activation=float((regions[i] == r).double().mean()),
                        contribution=float(parts[i, r]),
                        heatmap=region_map(regions[i] == r) if heatmaps else None,
                    )
                    for r in range(parts.shape[1])
                ),
            )
            for i, k in enumerate(chosen)
        ]

    # [/explain]

    def _contributions(self, subject: Subject, x: Tensor, regions: list[Tensor], targets: list[int]) -> Tensor:
        """Return (images, regions): integrated gradients of the target logits, summed over channels and pixels."""
        pixels = IntegratedGradients(subject.logits).attribute(
            x.to(subject.device),
            baselines=self.baseline_[None].to(subject.device, x.dtype),
            target=torch.tensor(targets, device=subject.device),
            n_steps=self.config.steps,
            internal_batch_size=max(len(x), ROWS_AT_ONCE),
        )
        flat = pixels.detach().double().cpu().sum(1).flatten(1)
        n = self._n_regions(x.shape)
        return torch.stack(
            [torch.zeros(n).double().index_add_(0, r.flatten(), row) for r, row in zip(regions, flat, strict=True)]
        )

    def _n_regions(self, shape: Sequence[int]) -> int:
        rows, columns = grid_of(self.config.n_regions, (shape[-2], shape[-1]))
        return rows * columns

    # [concepts]
    @property
    def n_concepts(self) -> int:
        """Number of regions of an image."""
        return self._n_regions(self.baseline_.shape)

    def label(self, index: int) -> str:
        """Return the name a person gave to a region, or where it lies."""
        _, columns = grid_of(self.config.n_regions, (self.baseline_.shape[1], self.baseline_.shape[2]))
        return self.labels.get(index, f"region in row {index // columns + 1}, column {index % columns + 1}")

    @property
    def gallery(self) -> Gallery:
        """Held-out images to whose predicted class a region adds most."""
        return self.gallery_

    @property
    def contributions_by_class(self) -> Tensor:
        """Mean contribution (regions, classes) when the class is predicted."""
        return self.by_class_

    # [/concepts]

    # [store]
    def tensors(self) -> dict[str, Tensor]:
        """Return the baseline, contributions by class and the gallery's crops."""
        return {"baseline": self.baseline_, "by_class": self.by_class_, **self.gallery_.tensors()}

    def state(self) -> dict[str, Any]:
        """Return the gallery's captions."""
        return {"gallery": self.gallery_.captions()}

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any], files: dict[str, bytes]) -> None:
        """Take back what was stored."""
        self.baseline_, self.by_class_ = tensors["baseline"], tensors["by_class"]
        self.gallery_ = Gallery.restore(tensors, state["gallery"])

    # [/store]

    def _measure(self, subject: Subject, held: Sequence[Batch], progress: Progress) -> None:
        """Explain the predictions of held-out images: how complete the parts are, and how few of them matter."""
        n = self.n_concepts
        self.gallery_ = Gallery(n, self.config.top_images, (1, 1))
        by_class = torch.zeros(n, subject.n_classes, dtype=torch.float64)
        counts = torch.zeros(subject.n_classes, dtype=torch.float64)
        errors: list[float] = []
        shares: list[float] = []
        for batch in held:
            if not len(batch) or len(errors) >= self.config.max_eval:
                continue
            with torch.no_grad():
                logits = subject.logits(batch.images)
            explained = self.explain_from(subject, batch.images, logits, {}, logits.argmax(1).tolist(), heatmaps=False)
            parts = torch.tensor([[c.contribution for c in e.concepts] for e in explained], dtype=torch.float64)
            errors += [abs(e.residual or 0.0) / max(1.0, abs(e.target_value)) for e in explained]
            shares += (parts.abs().amax(1) / parts.abs().sum(1).clamp_min(1e-30)).tolist()
            predicted = logits.argmax(1).cpu()
            by_class.index_add_(1, predicted, parts.T.contiguous())
            counts += torch.bincount(predicted, minlength=subject.n_classes)
            self.gallery_.offer(batch, parts.float().unsqueeze(-1))
            progress("measuring", len(errors), self.config.max_eval)
        self.by_class_ = (by_class / counts.clamp_min(1)).float()
        self.metrics = {"n_regions": float(n), "n_held_out": float(len(errors))}
        if errors:
            self.metrics["completeness_error"] = sum(errors) / len(errors)
            self.metrics["top_region_share"] = sum(shares) / len(shares)


def region_map(mask: Tensor) -> Tensor:
    """Return a region as a heatmap (height, width), at most 64 pixels a side."""
    heat = mask.float()[None, None]
    return adaptive_avg_pool2d(heat, (min(mask.shape[0], FINEST), min(mask.shape[1], FINEST)))[0, 0]
