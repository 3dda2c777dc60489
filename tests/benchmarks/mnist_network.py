"""The MNIST network of the rate-distortion benchmarks: trained once, kept under the given folder."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from auditor import Subject, open_data


def network(side: int = 28) -> nn.Sequential:
    """Two 5x5 convolutions with average pooling, so that Gaussian moments have a closed form."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (side // 4) ** 2, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def mnist(root: Path, split: str, side: int = 28) -> tuple[Tensor, Tensor]:
    """Return all images (N, 1, side, side) in [0, 1] and labels; 14 averages 2x2 pixels."""
    data = open_data(f"torchvision:MNIST?root={root}&split={split}")
    probe = Subject(network(), input_shape=(1, 28, 28))
    batches = list(data.batches(probe, 5000))
    images = torch.cat([b.images for b in batches])
    if side != 28:
        images = nn.functional.avg_pool2d(images, 28 // side)
    return images, torch.cat([b.labels for b in batches])


def trained(root: Path, cache: Path, side: int = 28, epochs: int = 5) -> tuple[Subject, float]:
    """Return the subject and its test accuracy; trains when the cache has no weights for this size."""
    torch.manual_seed(0)
    net = network(side)
    path = cache / f"mnist-avgpool-{side}.safetensors"
    if path.is_file():
        net.load_state_dict(load_file(path))
    else:
        x, y = mnist(root, "train", side)
        optimiser = torch.optim.Adam(net.parameters(), 2e-3)
        steps = epochs * (len(x) // 100)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=steps)
        for _ in range(epochs):
            for batch in torch.randperm(len(x)).split(100)[: len(x) // 100]:
                optimiser.zero_grad()
                nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
                optimiser.step()
                schedule.step()
        cache.mkdir(parents=True, exist_ok=True)
        save_file(net.state_dict(), path)
    subject = Subject(net.eval(), input_shape=(1, side, side), class_names=[str(i) for i in range(10)])
    x, y = mnist(root, "test", side)
    with torch.no_grad():
        predicted = torch.cat([subject.logits(part).argmax(1) for part in x.split(1000)])
    return subject, float((predicted == y).float().mean())
