"""POST /explain against a bare BentoML endpoint that only runs the same model's forward pass, in one run.

    python tests/benchmarks/bench_service.py [--models digits resnet18] [--engines torch onnx] [--seconds 8]
    python tests/benchmarks/bench_service.py --models efficientnet --engines onnx --data-root DATA
    python tests/benchmarks/bench_service.py --memory 20000
    python tests/benchmarks/bench_service.py --recovery
    python tests/benchmarks/bench_service.py --workers 1 2

Both servers have one worker with one thread. They are loaded in turns, over 8 connections of a lean client on the same
machine, so what else the machine does meets both; the ratio printed is the median over the rounds. Beside requests per
second stands the servers' CPU time per request, which a busy machine distorts least. ``contributions`` asks for ``nmf``
and ``xnn`` without heatmaps and without stability; ``heatmaps`` asks for ``nmf`` with PNG heatmaps. EfficientNet-Lite0
(its ImageNet weights, photos of DATA/cub20) is asked for ``nmf`` and ``xnn`` with PNG heatmaps, ``maps`` without and
``maps, fast`` with stability, beside a bare endpoint by torch and one by the exported graph in ONNX Runtime.

Wanted: contributions of the digits CNN >= 1.0, of resnet18 >= 0.8 (torch) and >= 1.5 (onnx); heatmaps >= 0.5; p99 at
most 3 times p50; memory of a worker grows by less than 2%; a killed worker is back within 15 seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import live_server as ls

RESULTS = Path(__file__).parent / "results" / "service.json"
ASKED = {
    "contributions": [("explainers", "nmf,xnn"), ("heatmaps", "none"), ("stability", "off")],
    "heatmaps": [("explainers", "nmf"), ("heatmaps", "png"), ("stability", "off")],
}
PHOTOS = {
    "maps": [("explainers", "nmf,xnn"), ("heatmaps", "png"), ("stability", "off")],
    "maps, fast": [("explainers", "nmf,xnn"), ("heatmaps", "png"), ("stability", "fast")],
}
WANTED_MAPS = {"heatmaps": 0.5, "maps": 0.5, "maps, fast": 0.2}
WANTED = {("digits", "torch"): 1.0, ("digits", "onnx"): 1.0, ("resnet18", "torch"): 0.8, ("resnet18", "onnx"): 1.5}


REGISTER = {
    "digits": lambda folder, root: ls.register_digits(),
    "resnet18": lambda folder, root: ls.register_resnet18(folder),
    "efficientnet": lambda folder, root: ls.register_efficientnet(folder, Path(root) / "cub20" / "train"),
}


def bare(model: str, store: str, folder: Path, engine: str = "torch"):
    port = ls.free_port()
    here = Path(__file__).parent
    command = [
        sys.executable,
        "-m",
        "bentoml",
        "serve",
        "bare_service:Bare",
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
    ]
    command += ["--working-dir", str(here)]
    return ls.started(command, port, folder, {**ls.at(store), "BARE_MODEL": model, "BARE_ENGINE": engine})


def round_of(live: ls.Live, requests: list[bytes], seconds: float, concurrency: int) -> tuple[ls.Load, float]:
    """Return the load and the server's CPU milliseconds per request."""
    before = live.cpu_s()
    load = ls.run_load(live.port, requests, seconds=seconds, concurrency=concurrency)
    answered = max(1, sum(load.statuses.values()))
    return load, 1000 * (live.cpu_s() - before) / answered


def files_of(model: str, folder: Path | None = None) -> list[bytes]:
    if model == "efficientnet":
        assert folder is not None
        return [path.read_bytes() for path in sorted((folder / model / "photos").iterdir())]
    return (
        ls.digit_files() if model == "digits" else [ls.image_file(x, "JPEG") for x in ls.smooth_noise(12, 224, seed=1)]
    )


def store_figures(what: str, rates: list[float], cpus: list[float], by_graph: list[float], expected: float) -> None:
    """Add what one comparison gave to results/service.json."""
    report = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    report[what] = {
        "requests_per_second_of_bare": round(statistics.median(rates), 3),
        "bare_cpu_per_request_of_ours": round(statistics.median(cpus), 3),
        "times_bare_cpu": round(1 / statistics.median(cpus), 2),
        **({"times_bare_cpu_by_onnx": round(1 / statistics.median(by_graph), 2)} if by_graph else {}),
        "wanted_of_bare": expected,
        "rounds": len(rates),
        "load_average": round(os.getloadavg()[0], 1),
    }
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")


