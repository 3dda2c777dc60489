"""make mutants: change one operator at a time and count how many changes the module's own tests notice.

A seeded sample of mutants is drawn evenly over the modules of ``modules.toml``; each runs against the module's mirrored
test file only. Prints a table and the mutants that survived, and exits with 1 when fewer than 90% were killed.

    python -m tests.mutants                               200 mutants of all modules
    python -m tests.mutants --modules kernels/admm --n 40 40 mutants of one folder
    python -m tests.mutants --only-survivors              once more, the survivors of the last run
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from .mutations import Mutant, mutants, mutated_source, sample

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
LAST_RUN = ROOT / ".mutants.json"
FOLDERS = ("auditor", "kernels", "plugins", "service", "tests", "docs", "pyproject.toml", "README.md")
REQUIRED_SHARE = 0.9
BASELINE_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Baseline:
    """The tests of a module without a mutant."""

    tests: list[str]
    compiled: bool
    seconds: float
    red: str | None  # why no mutant of the module can be judged

    @property
    def timeout_s(self) -> float:
        """A mutant that takes this long no longer stops by itself."""
        return 15 + 4 * self.seconds


@dataclass(frozen=True, slots=True)
class Equivalent:
    """A mutant said to behave as the original."""

    file: str
    source: str
    mutated: str
    reason: str


# ---------------------------------------------------------------- what to mutate


def module_files(names: list[str]) -> list[str]:
    """Every module with code under the names (files or folders), relative to the repository."""
    files: list[str] = []
    for name in names:
        path = ROOT / name.rstrip("/")
        if not path.exists():
            path = ROOT / f"{name}.py"
        if not path.exists():
            raise SystemExit(f"mutants: {name} is neither a module nor a folder of this repository.")
        below = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        files += [str(p.relative_to(ROOT)) for p in below if p.name != "__init__.py"]
    return list(dict.fromkeys(files))


def tests_of(file: str, extra: dict[str, list[str]]) -> list[str]:
    """The module's mirrored test file and the ones named for it, those that exist."""
    path = Path(file)
    mirrored = str(Path("tests") / path.parent / f"test_{path.stem}.py")
    return [name for name in [mirrored, *extra.get(file, [])] if (ROOT / name).exists()]


def equivalents() -> list[Equivalent]:
    """The entries of equivalent.toml."""
    return [
        Equivalent(**entry) for entry in tomllib.loads((HERE / "equivalent.toml").read_text()).get("equivalent", [])
    ]


def stale_entries(entries: list[Equivalent]) -> list[str]:
    """Say which entries name a line or a mutant that the source no longer has."""
    stale = []
    changes: dict[str, set[tuple[str, str, str]]] = {}
    for entry in entries:
        if not (ROOT / entry.file).exists():
            stale.append(f"{entry.file}: no such file")
            continue
        if entry.file not in changes:
            quoted = {other.source for other in entries if other.file == entry.file}
            changes[entry.file] = {mutant.change for mutant in mutants(ROOT, entry.file, quoted)}
        if (entry.file, entry.source, entry.mutated) not in changes[entry.file]:
            stale.append(f"{entry.file}: no line `{entry.source}` with the mutant `{entry.mutated}`")
    return stale


# ---------------------------------------------------------------- running tests on changed files


def copy_tree(target: Path) -> None:
    """Copy the sources and the tests, and map the import names onto them as the installed package does."""
    skip = shutil.ignore_patterns("__pycache__", "node_modules")
    for name in FOLDERS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=skip)
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, target / name)
    package = target / ".pkg" / "auditor"
    package.mkdir(parents=True)
    for path in (target / "auditor").iterdir():
        (package / path.name).symlink_to(path)
    for name in ("kernels", "plugins", "service"):
        (package / name).symlink_to(target / name)


