"""What agents make of images, of one heatmap and of contributions: purity of their groups on a registered model.

python tests/benchmarks/bench_grouping.py MODEL --data DATA --explainers xnn,concepts [--per-class 10] [--keep FILE]

Batches of ten images of four classes, by the model's predictions, once of any classes and once of the four most alike
to the model. The agent is the audit's (``grouping_purity``): Ward's method on the cells of the image (none), of the
image through one heatmap by excitation backprop (one-heatmap), on the slots' contributions (an explainer), or of the
image through the explainer's heatmaps. Nothing of the agents was tuned on any of these images.
"""

import argparse
import json
import os
from pathlib import Path

import numpy as np
import torch

from auditor import open_data, plugins
from auditor.attribution.excitation import ExcitationBackprop
from auditor.auditing.case import relevance
from auditor.explainers.answer import explanations_of
from auditor.explainers.shown_concepts import shown_concepts
from auditor.metrics.grouping_purity import chance, drawn_batches, masked, purity, small_pictures, ward_groups
from auditor.metrics.measure import bootstrap
from auditor.network.aten_graph import graph_of
from auditor.study.drawing import alike


def chosen_images(subject, data, per_class):
    """Return pixels, predicted classes and probabilities of at most so many images per predicted class."""
    kept, targets, p = [], [], []
    count = np.zeros(subject.n_classes, dtype=int)
    for batch in data.batches(subject, 32):
        with torch.no_grad():
            logits = subject.logits(batch.images)
        for x, k, row in zip(batch.images, logits.argmax(1).tolist(), subject.probabilities(logits), strict=True):
            if count[k] < per_class:
                count[k] += 1
                kept.append(x)
                targets.append(k)
                p.append(row)
    return torch.stack(kept), targets, torch.stack(p).double().numpy()


def one_heatmaps(subject, pixels, targets):
    """Return one heatmap per image and a blank for an empty one, brought to cells of 4 x 4 pixels."""
    floor = [-m / s for m, s in zip(subject.preprocessing.mean, subject.preprocessing.std, strict=True)]
    engine = ExcitationBackprop(graph_of(subject), floor=floor)
    parts = []
    for x, k in zip(pixels.split(16), torch.tensor(targets).split(16), strict=True):
        parts.append(engine.maps(subject.normalise(x), k[:, None]).maps[:, 0].float())
    return soft(torch.cat(parts))


def soft(maps):
    """Smooth single pixels: people are shown such maps smoothed too."""
    window = max(1, maps.shape[-1] // 16) | 1
    return torch.nn.functional.avg_pool2d(maps[:, None], window, 1, window // 2)[:, 0].double().numpy()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--explainers", required=True, help="names with commas between")
    parser.add_argument("--per-class", type=int, default=10)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    subject = plugins.load_subject(args.model)
    pixels, targets, p = chosen_images(subject, open_data(args.data), args.per_class)
    images, heat = pixels.double().numpy(), one_heatmaps(subject, pixels, targets)
    ways = {
        "none": lambda rows: small_pictures(images[rows]),
        "one-heatmap": lambda rows: small_pictures(masked(images[rows], heat[rows])),
    }
    for name in args.explainers.split(","):
        explainer = plugins.load(args.model, name, subject=subject)
        explanations = [
            e
            for x, k in zip(pixels.split(16), torch.tensor(targets).split(16), strict=True)
            for e in explanations_of(explainer, subject, x, k.tolist())
        ]
        maps = np.stack([relevance(e, tuple(pixels.shape[2:])).clamp_min(0).double().numpy() for e in explanations])

        def contributions(rows, e=explanations, of_class=explainer.concepts_are_of_class):
            return shown_concepts([e[i] for i in rows], is_of_class=of_class).values

        ways[f"{name}: contributions"] = contributions
        ways[f"{name}: heatmaps"] = lambda rows, maps=maps: small_pictures(masked(images[rows], maps[rows]))
    usable = [k for k in range(subject.n_classes) if targets.count(k) >= min(args.per_class, 5)]
    close = alike(p, np.array(targets), usable, 4)
    results = {}
    for title, some in (("any four classes", usable), ("the four most alike", close)):
        rows_of = [i for i, k in enumerate(targets) if k in some]
        batches, n = drawn_batches([targets[i] for i in rows_of], 4, 10, args.batches, 0)
        batches = [[rows_of[i] for i in rows] for rows in batches]
        level = np.mean([chance([targets[i] for i in rows], n) for rows in batches])
        print(f"{title}: {len(rows_of)} images, chance {level:.3f}")
        table = {}
        for name, features in ways.items():
            values = [purity(ward_groups(features(rows), n), [targets[i] for i in rows]) for rows in batches]
            low, high = bootstrap(values)
            table[name] = {"purity": round(float(np.mean(values)), 3), "low": round(low, 3), "high": round(high, 3)}
            print(f"  {name:28}{table[name]['purity']:8.3f}  ({low:.3f} to {high:.3f})", flush=True)
        results[title] = {"classes": [subject.class_names[k] for k in some], "purity": table}
    if args.keep:
        args.keep.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