def compare(name: str, uri: str, store: str, folder: Path, engines: list[str], args: argparse.Namespace) -> None:
    files = files_of(name, folder)
    with ExitStack() as stack:
        peer = stack.enter_context(bare(uri, store, folder / f"bare-{name}"))
        servers = {}
        for engine in engines:
            if engine == "onnx" and (reason := ls.export_onnx(uri, store)):
                print(f"{name:9} onnx   skipped: {reason}")
                continue
            servers[engine] = stack.enter_context(
                ls.serve(uri, store, folder / f"{name}-{engine}", engine=engine, log_requests="false")
            )
        plain = [ls.multipart(peer.port, "/predict", f) for f in files]
        round_of(peer, plain, 2, args.concurrency)
        graph_peer = None
        if name == "efficientnet" and "onnx" in servers:  # the stricter peer: the same graph, and nothing explained
            graph_peer = stack.enter_context(bare(uri, store, folder / f"bare-onnx-{name}", "onnx"))
            plain_graph = [ls.multipart(graph_peer.port, "/predict", f) for f in files]
            round_of(graph_peer, plain_graph, 2, args.concurrency)
        for engine, live in servers.items():
            model = live.get("/model")[1]
            print(f"{name:9} {engine:6} engine {model['engine']} {model.get('engine_reason', '')}")
            for what, fields in (PHOTOS if name == "efficientnet" else ASKED).items():
                requests = [ls.multipart(live.port, "/explain", f, fields) for f in files]
                round_of(live, requests, 2, args.concurrency)
                rates, cpus, by_graph, tails = [], [], [], []
                for _ in range(args.rounds):
                    theirs, their_cpu = round_of(peer, plain, args.seconds, args.concurrency)
                    ours, our_cpu = round_of(live, requests, args.seconds, args.concurrency)
                    rates.append(ours.rate / max(theirs.rate, 1e-9))
                    cpus.append(their_cpu / max(our_cpu, 1e-9))
                    if graph_peer is not None:
                        _, graph_cpu = round_of(graph_peer, plain_graph, args.seconds, args.concurrency)
                        by_graph.append(graph_cpu / max(our_cpu, 1e-9))
                        print(f"   bare, by onnx  cpu {graph_cpu:.2f} ms")
                    tails.append(ours.percentile(99) / ours.percentile(50))
                    print(f"   bare           {theirs.summary()}  cpu {their_cpu:.2f} ms")
                    print(f"   {what:14} {ours.summary()}  cpu {our_cpu:.2f} ms", flush=True)
                expected = WANTED_MAPS.get(what) or WANTED[name, engine]
                print(
                    f"{name:9} {engine:6} {what:14} requests per second {statistics.median(rates):.2f} of bare "
                    f"(wanted {expected}), by CPU per request {statistics.median(cpus):.2f}; "
                    f"p99/p50 {statistics.median(tails):.2f} (wanted <= 3)",
                    flush=True,
                )
                store_figures(f"{name} {engine} {what}", rates, cpus, by_graph, expected)