class Worker:
    """A process with a tree of its own."""

    def __init__(self, tree: Path) -> None:
        copy_tree(tree)
        env = os.environ | {
            "PYTHONPATH": f"{tree / '.pkg'}{os.pathsep}{tree}",
            "PYTHONSAFEPATH": "1",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(tree.parent),
        }
        command = [sys.executable, "-m", "tests.mutants.worker", str(tree)]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(
        self, file: str, source: str | None, tests: list[str], timeout_s: float, compiled: bool
    ) -> dict[str, object]:
        """Run the tests with the file replaced by ``source`` (None: as it is)."""
        job = {"file": file, "source": source, "tests": tests, "timeout_s": timeout_s, "compiled": compiled}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)
        reply = self.process.stdout.readline()
        if not reply:
            raise SystemExit("mutants: a worker died; see its message above.")
        return json.loads(reply)

    def close(self) -> None:
        """Let the process end by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class Workers:
    """Hands jobs to the workers that are free."""

    def __init__(self, folder: Path, n: int) -> None:
        self.workers = [Worker(folder / f"tree{i}") for i in range(n)]
        self.idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self.workers:
            self.idle.put(worker)

    def map(self, job: Callable[[Worker, object], object], items: list) -> list:
        """Run ``job(worker, item)`` for every item, results in the order of the items."""

        def one(item: object) -> object:
            worker = self.idle.get()
            try:
                return job(worker, item)
            finally:
                self.idle.put(worker)

        with ThreadPoolExecutor(len(self.workers)) as pool:
            return list(pool.map(one, items))

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def measure_baseline(worker: Worker, file: str, tests: list[str], always_compiled: bool) -> Baseline:
    """Run a module's tests unchanged: numba's functions as plain Python if the tests pass like that, else compiled."""
    if not tests:
        return Baseline(tests, False, 0.0, "no test file")
    reply: dict[str, object] = {}
    for compiled in (True,) if always_compiled else (False, True):
        timeout_s = BASELINE_TIMEOUT_S if compiled else 60.0
        reply = worker.run(file, None, tests, timeout_s, compiled)
        if reply["code"] == 0:
            return Baseline(tests, compiled, float(str(reply["seconds"])), None)
    how = "no tests collected" if reply["code"] == 5 else "they fail without a mutant"
    return Baseline(tests, True, 0.0, f"{' '.join(tests)}: {how}\n{reply['tail']}")


def judge(worker: Worker, mutant: Mutant, baseline: Baseline) -> str:
    """Return 'killed', 'killed by time' or 'survived'."""
    if baseline.red:
        return "survived"
    source = mutated_source(ROOT, mutant)
    reply = worker.run(mutant.file, source, baseline.tests, baseline.timeout_s, baseline.compiled)
    if reply["code"] is None:
        return "killed by time"
    return "survived" if reply["code"] == 0 else "killed"


# ---------------------------------------------------------------- the report


def table(verdicts: list[tuple[Mutant, str]], equivalent: set[tuple[str, str, str]]) -> tuple[str, float]:
    """Return the table and the share of killed mutants among those that are not equivalent."""
    rows = []
    for file in sorted({mutant.file for mutant, _ in verdicts}):
        counted = [verdict for m, verdict in verdicts if m.file == file and (m.change not in equivalent)]
        same = sum(m.file == file and m.change in equivalent for m, _ in verdicts)
        killed = sum(verdict.startswith("killed") for verdict in counted)
        rows.append((file, len(counted) + same, killed, len(counted) - killed, same))
    rows.append(("all", *(sum(row[i] for row in rows) for i in range(1, 5))))
    width = max(len(row[0]) for row in rows)
    lines = [f"{'module':{width}}  mutants  killed  survived  equivalent  share"]
    share = 1.0
    for name, n, killed, survived, same in rows:
        share = killed / (killed + survived) if killed + survived else 1.0
        lines.append(f"{name:{width}}  {n:7}  {killed:6}  {survived:8}  {same:10}  {share:5.0%}")
    return "\n".join(lines), share


def describe(mutant: Mutant, note: str = "") -> str:
    """File and line of a mutant and its diff."""
    return f"{mutant.file}:{mutant.line}  {mutant.operator}{note}\n    - {mutant.source}\n    + {mutant.mutated}"


def survivors_of_last_run() -> list[Mutant]:
    """The survivors of the last run that the source still has, wherever their lines moved to."""
    if not LAST_RUN.exists():
        raise SystemExit("mutants: --only-survivors needs an earlier run in this folder.")
    recorded = [Mutant(**entry) for entry in json.loads(LAST_RUN.read_text())]
    present: list[Mutant] = []
    for file in sorted({mutant.file for mutant in recorded}):
        expected = {mutant.change for mutant in recorded if mutant.file == file}
        if (ROOT / file).exists():
            quoted = {source for _, source, _ in expected}
            present += [mutant for mutant in mutants(ROOT, file, quoted) if mutant.change in expected]
    return present


def draw(options: argparse.Namespace, config: dict) -> list[Mutant]:
    """The mutants that this run judges."""
    if options.only_survivors:
        drawn = survivors_of_last_run()
        if options.modules:
            files = set(module_files(options.modules))
            drawn = [mutant for mutant in drawn if mutant.file in files]
        return drawn
    return sample(ROOT, module_files(options.modules or config["modules"]), options.n, options.seed)


def run(options: argparse.Namespace) -> int:
    """Draw, run and report; return the exit code."""
    config = tomllib.loads((HERE / "modules.toml").read_text())
    entries = equivalents()
    equivalent = {(entry.file, entry.source, entry.mutated) for entry in entries}
    drawn = draw(options, config)
    files = sorted({mutant.file for mutant in drawn})
    print(f"{len(drawn)} mutants in {len(files)} modules, seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        workers = Workers(Path(folder), options.workers)
        try:
            tests = {file: tests_of(file, config.get("extra", {})) for file in files}
            compiled = set(config["compiled"])
            measured = workers.map(lambda w, file: measure_baseline(w, file, tests[file], file in compiled), files)
            baselines = dict(zip(files, measured, strict=True))
            for file, baseline in baselines.items():
                if baseline.red:
                    print(f"{file}: {baseline.red}", flush=True)

            def one(worker: Worker, mutant: Mutant) -> str:
                verdict = judge(worker, mutant, baselines[mutant.file])
                if options.verbose:
                    print(f"{verdict:14} {mutant.file}:{mutant.line}", flush=True)
                return verdict

            verdicts = list(zip(drawn, workers.map(one, drawn), strict=True))
        finally:
            workers.close()
    survivors = [m for m, verdict in verdicts if verdict == "survived" and m.change not in equivalent]
    LAST_RUN.write_text(json.dumps([asdict(mutant) for mutant in survivors], indent=1))
    return report(verdicts, survivors, equivalent, stale_entries(entries), baselines)


def report(verdicts, survivors, equivalent, stale, baselines) -> int:
    """Print the table, the survivors and what is wrong with equivalent.toml; return the exit code."""
    for mutant in survivors:
        print(describe(mutant, "  (no tests ran)" if baselines[mutant.file].red else ""))
    lies = [m for m, verdict in verdicts if verdict.startswith("killed") and m.change in equivalent]
    for mutant in lies:
        print("listed as equivalent, but a test kills it: " + describe(mutant))
    for text in stale:
        print(f"stale entry in equivalent.toml: {text}")
    text, share = table(verdicts, equivalent)
    print(text)
    late = sum(verdict == "killed by time" for _, verdict in verdicts)
    if late:
        print(f"{late} of the killed did not end in time")
    return int(share < REQUIRED_SHARE or bool(lies) or bool(stale))


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--n", type=int, default=200, help="how many mutants to draw; 0 takes every one")
    parser.add_argument(
        "--modules", nargs="+", metavar="PATH", help="files or folders instead of those of modules.toml"
    )
    parser.add_argument("--only-survivors", action="store_true", help="once more, the survivors of the last run")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="one line per mutant while it runs")
    raise SystemExit(run(parser.parse_args()))


if __name__ == "__main__":
    main()
