"""The demo's model: a small CNN trained on scikit-learn's digits in seconds."""

from __future__ import annotations

import torch
from torch import nn

from auditor.data.source import open_data
from auditor.progress import Progress, silent
from auditor.subject.preprocessing import Preprocessing
from auditor.subject.subject import Subject

EPOCHS = 30


class DigitsNet(nn.Module):
    """Two convolutions, pooling and a linear head for 8x8 digits."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(24, 48, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(48, 64, 3, padding=1),
            nn.ReLU(),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(64 * 16, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of images (batch, 1, 8, 8)."""
        out: torch.Tensor = self.head(self.features(x))
        return out


def train_digits(seed: int = 0, progress: Progress = silent) -> tuple[Subject, float]:
    """Train on four fifths of the digits; return the subject and its accuracy on the rest."""
    generator = torch.Generator().manual_seed(seed)
    pre = Preprocessing.of((1, 8, 8), None, None, "stretch")
    train, test = (next(open_data(f"sklearn:digits?split={part}").batches(pre, 4096)) for part in ("train", "test"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = DigitsNet()
    optimiser = torch.optim.Adam(net.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, EPOCHS)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(train), generator=generator)
        for rows in torch.split(order, 64):
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(net(train.images[rows]), train.labels[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        schedule.step()
        progress("training on the digits", epoch + 1, EPOCHS)
    subject = Subject(net, input_shape=(1, 8, 8), class_names=[str(i) for i in range(10)], mean=0.0, std=1.0)
    with torch.no_grad():
        accuracy = float((subject.logits(test.images).argmax(1) == test.labels).float().mean())
    return subject, accuracy
