"""Runners side by side: one worker and two, a Ray worker and this process, explain-all and a bare forward pass.

    python tests/benchmarks/bench_cluster.py [--images 2000] [--parts harvest explain bare memory shards]

ResNet-18 at 224 with random weights on drawn JPEG files, two processors. Every rate is images per second of a second
pass, so that starting workers and loading the model are no part of it; ratios are of one run, and the pairs take turns.
``memory`` explains 5,000 and 100,000 drawn images by a small network and takes the driver's peak; ``shards`` is what
docs/scale.md is computed from. Results are added to results/cluster.json.

Wanted: 2 workers at least 1.7 times one; one Ray worker at most 15% slower than this process; explain-all at least 85%
of a bare map_batches; memory within 5%.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import envelope
import numpy as np
import torch
from PIL import Image
from torch import nn

RESULTS = Path(__file__).parent / "results" / "cluster.json"
COMMAND = "python tests/benchmarks/bench_cluster.py"


def draw(folder: Path, n: int, side: int = 224) -> Path:
    """Write n smooth JPEG files in four classes."""
    rng = np.random.default_rng(0)
    for k in range(n):
        path = folder / f"class{k % 4}" / f"{k:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            small = rng.integers(0, 256, (7, 7, 3), dtype=np.uint8)
            Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC).save(path, quality=90)
    return folder


def resnet18() -> Any:
    from torchvision.models import resnet18 as make

    from auditor import Subject

    torch.manual_seed(0)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    net = make(num_classes=4).eval()
    return Subject(net, input_shape=(3, 224, 224), class_names=[f"class{k}" for k in range(4)], mean=mean, std=std)


def pool(workers: int, cpus: int = 1) -> Any:
    from auditor.runners.ray_pool import PoolOptions, ray_workers

    return ray_workers(PoolOptions("local", workers, cpus))


def harvest_rate(subject: Any, folder: Path) -> float:
    """Return images per second of reading one layer of all images, on the current runner."""
    from auditor import open_data
    from auditor.explainers.layer_activations import harvest
    from auditor.progress import silent

    data, began, n = open_data(folder), time.perf_counter(), 0
    for batch, *_ in harvest(subject, data, "layer4", batch_size=64, progress=silent, with_images=False):
        n += len(batch)
    return n / (time.perf_counter() - began)


def explain_rate(model: Any, folder: Path, out: Path) -> float:
    from auditor import open_data
    from auditor.explainers.answer_options import AnswerOptions
    from auditor.explainers.explain_runs import explain_all

    began = time.perf_counter()
    result = explain_all(model, open_data(folder), str(out), AnswerOptions(stability="off", heatmaps="none"))
    return result.images / (time.perf_counter() - began)


def explained_model(subject: Any, folder: Path) -> Any:
    from auditor import fit, open_data
    from auditor.explainers.answer import ExplainedModel

    concepts = fit("nmf", subject, open_data(folder), rank=6, layer="layer4", max_eval=60)
    concepts.name, concepts.digest_ = "concepts", "not attached"
    return ExplainedModel.of(subject, {"concepts": concepts})


def harvests(images: Path, few: Path, subject: Any) -> list[dict[str, Any]]:
    """Measure harvest by this process, one worker and two; each after a warm-up on few images."""
    from auditor.runners.runner import using

    rows = [{"who": "this process, 2 threads", "harvest": _warm(lambda d: harvest_rate(subject, d), few, images)}]
    for who, workers, cpus in (
        ("1 Ray worker, 2 threads", 1, 2),
        ("1 Ray worker, 1 thread", 1, 1),
        ("2 Ray workers, 1 thread each", 2, 1),
    ):
        with pool(workers, cpus) as runner, using(runner):
            rows.append({"who": who, "harvest": _warm(lambda d: harvest_rate(subject, d), few, images)})
    rows[1]["to_this_process"] = round(rows[1]["harvest"] / rows[0]["harvest"], 3)
    rows[3]["to_one_worker"] = round(rows[3]["harvest"] / rows[2]["harvest"], 3)
    return rows


def explains(images: Path, few: Path, work: Path, model: Any) -> list[dict[str, Any]]:
    """Measure explain-all by one worker and two; each after a warm-up on few images."""
    from auditor.runners.runner import using

    rows = []
    for who, workers in (("1 Ray worker, 1 thread", 1), ("2 Ray workers, 1 thread each", 2)):
        with pool(workers) as runner, using(runner):
            rate = _warm(lambda d, w=workers: explain_rate(model, d, work / f"{w}{d.name}"), few, images)
            rows.append({"who": who, "explain_all": rate})
    rows[1]["to_one_worker"] = round(rows[1]["explain_all"] / rows[0]["explain_all"], 3)
    return rows


def _warm(measure: Any, few: Path, images: Path) -> float:
    measure(few)
    return round(measure(images), 2)


class Forward:
    """The bare forward pass, as somebody would write it for Ray Data."""

    def __init__(self, module: nn.Module) -> None:
        torch.set_num_threads(1)
        self.module = module.eval().to(memory_format=torch.channels_last)
        self.mean = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
        self.std = torch.tensor([0.229, 0.224, 0.225])[:, None, None]

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        pictures = [np.asarray(Image.open(path).convert("RGB")) for path in batch["path"]]
        x = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 255
        x = ((x - self.mean) / self.std).contiguous(memory_format=torch.channels_last)
        with torch.no_grad():
            return {"class": self.module(x).argmax(1).numpy()}


def bare(images: Path, few: Path, work: Path, subject: Any, model: Any) -> list[dict[str, Any]]:
    """Compare explain-all with map_batches, both by two workers of one processor."""
    import ray

    from auditor.runners.runner import using

    with pool(2) as runner, using(runner):
        ours = _warm(lambda d: explain_rate(model, d, work / f"bare-{d.name}"), few, images)
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False)
    try:
        theirs = {}
        for folder in (few, images):
            paths = [{"path": str(path)} for path in sorted(folder.rglob("*.jpg"))]
            began = time.perf_counter()
            data = ray.data.from_items(paths, override_num_blocks=max(2, len(paths) // 64))
            done = data.map_batches(
                Forward, fn_constructor_args=(subject.module,), batch_size=16, concurrency=2, num_cpus=1
            )
            n = sum(len(batch["class"]) for batch in done.iter_batches(batch_size=256))
            theirs[folder.name] = n, time.perf_counter() - began
    finally:
        ray.shutdown()
    (n, seconds), (n_few, of_few) = theirs[images.name], theirs[few.name]
    rate = (n - n_few) / (seconds - of_few)  # the difference of two runs leaves the start of the actors out
    return [{"explain_all": ours, "map_batches": round(rate, 2), "ratio": round(ours / rate, 3)}]


def memory(work: Path) -> list[dict[str, Any]]:
    """Explain drawn images of a small network by two workers; the driver's peak of memory, in a process of its own."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = []
    for n in (5_000, 100_000):
        file = work / f"drawn-{n}.parquet"
        pixels = np.random.default_rng(0).integers(0, 256, (n, 8, 8), dtype=np.uint8)
        column = pa.FixedShapeTensorArray.from_numpy_ndarray(pixels)
        pq.write_table(pa.table({"image": column, "label": np.arange(n) % 10}), file, row_group_size=1000)
        arguments = [sys.executable, __file__, "--one-memory", str(file), str(work / f"out-{n}")]
        done = subprocess.run(arguments, capture_output=True, text=True, check=True)
        rows.append({"images": n, **json.loads(done.stdout.splitlines()[-1])})
    rows[1]["ratio"] = round(rows[1]["driver_peak_mb"] / rows[0]["driver_peak_mb"], 3)
    return rows


