"""Tampering: flipped bytes that are noticed, killed writers that leave no half state, and what verification costs.

    python tests/benchmarks/bench_tampering.py flips --n 1000     # single bits of files and tags, one at a time
    python tests/benchmarks/bench_tampering.py kills --n 50       # SIGKILL inside the commands fit, audit and gate
    python tests/benchmarks/bench_tampering.py cost               # verification in the start of a server, resnet18

Each part prints one line and writes its figures to ``results/tampering.json``. The registry is a new one with a
small network, an explainer, an ONNX graph, an audit and a verdict; ``flips`` is what ``auditor verify`` does.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

RESULTS = Path(__file__).parent / "results" / "tampering.json"
NAME = "small"
POLICY = '[limits."model/accuracy"]\nmin = 0.0\n'


def use(folder: Path) -> None:
    """Make the registry of a folder the current one."""
    import mlflow

    uri = f"sqlite:///{folder / 'mlflow.db'}"
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    os.environ["AUDITOR_CACHE"] = str(folder / "cache")


def build(folder: Path) -> str:
    """Register a small network with an explainer, a graph, an audit and a verdict; return its URI."""
    import mlflow
    import numpy as np
    import torch
    from torch import nn

    from auditor import AuditConfig, Subject, fit, open_data, plugins
    from auditor.plugins.registry.onnx_exports import export

    use(folder)
    mlflow.MlflowClient().create_experiment("bench", artifact_location=(folder / "artifacts").as_uri())
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))
    uri = plugins.log_subject(Subject(net, input_shape=(1, 9, 11)), NAME, experiment="bench")
    images = np.random.default_rng(0).integers(0, 255, (200, 9, 11), dtype=np.uint8)
    np.savez(folder / "x.npz", images=images, labels=np.arange(200) % 3)
    (folder / "policy.toml").write_text(POLICY)
    data, subject = open_data(folder / "x.npz"), plugins.load_subject(uri)
    for k in range(2):
        concepts = fit("nmf", subject, data, layer="1", rank=2, refits=1, max_eval=10, seed=k)
        concepts.save(folder / f"explainer-{k}", subject)
    plugins.attach(concepts, uri, "concepts", subject=subject, attach_anyway=True)
    export(uri)
    plugins.run_audit(uri, data, config=AuditConfig(images=20, layers=False, reliance=False))
    plugins.run_gate(uri, folder / "policy.toml", promote="champion")
    return uri


# flipped bytes


def targets(uri: str) -> dict[str, list[Any]]:
    """Return what is flipped, by sort: paths of files, and names of tags."""
    from auditor.plugins.registry.location import resolve

    version = resolve(uri)
    root = Path(version.root.removeprefix("file://"))
    files = [p for p in sorted(root.rglob("*")) if p.is_file()]

    def below(*parts: str) -> list[Path]:
        return [p for p in files if p.is_relative_to(root.joinpath(*parts))]

    apart = [*below("explainers"), *below("audits"), *below("auditor")]
    return {
        "model files": [p for p in files if p not in apart],
        "explainers": below("explainers"),
        "graph": below("auditor", "exports"),
        "audit": below("audits"),
        "verdict": below("auditor", "verdicts"),
        "tags": [key for key in version.tags if key.startswith("auditor.")],
    }


@contextmanager
def flipped(uri: str, target: Any, rng: random.Random):
    """Flip one bit of a file or a tag, and put it back afterwards; gives the name that a message should hold."""
    from auditor.plugins.registry.location import resolve, set_tag

    if isinstance(target, Path):
        content = target.read_bytes()
        changed = bytearray(content)
        changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        target.write_bytes(changed)
        try:
            yield target.name
        finally:
            target.write_bytes(content)
        return
    version = resolve(uri)
    value = version.tags[target].encode()
    changed = bytearray(value)
    changed[rng.randrange(len(value))] ^= 1 << rng.randrange(5)  # stays text
    set_tag(version, target, changed.decode("latin-1"))
    try:
        yield target
    finally:
        set_tag(version, target, value.decode())


def flips(n: int, seed: int) -> dict[str, Any]:
    """Flip ``n`` bits, one at a time, and count those that verification notices and names."""
    from auditor.errors import AuditError
    from auditor.plugins import load_subject, verify

    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        uri = build(Path(folder))
        subject = load_subject(uri)
        assert not [x.problem for x in verify(uri) if not x.verified], "the untouched registry does not verify"
        choices = targets(uri)
        noticed, named, missed = Counter(), Counter(), []
        for k in range(n):
            sort = sorted(choices)[k % len(choices)]
            target = rng.choice(choices[sort])
            with flipped(uri, target, rng) as name:
                try:  # what is not in the model's own files does not change how it loads
                    loaded = None if sort == "model files" else subject
                    problems = [x.problem for x in verify(uri, subject=loaded) if not x.verified]
                except AuditError as error:
                    problems = [str(error)]
            noticed[sort] += bool(problems)
            named[sort] += any(name in text for text in problems)
            if not any(name in text for text in problems):
                missed.append({"target": str(target)[-80:], "said": problems[:1]})
    total = {"n": n, "noticed": sum(noticed.values()), "named": sum(named.values())}
    return {**total, "by_sort": dict(noticed), "missed": missed[:20]}


# killed writers


def forked(work: Callable[[], None]) -> int:
    """Run ``work`` in a process of its own and return its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


