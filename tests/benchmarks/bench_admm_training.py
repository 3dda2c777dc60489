"""Training by ADMM on MNIST and Fashion-MNIST: the published table, reached or not, and what each ingredient adds.

python tests/benchmarks/bench_admm_training.py shallow --data-root DATA [--seeds 3] [--epochs 25] [--keep FOLDER]

shallow      MNIST 784-128-128-10, squared loss: Block-ADMM, SGD (published and tuned), full ADMM, Taylor, BCD, Gotmare
deep         MNIST, 10 and 20 fully connected layers, no residuals, a block per layer: Block-ADMM, SGD, Adam, one start
fashion      Fashion-MNIST 784-1000-1000-10, cross-entropy: Block-ADMM and dlADMM
orthonormal  dlADMM with orthonormal rows against without: feasibility and accuracy
time         CPU time of one Block-ADMM epoch with 5 inner steps against one SGD epoch of the same network
ingredients  what kept variables, inner steps and duals add to back-propagation (validation accuracy)
rates        how SGD's learning rate and start were chosen: a grid on 10,000 training images (validation accuracy)

Settings were chosen on the last 10,000 training images (``--validate`` reports those and never opens the test set).
``--keep FOLDER`` holds every result and, for fashion, the run itself: a command that was cut goes on where it stopped.
"""

import argparse
import gzip
import itertools
import json
import os
import re
import shutil
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from auditor.errors import NumericsError
from auditor.training.backprop import BackpropConfig, backprop
from auditor.training.block_admm import BlockAdmm, BlockAdmmConfig
from auditor.training.block_coordinate_descent import BcdConfig, bcd
from auditor.training.cycle import accuracy
from auditor.training.dladmm import DlAdmm, DlAdmmConfig
from auditor.training.full_admm import FullAdmmConfig, full_admm

SHALLOW = {"beta": 10.0, "beta_ratio": 10.0, "dual_step": 1.0, "z_steps": 5, "lr": 2e-3, "average": 0.999}
DEEP = {"beta": 10.0, "beta_ratio": 3.0, "dual_step": 1.0, "z_steps": 3, "average": 0.999}
DEEP_RATE = {10: 1e-3, 20: 5e-4}
TUNED = {3: 0.8, 10: 0.1, 20: 0.01}  # SGD's learning rate by number of layers, from ``rates``
RATES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.2)
FASHION = {
    "loss": "cross_entropy", "beta": 1.0, "beta_ratio": 10.0, "dual_step": 0.5, "z_steps": 3, "lr": 1e-3,
    "z_optimizer": "gradient", "weight_decay": 0.1, "average": 0.998, "copies": 4, "standard": True,
}  # fmt: skip


def idx(path, skip):
    with gzip.open(path) as file:
        return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)[skip:]


def images(root, name, validate):
    """Training and held-out images: the test set, or with ``validate`` the last 10,000 of the training set."""
    raw = Path(root) / name / "raw"

    def part(split):
        x = idx(raw / f"{split}-images-idx3-ubyte.gz", 16).view(-1, 784).float() / 255
        return x, idx(raw / f"{split}-labels-idx1-ubyte.gz", 8).long()

    x, y = part("train")
    return (x[:-10000], y[:-10000], x[-10000:], y[-10000:]) if validate else (x, y, *part("t10k"))


def mlp(widths, seed, gain=None):
    """Affine layers with ReLU between; normal weights, zero biases.

    Deep nets start at He's size, shallow ones at a quarter of it (chosen on validation images: 98.2 against 97.6%).
    """
    gain = gain or (1.0 if len(widths) > 5 else 0.25)
    torch.manual_seed(seed)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    for lin in layers:
        nn.init.kaiming_normal_(lin.weight, nonlinearity="relu")
        lin.weight.data.mul_(gain)
        nn.init.zeros_(lin.bias)
    return [*(nn.Sequential(lin, nn.ReLU()) for lin in layers[:-1]), layers[-1]]


