"""Runners side by side: one worker and two, a Ray worker and this process, explain-all and a bare forward pass.

    python tests/benchmarks/bench_cluster.py [--images 2000] [--parts harvest explain …]

ResNet-18 at 224 with random weights on drawn JPEG files, two processors. Rates leave out the start of workers and the
loading of the model; ratios are of one run, in which those compared take turns slice by slice of the images.
``memory`` explains 5,000 and 100,000 drawn images by a small network and takes the driver's peak; ``shards`` is what
docs/scale.md is computed from. Results are added to results/cluster.json.

Wanted: 2 workers at least 1.7 times one; one Ray worker at most 15% slower than this process; explain-all at least 85%
of a bare map_batches; memory within 5%.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import envelope
import numpy as np
import torch
from PIL import Image
from torch import nn

RESULTS = Path(__file__).parent / "results" / "cluster.json"
COMMAND = "python tests/benchmarks/bench_cluster.py"
PASSES = {"harvest", "explain", "bare"}  # parts that run the network


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


@contextmanager
def pools(options: Mapping[str, tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """Give pools of (workers, threads of each) side by side, so that they can take turns on one machine."""
    import ray

    from auditor.runners.ray_pool import PoolOptions, RayRunner

    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init("local", num_cpus=sum(w * c for w, c in options.values()), include_dashboard=False, log_to_driver=False)
    runners = {name: RayRunner(ray, PoolOptions("local", w, c)) for name, (w, c) in options.items()}
    try:
        yield runners
    finally:
        for runner in runners.values():
            runner.close()
        ray.shutdown()


def in_turns(measures: Mapping[str, Callable[[Path], float]], few: Path, slices: Sequence[Path]) -> dict[str, float]:
    """Let each warm up on few images, then take slice after slice in turn; return images per second of all slices."""
    seconds, images = dict.fromkeys(measures, 0.0), 0
    for measure in measures.values():
        measure(few)
    for k, part in enumerate(slices):
        n = len(list(part.rglob("*.jpg")))
        images += n
        names = list(measures) if k % 2 else list(measures)[::-1]
        for name in names:
            seconds[name] += n / measures[name](part)
    return {name: round(images / s, 2) for name, s in seconds.items()}


def on(runner: Any, rate: Callable[[Path], float]) -> Callable[[Path], float]:
    """Return the measure, taken on a runner."""
    from auditor.runners.runner import using

    def measured(folder: Path) -> float:
        with using(runner):
            return rate(folder)

    return measured


def harvests(slices: Sequence[Path], few: Path, subject: Any) -> list[dict[str, Any]]:
    """Measure harvest by this process, one worker and two, in turns."""
    options = {"1 Ray worker, 2 threads": (1, 2), "1 Ray worker, 1 thread": (1, 1), "2 Ray workers, 1 thread": (2, 1)}
    with pools(options) as runners:
        measures = {"this process, 2 threads": lambda d: harvest_rate(subject, d)}
        measures |= {name: on(runner, lambda d: harvest_rate(subject, d)) for name, runner in runners.items()}
        rates = in_turns(measures, few, slices)
    here, wide, one, two = rates.values()
    rows = [{"who": name, "harvest": rate} for name, rate in rates.items()]
    rows[1]["to_this_process"] = round(wide / here, 3)
    rows[3]["to_one_worker"] = round(two / one, 3)
    return rows


def explains(slices: Sequence[Path], few: Path, work: Path, model: Any) -> list[dict[str, Any]]:
    """Measure explain-all by one worker and two, in turns."""
    count = itertools.count()
    with pools({"1 Ray worker, 1 thread": (1, 1), "2 Ray workers, 1 thread": (2, 1)}) as runners:
        rate = lambda d: explain_rate(model, d, work / f"explained-{next(count)}")  # noqa: E731
        rates = in_turns({name: on(runner, rate) for name, runner in runners.items()}, few, slices)
    one, two = rates.values()
    rows = [{"who": name, "explain_all": rate} for name, rate in rates.items()]
    rows[1]["to_one_worker"] = round(two / one, 3)
    return rows


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


class Cpu(Forward):
    """The same, saying how much of the processor it took."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        began = time.process_time()
        said = super().__call__(batch)
        return {"cpu": np.full(len(said["class"]), (time.process_time() - began) / len(said["class"]))}


