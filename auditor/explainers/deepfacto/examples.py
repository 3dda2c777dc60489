"""What a deepfacto fit works on: its options, the layer it may factorize, and the images with what is known of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from auditor.data.source import Batch, Data
from auditor.errors import DataError, LayerError, NumericsError, OptionError
from auditor.explainers.base import HoldOutConfig
from auditor.explainers.deepfacto.block_settings import BlockSettings
from auditor.explainers.deepfacto.factor_admm import FactorSettings, Task, validated
from auditor.explainers.fitted_images import FittedImages
from auditor.progress import Progress
from auditor.runners.image_runs import counted, over_batches
from auditor.subject.layers import Layout
from auditor.subject.subject import Subject

DEFAULT_RANK = 16
PASSES, LEAST_PASSES = 12, 2
DEFAULTS: dict[str, dict[str, float]] = {  # by form
    "blocks": {"lr": 3e-4, "dual_step": 0.1, "fidelity": 0.5, "reconstruction": 0.003},
    "linear": {"lr": 1e-3, "dual_step": 0.0, "fidelity": 0.1, "reconstruction": 0.03},
}
OPERATIONS = 3 * 10**12  # of all passes of a fit that leaves their number open: a minute or two of one core


class DeepFactoConfig(HoldOutConfig):
    """Options of kind ``deepfacto``."""

    rank: int | None = Field(default=None, ge=1, description="Number of factors; default 16 or what the layer has.")
    head: Literal["auto", "blocks", "linear"] = Field(
        default="auto",
        description="What reads the scores: the network's own blocks above the layer (auto: where it can be cut), or a "
        "linear head in their stead.",
    )
    objective: Literal["cross_entropy", "squared"] = Field(
        default="cross_entropy", description="Loss of the labels; linear: cross_entropy."
    )
    copies: int | None = Field(
        default=None, ge=1, description="Blocks: moved copies of each image; default: 8 at most, 4000 rows in all."
    )
    mirror: bool | None = Field(
        default=None, description="Blocks: mirrored copies; default: where the model takes mirror images for the same."
    )
    trained_from: str | None = Field(
        default=None, description="Blocks: layer where training starts; default: half of the weights below are trained."
    )
    warm_passes: int = Field(default=20, ge=0, description="Blocks: passes of the blocks above alone, at the start.")
    lr_above: float = Field(default=1e-3, gt=0, description="Blocks: step size of lift and blocks above.")
    inner_steps: int = Field(default=3, ge=1, description="Blocks: steps on scores and variables per visit.")
    basis_steps: int = Field(default=1, ge=0, description="Blocks: HALS passes over M per visit.")
    start: Literal["forward", "kept"] = Field(
        default="forward", description="Blocks: Z of a visit from the forward pass, or kept from the last visit."
    )
    cells: int | None = Field(
        default=None, ge=1, description="Linear: side of the grid of means that it reads; default: 1, 2 or 4, by trial."
    )
    epochs: int | None = Field(
        default=None,
        ge=0,
        description="Passes over the images; 0 stops after the warm start; default 12, and 2 or more where the network "
        "is so costly that 12 would take many minutes.",
    )
    patience: int = Field(default=3, ge=1, description="Passes without a better state after which training ends.")
    train_batch: int = Field(default=32, ge=1, description="Images per step of the training.")
    lr: float | None = Field(
        default=None,
        gt=0,
        description="Step size below the layer (Adam, cosine decay); default 3e-4, linear 1e-3.",
    )
    beta: float = Field(default=1.0, gt=0, description="Penalty that ties Z to what the layers below give.")
    gamma: float = Field(default=1.0, gt=0, description="Penalty that ties Z to the product M S.")
    reconstruction: float | None = Field(
        default=None, ge=0, le=1, description="Share of what M S misses that Z gives up; default .003, linear .03."
    )
    anchor: float = Field(default=0.01, ge=0, description="Linear: penalty that ties Z to the model's own activation.")
    trust: float = Field(default=0.1, gt=0, description="Linear: largest change asked of a batch's scores at once.")
    supervision: float = Field(default=1.0, ge=0, description="Linear: weight of what the heads ask for.")
    pooled: float = Field(default=1.0, ge=0, description="Linear: weight of a second head, on mean scores.")
    l1: float = Field(default=0.0, ge=0, description="Linear: penalty on the scores that are asked for.")
    dual_step: float | None = Field(
        default=None, ge=0, le=1, description="Damping of the duals; 0: penalties only; default .1, linear 0."
    )
    fidelity: float | None = Field(
        default=None, ge=0, le=1, description="Share of the model's own logits in the objective; default .5, linear .1."
    )
    max_images: int = Field(default=10_000, ge=8, description="Images at most, drawn evenly.")
    max_positions: int = Field(default=40_000, ge=16, description="Positions of the warm start's factorization.")
    attributes: str | None = Field(default=None, description="CSV of attributes per image or class, for the probe.")
    threshold: float = Field(default=0.5, description="An attribute above it means yes (50 for percentages).")
    refits: int = Field(default=1, ge=0, description="Re-fits from other starts, for the basis stability; 0: none.")
    top_images: int = Field(default=8, ge=1, le=64, description="Images kept per factor, as small crops.")
    memory_limit: float | None = Field(default=None, gt=0, description="GiB the training may take; default: free ones.")

    def passes(self, operations: int, n_images: int) -> int:
        """Return the passes over the images; where they are left open, as many as `OPERATIONS` allow.

        ``operations`` are those of one image's forward pass. A re-fit for the basis stability takes as many again.

        >>> [DeepFactoConfig(refits=1).passes(n, 1400) for n in (100_000, 82_000_000, 4_000_000_000)]
        [12, 4, 2]
        >>> DeepFactoConfig(epochs=30).passes(4_000_000_000, 1400)
        30
        """
        if self.epochs is not None:
            return self.epochs
        each = 3 * operations * n_images * (1 + self.n_refits)  # a backward pass takes about two forward ones
        return max(LEAST_PASSES, min(PASSES, OPERATIONS // max(1, each)))

    def of_form(self, name: str, form: str) -> float:
        """Return an option whose default depends on the form."""
        value: float | None = getattr(self, name)
        return DEFAULTS[form][name] if value is None else value

    def block_settings(self, seed: int, epochs: int) -> BlockSettings:
        """Return what the training of blocks takes, for so many passes."""
        names = ("patience", "warm_passes", "lr_above", "beta", "gamma", "inner_steps", "basis_steps")
        same = {k: getattr(self, k) for k in names} | {k: self.of_form(k, "blocks") for k in DEFAULTS["blocks"]}
        squared = self.objective == "squared"
        return BlockSettings(
            **same, batch=self.train_batch, epochs=epochs, start=self.start, squared=squared, seed=seed
        )

    def settings(self, seed: int, epochs: int) -> FactorSettings:
        """Return what the training of a linear head takes, for so many passes."""
        names = ("beta", "gamma", "anchor", "trust", "supervision", "pooled", "l1")
        same = {k: getattr(self, k) for k in names} | {
            k: self.of_form(k, "linear") for k in ("dual_step", "lr", "reconstruction")
        }
        more = {"batch": self.train_batch, "epochs": epochs, "patience": self.patience}
        return FactorSettings(**same, **more, seed=seed)

    @property
    def n_refits(self) -> int:
        """Re-fits behind the fit's ``basis_stability``."""
        return self.refits