def drive(cycles, blocks, n_cycles, held, label, averaged=None, every=5):
    """Run for so many cycles; return held-out accuracy (of the last cycle, never the best) and CPU seconds."""
    began, last = time.process_time(), None
    try:
        for last in itertools.islice(cycles, n_cycles):
            if last.epoch % every == 0 or last.epoch == n_cycles:
                spent = time.process_time() - began
                print(f"   {label} epoch {last.epoch} loss {last.loss:.4f} cpu {spent:.0f} s", flush=True)
    except NumericsError as error:
        print(f"   {label}: {error}", flush=True)
    spent = time.process_time() - began
    if averaged is not None:
        with averaged():
            return accuracy(blocks, *held), spent
    return accuracy(blocks, *held), spent


def by_blocks(widths, seed, data, epochs, label, gain=None, keep=None, **options):
    x, y, *held = data
    blocks = mlp(widths, seed, gain)
    solver = BlockAdmm(blocks, x, y, BlockAdmmConfig(**{"decay_epochs": epochs, **options, "seed": seed}))
    if keep is None:
        return drive(iter(solver), blocks, epochs, held, label, solver.averaged)
    folder, clock, spent = Path(keep), Path(keep) / "seconds.json", 0.0
    if clock.exists():
        spent = json.loads(clock.read_text())
        solver.resume(folder)
    while solver.epoch < epochs:  # three epochs, then a save
        curve, more = drive(iter(solver), blocks, min(3, epochs - solver.epoch), held, label, solver.averaged, every=1)
        spent += more
        solver.save(folder)
        clock.write_text(json.dumps(spent))
    with solver.averaged():
        curve = accuracy(blocks, *held)
    shutil.rmtree(folder)
    return curve, spent


def by_backprop(widths, seed, data, epochs, label, gain=None, **options):
    x, y, *held = data
    blocks = mlp(widths, seed, gain)
    return drive(backprop(blocks, x, y, BackpropConfig(**options, seed=seed)), blocks, epochs, held, label)


def closed(make, widths, seed, data, args, label):
    """A full-batch method on the first ``--samples`` images, since each iteration takes all of them; 0: all."""
    x, y, *held = data
    n = args.samples or len(x)
    blocks = mlp(widths, seed)
    return drive(make(blocks, x[:n], y[:n]), blocks, args.iterations, held, f"{label} on {n}", every=20)


def table(rows):
    """Rows of (name, published, reach, [accuracies], [seconds])."""
    print(f"\n{'method':44}{'published':>11}{'reach':>8}{'reached':>9}{'spread':>8}{'seeds':>7}{'cpu s':>8}")
    for name, published, reach, values, seconds in rows:
        mean = 100 * statistics.mean(values)
        spread = 100 * (max(values) - min(values)) / 2
        verdict = "" if reach is None else ("  yes" if mean >= reach else "  NO")
        shown = "" if reach is None else f"{reach:.1f}"
        print(
            f"{name:44}{published:>11}{shown:>8}{mean:9.2f}{spread:8.2f}{len(values):7}"
            f"{statistics.mean(seconds):8.0f}{verdict}",
            flush=True,
        )


def many(run, args, name):
    """Run for every seed; what ``--keep`` already has is not run again."""
    results_file = Path(args.keep) / "results.jsonl" if args.keep else None
    stored_rows = (
        [json.loads(line) for line in results_file.read_text().splitlines()]
        if results_file and results_file.exists()
        else []
    )
    values, seconds = [], []
    for seed in range(args.first, args.first + args.seeds):
        key = [args.experiment, name, seed, args.epochs, args.iterations, args.samples, args.validate, args.set]
        stored = next((row["found"] for row in stored_rows if row["key"] == key), None)
        if stored is None:
            stored = list(run(seed))
            if results_file:
                results_file.parent.mkdir(parents=True, exist_ok=True)
                with results_file.open("a") as file:
                    file.write(json.dumps({"key": key, "found": stored}) + "\n")
        print(f"   {name}: seed {seed}: {100 * stored[0]:.2f}%", flush=True)
        values.append(stored[0])
        seconds.append(stored[1])
    return values, seconds