ACTIONS = ("attach", "audit", "gate", "promote")


def command(folder: Path, uri: str, action: str, k: int) -> list[str]:
    """Return the command line that does one thing that writes, as a user types it."""
    data = ["--data", str(folder / "x.npz"), "--seed", str(k)]
    quick = ["--set", "rank=2", "--set", "refits=1", "--set", "max_eval=10", "--set", f"max_iter={20 + k}"]
    words = {
        "attach": ["fit", "nmf", uri, *data, "--name", "concepts", "--layer", "1", *quick, "--attach-anyway"],
        "audit": ["audit", uri, *data, "--images", "20", "--no-reliance", "--checks", "performance", "--fresh"],
        "gate": ["gate", uri, "--policy", str(folder / "policy.toml")],
        "promote": ["gate", uri, "--policy", str(folder / "policy.toml"), "--promote", f"alias-{k}"],
    }
    return [str(Path(sys.executable).parent / "auditor"), *words[action]]


def run_until(folder: Path, arguments: list[str], change: int = 0) -> tuple[int, int]:
    """Run a command and kill it right after the store has changed for the n-th time; 0: let it end.

    Returns its exit code and how often the store changed.
    """
    with (folder / "command.log").open("wb") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=log)
        changes, last = 0, contents(folder)
        while process.poll() is None:
            now = contents(folder)
            changes += now != last
            last = now
            if change and changes >= change:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.0005)
        return process.wait(), changes


def contents(folder: Path) -> frozenset[tuple[str, int, int]]:
    """Return what the store holds: the files of the artifacts and of the database, with size and time."""
    entries = set()
    for path in [*folder.glob("mlflow.db*"), *(folder / "artifacts").rglob("*")]:
        try:
            info = path.stat()
        except OSError:
            continue  # gone meanwhile
        entries.add((str(path), info.st_size, info.st_mtime_ns))
    return frozenset(entries)


def check(folder: Path, uri: str) -> None:
    """Raise when anything is neither as before nor as after: a tag without its files, an alias without its verdict."""
    import mlflow

    from auditor.plugins import latest_audit, verify
    from auditor.plugins.registry import history, logged_state
    from auditor.plugins.registry.location import resolve
    from auditor.plugins.registry.verdicts import latest_verdict

    use(folder)
    problems = [x.problem for x in verify(uri) if not x.verified]
    assert not problems, problems
    latest_audit(uri)
    verdict = latest_verdict(uri)
    assert verdict is not None
    for alias, number in mlflow.MlflowClient().get_registered_model(NAME).aliases.items():
        assert str(number) == resolve(uri).version, alias
        assert verdict.verdict == "pass", alias
    lines = history.verify(history.entries(NAME), heads=history.heads_of(NAME))
    broken = [e.problem for e in [*lines, *logged_state.differences(NAME, lines)] if e.problem]
    assert not broken, broken


def preload() -> None:
    """Import what ``check`` needs, once for all the processes that are forked for it."""
    for name in ("subjects", "verification", "verdicts", "logged_state", "audits"):
        importlib.import_module(f"auditor.plugins.registry.{name}")
    importlib.import_module("mlflow.store.model_registry.sqlalchemy_store")
    importlib.import_module("torch")


