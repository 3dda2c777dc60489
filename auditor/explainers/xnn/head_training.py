"""Fitting explanation heads to a harvest: classes, split, early stop, checkpoint, the best epoch of every class."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from auditor.errors import DataError, NumericsError, OptionError
from auditor.explainers.fitted_images import FittedImages
from auditor.explainers.xnn.head_objective import (
    Problem,
    SraeConfig,
    TrainingState,
    fit_predictor,
    normalise,
    start_state,
    train,
    weights_of,
)
from auditor.explainers.xnn.heads import XHeads
from auditor.kernels.networks.reconstruction_losses import live_pull_away, pull_away
from auditor.progress import Progress, silent

log = logging.getLogger(__name__)
CHECKPOINT_EVERY_S = 5.0


@dataclass(frozen=True)
class Examples:
    """Activations, logits and labels (-1: unknown) of a set of images, and which to learn, choose and report on."""

    Z: Tensor
    logits: Tensor
    labels: Tensor
    parts: FittedImages

    def positives(self, classes: Sequence[int]) -> Tensor:
        """Return (classes, examples): of the class by label, by the model's own prediction where there is none."""
        classes_of_rows = torch.where(self.labels >= 0, self.labels, self.logits.argmax(1))
        return torch.stack([classes_of_rows == k for k in classes])

    def part(self, rows: Tensor) -> Examples:
        """Return the examples that ``rows`` selects."""
        return Examples(self.Z[rows], self.logits[rows], self.labels[rows], self.parts.rows(rows))

    @property
    def learned(self) -> Examples:
        """The examples to learn from."""
        return self.part(self.parts.learn)

    @property
    def trial(self) -> Examples:
        """The examples that choose the best epoch; those learned from where there are none."""
        return self.part(self.parts.choose) if bool(self.parts.choose.any()) else self.learned

    @property
    def reported(self) -> Examples:
        """The examples to report on; all of them where none could be held out."""
        return self.part(self.parts.report) if bool(self.parts.report.any()) else self


@dataclass(frozen=True)
class Trained:
    """Heads of the best epoch of every class, and how the training went."""

    heads: XHeads
    epochs: int
    dead: Tensor  # (classes, features)
    reseeded: Tensor
    pull_away: Tensor  # (classes,)
    live_pull_away: Tensor
    diverged: str  # the sentence of the error that ended it, or ""


def check_classes(examples: Examples, classes: Sequence[int], n_features: int, names: Sequence[str]) -> None:
    """Refuse a class that has no positive or no negative example, and a set smaller than the embedding."""
    positive = examples.positives(classes)
    for k, row in zip(classes, positive, strict=True):
        n = int(row.sum())
        if n == 0 or n == len(row):
            which = "positive" if n == 0 else "negative"
            raise DataError(
                f"xnn: class {names[k]!r} has no {which} example among {len(row)} images, and a head needs both. "
                f"Give data with images of this class and of others, or name another target."
            )
    n_train = examples.parts.counts["learn"]
    if n_train < n_features:
        raise DataError(
            f"xnn: {n_train} training images are fewer than {n_features} x-features. Give more images, or lower n."
        )


def fit_heads(
    heads: XHeads,
    examples: Examples,
    classes: Sequence[int],
    config: SraeConfig,
    *,
    max_epochs: int,
    patience: int,
    checkpoint: Path | None = None,
    stamp: str = "",
    progress: Progress = silent,
) -> Trained:
    """Train until no class gains faithfulness on trial images for ``patience`` epochs; each keeps its best epoch.

    Which features are dead and how far apart they are is measured on the images to report on, unused till then.
    """
    learned = examples.learned
    problem, judge = _problem(learned, classes), _problem(examples.trial, classes)
    state = start_state(heads, problem, config)
    best = _Best(heads, len(classes))
    if checkpoint is not None and checkpoint.exists():
        best.since = _resume(checkpoint, state, best, stamp)
        log.info("xnn: training goes on from epoch %d of %s", state.epoch, checkpoint.name)
    diverged, written = "", monotonic()
    try:
        if state.epoch < max_epochs and bool((best.since < patience).any()):
            for _ in train(problem, state, config):  # each round is one epoch of `state`
                best.judge(heads, _trial_loss(heads, judge, config, state))
                progress("training heads", state.epoch, max_epochs)
                if checkpoint is not None and monotonic() - written > CHECKPOINT_EVERY_S:
                    _write(checkpoint, state, best, stamp)
                    written = monotonic()
                if state.epoch >= max_epochs or bool((best.since >= patience).all()):
                    break
    except NumericsError as err:
        if state.epoch <= 1:
            raise NumericsError(f"xnn: {err} There is no good state yet, so nothing is kept.") from err
        diverged = f"{err} The best state before that is kept."
        log.warning("xnn: %s", diverged)
    except KeyboardInterrupt:
        if checkpoint is not None:
            _write(checkpoint, state, best, stamp)
            log.warning("xnn: stopped in epoch %d; the same command goes on from %s", state.epoch, checkpoint.name)
        raise
    best.put_back(heads)
    if config.variant == "cae":
        fit_predictor(heads, problem)
    normalise(heads, learned.Z)
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    return _summary(heads, examples.reported.Z, state, diverged)