def shallow(args):
    data, widths, e = images(args.data_root, "MNIST", args.validate), [784, 128, 128, 10], args.epochs or 15
    methods = [
        ("Block-ADMM, 5 inner steps, duals", "97.53", 97.6,
         lambda s: by_blocks(widths, s, data, e, "block", **SHALLOW)),
        ("SGD, lr .005", "95.29", None, lambda s: by_backprop(widths, s, data, e, "sgd", lr=0.005, gain=1.0)),
        (f"SGD, lr {TUNED[3]}, chosen on validation", "-", None,
         lambda s: by_backprop(widths, s, data, e, "sgd", lr=TUNED[3])),
        (
            "full ADMM",
            "95.02",
            None,
            lambda s: closed(
                lambda b, x, y: full_admm(b, x, y, FullAdmmConfig(seed=s)), widths, s, data, args, "full"
            ),
        ),
        (
            "Taylor",
            "87.52",
            None,
            lambda s: closed(
                lambda b, x, y: full_admm(b, x, y, FullAdmmConfig(variant="taylor", seed=s)),
                widths, s, data, args, "taylor",
            ),
        ),
        (
            "BCD (Zeng)",
            "83.28",
            None,
            lambda s: closed(lambda b, x, y: bcd(b, x, y, BcdConfig(seed=s)), widths, s, data, args, "bcd"),
        ),
        (
            "block splitting without duals (Gotmare)",
            "-",
            None,
            lambda s: by_blocks(
                widths, s, data, e, "gotmare", dual_step=0, start="kept", z_optimizer="sgd", z_lr=0.1, z_steps=5
            ),
        ),
        (
            "Adam, cosine decay (not in the paper)",
            "-",
            None,
            lambda s: by_backprop(widths, s, data, e, "adam", optimizer="adam", lr=2e-3, decay_epochs=e),
        ),
    ]  # fmt: skip
    race(args, methods)


def race(args, methods):
    """Run the (name, published, reach, run) whose name matches ``--methods``; the table grows with each."""
    rows = []
    for name, published, reach, run in methods:
        if re.search(args.methods or "", name):
            rows.append((name, published, reach, *many(run, args, name)))
            table(rows)


def deep(args):
    data, runs, e = images(args.data_root, "MNIST", args.validate), [], args.epochs or 6
    for n_layers, published, reach in ((10, "94.43", 95.0), (20, "91.75", 92.0)):
        widths = [784, *[128] * (n_layers - 1), 10]

        def plain(s, w=widths, **o):
            return by_backprop(w, s, data, e, "plain", **o)

        rate = TUNED[n_layers]
        runs += [
            (f"Block-ADMM, {n_layers} layers in {n_layers} blocks", published, reach,
             lambda s, w=widths, lr=DEEP_RATE[n_layers]: by_blocks(w, s, data, e, "block", lr=lr, **DEEP)),
            (f"SGD lr .005, {n_layers} layers", "10.28", None, lambda s, f=plain: f(s, lr=0.005)),
            (f"SGD lr {rate}, {n_layers} layers", "-", None, lambda s, f=plain, r=rate: f(s, lr=r)),
            (f"Adam lr .001, {n_layers} layers", "58", None,
             lambda s, f=plain: f(s, optimizer="adam", lr=1e-3)),
            (f"Adam lr .0005, cosine, {n_layers} layers", "-", None,
             lambda s, f=plain: f(s, optimizer="adam", lr=5e-4, decay_epochs=e)),
        ]  # fmt: skip
    print(f"one start for all: normal weights of He's size, zero biases; {e} epochs; Block-ADMM: a block per layer")
    race(args, runs)


def rates(args):
    x, y, *held = images(args.data_root, "MNIST", True)
    data, e = (x[:10000], y[:10000], *held), args.epochs or 8
    for n_layers in [int(d) for d in (args.depths or "3,10,20").split(",")]:
        for gain, lr in itertools.product((0.25, 1.0) if n_layers == 3 else (1.0,), RATES):
            curve, _ = by_backprop([784, *[128] * (n_layers - 1), 10], 0, data, e, "sgd", lr=lr, gain=gain)
            print(f"{n_layers} layers, {gain} of He's weights, SGD lr {lr}: {100 * curve:.2f}%", flush=True)


