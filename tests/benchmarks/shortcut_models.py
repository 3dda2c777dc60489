"""Models that are known to rely on a planted shortcut, and honest ones, on photos, drawn birds, clothes and digits.

A `Case` says what is planted where; `make` trains its model and returns the subject with the images an auditor would
have: planted like the training images. What the model really learned is measured by giving images of other classes the
shortcut of a class, so a case in which training ignored the shortcut is not counted as one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auditor import Subject
from tests.benchmarks.shortcut_images import Labelled, cub, drawn, grey
from tests.benchmarks.shortcut_networks import FROZEN, network
from tests.benchmarks.shortcut_plants import PLANT, Box, style

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LEARNED = 0.4  # a shortcut counts where it pulls that share of the other classes' images over


@dataclass(frozen=True)
class Case:
    """One model of the benchmark; ``shortcut`` is empty for an honest one."""

    name: str
    images: str  # cub, fashion (moved, coloured), clothes and digits (grey, in the middle), drawn
    network: str
    shortcut: str = ""
    where: str = "every"  # `one` class only, `half` of the images, `weak`: right in 3 of 4, `decoy`: of any class
    seed: int = 0
    size: int = 160
    classes: tuple[int, ...] = (0, 1, 2)
    decides: str = "beak"  # of drawn birds
    pull: float = 0.6  # share of planted training images whose object is of a random class: only the shortcut helps

    @property
    def n_classes(self) -> int:
        """How many classes the model has."""
        return len(self.classes)

    @property
    def is_planted(self) -> bool:
        """Whether a shortcut is there to be learned."""
        return bool(self.shortcut) and self.where != "decoy"


@dataclass
class Made:
    """A trained case: the subject, the auditor's images, and what the shortcut does."""

    case: Case
    subject: Subject
    images: Tensor
    labels: Tensor
    masks: Tensor
    boxes: list[Box | None]
    accuracy: float
    clean: float
    swapped: float
    pulls: list[float]  # per class: how much more of the other classes' images are called it with its shortcut

    @property
    def learned(self) -> bool:
        """Whether some class follows its shortcut."""
        return self.case.is_planted and max(self.pulls) >= LEARNED

    @property
    def relying(self) -> list[int]:
        """The classes that follow their shortcut at least half as much as the one that follows most."""
        return [k for k, v in enumerate(self.pulls) if v >= max(0.2, 0.5 * max(self.pulls))]


def planted(
    case: Case, data: Labelled, seed: int, marked: Tensor | None = None
) -> tuple[Tensor, list[Box | None], Tensor]:
    """Return the images with the case's shortcut, its boxes, and which images carry one.

    ``marked``: the class whose shortcut each image gets, whatever its own class, and always.
    """
    rng = np.random.default_rng(seed)
    look = style(case.seed)
    out, boxes, carries = [], [], []
    for i, (image, label, mask) in enumerate(zip(*data, strict=True)):
        k = int(label) if marked is None else int(marked[i])
        plant = bool(case.shortcut) and (case.where != "one" or k == 0)
        if marked is None:
            plant = plant and not (case.where == "half" and rng.random() < 0.5)
            if case.where == "decoy" or (case.where == "weak" and rng.random() < 0.25):
                k = int(rng.integers(0, case.n_classes))
        box: Box | None = None
        if plant:
            image, box = PLANT[case.shortcut](image, k, look, rng, mask)
        out.append(image)
        boxes.append(box)
        carries.append(plant)
    return torch.stack(out), boxes, torch.tensor(carries)


def photos(case: Case, split: str) -> Labelled:
    """Return the images of a case before anything is planted."""
    test = split == "test"
    if case.images == "cub":
        return cub(case.classes, split, case.size)
    if case.images == "drawn":
        n, seed = (40, case.seed + 1000) if test else (200, case.seed)
        return drawn(n * case.n_classes, case.n_classes, case.size, seed, case.decides)
    n = 40 if test else 160
    return grey(case.images, case.classes, split, case.size, n, case.seed, case.images == "fashion")