def one_memory(file: str, out: str) -> None:
    from auditor import fit, open_data
    from auditor.demo import train_digits
    from auditor.explainers.answer import ExplainedModel
    from auditor.runners.runner import using

    subject, _ = train_digits(0)
    concepts = fit("nmf", subject, open_data("sklearn:digits"), rank=6, max_eval=60)
    concepts.name, concepts.digest_ = "concepts", "not attached"
    with pool(2) as runner, using(runner):
        rate = explain_rate(ExplainedModel.of(subject, {"concepts": concepts}), Path(file), Path(out))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"driver_peak_mb": round(peak, 1), "images_per_second": round(rate, 1)}))


def shards(images: Path) -> list[dict[str, Any]]:
    """Measure what the driver does per shard: opening, the bytes of a result, the seconds to take it in."""
    from multiprocessing.reduction import ForkingPickler

    from auditor import open_data
    from auditor.data import merkle
    from auditor.explainers.explain_runs import MarkedRun, PartWritten

    began = time.perf_counter()
    data = open_data(images)
    opened = time.perf_counter() - began
    item = len(ForkingPickler.dumps(MarkedRun(0, 256, (), "0" * 64)))
    leaves = {7: "ab" * 32}
    result = len(ForkingPickler.dumps(PartWritten(256, 1, 1.0, {}, leaves, "part-000000000-000000256.parquet")))
    many = 200_000
    began = time.perf_counter()
    merkle.root(["ab" * 32] * many)
    tree = (time.perf_counter() - began) / many
    source = len(ForkingPickler.dumps(data))
    return [
        {
            "images": len(data),
            "open_seconds_per_million_images": round(opened / len(data) * 1e6, 1),
            "item_bytes": item,
            "result_bytes": result,
            "source_bytes_per_image": round(source / len(data), 1),
            "tree_seconds_per_million_shards": round(tree * 1e6, 2),
        }
    ]


def main() -> None:
    """Measure the parts that were asked for and store what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--parts", nargs="+", default=["harvest", "explain", "bare", "memory", "shards"])
    parser.add_argument("--one-memory", nargs=2, metavar=("FILE", "OUT"))
    options = parser.parse_args()
    if options.one_memory:
        one_memory(*options.one_memory)
        return
    torch.set_num_threads(2)
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    tables = {t["title"]: t for t in stored.get("tables", [])}
    with tempfile.TemporaryDirectory(prefix="auditor-cluster-") as folder:
        work = Path(folder)
        os.environ["AUDITOR_CACHE"] = str(work / "cache")
        images, few = draw(work / "all", options.images), draw(work / "few", 64)
        subject = resnet18()
        model = explained_model(subject, few) if {"explain", "bare"} & set(options.parts) else None
        measures = {
            "harvest": lambda: harvests(images, few, subject),
            "explain": lambda: explains(images, few, work, model),
            "bare": lambda: bare(images, few, work, subject, model),
            "memory": lambda: memory(work),
            "shards": lambda: shards(images),
        }
        for part in options.parts:
            rows = measures[part]()
            print(part, json.dumps(rows, indent=1), flush=True)
            tables[part] = envelope.table(part, rows, f"{options.images} images" if part in ("harvest", "explain", "bare") else "")
            envelope.write(
                "cluster",
                experiment="One worker, two, and this process; explain-all beside a bare pass; memory of the driver",
                command=COMMAND,
                settings={
                    "images": options.images,
                    "network": "resnet18, random weights, 224",
                    "cores": os.cpu_count(),
                },
                seeds=0,
                tables=list(tables.values()),
            )


if __name__ == "__main__":
    main()
