"""Concepts shared by pixels, layers and examples (kind ``coupled``): one latent space, X_b ~ P_b F for every block.

An image is explained by projecting its blocks on the fitted bases: f says how much of each concept it holds. The
factor of the explained layer turns f into a reconstruction of that layer, and contributions to the logit follow as in
kind ``nmf`` (complete by construction). The maths is in ``kernels/factorization/coupled.py``.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from PIL.Image import Image
from pydantic import Field, field_validator
from torch import Tensor

from auditor.attribution.heatmap import overlay
from auditor.data.python_objects import pixels_of_any
from auditor.data.source import Batch, Data, open_data
from auditor.errors import DataError, NumericsError, OptionError
from auditor.explainers.base import Explainer, ExplainerConfig, HoldOutConfig, Reads
from auditor.explainers.contributions import contributions
from auditor.explainers.coupled.blocks import (
    Block,
    WholeLayout,
    pooled_grid,
    scale_of,
    unpooled,
)
from auditor.explainers.coupled.latent_space import (
    ConceptSensitivity,
    Neighbours,
    class_scores_of,
    distinctness,
    mask_of,
    neighbours,
    one_dimensional_order,
    purity,
)
from auditor.explainers.coupled.reading import read, rows_of
from auditor.explainers.coupled.superclasses import read_superclasses
from auditor.explainers.explanation import Concept, Explanation, class_scores
from auditor.explainers.gallery import Gallery, Shot
from auditor.explainers.restating import restating
from auditor.kernels.factorization.coupled import Coupling, couple, project_coupled
from auditor.kernels.factorization.coupled_columns import Penalties
from auditor.kernels.networks.linear_cka import linear_cka
from auditor.network.above_layer import prepare_above_layer
from auditor.progress import Progress, silent
from auditor.runners.runner import current
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)
THUMB = 24  # pixels of a fitted example's thumbnail, for the neighbour view
LAMBDAS = (0.1, 0.01, 0.001)  # of the paper's table, each against 1


class CoupledConfig(HoldOutConfig):
    """Options of kind ``coupled``."""

    rank: int = Field(default=10, ge=1, description="Number of shared concepts.")
    layers: list[str] | None = Field(default=None, description="Layers to couple; default: the explained one.")
    pixels: bool = Field(default=True, description="Couple the pixels too, one block per channel.")
    logits: bool = Field(default=False, description="Couple the logits as a signed block.")
    variant: Literal["base", "group", "tv"] = Field(default="base", description="Penalty on the shared latent.")
    solver: Literal["hals", "mu"] = Field(default="hals", description="Coordinate or multiplicative updates.")
    init: Literal["random", "nndsvda"] = Field(default="random", description="Start of the factorization.")
    weights: Literal["norm", "mean", "none"] = Field(default="norm", description="What each block is divided by.")
    normalise: Literal["none", "common", "per-block"] = Field(default="none", description="Unit-norm columns.")
    scale_rows: bool | None = Field(default=None, description="Rows of F sum to one; default: for group and tv.")
    lambda_basis: float = Field(default=1e-4, ge=0, description="L2 penalty on the bases.")
    lambda_latent: float = Field(default=1.0, ge=0, description="L2 penalty on F (variant base).")
    lambda_group: float = Field(default=0.2, ge=0, description="Group penalty, about the share of a group it removes.")
    lambda_tv: float = Field(default=0.05, ge=0, description="Total variation of F along the order of the examples.")
    order: Literal["auto", "labels", "activations"] = Field(
        default="auto",
        description="Order of the examples (variant tv): by label, or by a one-dimensional embedding of the "
        "activations; auto: by label where there are any.",
    )
    lambda_ortho: float = Field(default=0.02, ge=0, description="Penalty on co-activation (variant tv).")
    pool: int = Field(default=4, ge=1, description="Longest side of a layer's grid after average pooling.")
    pixel_side: int = Field(default=32, ge=2, description="Longest side of the pixel blocks after average pooling.")
    max_images: int = Field(default=3000, ge=2, description="Images of the fit at most, drawn evenly.")
    max_iter: int = Field(default=300, ge=1, description="Sweeps at most.")
    tol: float = Field(default=1e-4, ge=0, description="Stop when ten sweeps gain less than this share.")
    lambda_table: bool = Field(default=True, description="Re-fit with other L2 penalties on F and report the CKA.")
    top_images: int = Field(default=8, ge=1, le=64, description="Images kept per concept.")
    superclasses: str | None = Field(default=None, description="CSV of label,superclass: a second name of the labels.")

    @field_validator("layers", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else value

    def with_another_start(self, k: int) -> CoupledConfig:
        """Return the options of the k-th re-fit: another seed, and a random start."""
        return self.model_copy(update={"seed": self.seed + k, "init": "random"})


class CoupledExplainer(Explainer):
    """Shared concepts of pixels, layers and examples.

    ``CoupledExplainer(layers=["layer2", "layer4"], rank=10).fit(subject, data).explain(subject, images)``
    """

    kind: ClassVar[str] = "coupled"
    Config: ClassVar[type[ExplainerConfig]] = CoupledConfig
    headline: ClassVar[tuple[str, ...]] = ("f_cls", "relative_error")
    remedy: ClassVar[str] = (
        "more concepts (--set rank=30), a finer grid (--set pool=7), another layer, or, for many classes, kind "
        "nmf, which has a basis per class"
    )

    blocks_: list[Block]
    P_: list[Tensor]  # (rows, concepts) per block, for blocks divided by their scale
    F_: Tensor  # (concepts, examples)
    labels_: Tensor  # (examples,) classes of the model, or numbers of label_names_; -1 where unknown
    label_names_: tuple[str, ...] | None  # the data's own labels where these are no classes of the model
    superclasses_: tuple[str, ...]  # of every label; empty where none were given
    ids_: list[str]
    by_class_: Tensor  # (concepts, classes) mean contribution when the class is predicted
    class_score_: Tensor  # (concepts, classes) latent score summed per class
    sensitivity_: Tensor  # (concepts, classes)
    thumbs_: Tensor  # uint8 (examples, channels, THUMB, THUMB)
    gallery_: Gallery
    remarks_: list[str]  # what the fit has to say of its concepts

    def fit(self, subject: Subject, data: Any, progress: Progress = silent) -> CoupledExplainer:
        """Fit the shared latent space; every n-th image is held out for the metrics."""
        cfg: CoupledConfig = self.config
        data = open_data(data)
        if cfg.target is not None:
            subject.class_index(cfg.target)
        names = list(dict.fromkeys(cfg.layers or [])) or [subject.layer(cfg.layer).name]
        layer = subject.layer(cfg.layer if cfg.layer is not None else names[-1]).name
        names = [subject.layer(name).name for name in names]
        self.layer_ = layer
        if layer not in names:
            names.append(layer)
        self.blocks_ = _blocks(subject, names, cfg)
        drawn = self._drawn(data)
        layers = tuple(self.layers())
        learned, reported, images = read(
            subject, drawn, tuple(self.blocks_), layers, cfg.held_out_every, cfg.batch_size, progress
        )
        X, held_X, fitted, held = learned.blocks, reported.blocks, learned.examples, reported.examples
        self.label_names_ = _foreign_labels(subject, data, fitted)
        shown = fitted.labels if self.label_names_ is None else fitted.source_labels
        self.superclasses_ = self._superclasses(subject)
        order = self._order(X, shown)
        X = [x[:, order].contiguous() for x in X]
        self.labels_, self.ids_, thumbs = shown[order], [fitted.ids[i] for i in order.tolist()], fitted.images[order]
        self.blocks_ = [
            Block(b.name, b.layer, b.channels, b.grid, float(x.min()) < 0, scale_of(x, cfg.weights))
            for b, x in zip(self.blocks_, X, strict=True)
        ]
        X = self._scaled(X)
        best = self._couple(X, self._lambda(), progress)
        self.P_, self.F_ = best.P, best.F
        self.metrics = {
            "rank": float(cfg.rank),
            "kkt": best.kkt,
            "n_dead": float(len(best.dead)),
            "purity": purity(best.F, self.labels_),
            **{f"fit_relative_error/{b.name}": e for b, e in zip(self.blocks_, best.relative_errors, strict=True)},
        }
        for b, p in zip(self.blocks_, best.P, strict=True):
            if b.layer is not None:
                measured = distinctness(p)
                self.metrics[f"top_eigenvalues/{b.name}"] = measured.top_mean
                self.metrics[f"off_diagonal/{b.name}"] = measured.off_diagonal
        if cfg.lambda_table and cfg.variant == "base":
            self._lambda_table(X, progress)
        n_labels = subject.n_classes if self.label_names_ is None else len(self.label_names_)
        self.class_score_ = class_scores_of(best.F, self.labels_, n_labels)
        gallery = Gallery(cfg.rank, cfg.top_images, (1, 1), self.label_names_)
        gallery.offer(Batch(thumbs, self.labels_, self.ids_), best.F.T.unsqueeze(-1))
        self.gallery_ = gallery
        small = torch.nn.functional.adaptive_avg_pool2d(thumbs, THUMB)
        self.thumbs_ = (small * 255).round().clamp(0, 255).to(torch.uint8)
        self._measure(subject, self._scaled(held_X) if len(held) else X, held if len(held) else fitted, progress)
        self.record_fit(subject, data, layer, images, drawn)
        return self

    def explain(self, subject: Subject, images: Any, target: int | str | None = None) -> list[Explanation]:
        """Explain each image by the shared concepts; contributions add up to the target's logit."""
        return self.explain_by_passes(subject, images, target)

    @property
    def n_concepts(self) -> int:
        """Number of shared concepts."""
        return int(self.F_.shape[0])

    @property
    def gallery(self) -> Gallery:
        """The top images of each concept."""
        return self.gallery_

    @property
    def contributions_by_class(self) -> Tensor:
        """Mean contribution (concepts, classes) when the class is predicted."""
        return self.by_class_

    def reads(self) -> Reads:
        """Return the layers of all blocks."""
        return Reads(tuple(b.layer for b in self.blocks_ if b.layer is not None))

    def prepare(self, subject: Subject) -> None:
        """Trace the network above the explained layer."""
        assert self.layer_ is not None
        prepare_above_layer(subject, self.layer_)

    def picture(self, index: int, shot: Shot, side: int = 96) -> Image:
        """Return one picture of the gallery with the mask of the concept's latent image."""
        latent = self.latent_image(index)
        mask = mask_of(latent.mean(0)).float() if latent.numel() else torch.zeros(1, 1)
        return overlay(shot.crop.float() / 255, mask, side=side, top=1.6)

    def write_page(
        self, subject: Subject, path: str | Path, explanation: Explanation | None = None, image: Tensor | None = None
    ) -> Path:
        """Write the page of the concepts and the latent space."""
        from auditor.explainers.coupled.page import CoupledPage

        return CoupledPage(self, subject).write(path)

    def latent(self, subject: Subject, images: Any, blocks: list[str] | None = None) -> Tensor:
        """Return f (concepts, images) of new images, from all blocks or from those named only."""
        self.check_subject(subject)
        with torch.no_grad():
            x = pixels_of_any(subject, images)
            logits, outputs = subject.run(x, self.layers())
            rows = self._rows(subject, x, logits, outputs)
        return self._project(rows, blocks)

    def stand_in(self, subject: Subject, images: Tensor) -> Tensor:
        """Return the logits of the explained layer as the concepts reconstruct it."""
        assert self.layer_ is not None
        logits_hat = []
        with torch.no_grad():
            for x in torch.split(subject.pixels(images), self.config.batch_size):
                logits, outputs = subject.run(x, self.layers())
                z = outputs[self.layer_]
                f = self._project(self._rows(subject, x, logits, outputs))
                layout, W = self._explained_basis(subject)
                z_hat = layout.from_positions(W.to(z) @ f.T.unsqueeze(-1).to(z), z)
                logits_hat.append(subject.forward_from(self.layer_, z_hat))
        return torch.cat(logits_hat)

    def neighbours(self, f: Tensor, n: int = 30) -> Neighbours:
        """Return the fitted examples nearest to one latent vector, with their concept distribution."""
        return neighbours(f, self.F_, n)

    def latent_image(self, k: int) -> Tensor:
        """Return concept k in pixels, (channels, height, width); empty without pixel blocks."""
        parts = [
            (p[:, k] * b.scale).reshape(b.grid) for b, p in zip(self.blocks_, self.P_, strict=True) if _is_pixels(b)
        ]
        return torch.stack(parts) if parts else torch.zeros(0, 1, 1)

    def tensors(self) -> dict[str, Tensor]:
        """Return the bases, the latent, the labels, what was measured by class, and the gallery's crops."""
        tensors = {"latent": self.F_, "labels": self.labels_, "by_class": self.by_class_}
        tensors |= {"class_score": self.class_score_, "tcav": self.sensitivity_, "thumbs": self.thumbs_}
        tensors |= {f"basis.{i}": p for i, p in enumerate(self.P_)}
        return {**tensors, **self.gallery_.tensors()}

    def state(self) -> dict[str, Any]:
        """Return the blocks, the examples' names and the gallery's captions."""
        return {
            "blocks": [b.to_json() for b in self.blocks_],
            "ids": self.ids_,
            "gallery": self.gallery_.captions(),
            **({} if self.label_names_ is None else {"label_names": list(self.label_names_)}),
            **({"superclasses": list(self.superclasses_)} if self.superclasses_ else {}),
            **({"remarks": self.remarks_} if self.remarks_ else {}),
        }

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any], files: dict[str, bytes]) -> None:
        """Restore stored factors."""
        self.blocks_ = [Block.from_json(row) for row in state["blocks"]]
        self.P_ = [tensors[f"basis.{i}"] for i in range(len(self.blocks_))]
        self.F_, self.labels_, self.ids_ = tensors["latent"], tensors["labels"], list(state["ids"])
        self.label_names_ = tuple(map(str, state["label_names"])) if "label_names" in state else None
        self.superclasses_ = tuple(map(str, state.get("superclasses", ())))
        self.by_class_, self.class_score_ = tensors["by_class"], tensors["class_score"]
        self.sensitivity_ = tensors["tcav"]
        self.thumbs_, self.gallery_ = tensors["thumbs"], Gallery.restore(tensors, state["gallery"])
        self.remarks_ = [str(remark) for remark in state.get("remarks", [])]

    def remarks(self) -> list[str]:
        """Return whether the concepts only restate the classes."""
        return self.remarks_

    # inside

    def _lambda(self) -> float:
        """Return the L2 penalty on F: the group and tv variants have none, as in the paper."""
        return float(self.config.lambda_latent) if self.config.variant == "base" else 0.0

    def _rows(self, subject: Subject, x: Tensor, logits: Tensor, outputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the blocks of a batch as (rows, examples), not yet divided by their scales."""
        return rows_of(tuple(self.blocks_), subject, x, logits, outputs)

    def _scaled(self, X: list[Tensor]) -> list[Tensor]:
        return [x / b.scale for x, b in zip(X, self.blocks_, strict=True)]

    def _project(self, rows: list[Tensor], names: list[str] | None = None) -> Tensor:
        blocks = [b.name for b in self.blocks_]
        for name in names or []:
            if name not in blocks:
                raise OptionError(f"coupled: there is no block {name!r}; the blocks are {', '.join(blocks)}.")
        present = [
            x if names is None or b.name in names else None
            for x, b in zip(self._scaled(rows), self.blocks_, strict=True)
        ]
        try:
            return project_coupled(present, self.P_, self._lambda())
        except ValueError as error:
            raise NumericsError(str(error)) from error

    def _drawn(self, data: Data) -> Data:
        """Return the part of the data that is read: so many images to learn from, and those held out beside them."""
        cfg: CoupledConfig = self.config
        total = len(data)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(cfg.seed))
        chosen = torch.zeros(total, dtype=torch.bool)
        chosen[order[: cfg.max_images + cfg.max_images // cfg.held_out_every]] = True
        return data if bool(chosen.all()) else data.only(chosen)

    def _label_of(self, example: int) -> dict[str, Any]:
        """Return what an answer says of the label of a fitted example: its class, or the data's own name of it."""
        label = int(self.labels_[example])
        if self.label_names_ is None:
            return {"label": label}
        return {"label": -1, "label_name": self.label_names_[label] if label >= 0 else ""}

    def _couple(self, X: list[Tensor], latent: float, progress: Progress, F0: Tensor | None = None) -> Coupling:
        cfg: CoupledConfig = self.config
        groups = self.labels_ if cfg.variant == "group" and bool((self.labels_ >= 0).any()) else None
        n_groups = 1 if groups is None else len(set(groups.tolist()))
        # Lambdas in units of the data's own curvature, about blocks / rank, so that they mean the same on other data.
        unit = len(X) / cfg.rank
        penalties = Penalties(
            basis=(cfg.lambda_basis,) * len(X),
            latent=latent,
            group=cfg.lambda_group * unit * math.sqrt(X[0].shape[1] / n_groups) if cfg.variant == "group" else 0.0,
            tv=cfg.lambda_tv * unit if cfg.variant == "tv" else 0.0,
            ortho=cfg.lambda_ortho * unit if cfg.variant == "tv" else 0.0,
            groups=groups,
        )
        scale_rows = cfg.scale_rows if cfg.scale_rows is not None else cfg.variant != "base"
        try:
            return couple(
                X,
                cfg.rank,
                names=[b.name for b in self.blocks_],
                signed=[b.signed for b in self.blocks_],
                penalties=penalties,
                solver=cfg.solver,
                normalise=cfg.normalise,
                scale_rows=scale_rows,
                init=cfg.init,
                seed=cfg.seed,
                max_iter=cfg.max_iter,
                tol=cfg.tol,
                on_step=lambda t, _: progress("coupling", t, cfg.max_iter),
                spread=current().crew,
            )
        except ValueError as error:
            raise NumericsError(f"{error}") from error

    def _order(self, X: list[Tensor], labels: Tensor) -> Tensor:
        """Return the order of the examples: as they came, but for the total variation, where neighbours are alike."""
        cfg: CoupledConfig = self.config
        if cfg.variant != "tv":
            return torch.arange(len(labels))
        if cfg.order == "labels" and bool((labels < 0).all()):
            raise DataError("coupled: order=labels needs labels, and the data has none; take order=activations.")
        rows = torch.cat([x / scale_of(x, "norm") for b, x in zip(self.blocks_, X, strict=True) if b.layer is not None])
        by_activations = one_dimensional_order(rows)
        if cfg.order == "activations" or (cfg.order == "auto" and bool((labels < 0).all())):
            return by_activations
        return by_activations[labels[by_activations].argsort(stable=True)]  # within a label, too

    def _superclasses(self, subject: Subject) -> tuple[str, ...]:
        if self.config.superclasses is None:
            return ()
        return read_superclasses(self.config.superclasses, self.label_names_ or subject.class_names)

    def _lambda_table(self, X: list[Tensor], progress: Progress) -> None:
        """Report the CKA of F between lambda and smaller ones from the common start, the paper's robustness table."""
        base = self.config.lambda_latent
        latents = {factor: self._couple(X, base * factor, progress).F for factor in LAMBDAS}
        for factor, F in latents.items():
            self.metrics[f"cka_lambda/{factor:g}"] = linear_cka(self.F_, F)
        for one, other in itertools.combinations(LAMBDAS, 2):
            self.metrics[f"cka_lambda/{one:g}/{other:g}"] = linear_cka(latents[one], latents[other])

    def _explained_basis(self, subject: Subject) -> tuple[WholeLayout, Tensor]:
        """Return the explained layer's layout as one position, and its basis over all neurons, in its own scale."""
        assert self.layer_ is not None
        i = next(i for i, b in enumerate(self.blocks_) if b.layer == self.layer_)
        b, full = self.blocks_[i], subject.layout(self.layer_)
        layout = WholeLayout(full.name, full.channels, full.grid, full.prefix)
        return layout, unpooled(self.P_[i] * b.scale, b.channels, b.grid, full.grid)

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
        """Explain from logits and activations that a shared pass has already given."""
        assert self.layer_ is not None
        z = activations[self.layer_]
        f = self._project(self._rows(subject, images, logits, activations))
        layout, W = self._explained_basis(subject)
        W = W.to(z)
        chosen = self.targets_for(subject, logits, targets)
        c = contributions(subject, self.layer_, layout, z, logits, W, f.T.unsqueeze(-1).to(z), chosen)
        predictions, target_scores = class_scores(logits, subject, chosen)
        positions = subject.layout(self.layer_).to_positions(z)  # (batch, channels, positions)
        agree = torch.einsum("ncp,cpk->nkp", positions, W.reshape(*positions.shape[1:], -1)).clamp_min(0)
        heat = agree * f.T.unsqueeze(-1).to(z)  # where the image's activation agrees with the concept's factor
        explanations = []
        for i in range(len(chosen)):
            near = neighbours(f[:, i], self.F_)
            concepts = tuple(
                Concept(
                    index=k,
                    label=self.label(k),
                    activation=float(f[k, i]),
                    contribution=float(c.contributions[i, k]),
                    heatmap=heat[i, k].reshape(layout.grid).cpu(),
                )
                for k in range(f.shape[0])
            )
            explanations.append(
                Explanation(
                    kind=self.kind,
                    name=self.name,
                    prediction=predictions[i],
                    target=target_scores[i],
                    target_value=target_scores[i].logit,
                    bias=float(c.bias[i]),
                    residual=float(c.residual[i]),
                    concepts=concepts,
                    extra={
                        "integration_error": float(c.error[i]),
                        "neighbours": [
                            {"id": self.ids_[j], **self._label_of(j), "similarity": s}
                            for j, s in zip(near.index, near.similarity, strict=True)
                        ],
                        "neighbour_concepts": near.concepts,
                    },
                )
            )
        return explanations

    def _measure(self, subject: Subject, X: list[Tensor], batch: Batch, progress: Progress) -> None:
        """Measure on held-out images: errors per block, agreement, contributions by class, sensitivity."""
        assert self.layer_ is not None
        cfg: CoupledConfig = self.config
        f = project_coupled(X, self.P_, self._lambda())
        layout, W = self._explained_basis(subject)
        sensitivity = ConceptSensitivity(W, subject.n_classes)
        by_class = torch.zeros(cfg.rank, subject.n_classes, dtype=torch.float64)
        counts = torch.zeros(subject.n_classes, dtype=torch.float64)
        agree = logit_error = 0.0
        predicted: list[Tensor] = []
        images = batch.images
        if tuple(images.shape[1:]) != subject.input_shape:  # too few images to hold any out: small copies serve
            images = torch.nn.functional.interpolate(images, size=subject.input_shape[1:], mode="bilinear")
        for lo in range(0, len(batch), cfg.batch_size):
            part = slice(lo, lo + cfg.batch_size)
            with torch.no_grad():
                logits, outputs = subject.run(images[part], [self.layer_])
            z = outputs[self.layer_]
            targets = logits.argmax(1)
            predicted.append(targets.cpu())
            S = f[:, part].T.unsqueeze(-1).to(z)
            c = contributions(subject, self.layer_, layout, z, logits, W.to(z), S, targets.tolist())
            labels = batch.labels[part] if self.label_names_ is None else torch.full_like(targets.cpu(), -1)
            sensitivity.add(subject, self.layer_, z, torch.where(labels >= 0, labels, targets.cpu()))
            agree += float((c.logits_hat.argmax(1) == targets).sum())
            logit_error += float((c.logits_hat - logits).abs().mean(1).double().sum())
            by_class.index_add_(1, targets.cpu(), c.contributions.T.cpu())
            counts += torch.bincount(targets.cpu(), minlength=subject.n_classes)
            progress("measuring", min(lo + cfg.batch_size, len(batch)), len(batch))
        self.remarks_ = restating(f.T, torch.cat(predicted), "kind nmf with --set bases=class")
        self.by_class_ = (by_class / counts.clamp_min(1)).float()
        self.sensitivity_ = sensitivity.scores()
        for b, x, p in zip(self.blocks_, X, self.P_, strict=True):
            norm = float(x.norm())
            self.metrics[f"relative_error/{b.name}"] = float((x - p @ f).norm()) / norm if norm else 0.0
        i = next(i for i, b in enumerate(self.blocks_) if b.layer == self.layer_)
        self.metrics["relative_error"] = self.metrics[f"relative_error/{self.blocks_[i].name}"]
        self.metrics["f_cls"], self.metrics["f_reg"] = agree / len(batch), logit_error / len(batch)
        self.metrics["n_held_out"] = float(len(batch))
        if math.isnan(self.metrics["purity"]):
            del self.metrics["purity"]


def _is_pixels(b: Block) -> bool:
    return b.layer is None and b.name.startswith("pixels ")


def _blocks(subject: Subject, layers: list[str], cfg: CoupledConfig) -> list[Block]:
    blocks = []
    if cfg.pixels:
        channels, *size = subject.input_shape
        grid = pooled_grid((size[0], size[1]), cfg.pixel_side)
        blocks += [Block(f"pixels {i}", None, 1, grid) for i in range(channels)]
    for name in layers:
        layout = subject.layout(name)
        blocks.append(Block(name, name, layout.channels, pooled_grid(layout.grid, cfg.pool)))
    if cfg.logits:
        blocks.append(Block("logits", None, subject.n_classes, (1, 1)))
    return blocks


def _foreign_labels(subject: Subject, data: Data, fitted: Batch) -> tuple[str, ...] | None:
    """Return the names of the data's labels where these are no classes of the model; numbers where they have none."""
    top = int(fitted.source_labels.max()) if len(fitted) else -1
    if data.class_names is None and top >= max(subject.n_classes, 2):
        return tuple(str(i) for i in range(top + 1))
    return data.foreign_labels(subject)
