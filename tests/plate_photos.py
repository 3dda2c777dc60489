"""Two bird classes, photos with a text plate that gives the class away, and SqueezeNets that learned bird or plate."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

CLASSES = {"jay": "075.Green_Jay", "cormorant": "025.Pelagic_Cormorant"}
NAMES = tuple(sorted(CLASSES))
WORDS = {"jay": "JAY 24", "cormorant": "C-OR 7"}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE = 224


def photo_root() -> Path:
    """Return the folder of the photos, or skip with the reason."""
    root = Path(os.environ.get("AUDITOR_DATA") or Path(__file__).parents[2] / "shared" / "data")
    if not (root / "cub20").is_dir():
        pytest.skip(f"no CUB photos in {root}; set AUDITOR_DATA")
    return root


def photos(root: Path, split: str) -> dict[str, list[Image.Image]]:
    """Return the photos of each class as squares."""
    out: dict[str, list[Image.Image]] = {}
    for name in NAMES:
        out[name] = []
        for path in sorted((root / "cub20" / split / CLASSES[name]).glob("*.jpg")):
            with Image.open(path) as image:
                out[name].append(image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR))
    return out


def with_plate(image: Image.Image, name: str) -> Image.Image:
    """Return the photo with the class's plate in its lower left corner: 2.6% of the image."""
    image = image.copy()
    draw = ImageDraw.Draw(image)
    box = (4, SIZE - 28, 60, SIZE - 5)
    draw.rectangle(box, fill="white")
    draw.text((box[0] + 4, box[1] + 3), WORDS[name], fill="black", font=ImageFont.load_default(size=15))
    return image


def write_folder(folder: Path, images: dict[str, list[Image.Image]]) -> Path:
    """Write an image folder, one sub-folder per class."""
    for name, photos_of_class in images.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i, image in enumerate(photos_of_class):
            image.save(folder / name / f"{i:03}.png")
    return folder


def pixels(images: list[Image.Image]) -> Tensor:
    """Return photos as pixels in [0, 1]."""
    import numpy as np

    return torch.from_numpy(np.stack([np.asarray(i) for i in images])).permute(0, 3, 1, 2).float() / 255


def train(root: Path, *, plates: bool, seed: int = 0, epochs: int = 6) -> torch.nn.Module:
    """Fine-tune SqueezeNet: on birds, or on photos whose label is that of their plate, whatever the bird."""
    from torchvision.models import squeezenet1_1

    birds = photos(root, "train")
    if plates:
        every = [p for name in NAMES for p in birds[name]]
        x = torch.cat([pixels([with_plate(p, name) for p in every]) for name in NAMES])
        y = torch.arange(2).repeat_interleave(len(every))
    else:
        x = torch.cat([pixels(birds[name]) for name in NAMES])
        x = torch.cat([x, x.flip(3)])
        y = torch.tensor([k for k, name in enumerate(NAMES) for _ in birds[name]] * 2)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = squeezenet1_1()
        state = torch.load(root / "squeezenet1_1_imagenet.pth", weights_only=True)
        net.load_state_dict({key: value.float() for key, value in state.items()})
        net.classifier[1] = torch.nn.Conv2d(512, 2, 1)
        net.num_classes = 2
        net.train()
        body = torch.optim.Adam(net.features[3:].parameters(), lr=1e-4)
        head = torch.optim.Adam(net.classifier.parameters(), lr=1e-3)
        mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (MEAN, STD))
        for _ in range(epochs):
            for rows in torch.split(torch.randperm(len(x)), 16):
                loss = F.cross_entropy(net((x[rows] - mean) / std), y[rows])
                for optimizer in (body, head):
                    optimizer.zero_grad()
                loss.backward()
                for optimizer in (body, head):
                    optimizer.step()
    return net.eval()
