"""A network of many classes on small images: each class is two textures of its own in some cells of the image."""

import numpy as np
import torch
from torch import nn

from auditor import Subject

N_CLASSES, CELL, CELLS = 41, 4, 5  # no multiple of five: every fifth image is held out, of all classes in turn
SIDE = CELL * CELLS


def textures() -> torch.Tensor:
    """Patterns of -1 and 1, (2 per class, CELL, CELL), all far from each other."""
    g = torch.Generator().manual_seed(0)
    rows: list[torch.Tensor] = []
    while len(rows) < 2 * N_CLASSES:
        row = torch.randint(0, 2, (CELL * CELL,), generator=g) * 2.0 - 1
        if all(float(row @ other) <= 8 for other in rows):
            rows.append(row)
    return torch.stack(rows).view(-1, CELL, CELL)


class Net(nn.Module):
    """A channel per texture that fires where a cell has it, pooling, and a head that reads two textures a class."""

    def __init__(self, bend: bool = False) -> None:
        super().__init__()
        conv = nn.Conv2d(1, 2 * N_CLASSES, CELL, stride=CELL)
        conv.weight.data = textures()[:, None]
        conv.bias.data.fill_(-3.0)
        self.features = nn.Sequential(conv, nn.ReLU())
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(2 * N_CLASSES, N_CLASSES)
        self.fc.weight.data = torch.eye(N_CLASSES).repeat(1, 2) * 4
        self.fc.bias.data.zero_()
        self.bend = bend

    def forward(self, x):
        y = self.fc(self.pool(self.features((x - 0.5) * 2)).flatten(1))
        return torch.tanh(y / 20) * 20 if self.bend else y


def subject(bend: bool = False) -> Subject:
    return Subject(Net(bend).eval(), input_shape=(1, SIDE, SIDE), class_names=[f"kind {k}" for k in range(N_CLASSES)])


def images(per_class: int, seed: int = 0, contrast: float = 0.45):
    """Pixels (n, SIDE, SIDE, 1) and the class each is drawn for; classes take turns."""
    rng, patches = np.random.default_rng(seed), textures().numpy()
    pixels, labels = [], []
    for _ in range(per_class):
        for k in range(N_CLASSES):
            image = 0.5 + 0.04 * rng.standard_normal((SIDE, SIDE))
            cells = rng.choice(CELLS * CELLS, 10, replace=False)
            for i, cell in enumerate(cells):
                y, x = CELL * (cell // CELLS), CELL * (cell % CELLS)
                texture = patches[k] if i < 5 else patches[N_CLASSES + k]
                image[y : y + CELL, x : x + CELL] += contrast * texture
            pixels.append(image[:, :, None])
            labels.append(k)
    return np.stack(pixels).clip(0, 1).astype(np.float32), np.array(labels)


def write(path, per_class: int, **options):
    """Write images to an ``.npz`` without labels and return its path."""
    pixels, _ = images(per_class, **options)
    np.savez(path, images=pixels)
    return path