def kills(n: int, seed: int) -> dict[str, Any]:
    """Kill commands at ``n`` points, spread evenly over the changes that each makes to the store."""
    uri = f"models:/{NAME}/1"
    states: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        os.environ |= {"MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}", "AUDITOR_CACHE": f"{folder}/cache"}
        assert forked(lambda: build(folder) and None) == 0
        changes = {}
        for action in ACTIONS:
            code, changes[action] = run_until(folder, command(folder, uri, action, seed))
            assert code == 0, (folder / "command.log").read_text()
        print(f"changes of the store: {changes}", flush=True)
        preload()
        for k in range(n):
            action = ACTIONS[k % 4]
            point = 1 + (k // 4) * changes[action] * 4 // n
            code, _ = run_until(folder, command(folder, uri, action, seed + k + 1), point)
            ended = "killed" if code == -signal.SIGKILL else f"ended with {code}"
            whole = forked(lambda: check(folder, uri)) == 0
            states[f"{action} {ended}, {'whole' if whole else 'half'}"] += 1
    half = sum(count for state, count in states.items() if state.endswith("half"))
    killed = sum(count for state, count in states.items() if "killed" in state)
    return {"n": n, "killed": killed, "half_states": half, "by_action": dict(states)}


# what it costs


def cost() -> dict[str, Any]:
    """Load resnet18 at 224 as a server does, with a graph and an explainer, and time what verifies."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        assert forked(lambda: build_resnet(folder)) == 0
        assert forked(lambda: serve_once(folder)) == 0
        parts = json.loads((folder / "cost.json").read_text())
    share = parts["verification_s"] / parts["start_s"]
    print(
        f"verification {parts['verification_s']:.2f} s of {parts['start_s']:.2f} s until the first answer: {share:.1%}"
    )
    return {**parts, "share": share}


def build_resnet(folder: Path) -> None:
    """Register resnet18 with concepts and a graph."""
    import mlflow
    import numpy as np
    import torch
    import torchvision

    from auditor import Subject, fit, open_data, plugins
    from auditor.plugins.registry.onnx_exports import export

    use(folder)
    mlflow.MlflowClient().create_experiment("bench", artifact_location=(folder / "artifacts").as_uri())
    torch.manual_seed(0)
    net = torchvision.models.resnet18(weights=None, num_classes=10).eval()
    uri = plugins.log_subject(Subject(net, input_shape=(3, 224, 224)), "resnet18", experiment="bench")
    np.savez(folder / "x.npz", images=np.random.default_rng(0).integers(0, 255, (16, 224, 224, 3), dtype=np.uint8))
    subject = plugins.load_subject(uri)
    concepts = fit(
        "nmf", subject, open_data(folder / "x.npz"), layer="layer4", rank=4, refits=1, max_eval=4, max_iter=20
    )
    plugins.attach(concepts, uri, "concepts", subject=subject, attach_anyway=True)
    export(uri)


def serve_once(folder: Path) -> None:
    """Start as a worker does, in a process that has imported nothing yet, and write how long each part took."""
    began = time.perf_counter()
    use(folder)
    from auditor.explainers import artifact
    from auditor.plugins.registry import model_files, pt2_archive, subjects
    from auditor.service import forward_pass, served_version
    from auditor.service.settings import Settings
    from auditor.service.worker import warm_up
    from auditor.subject import subject

    spent: Counter[str] = Counter()
    for module, name in (
        (model_files, "digests"),
        (model_files, "check"),
        (pt2_archive, "repack"),
        (pt2_archive, "graph_digest"),
        (subjects, "check_notes"),
        (subject, "of_weights"),
        (artifact, "_read_files"),
        (forward_pass, "compare_with_torch"),
    ):
        setattr(module, name, timed(getattr(module, name), f"{module.__name__}.{name}", spent))
    settings = Settings(model="models:/resnet18/1", engine="onnx")
    version = served_version.load_version(settings)
    warm_up(version, settings)
    total = time.perf_counter() - began
    figures = {"start_s": total, "verification_s": sum(spent.values()), "parts": dict(spent)}
    (folder / "cost.json").write_text(json.dumps(figures))


def timed(function: Callable[..., Any], name: str, spent: Counter[str]) -> Callable[..., Any]:
    """Return the function with its time added to ``spent``."""

    def run(*args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            spent[name] += time.perf_counter() - began

    return run


def shared(run: Callable[[int, int], dict[str, Any]], n: int, seed: int, jobs: int) -> dict[str, Any]:
    """Run ``n`` cases in processes, each with a registry and a seed of its own, and add up what they count."""
    parts = [n // jobs + (k < n % jobs) for k in range(jobs)]
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        files = [Path(name) / f"{k}.json" for k in range(jobs)]

        def work(k: int) -> None:
            files[k].write_text(json.dumps(run(parts[k], seed + k)))

        children = []
        for k in range(jobs):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    work(k)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            children.append(child)
        for child in children:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "a part did not finish"
        figures = [json.loads(file.read_text()) for file in files]
    total: dict[str, Any] = {"seeds": [seed, seed + jobs - 1]}
    for key, value in figures[0].items():
        if isinstance(value, int):
            total[key] = sum(part[key] for part in figures)
        elif isinstance(value, dict):
            total[key] = dict(sum((Counter(part[key]) for part in figures), Counter()))
        else:
            total[key] = [item for part in figures for item in part[key]]
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["flips", "kills", "cost"])
    parser.add_argument("--n", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes, each with a registry of its own")
    options = parser.parse_args()
    if options.part == "cost":
        figures = cost()
    else:
        run, n = (flips, 1000) if options.part == "flips" else (kills, 50)
        figures = shared(run, options.n or n, options.seed, options.jobs)
        print(json.dumps({k: v for k, v in figures.items() if k != "missed"}))
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**stored, options.part: figures}, indent=1, sort_keys=True) + "\n")
    failed = figures.get("half_states") or figures.get("n", 0) != figures.get("noticed", figures.get("n", 0))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