def bare(slices: Sequence[Path], few: Path, work: Path, subject: Any, model: Any) -> list[dict[str, Any]]:
    """Compare explain-all with map_batches, both by two workers of one processor, in turns."""
    import ray

    count = itertools.count()

    def theirs(folder: Path) -> float:
        paths = [{"path": str(path)} for path in sorted(folder.rglob("*.jpg"))]
        data = ray.data.from_items(paths, override_num_blocks=max(2, len(paths) // 32))
        done = data.map_batches(
            Forward, fn_constructor_args=(subject.module,), batch_size=16, concurrency=2, num_cpus=1
        )
        times = [(len(batch["class"]), time.perf_counter()) for batch in done.iter_batches(batch_size=None)]
        half = len(times) // 2  # the first half holds the start of the actors
        images = sum(n for n, _ in times[half:])
        return images / (times[-1][1] - times[half - 1][1])

    with pools({"explain-all": (2, 1), "room for map_batches": (1, 3)}) as runners:
        runners["room for map_batches"].close()
        ours = on(runners["explain-all"], lambda d: explain_rate(model, d, work / f"bare-{next(count)}"))
        rates = in_turns({"explain_all": ours, "map_batches": theirs}, few, slices)
    return [{**rates, "ratio": round(rates["explain_all"] / rates["map_batches"], 3)}]


def spent() -> float:
    """Return the CPU seconds of this process and of the workers of its cluster."""
    import psutil

    workers = [p for p in psutil.Process().children(recursive=True) if "ray::" in "".join(p.cmdline()[:1])]
    return time.process_time() + sum(sum(p.cpu_times()[:2]) for p in workers)


def processor_time(images: Path, few: Path, work: Path, subject: Any, model: Any) -> list[dict[str, Any]]:
    """Measure CPU milliseconds per image, driver and workers together, which other programs change least."""
    import ray

    torch.set_num_threads(1)
    count, rows, n = itertools.count(), [], len(list(images.rglob("*.jpg")))

    def measured(who: str, rate: Callable[[Path], Any]) -> None:
        rate(few)
        before, own = spent(), time.process_time()
        rate(images)
        total, own = spent() - before, time.process_time() - own
        rows.append(
            {"who": who, "cpu_ms_per_image": round(1000 * total / n, 2), "of_the_driver": round(1000 * own / n, 3)}
        )

    measured("harvest, this process", lambda d: harvest_rate(subject, d))
    with pools({"one": (1, 1), "two": (2, 1), "room": (1, 2)}) as runners:
        runners["room"].close()
        explained = lambda d: explain_rate(model, d, work / f"cpu-{next(count)}")  # noqa: E731
        measured("harvest, 1 Ray worker", on(runners["one"], lambda d: harvest_rate(subject, d)))
        measured("harvest, 2 Ray workers", on(runners["two"], lambda d: harvest_rate(subject, d)))
        measured("explain-all, 1 Ray worker", on(runners["one"], explained))
        measured("explain-all, 2 Ray workers", on(runners["two"], explained))
        for runner in runners.values():
            runner.close()
        paths = [{"path": str(path)} for path in sorted(images.rglob("*.jpg"))]
        data = ray.data.from_items(paths, override_num_blocks=max(2, len(paths) // 32))
        done = data.map_batches(Cpu, fn_constructor_args=(subject.module,), batch_size=16, concurrency=2, num_cpus=1)
        seconds = sum(float(batch["cpu"].sum()) for batch in done.iter_batches(batch_size=None))
        rows.append({"who": "map_batches, the function alone", "cpu_ms_per_image": round(1000 * seconds / n, 2)})
    return rows


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


@dataclass(frozen=True)
class Fed:
    """A worker that sends what a pass over images sends, of the real size, without the pass."""

    shape: tuple[int, ...]
    images: int

    def __call__(self, item: int) -> Iterator[Any]:
        from auditor.data.source import Batch
        from auditor.runners.image_runs import EndOfRun, OfBatch

        g = torch.Generator().manual_seed(item)
        for first in range(0, self.images, 16):
            names = [f"class/{k:09d}.jpg" for k in range(first, first + 16)]
            batch = Batch(torch.zeros(16, 0, 224, 224), torch.zeros(16, dtype=torch.long), names)
            z = torch.rand(16, *self.shape, generator=g)
            yield OfBatch(16, torch.arange(first, first + 16), (batch, torch.rand(16, 1000), z))
        yield EndOfRun(self.images, 0, 1.0, {}, {item: "ab" * 32})


@dataclass(frozen=True)
class Written:
    """A worker that says that it has written a file."""

    def __call__(self, item: int) -> Any:
        from auditor.explainers.explain_runs import PartWritten

        return PartWritten(256, 1, 1.0, {}, {item: "ab" * 32}, f"part-{item:09d}-{item + 256:09d}.parquet")


def reductions() -> list[dict[str, Any]]:
    """Measure the driver's seconds per shard of 256 images, fed by workers that send statistics of the real size."""
    from auditor.explainers.layer_activations import Reservoir

    rows, n = [], 24
    with pools({"one": (1, 1)}) as runners:
        runner = runners["one"]
        list(runner.map(Written(), range(10)))
        for what, shape in (("nmf, layer4 of resnet18", (512, 7, 7)), ("xnn, after the pooling", (512,))):
            reservoir, began, n_bytes = Reservoir(60_000, 0), time.process_time(), 0
            for part in runner.stream(Fed(shape, 256), range(n)):
                given = getattr(part, "given", None)
                if given is not None:
                    _, logits, z = given
                    n_bytes += 4 * (z.numel() + logits.numel())
                    reservoir.put(z.flatten(2).permute(1, 0, 2).flatten(1) if z.dim() == 4 else z.T)
            used = time.process_time() - began
            rows.append({"what": what, "bytes_per_shard": n_bytes // n, "driver_s_per_shard": round(used / n, 4)})
        began, many = time.process_time(), 2000
        list(runner.map(Written(), range(many)))
        used = time.process_time() - began
    size = len(ForkingPickler.dumps(Written()(7)))
    rows.append({"what": "explain-all", "bytes_per_shard": size, "driver_s_per_shard": round(used / many, 5)})
    return rows


def main() -> None:
    """Measure the parts that were asked for and store what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument(
        "--parts", nargs="+", default=["harvest", "explain", "bare", "processor", "memory", "shards", "reductions"]
    )
    parser.add_argument("--one-memory", nargs=2, metavar=("FILE", "OUT"))
    options = parser.parse_args()
    if options.one_memory:
        one_memory(*options.one_memory)
        return
    torch.set_num_threads(2)
    parts = set(options.parts)
    with tempfile.TemporaryDirectory(prefix="auditor-cluster-") as folder:
        work = Path(folder)
        os.environ["AUDITOR_CACHE"] = str(work / "cache")
        few = draw(work / "few", 64)
        n = max(1, options.images // 250) if parts & PASSES else 0
        slices = [draw(work / f"slice-{k}", options.images // n) for k in range(n)]
        subject = resnet18()
        model = explained_model(subject, few) if {"explain", "bare", "processor"} & parts else None
        measures = {
            "harvest": lambda: harvests(slices, few, subject),
            "explain": lambda: explains(slices, few, work, model),
            "bare": lambda: bare(slices, few, work, subject, model),
            "processor": lambda: processor_time(draw(work / "cpu", 256), few, work, subject, model),
            "memory": lambda: memory(work),
            "shards": lambda: shards(draw(work / "all", 1024, side=64)),
            "reductions": reductions,
        }
        for part in options.parts:
            rows = measures[part]()
            print(part, json.dumps(rows, indent=1), flush=True)
            store(part, rows, f"{options.images} images, slices of 250 in turns" if part in PASSES else "")


def store(part: str, rows: list[dict[str, Any]], note: str) -> None:
    """Put a table into the stored results, in the place of the one of its name."""
    with envelope.locked(RESULTS):
        stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        tables = {t["title"]: t for t in stored.get("tables", [])} | {part: envelope.table(part, rows, note)}
        envelope.write(
            "cluster",
            experiment="One worker, two, and this process; explain-all beside a bare pass; what the driver takes",
            command=COMMAND,
            settings={"network": "resnet18, random weights, 224", "cores": os.cpu_count()},
            seeds=0,
            tables=list(tables.values()),
        )


if __name__ == "__main__":
    main()