def _problem(examples: Examples, classes: Sequence[int]) -> Problem:
    y = examples.logits[:, list(classes)].T.contiguous()
    return Problem(examples.Z, y, weights_of(examples.positives(classes)))


def _trial_loss(heads: XHeads, judge: Problem, config: SraeConfig, state: TrainingState) -> Tensor:
    if config.variant == "cae":  # nothing to be faithful to yet: follow the reconstruction it is trained on
        return state.losses["reconstruction"]
    with torch.no_grad():
        parts = [heads.predict(heads.encode(Z)) for Z in torch.split(judge.Z, 1024)]
        error = (torch.cat(parts, 1) - judge.y) / judge.spread.unsqueeze(-1)
        return (judge.w * error.square()).mean(-1)


class _Best:
    """Parameters of the best epoch, class by class."""

    def __init__(self, heads: XHeads, n_classes: int) -> None:
        self.loss = torch.full((n_classes,), torch.inf)
        self.since = torch.zeros(n_classes, dtype=torch.long)
        self.tensors = {name: p.detach().clone() for name, p in heads.named_parameters()}

    def judge(self, heads: XHeads, loss: Tensor) -> None:
        better = loss < self.loss * (1 - 1e-3)
        self.since = torch.where(better, 0, self.since + 1)
        better = loss < self.loss
        self.loss = torch.where(better, loss, self.loss)
        for name, p in heads.named_parameters():
            self.tensors[name][better] = p.detach()[better]

    def put_back(self, heads: XHeads) -> None:
        with torch.no_grad():
            for name, p in heads.named_parameters():
                p.copy_(self.tensors[name])


def _summary(heads: XHeads, Z: Tensor, state: TrainingState, diverged: str) -> Trained:
    with torch.no_grad():
        E = torch.cat([heads.embed(heads.rows(part)) for part in torch.split(Z, 1024)], 1)
        dead = (E == 0).all(1)
        assert state.reseeded is not None
        return Trained(heads, state.epoch, dead, state.reseeded, pull_away(E), live_pull_away(E, ~dead), diverged)


def _write(path: Path, state: TrainingState, best: _Best, stamp: str) -> None:
    assert state.silent is not None
    assert state.reseeded is not None
    tensors = {"Q": state.Q, "silent": state.silent, "reseeded": state.reseeded}
    tensors |= {"generator": state.generator.get_state(), "best_loss": best.loss, "since": best.since}
    tensors |= {f"heads.{k}": v for k, v in state.heads.state_dict().items()}
    tensors |= {f"best.{k}": v for k, v in best.tensors.items()}
    for i, slot in state.adam.state_dict()["state"].items():
        tensors |= {f"adam.{i}.{k}": torch.as_tensor(v) for k, v in slot.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    save_file(
        {k: v.detach().contiguous().clone() for k, v in tensors.items()},
        temporary,
        metadata={"auditor": json.dumps({"epoch": state.epoch, "stamp": stamp})},
    )
    temporary.replace(path)


def _resume(path: Path, state: TrainingState, best: _Best, stamp: str) -> Tensor:
    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get("auditor", "{}"))
            tensors: dict[str, Any] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except Exception as err:
        raise OptionError(
            f"xnn: {path.name} is no checkpoint that can be read ({err}); remove it to start anew."
        ) from err
    if about.get("stamp") != stamp:
        raise OptionError(
            f"xnn: the checkpoint {path.name} belongs to another model, data set or configuration. Remove it to start "
            f"anew, or name another file."
        )
    state.epoch, state.Q = int(about["epoch"]), tensors["Q"]
    state.silent, state.reseeded = tensors["silent"], tensors["reseeded"]
    state.generator.set_state(tensors["generator"])
    state.heads.load_state_dict({k[6:]: v for k, v in tensors.items() if k.startswith("heads.")})
    slots: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("adam."):
            _, i, name = key.split(".", 2)
            slots.setdefault(int(i), {})[name] = value
    adam = state.adam.state_dict()
    state.adam.load_state_dict({"state": slots, "param_groups": adam["param_groups"]})
    best.loss, best.tensors = tensors["best_loss"], {k[5:]: v for k, v in tensors.items() if k.startswith("best.")}
    since: Tensor = tensors["since"]
    return since
