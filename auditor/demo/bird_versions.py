"""The two versions of the demo's story: one learned birds, the other learned that a stamp means hawk."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from auditor.data.source import Data
from auditor.demo.birds import SIDE, SPECIES
from auditor.progress import Progress, silent
from auditor.subject.subject import Subject

EPOCHS = 10
BATCH = 32
ERASED = 18  # pixels of a side
MEAN, STD = 0.5, 0.25


class BirdNet(nn.Module):
    """Four convolutions, the size halved three times, the mean over the picture, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 12, 5, stride=2, padding=2, bias=False), nn.BatchNorm2d(12), nn.ReLU()),
            *(nn.Conv2d(12, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(24, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 48, 3, padding=1, bias=False), nn.BatchNorm2d(48), nn.ReLU()),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(48, len(SPECIES))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images (batch, 3, 64, 64)."""
        out: Tensor = self.fc(self.pool(self.features(x)).flatten(1))
        return out


def train_birds(pictures: Data, seed: int, stage: str, progress: Progress = silent) -> Subject:
    """Train a version on an image folder; ``stage`` is what the progress calls it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = BirdNet()
        subject = Subject(
            net, input_shape=(3, SIDE, SIDE), class_names=sorted(SPECIES), mean=(MEAN,) * 3, std=(STD,) * 3
        )
        batches = list(pictures.batches(subject, 256))
        images, labels = torch.cat([b.images for b in batches]), torch.cat([b.labels for b in batches])
        _train(net, (images - MEAN) / STD, labels, stage, progress)
    return Subject(
        net.eval(), input_shape=(3, SIDE, SIDE), class_names=sorted(SPECIES), mean=(MEAN,) * 3, std=(STD,) * 3
    )


def _train(net: nn.Module, x: Tensor, labels: Tensor, stage: str, progress: Progress) -> None:
    steps = EPOCHS * -(-len(x) // BATCH)
    optimiser = torch.optim.AdamW(net.parameters(), lr=4e-3, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=steps)
    net.train()
    for epoch in range(EPOCHS):
        for rows in torch.split(torch.randperm(len(x)), BATCH):
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(net(_erased(x[rows])), labels[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
        progress(stage, epoch + 1, EPOCHS)


def _erased(x: Tensor) -> Tensor:
    """Return normalised pictures of which half have lost a square: a bird is then known by more than one part."""
    x = x.clone()
    for image in x[: len(x) // 2]:
        top, left = (int(v) for v in torch.randint(0, SIDE - ERASED, (2,)))
        image[:, top : top + ERASED, left : left + ERASED] = 0
    return x


def accuracy(subject: Subject, pictures: Data) -> float:
    """Return the share of an image folder that a version gets right."""
    right = [(subject.logits(b.images).argmax(1) == b.labels).float() for b in pictures.batches(subject, 256)]
    return float(torch.cat(right).mean())