@dataclass(frozen=True, slots=True)
class FactorExamples:
    """Images, labels (the model's predictions where unknown), the model's logits, and which are held out.

    ``drawn`` is the part of the data that they are, ``fitted`` says which of it is which.
    """

    batch: Batch
    labels: Tensor
    logits: Tensor
    held: Tensor
    labelled: bool
    fitted: FittedImages
    drawn: Data

    def task(self, fidelity: float) -> Task:
        """Return the part that the training sees."""
        fit = ~self.held
        return Task(self.batch.images[fit], self.labels[fit], self.logits[fit], fidelity)


def factorizable_layer(subject: Subject, name: str | None) -> str:
    """Return the layer to factorize; default: the suggested one, or the last non-negative one if that is signed."""
    layer = subject.layer(name)
    if layer.nonnegative:
        return layer.name
    others = [item for item in subject.layers() if item.explainable and item.nonnegative and item.shape[0] > 1]
    features = [item for item in others if item.layout is not None and item.layout.channels != subject.n_classes]
    features = [item for item in features if item.is_spatial] or features
    if name is None and features:
        return features[-1].name
    hint = f"take one after a ReLU, such as {features[-1].name!r}" if features else "this model has none after a ReLU"
    raise LayerError(
        f"deepfacto: layer {layer.name!r} gives negative values, and a non-negative factorization cannot show them; "
        f"{hint} (kind nmf explains signed layers too)."
    )


