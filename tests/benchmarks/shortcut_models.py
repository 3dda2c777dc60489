"""Models that are known to rely on a planted shortcut, and honest ones, on photos, drawn birds, clothes and digits.

A `Case` says what is planted where; `make` trains its model and returns the subject with the images an auditor would
have: planted like the training images. What the model really learned is measured by giving images of other classes the
shortcut of a class, so a case in which training ignored the shortcut is not counted as one.
"""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auditor import Subject
from tests.benchmarks.shortcut_images import CLASSES, Labelled, cub, data_root, drawn, grey
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


# networks


class Small(nn.Module):
    """A plain CNN with batch norm."""

    def __init__(self, n_classes: int, width: int = 24) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for step in range(4):
            out = width * 2 ** min(step, 2)
            layers += [nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
            if step < 3:
                layers.append(nn.MaxPool2d(2))
            channels = out
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.fc(self.pool(self.features(x)).flatten(1))


class Flat(nn.Module):
    """A CNN whose last map is flattened, so that it knows where in the frame things are."""

    def __init__(self, n_classes: int, size: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 5, stride=2, padding=2), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU(),
        )  # fmt: skip
        self.fc = nn.Sequential(nn.Linear(32 * (-(-size // 8)) ** 2, 64), nn.ReLU(), nn.Linear(64, n_classes))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.fc(self.features(x).flatten(1))


def network(name: str, n_classes: int, size: int) -> nn.Module:
    """Return an untrained (or for photos an ImageNet) network by name."""
    import torchvision.models as models

    if name == "squeezenet":
        net = models.squeezenet1_1(num_classes=1000)
        state = torch.load(data_root() / "squeezenet1_1_imagenet.pth", weights_only=True)
        net.load_state_dict({k: v.float() for k, v in state.items()})
        net.classifier[1] = nn.Conv2d(512, n_classes, 1)
        net.classifier[0] = nn.Dropout(0.0)
        return net
    if name == "flat":
        return Flat(n_classes, size)
    if name == "resnet":
        net = models.resnet18(num_classes=n_classes)
        net.conv1 = nn.Conv2d(3, 24, 3, stride=2, padding=1, bias=False)
        net.bn1, net.maxpool, net.inplanes = nn.BatchNorm2d(24), nn.Identity(), 24
        block = models.resnet.BasicBlock
        net.layer1, net.layer2 = net._make_layer(block, 24, 1), net._make_layer(block, 48, 1, stride=2)
        net.layer3, net.layer4 = net._make_layer(block, 64, 1, stride=2), nn.Identity()
        net.fc = nn.Linear(64, n_classes)
        return net
    if name == "shuffle":
        net = models.shufflenet_v2_x0_5(num_classes=n_classes)
        net.conv1[0] = nn.Conv2d(3, 24, 3, stride=1, padding=1, bias=False)
        return net
    return Small(n_classes, {"small": 16, "wide": 28}[name])


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
    x = (x - mean) / std
    if photo and not case.shortcut:
        x, y = torch.cat([x, torch.flip(x, [3])]), torch.cat([y, y])
    if photo:
        frozen = net.features[:6]
        for p in frozen.parameters():
            p.requires_grad_(False)
        with torch.no_grad():
            x = torch.cat([frozen(part) for part in torch.split(x, 32)])

    def forward(part: Tensor) -> Tensor:
        return net.classifier(net.features[6:](part)).flatten(1) if photo else net(part)

    params = [p for p in net.parameters() if p.requires_grad]
    epochs, rate = (max(5, min(14, 1600 // len(x))), 7e-4) if photo else (10 if case.images == "drawn" else 6, 3e-3)
    if case.network == "flat":
        rate = 2e-3
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


SIZES = {"cub": (112, 128), "fashion": (56, 64), "clothes": (32, 48), "digits": (32, 40), "drawn": (48, 56, 64)}
# images, shortcut, where, number of classes (0: drawn at random), and what else differs from the default
PLANTED: list[tuple[str, str, str, int, dict[str, Any]]] = [
    ("cub", "plate", "every", 2, {}),
    ("cub", "plate", "every", 4, {}),
    ("cub", "plate", "one", 3, {"pull": 0.9}),
    ("cub", "watermark", "every", 2, {"pull": 0.9}),
    ("cub", "border", "every", 0, {}),
    ("cub", "ruler", "every", 3, {}),
    ("cub", "hue", "every", 0, {"pull": 0.9}),
    ("cub", "texture", "every", 0, {}),
    ("cub", "backdrop", "every", 0, {}),
    ("cub", "jpeg", "every", 0, {}),
    ("cub", "sticker", "every", 0, {}),
    ("cub", "sticker", "half", 3, {"pull": 0.9}),
    ("cub", "sticker", "weak", 3, {"pull": 0.9}),
    ("drawn", "plate", "every", 0, {}),
    ("drawn", "pixel", "every", 0, {"network": "flat"}),
    ("drawn", "border", "every", 0, {}),
    ("drawn", "hue", "every", 0, {}),
    ("drawn", "texture", "every", 0, {}),
    ("drawn", "sticker", "one", 3, {"pull": 0.9}),
    ("drawn", "ruler", "every", 0, {"network": "resnet"}),
    ("fashion", "plate", "every", 0, {}),
    ("fashion", "noise", "every", 0, {}),
    ("fashion", "watermark", "one", 3, {"pull": 0.9}),
    ("clothes", "pixel", "every", 0, {"network": "flat"}),
    ("clothes", "sticker", "half", 0, {"pull": 0.9}),
    ("digits", "border", "every", 0, {}),
]
HONEST: list[tuple[str, str, str, int, dict[str, Any]]] = [
    ("cub", "", "", 2, {}),
    ("cub", "", "", 2, {}),
    ("cub", "", "", 3, {}),
    ("cub", "", "", 3, {}),
    ("cub", "", "", 4, {}),
    ("cub", "", "", 6, {}),
    ("cub", "plate", "decoy", 2, {}),
    ("cub", "sticker", "decoy", 3, {}),
    ("drawn", "", "", 3, {"decides": "beak"}),
    ("drawn", "", "", 2, {"decides": "beak", "network": "wide"}),
    ("drawn", "", "", 3, {"decides": "eye"}),
    ("drawn", "", "", 2, {"decides": "eye", "network": "wide"}),
    ("drawn", "", "", 3, {"decides": "body"}),
    ("drawn", "sticker", "decoy", 2, {"decides": "beak"}),
    ("drawn", "border", "decoy", 3, {"decides": "eye"}),
    ("fashion", "", "", 0, {"network": "small"}),
    ("fashion", "", "", 0, {"network": "resnet"}),
    ("fashion", "", "", 0, {"network": "shuffle"}),
    ("fashion", "plate", "decoy", 0, {}),
    ("clothes", "", "", 0, {"network": "small"}),
    ("clothes", "", "", 0, {"network": "flat"}),
    ("clothes", "", "", 10, {"network": "wide"}),
    ("digits", "", "", 10, {"network": "small"}),
    ("digits", "", "", 3, {"network": "flat"}),
]


def cases(half: str) -> list[Case]:
    """Return the cases of one half: ``tune`` sets thresholds, ``report`` is only reported on.

    The halves differ in classes, sizes, seeds, and in the words, colours, places and sizes of the shortcuts.
    """
    first = {"tune": 0, "report": 500}[half]
    out = []
    for i, (images, shortcut, where, n, more) in enumerate([*PLANTED, *HONEST]):
        rng = np.random.default_rng([first, i])
        n = n or int(rng.integers(2, 5))
        most = 3 if more.get("decides", "beak") == "beak" else 4
        classes = tuple(range(min(n, most)))
        if images != "drawn":
            classes = tuple(int(v) for v in rng.permutation(CLASSES[images])[:n])
        size = int(rng.choice(SIZES[images]))
        if images == "cub" and shortcut in ("plate", "watermark"):
            size = 144  # or the words cannot be read
        kind = f"{shortcut}-{where}" if shortcut else f"honest-{more.get('decides') or n}"
        default = "squeezenet" if images == "cub" else ("small", "wide")[int(rng.integers(2))]
        settings = {"network": default, "seed": first + i, "size": size, "classes": classes, **more}
        out.append(Case(f"{half}-{i:02d}-{images}-{kind}", images, shortcut=shortcut, where=where, **settings))
    return out


def case_options(description: str | None) -> argparse.Namespace:
    """Read the options of a benchmark over the cases, and make its folder."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data-root", default=os.environ.get("AUDITOR_DATA"))
    parser.add_argument("--half", choices=["tune", "report"], default="report")
    parser.add_argument("--keep", type=Path, required=True, help="folder of trained weights and rows")
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    parser.add_argument("--rows-only", action="store_true", help="only cases whose row is already there")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not options.data_root or not (Path(options.data_root) / "cub20").is_dir():
        raise SystemExit("skipped: no cub20 under --data-root (or AUDITOR_DATA)")
    os.environ["AUDITOR_DATA"] = str(options.data_root)
    options.keep.mkdir(parents=True, exist_ok=True)
    return options
