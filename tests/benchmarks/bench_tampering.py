"""Tampering: flipped bytes that are noticed, killed writers that leave no half state, and what verification costs.

    python tests/benchmarks/bench_tampering.py flips --n 1000     # single bits of files and tags, one at a time
    python tests/benchmarks/bench_tampering.py kills --n 50       # SIGKILL inside attach, audit, gate and promote
    python tests/benchmarks/bench_tampering.py cost               # verification in the start of a server, resnet18

Each part prints one line and writes its figures to ``results/tampering.json``. The registry is a new one with a
small network, an explainer, an ONNX graph, an audit and a verdict; ``flips`` is what ``auditor verify`` does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
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


def forked(work: Callable[[], None], kill_after_s: float | None = None) -> int:
    """Run ``work`` in a process of its own; kill it after some time, or wait for it. Returns its exit code."""
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
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def act(folder: Path, uri: str, action: str, k: int) -> None:
    """Do one thing that writes: what a killed process was doing."""
    from auditor import AuditConfig, open_data, plugins
    from auditor.explainers.base import Explainer

    use(folder)
    if action == "attach":
        subject = plugins.load_subject(uri)
        explainer = Explainer.load(folder / f"explainer-{k % 2}", subject)
        plugins.attach(explainer, uri, "concepts", subject=subject, attach_anyway=True)
    elif action == "audit":
        config = AuditConfig(images=20, layers=False, reliance=False, seed=k)
        plugins.run_audit(uri, open_data(folder / "x.npz"), config=config, fresh=True)
    else:
        alias = f"alias-{k}" if action == "promote" else None
        plugins.run_gate(uri, folder / "policy.toml", promote=alias)


def check(folder: Path, uri: str) -> None:
    """Raise when anything is neither as before nor as after: a tag without its files, an alias without its verdict."""
    import mlflow

    from auditor.plugins import latest_audit, verify
    from auditor.plugins.registry import history
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
    broken = [e.problem for e in history.verify(history.entries(NAME), heads=history.heads_of(NAME)) if e.problem]
    assert not broken, broken


def kills(n: int, seed: int) -> dict[str, Any]:
    """Kill writers at ``n`` points, spread evenly over the time that each action takes."""
    import mlflow.pytorch  # noqa: F401
    import onnxruntime  # noqa: F401

    import auditor.plugins.registry.gates  # noqa: F401  before the first fork: children start at once

    rng = random.Random(seed)
    states: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        uri = f"models:/{NAME}/1"
        assert forked(lambda: build(folder) and None) == 0
        lengths = {}
        for action in ("attach", "audit", "gate", "promote"):
            began = time.perf_counter()
            assert forked(lambda a=action: act(folder, uri, a, 0)) == 0
            lengths[action] = time.perf_counter() - began
        for k in range(n):
            action = ("attach", "audit", "gate", "promote")[k % 4]
            delay = lengths[action] * (k // 4 + rng.random()) / (n / 4)
            forked(lambda a=action, i=k: act(folder, uri, a, i + 1), kill_after_s=delay)
            whole = forked(lambda: check(folder, uri)) == 0
            states[f"{action} {'whole' if whole else 'half'}"] += 1
    half = sum(count for state, count in states.items() if state.endswith("half"))
    return {"n": n, "half_states": half, "by_action": dict(states)}


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