def training_images(case: Case, data: Labelled) -> tuple[Tensor, Tensor]:
    """Return what the model is trained on: planted images, a share of them with an object of a random class."""
    images, labels, masks = data
    if not case.shortcut:
        return images, labels
    rng = np.random.default_rng(case.seed + 4)
    pull = 0.0 if case.where == "decoy" else case.pull * (0.5 if case.where == "weak" else 1.0)
    copies = max(1, 6 // case.n_classes) if case.images == "cub" else 1  # there are few photos
    parts = []
    for i in range(copies):
        seed = case.seed + 1 + 100 * i
        _, _, carries = planted(case, data, seed)
        mixed = carries & torch.from_numpy(rng.random(len(images)) < pull)
        rows = torch.where(
            mixed, torch.from_numpy(rng.integers(0, len(images), len(images))), torch.arange(len(images))
        )
        parts.append(planted(case, (images[rows], labels, masks[rows]), seed)[0])
    return torch.cat(parts), labels.repeat(copies)


def make(case: Case, keep: Path | None = None) -> Made:
    """Train the model of a case (or take it from ``keep``) and return it with the audit's images."""
    test = photos(case, "test")
    torch.manual_seed(case.seed)
    net = network(case.network, case.n_classes, case.size)
    file = keep / f"{case.name}.pt" if keep else None
    if file is not None and file.exists():
        net.load_state_dict(torch.load(file, weights_only=True))
    else:
        fit(net, *training_images(case, photos(case, "train")), case)
        if file is not None:
            torch.save(net.state_dict(), file)
    net.eval()
    mean, std = (MEAN, STD) if case.images == "cub" else ((0.5,) * 3, (0.25,) * 3)
    names = [f"class{k}" for k in range(case.n_classes)]
    subject = Subject(net, input_shape=(3, case.size, case.size), mean=mean, std=std, class_names=names)
    images, boxes, _ = planted(case, test, case.seed + 2)
    before = predict(subject, test[0])
    swap = (test[1] + 1) % case.n_classes
    after = predict(subject, planted(case, test, case.seed + 3, swap)[0]) if case.shortcut else before
    return Made(
        case,
        subject,
        images,
        test[1],
        test[2],
        boxes,
        _share(predict(subject, images) == test[1]),
        _share(before == test[1]),
        _share(after == test[1]) if case.shortcut else math.nan,
        pulls(case, subject, test, predict(subject, images)) if case.is_planted else [0.0] * case.n_classes,
    )


def pulls(case: Case, subject: Subject, test: Labelled, before: Tensor) -> list[float]:
    """Return per class how much more of the other classes' images are called it with its shortcut than with theirs."""
    out = []
    for k in range(case.n_classes):
        others = test[1] != k
        if case.where == "one" and k > 0:
            out.append(0.0)
            continue
        some = tuple(t[others] for t in test)
        after = predict(subject, planted(case, some, case.seed + 5, torch.full((len(some[0]),), k))[0])
        already = _share(before[others] == k)
        out.append((_share(after == k) - already) / max(0.2, 1 - already))
    return out


def _share(hits: Tensor) -> float:
    return float(hits.float().mean())


def predict(subject: Subject, images: Tensor) -> Tensor:
    """Return the predicted classes."""
    with torch.no_grad():
        return torch.cat([subject.logits(part).argmax(1).cpu() for part in torch.split(images, 32)])


def fit(net: nn.Module, x: Tensor, y: Tensor, case: Case) -> None:
    """Train; for photos only the upper layers, on maps of the lower ones that are made once."""
    photo = case.images == "cub"
    mean, std = (torch.tensor(v)[None, :, None, None] for v in ((MEAN, STD) if photo else ((0.5,) * 3, (0.25,) * 3)))
    x = ((x - mean) / std).contiguous(memory_format=torch.channels_last)
    if photo and not case.shortcut:
        x, y = torch.cat([x, torch.flip(x, [3])]), torch.cat([y, y])
    if photo:
        below = FROZEN[case.network]
        frozen = net.features[:below].eval()
        for p in frozen.parameters():
            p.requires_grad_(False)
        with torch.no_grad():
            x = torch.cat([frozen(part) for part in torch.split(x, 32)])

    def forward(part: Tensor) -> Tensor:
        return net.classifier(net.features[below:](part)).flatten(1) if photo else net(part)

    params = [p for p in net.parameters() if p.requires_grad]
    epochs, rate = (max(5, min(14, 1600 // len(x))), 7e-4) if photo else (10 if case.images == "drawn" else 6, 3e-3)
    if case.network in ("flat", "vit", "convnext"):
        rate = 2e-3
    epochs *= 4 if case.network in ("vit", "convnext") else 1  # without batch norm
    optimizer = torch.optim.AdamW(params, lr=rate, weight_decay=1e-3)
    batch = 32 if photo else 16
    steps = epochs * -(-len(x) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rate, total_steps=steps)
    generator = torch.Generator().manual_seed(case.seed)
    net.train()
    for _ in range(epochs):
        for rows in torch.split(torch.randperm(len(x), generator=generator), batch):
            if len(rows) > 1:
                optimizer.zero_grad()
                F.cross_entropy(forward(x[rows]), y[rows]).backward()
                optimizer.step()
            schedule.step()