def fashion(args):
    data, widths = images(args.data_root, "FashionMNIST", args.validate), [784, 1000, 1000, 10]
    e, settings = args.epochs or 8, {**FASHION, **json.loads(args.set)}
    training_set = widened(data, settings.pop("copies"))
    if settings.pop("standard"):  # mean 0, deviation 1 over all pixels
        training_set = (
            (training_set[0] - 0.286) / 0.353,
            training_set[1],
            (training_set[2] - 0.286) / 0.353,
            training_set[3],
        )
    race(args, [
        ("Block-ADMM, cross-entropy", "90.39", 90.4,
         lambda s: by_blocks(widths, s, training_set, e, "block",
                             keep=args.keep and Path(args.keep) / f"run-{s}", **settings)),
        ("dlADMM", "84.67", 84.7, lambda s: by_dladmm(widths, s, data, args)[:2]),
    ])  # fmt: skip


def widened(data, copies):
    """More training images, each a sample with variables of its own: mirrored (2 copies), moved by a pixel (4)."""
    x, y, *held = data
    pictures = x.view(-1, 28, 28)
    if copies >= 2:
        pictures = torch.cat([pictures, pictures.flip(2)])
    if copies >= 4:
        steps = torch.randint(0, 8, (len(pictures),), generator=torch.Generator().manual_seed(0))
        moved = pictures.clone()
        for k, (down, right) in enumerate(d for d in itertools.product((-1, 0, 1), repeat=2) if d != (0, 0)):
            rows = steps == k
            padded = nn.functional.pad(pictures[rows], (1, 1, 1, 1))
            moved[rows] = padded[:, 1 - down : 29 - down, 1 - right : 29 - right]
        pictures = torch.cat([pictures, moved])
    return pictures.reshape(-1, 784), y.repeat(copies), *held


def by_dladmm(widths, seed, data, args, **options):
    """dlADMM on the first ``--samples`` images, since each iteration takes all of them; 0: all."""
    x, y, *held = data
    n = args.samples or len(x)
    blocks = mlp(widths, seed, gain=1.0)
    settings = {
        "nu": args.nu,
        "rho": args.rho,
        "theta": args.theta,
        "w_steps": 10,
        "solver": "exact",
        "init": args.init or None,
    }
    solver = DlAdmm(blocks, x[:n], y[:n], DlAdmmConfig(**{**settings, **options, "seed": seed}))
    curve, spent = drive(iter(solver), blocks, args.iterations, held, "dladmm", every=5)
    return curve, spent, solver.violation()


def orthonormal(args):
    data, rows = images(args.data_root, "MNIST", args.validate), []
    widths = [784, 128, 128, 10]
    worst = 0.0
    for constraint in ("none", "orthonormal"):
        results = [by_dladmm(widths, s, data, args, constraint=constraint) for s in range(args.seeds)]
        worst = max(worst, *(v for *_, v in results))
        rows.append((f"dlADMM, {constraint}", "-", None, [r[0] for r in results], [r[1] for r in results]))
        table(rows)
    lost = 100 * (statistics.mean(rows[0][3]) - statistics.mean(rows[1][3]))
    print(f"max |W W' - I| = {worst:.1e} (limit 1e-6); accuracy lost {lost:.2f} points (limit 2)")


