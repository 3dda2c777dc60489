"""How many draws of noise pixel flipping needs: photos differ far more among each other than draws do.

Prints the standard deviation of the area between photos and between draws of one photo, and how much wider the
interval over photos is with 1, 2 or 4 draws than with 8. SqueezeNet (ImageNet) on CUB photos, Grad-CAM and a
random map.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from real_activations import MEAN, STD, add_data_root, need, photos
from torchvision.models import squeezenet1_1

from auditor import Subject
from auditor.attribution.baselines import grad_cam
from auditor.auditing.explanation_quality import flip_cells
from auditor.perturbation.pixel_flipping import pixel_flip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_root(parser)
    parser.add_argument("--images", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=6)
    args = parser.parse_args()
    root = need(args.data_root, "cub20", "squeezenet1_1_imagenet.pth")
    model = squeezenet1_1()
    model.load_state_dict(torch.load(root / "squeezenet1_1_imagenet.pth", weights_only=True))
    subject = Subject(model.eval(), input_shape=(3, 224, 224), mean=MEAN, std=STD)
    mean, std = (torch.tensor(v)[:, None, None] for v in (MEAN, STD))
    x = (photos(root, args.images, "test") * std + mean).clamp(0, 1)
    with torch.no_grad():
        targets = subject.logits(x).argmax(1)
    cells = flip_cells(subject.input_shape)
    assert cells.layout is not None
    scores = F.adaptive_avg_pool2d(grad_cam(subject, x, targets).mean(1, keepdim=True).float(), cells.layout).flatten(1)
    random = torch.rand(scores.shape, generator=torch.Generator().manual_seed(0))

    def area(map_: torch.Tensor, seed: int) -> torch.Tensor:
        group = max(1, cells.size // 16)
        return pixel_flip(subject.logits, x, targets, map_, cells, group=group, draws=1, seed=seed, chunk=64).area()

    forward = torch.stack([area(scores, seed) for seed in range(args.seeds)])
    null = torch.stack([area(random, seed) for seed in range(args.seeds)])
    for name, values in (("flip_area", forward), ("flip_gain", null - forward)):
        draws = values.var(0).mean()
        images = (values.mean(0).var() - draws / len(values)).clamp_min(0)
        wider = {d: float(((images + draws / d) / (images + draws / 8)).sqrt()) for d in (1, 2, 4)}
        text = ", ".join(f"{d} {w:.3f}" for d, w in wider.items())
        print(
            f"{name}: sd of photos {images.sqrt():.4f}, of draws {draws.sqrt():.4f}; interval against 8 draws: {text}"
        )


if __name__ == "__main__":
    main()
