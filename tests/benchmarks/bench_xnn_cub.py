"""The table of the XNN paper on 20 classes of CUB: SqueezeNet with a new classifier, parts and boxes as annotated.

python tests/benchmarks/bench_xnn_cub.py --data-root DATA [--seeds 3] [--shown 4] [--classes 20]

The body keeps the given ImageNet weights; a classifier (mean over positions, 128 ReLU units, 20 logits) is trained on
its features, since SqueezeNet has no fully connected layer a head could attach to. Every fifth photo is unseen by the
classifier and by the heads, and all figures are measured on those.
"""

import argparse
import csv
import os
import time
from pathlib import Path

import torch
from PIL import Image
from torch import nn
from torchvision.models import squeezenet1_1

from auditor import Subject, open_data
from auditor.locality import voronoi_parts
from auditor.xnn import XnnConfig
from auditor.xnn_table import METHODS, xnn_table

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def annotated(root):
    """Return parts(image id, size): Voronoi masks of the visible points inside the bird's box, and context."""
    boxes, points = {}, {}
    with (root / "boxes.csv").open() as file:
        for row in csv.DictReader(file):
            values = list(row.values())
            boxes[Path(values[0]).name] = tuple(float(v) for v in values[-4:])
    with (root / "parts.csv").open() as file:
        for row in csv.DictReader(file):
            values = list(row.values())
            points.setdefault(Path(values[0]).name, {})[values[1]] = (float(values[-2]), float(values[-1]))
    names = sorted({part for p in points.values() for part in p})

    def parts(image_id, size):
        path = next(iter((root / "train").rglob(Path(image_id).name)))
        with Image.open(path) as image:
            sx, sy = size[1] / image.width, size[0] / image.height
        x, y, w, h = boxes[path.name]
        hidden = (float("nan"), float("nan"))
        at = torch.tensor([points.get(path.name, {}).get(n, hidden) for n in names], dtype=torch.float64)
        return voronoi_parts(at * torch.tensor([sx, sy]), size, (x * sx, y * sy, w * sx, h * sy))

    return parts


def classifier(root, data, n_classes=20, epochs=60):
    torch.manual_seed(0)
    body = squeezenet1_1(weights=None)
    body.load_state_dict({k: v.float() for k, v in torch.load(root, weights_only=True).items()})
    pooled = nn.Sequential(body.features, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    feature = Subject(pooled, input_shape=(3, 224, 224), mean=MEAN, std=STD)
    with torch.no_grad():
        pairs = [(feature.logits(b.images), b.labels) for b in data.batches(feature, 32)]
    Z, y = torch.cat([z for z, _ in pairs]), torch.cat([labels for _, labels in pairs])
    seen = torch.arange(len(Z)) % 5 != 4
    head = nn.Sequential(nn.Linear(512, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, n_classes))
    adam = torch.optim.AdamW(head.parameters(), 2e-3, weight_decay=1e-2)
    for _ in range(epochs):
        for rows in seen.nonzero()[:, 0][torch.randperm(int(seen.sum()))].split(64):
            adam.zero_grad()
            nn.functional.cross_entropy(head(Z[rows]), y[rows]).backward()
            adam.step()
    head.eval()
    with torch.no_grad():
        right = head(Z).argmax(1) == y
    print(f"classifier: seen {right[seen].float().mean():.3f}, unseen {right[~seen].float().mean():.3f}")
    return nn.Sequential(*pooled, *head).eval()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", default=os.environ.get("AUDITOR_DATA"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--shown", type=int, default=4, help="unseen positives per class whose heatmaps are judged")
    parser.add_argument("--classes", type=int, default=20, help="how many of the classes get a head")
    parser.add_argument("--epochs", type=int, default=150)
    args = parser.parse_args()
    root = Path(args.data_root or "") / "cub20"
    weights = Path(args.data_root or "") / "squeezenet1_1_imagenet.pth"
    if not args.data_root or not root.exists() or not weights.exists():
        raise SystemExit("skipped: no cub20 and squeezenet1_1_imagenet.pth under --data-root (or AUDITOR_DATA)")
    data = open_data(str(root / "train"))
    subject = Subject(classifier(weights, data), input_shape=(3, 224, 224), mean=MEAN, std=STD)
    total = {m: [] for m in METHODS}
    for seed in range(args.seeds):
        began = time.perf_counter()
        cfg = XnnConfig(seed=seed, max_epochs=args.epochs, targets=list(range(args.classes)))
        for row in xnn_table(subject, data, cfg, images_per_class=args.shown, parts=annotated(root)):
            total[row.method].append([row.f_reg, row.f_cls, row.o1, row.o2, row.locality, row.alive, row.pull_away])
        print(f"seed {seed}: {time.perf_counter() - began:.0f} s")
        columns = ("f_reg", "f_cls", "o1", "o2", "locality", "alive", "pull_away")
        print(f"{'method':10}" + "".join(f"{c:>11}" for c in columns))
        for method, rows in total.items():
            mean = torch.tensor(rows).mean(0).tolist()
            print(f"{method:10}" + "".join(f"{v:11.3f}" for v in mean), flush=True)


if __name__ == "__main__":
    main()