def timing(args):
    x, y, *_ = images(args.data_root, "MNIST", True)
    cpu = {"block": [], "sgd": []}
    wall = {"block": [], "sgd": []}
    runs = {
        "block": iter(BlockAdmm(b := mlp([784, 128, 128, 10], 0), x, y, BlockAdmmConfig(**SHALLOW))),
        "sgd": backprop(mlp([784, 128, 128, 10], 0), x, y, BackpropConfig()),
    }
    del b
    for cycles in runs.values():
        next(cycles)  # warm
    for _ in range(args.epochs or 5):
        for name, cycles in runs.items():
            began = time.process_time(), time.perf_counter()
            next(cycles)
            cpu[name].append(time.process_time() - began[0])
            wall[name].append(time.perf_counter() - began[1])
    for what, spent in (("CPU", cpu), ("wall", wall)):
        a, b = (statistics.median(spent[name]) for name in ("block", "sgd"))
        print(f"{what}: Block-ADMM epoch {a:.2f} s, SGD epoch {b:.2f} s, ratio {a / b:.2f} (limit 4)")


def ingredients(args):
    data, e = images(args.data_root, "MNIST", True), args.epochs or 8
    base = {"lr": 1e-3, "average": 0.999, "beta": 10.0, "beta_ratio": 3.0, "dual_step": 1.0, "z_steps": 5}
    variants = [
        ("back-propagation, Adam", None),
        ("all: 5 inner steps, duals, beta 10, ratio 3", base),
        ("without duals", {**base, "dual_step": 0}),
        ("1 inner step", {**base, "z_steps": 1}),
        ("1 inner step, without duals", {**base, "z_steps": 1, "dual_step": 0}),
        ("one penalty for all (ratio 1)", {**base, "beta_ratio": 1.0}),
        ("beta 1, growing (eq. 4.7)", {**base, "beta": 1.0, "penalty_factor": 0.5, "penalty_bound": 0.02}),
        ("kept Z", {**base, "start": "kept"}),
        ("kept Z, without duals", {**base, "start": "kept", "dual_step": 0}),
        ("without averaged weights", {**base, "average": 0.0}),
    ]
    depths = [int(d) for d in (args.depths or "3").split(",")]
    for depth in depths:
        widths, rows = [784, *[128] * (depth - 1), 10], []
        for name, options in variants:
            if options is None:

                def run(s, w=widths):
                    return by_backprop(w, s, data, e, "adam", optimizer="adam", lr=1e-3, decay_epochs=e)
            else:

                def run(s, o=options, w=widths):
                    return by_blocks(w, s, data, e, "block", **o)

            rows.append((f"{depth} layers: {name}", "-", None, *many(run, args, f"{depth} layers: {name}")))
            table(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    experiments = {
        "shallow": shallow, "deep": deep, "fashion": fashion, "orthonormal": orthonormal, "time": timing,
        "ingredients": ingredients, "rates": rates,
    }  # fmt: skip
    parser.add_argument("experiment", choices=experiments)
    parser.add_argument("--data-root", default=os.environ.get("AUDITOR_DATA"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--epochs", type=int, help="default: what the table was made with")
    parser.add_argument("--iterations", type=int, help="of the full-batch methods; default: 10 for fashion, else 100")
    parser.add_argument("--samples", type=int, default=0, help="full-batch methods: first so many images; 0: all")
    parser.add_argument("--nu", type=float, default=1e-2)
    parser.add_argument("--rho", type=float, default=1e-2)
    parser.add_argument("--theta", type=float, default=1e-6)
    parser.add_argument("--init", type=float, default=0.0, help="dlADMM: deviation of normal weights; 0: He's")
    parser.add_argument("--methods", help="regular expression: only rows whose name it finds")
    parser.add_argument("--depths", help="ingredients, rates: numbers of layers, commas between")
    parser.add_argument("--keep", help="folder for results, and for fashion's runs: go on where a cut command stopped")
    parser.add_argument("--set", default="{}", help="fashion: JSON of Block-ADMM settings that replace the table's")
    parser.add_argument("--validate", action="store_true")
    args = parser.parse_args()
    if not args.data_root or not (Path(args.data_root) / "MNIST" / "raw").exists():
        raise SystemExit("skipped: no MNIST/raw under --data-root (or AUDITOR_DATA)")
    args.iterations = args.iterations or (10 if args.experiment == "fashion" else 100)
    torch.set_num_threads(1)
    experiments[args.experiment](args)


if __name__ == "__main__":
    main()