def rank_for(rank: int | None, layer: str, layout: Layout) -> int:
    """Return the rank, at most the layer's width."""
    if rank is not None and rank > layout.channels:
        raise OptionError(
            f"deepfacto: rank must be at most the {layout.channels} channels of layer {layer!r}, got {rank}; choose a "
            "smaller one."
        )
    return rank if rank is not None else min(DEFAULT_RANK, layout.channels)


@dataclass(frozen=True)
class LogitsPass:
    """Runs the network on a batch; the images are trained on, so they come too."""

    def __call__(self, subject: Subject, batch: Batch, positions: Tensor) -> tuple[Batch, Tensor]:
        """Return the batch and its logits."""
        with torch.no_grad():
            return batch, subject.logits(batch.images).float().cpu()


def gather(subject: Subject, data: Data, n: int, cfg: DeepFactoConfig, progress: Progress) -> FactorExamples:
    """Read ``n`` images drawn evenly, with labels and the model's logits; every few-th is held out."""
    total = len(data)
    chosen = torch.zeros(total, dtype=torch.bool)
    chosen[torch.randperm(total, generator=torch.Generator().manual_seed(cfg.seed))[:n]] = True
    drawn = data if bool(chosen.all()) else data.only(chosen)
    batches, logits = [], []
    report = counted(progress, "reading images", len(drawn))
    for part in over_batches(LogitsPass(), subject, drawn, batch_size=cfg.batch_size, progress=report):
        batches.append(part.given[0])
        logits.append(part.given[1])
    ids = [i for b in batches for i in b.ids]
    batch = Batch(torch.cat([b.images for b in batches]), torch.cat([b.labels for b in batches]), ids)
    y = torch.cat(logits)
    if not bool(torch.isfinite(y).all()):
        raise NumericsError(
            "deepfacto: the model gives NaN or infinite logits on these images; correct the model first."
        )
    labelled = bool((batch.labels >= 0).any())
    labels = batch.labels if labelled else y.argmax(1)
    classes = sorted(set(labels[labels >= 0].tolist()))
    if len(classes) < 2:
        what = "is labelled" if labelled else "is predicted"
        raise DataError(
            f"deepfacto: every image {what} {subject.class_names[classes[0]]!r}, and a head needs at least two classes "
            "to separate; give data with others."
        )
    if classes[-1] >= subject.n_classes:
        raise DataError(
            f"deepfacto: label {classes[-1]} is beyond the model's {subject.n_classes} classes; give its own data."
        )
    parts = FittedImages.each(len(ids), cfg.held_out_every)
    held = parts.report
    if not bool(held.any()) or len(set(labels[~held & (labels >= 0)].tolist())) < 2:
        raise DataError(
            f"deepfacto: {len(ids)} images are too few to train on some and measure on others; give more images."
        )
    choose = torch.zeros_like(held)
    choose[parts.learn] = validated(int(parts.learn.sum()))  # the best pass is chosen on some of the learned images
    fitted = FittedImages(parts.learn, choose, held)
    return FactorExamples(batch, labels, y, held, labelled, fitted, drawn)


def check_activations(Z: Tensor, layer: str) -> None:
    """Refuse activations that are not finite, or negative."""
    if not bool(torch.isfinite(Z).all()):
        raise NumericsError(f"deepfacto: layer {layer!r} gives NaN or infinite values; correct the model first.")
    if float(Z.min()) < 0:
        raise LayerError(
            f"deepfacto: layer {layer!r} gives negative values on these images (down to {float(Z.min()):.3g}), and a "
            "non-negative factorization cannot show them; take a layer after a ReLU."
        )
