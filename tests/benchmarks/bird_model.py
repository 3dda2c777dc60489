"""Make models:/birds/1 for studies and grouping: SqueezeNet of ImageNet with a last layer for 20 species, registered.

MLFLOW_TRACKING_URI=sqlite:///birds.db python tests/benchmarks/bird_model.py --data-root DATA [--name birds]

The network is not tuned, only a linear layer is fitted to the pooled features of cub20/train (and their mirror images);
its accuracy on cub20/test is printed. Then, as for any model:

auditor fit xnn models:/birds/1 --data DATA/cub20/train --limit 300 --name xnn
auditor fit nmf models:/birds/1 --data DATA/cub20/train --limit 300 --name concepts
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from photo_networks import IMAGENET, imagenet_squeezenet, photos_of
from torch import nn

from auditor import Subject, open_data, plugins

CLASSES = list(range(20))


def pooled(root, features, split, mirrored):
    """Return the mean feature of every photo of a split, and its class."""
    mean, std = (torch.tensor(IMAGENET[name]).view(3, 1, 1) for name in ("mean", "std"))
    rows, labels = [], []
    with torch.no_grad():
        for images, classes in photos_of(root, split, CLASSES):
            for copy in (images, images.flip(3)) if mirrored else (images,):
                rows.append(features((copy - mean) / std).mean((2, 3)))
                labels.append(classes)
    return torch.cat(rows), torch.cat(labels)


def fitted(x, y, steps=400):
    """Return a linear layer fitted to features."""
    torch.manual_seed(0)
    linear = nn.Linear(x.shape[1], len(CLASSES))
    optimizer = torch.optim.AdamW(linear.parameters(), lr=3e-3, weight_decay=1e-1)
    for _ in range(steps):
        rows = torch.randperm(len(x))[:128]
        optimizer.zero_grad()
        F.cross_entropy(linear(x[rows]), y[rows]).backward()
        optimizer.step()
    return linear


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--name", default="birds")
    args = parser.parse_args()
    features = imagenet_squeezenet(args.data_root).module.features
    linear = fitted(*pooled(args.data_root, features, "train", mirrored=True))
    x, y = pooled(args.data_root, features, "test", mirrored=False)
    print(f"accuracy on cub20/test: {float((linear(x).argmax(1) == y).float().mean()):.3f}")
    last = nn.Conv2d(x.shape[1], len(CLASSES), 1)  # at every position, then the mean: the same as the other way round
    last.weight.data, last.bias.data = linear.weight.data[:, :, None, None], linear.bias.data
    net = nn.Sequential(*features, last, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    names = open_data(str(args.data_root / "cub20" / "train")).class_names
    print(plugins.log_subject(Subject(net, input_shape=(3, 224, 224), class_names=names, **IMAGENET), args.name))


if __name__ == "__main__":
    main()