def memory(uri: str, store: str, folder: Path, n: int) -> None:
    """Print how a worker's resident memory grows over n requests of all sorts."""
    files = ls.digit_files()
    with ls.serve(uri, store, folder / "memory", log_requests="false") as live:
        mixed = []
        for i, file in enumerate(files):
            style = ("none", "png", "array", "none", "none")[i % 5]
            steady = "fast" if i % 10 == 1 else "off"
            fields = [("explainers", "nmf,xnn" if i % 3 else "nmf"), ("heatmaps", style), ("stability", steady)]
            mixed.append(ls.multipart(live.port, "/explain", file, fields))
        mixed.append(ls.multipart(live.port, "/explain", b"no image"))
        mixed.append(ls.http("GET", live.port, "/explainers"))
        workers = live.workers()
        warm = ls.run_load(live.port, mixed, n=1000)
        before = {pid: ls.rss_mb(pid) for pid in workers}
        print(
            f"memory: after {sum(warm.statuses.values())} requests to warm up: {[round(v) for v in before.values()]} MB"
        )
        for part in range(10):
            load = ls.run_load(live.port, mixed, n=n // 10)
            now = {pid: ls.rss_mb(pid) for pid in workers}
            print(
                f"   {(part + 1) * (n // 10):6} requests {load.summary()} {[round(v, 1) for v in now.values()]} MB",
                flush=True,
            )
        growth = max(now[pid] / before[pid] - 1 for pid in workers)
        print(f"memory: resident memory of a worker grew by {100 * growth:.2f}% over {n} requests (wanted < 2%)")


def recovery(uri: str, store: str, folder: Path) -> None:
    """Print how long a killed worker is away while 8 callers ask on, alone and beside another one."""
    for workers in (1, 2):
        settings = {"workers": workers, "log_requests": "false"}
        with ls.serve(uri, store, folder / f"recovery-{workers}", **settings) as live:
            requests = [ls.multipart(live.port, "/explain", f, ASKED["contributions"]) for f in files_of("digits")]
            _wait_served(live, workers)
            ls.run_load(live.port, requests, n=200)
            with ls.under_load(live.port, requests, concurrency=8) as load:
                time.sleep(1)
                os.kill(live.workers()[0], signal.SIGKILL)
                began = time.perf_counter()
                _wait_served(live, workers + 1)
                took = time.perf_counter() - began
                time.sleep(1)
        print(
            f"recovery: {workers} worker(s), one killed under load: its place taken and warm after {took:.1f} s "
            f"(wanted <= 15); {dict(load.statuses)}, {load.lost} connections lost (8 in flight)",
            flush=True,
        )


def _wait_served(live: ls.Live, n: int) -> None:
    """Wait until workers have said n times that they serve."""
    ls.eventually(lambda: live.log.read_text().count('"model served"') >= n, f"{n} workers were warm")


def several(uri: str, store: str, folder: Path, counts: list[int], seconds: float) -> None:
    """Print requests per second with several workers of one thread each, and whether /metrics counts them all."""
    for workers in counts:
        settings = {"workers": workers, "log_requests": "false"}
        with ls.serve(uri, store, folder / f"workers-{workers}", **settings) as live:
            requests = [ls.multipart(live.port, "/explain", f, ASKED["contributions"]) for f in files_of("digits")]
            _wait_served(live, workers)
            warm = ls.run_load(live.port, requests, n=200)
            load, cpu = round_of(live, requests, seconds, 8)
            sent = sum(warm.statuses.values()) + sum(load.statuses.values())
            lines = live.get("/metrics")[1].splitlines()
            counted = sum(
                float(v.split()[-1]) for v in lines if v.startswith('auditor_requests_total{route="/explain"')
            )
            ready = sum(float(v.split()[-1]) for v in lines if v.startswith("auditor_ready"))
        print(
            f"workers: {workers}: {load.summary()}  cpu {cpu:.2f} ms; /metrics counts {counted:.0f} of {sent} requests "
            f"and {ready:.0f} ready workers",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["digits", "resnet18"], choices=list(REGISTER))
    parser.add_argument("--data-root", type=Path, default=os.environ.get("AUDITOR_DATA"), help="for efficientnet")
    parser.add_argument("--engines", nargs="+", default=["torch", "onnx"], choices=["torch", "onnx"])
    parser.add_argument("--seconds", type=float, default=8.0, help="of each round and server")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--memory", type=int, metavar="N", help="only this: memory of a worker over N requests")
    parser.add_argument("--recovery", action="store_true", help="only this: how long a killed worker is away")
    parser.add_argument("--workers", nargs="+", type=int, metavar="N", help="only this: the digits with N workers")
    parser.add_argument("--dir", type=Path, help="keep the registered models here for the next run")
    args = parser.parse_args()
    os.environ.update(ls.QUIET)
    folder = args.dir or Path(tempfile.mkdtemp(prefix="bench-service-"))
    try:
        print(f"load average before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        only = args.memory or args.recovery or args.workers
        for name in ["digits"] if only else args.models:
            store = ls.use_store(folder / name)
            done = folder / name / "uri"
            if not done.exists():
                uri = REGISTER[name](folder / name, args.data_root)
                done.write_text(uri)
            uri = done.read_text()
            if args.memory:
                memory(uri, store, folder, args.memory)
            if args.recovery:
                recovery(uri, store, folder)
            if args.workers:
                several(uri, store, folder, args.workers, args.seconds)
            if not only:
                compare(name, uri, store, folder, args.engines, args)
    finally:
        if args.dir is None:
            ls.remove(folder)


if __name__ == "__main__":
    main()
