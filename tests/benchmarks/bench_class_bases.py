"""What a basis per class is worth: ways to let concepts stand in, each with a control that knows nothing of the class.

    AUDITOR_DATA=… python -m tests.benchmarks.bench_class_bases [--network lite0] [--half A] [--store]

Photos of CUB-20 before SqueezeNet and EfficientNet-Lite0 of ImageNet, rank 10 per predicted class, each fifth photo
held out. Ways were compared on the photos of every second bird (half A); half B was looked at once. ``kept`` is the
share of held-out photos whose class survives, ``control`` the same where it should not:

own         each photo by the basis of the model's class; control: the runner-up's basis makes it the runner-up
beside      own and 10 shared concepts together; the same control
head        as `beside`, projected in the metric  I + 10 H'H  of the head's centred rows; the same control
together    the concepts of the five nearest classes in one projection; control: without those of the model's class
together*   the same in the metric of the head
two         the two nearest classes in one projection; control: the next two
blind       the basis, of all, that fits the photo best; control: chance
shared      50 shared concepts, no class's own (the same in the metric of the head: shared*)
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "class_bases.json"
RANK, COLUMNS = 10, 12_000


@dataclass
class Photos:
    """Activations of one layer, logits, the closed-form head, and the bases fitted to four fifths of the photos."""

    Z: Any  # (photos, channels, positions)
    logits: Any
    head: Any

    def __post_init__(self) -> None:
        import torch

        self.classes = self.logits.argmax(1)
        self.held = torch.arange(len(self.Z)) % 5 == 4
        self.rows = self.held.nonzero()[:, 0]
        self.present = torch.tensor(sorted(set(self.classes[~self.held].tolist())))
        self.bases = {int(k): self._basis(~self.held & (self.classes == k), RANK) for k in self.present}
        self.shared = {rank: self._basis(~self.held, rank) for rank in (10, 50)}
        H = self.head.weight[self.present].flatten(1)
        H = H - H.mean(0)
        H = H * (H.shape[1] / H.square().sum()).sqrt()
        _, s, V = torch.linalg.svd(H, full_matrices=False)
        self.metric = torch.cat([torch.eye(H.shape[1]), 10**0.5 * s[:, None] * V])

    def _basis(self, chosen: Any, rank: int) -> Any:
        import torch

        from auditor.kernels.factorization.nmf import factorize

        X = self.Z[chosen].permute(1, 0, 2).flatten(1)
        X = X[:, torch.linspace(0, X.shape[1] - 1, min(COLUMNS, X.shape[1])).long()].contiguous()
        return factorize(X, min(rank, *X.shape), max_iter=60, tol=1e-3).W

    def hat(self, row: Any, W: Any, in_metric: bool = False) -> Any:
        """Return one photo's activations as concepts W give them."""
        from auditor.kernels.factorization.projection import project

        x = self.Z[row].contiguous()
        return W @ (project(self.metric @ x, self.metric @ W) if in_metric else project(x, W))

    def nearest(self, row: Any, n: int, without: int = -1) -> list[int]:
        """Return the classes with a basis whose logits are largest."""
        order = self.present[self.logits[row, self.present].argsort(descending=True)].tolist()
        return [k for k in order if k != without][:n]

    def share(self, hats: list[Any], classes: Any) -> float:
        """Return the share of held-out photos that are of these classes when they are replaced so."""
        import torch

        return float((self.head.logits(torch.stack(hats)).argmax(1) == torch.as_tensor(classes)).double().mean())

    def of(self, classes: list[int], shared: int = 0) -> Any:
        """Return the concepts of some classes, and shared ones beside them."""
        import torch

        return torch.cat([*(self.bases[k] for k in classes), *([self.shared[shared]] if shared else [])], 1)


def measured(p: Photos) -> dict[str, tuple[float, float]]:
    """Return (kept, control) of every way."""
    rows, truth = p.rows.tolist(), p.classes[p.rows].tolist()
    own = [p.nearest(r, 1)[0] if k not in p.bases else k for r, k in zip(rows, truth, strict=True)]
    second = [p.nearest(r, 1, without=k)[0] for r, k in zip(rows, own, strict=True)]
    out: dict[str, tuple[float, float]] = {}
    for name, shared, metric in (("own", 0, False), ("beside", 10, False), ("head", 10, True)):
        kept = [p.hat(r, p.of([k], shared), metric) for r, k in zip(rows, own, strict=True)]
        control = [p.hat(r, p.of([k], shared), metric) for r, k in zip(rows, second, strict=True)]
        out[name] = p.share(kept, truth), p.share(control, second)
    for name, n, metric in (("together", 5, False), ("together*", 5, True), ("two", 2, False)):
        kept = [p.hat(r, p.of(p.nearest(r, n)), metric) for r in rows]
        control = [p.hat(r, p.of(p.nearest(r, n, without=k)), metric) for r, k in zip(rows, truth, strict=True)]
        out[name] = p.share(kept, truth), p.share(control, truth)
    best = []
    for r in rows:
        hats = {k: p.hat(r, W) for k, W in p.bases.items()}
        best.append(min(hats.values(), key=lambda hat, r=r: float((p.Z[r] - hat).square().sum())))
    out["blind"] = p.share(best, truth), 1 / len(p.present)
    for name, metric in (("shared", False), ("shared*", True)):
        out[name] = p.share([p.hat(r, p.shared[50], metric) for r in rows], truth), 1 / len(p.present)
    return out


def photos_of(network: str, root: Path) -> tuple[Any, Any, Any, list[str]]:
    """Return activations of the chosen layer, logits, the head and the bird of every photo."""
    import torch

    from auditor import open_data
    from auditor.explainers.layer_activations import harvest
    from auditor.explainers.layer_choice import choose_layer
    from auditor.network.above_layer import prepare_above_layer
    from auditor.progress import silent
    from tests.benchmarks.bench_photo_concepts import network as subject_of
    from tests.benchmarks.bench_photo_concepts import photos

    subject = subject_of(network, root)
    with tempfile.TemporaryDirectory() as scratch:
        data = open_data(photos(root, Path(scratch)))
        layer = choose_layer(subject, data, None)
        above = prepare_above_layer(subject, layer)
        assert above is not None
        z, logits, birds = [], [], []
        for batch, _, y, activations in harvest(subject, data, layer, batch_size=16, progress=silent):
            z.append(activations.flatten(2).half())
            logits.append(y)
            birds += [Path(i).parent.name for i in batch.ids]
    return torch.cat(z).float(), torch.cat(logits), above.head, birds


def main() -> None:
    """Print one row per way; with --store keep them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", default=os.environ.get("AUDITOR_DATA", ""), help="folder that holds cub20/")
    parser.add_argument("--network", default="squeezenet,lite0")
    parser.add_argument("--half", default="A,B")
    parser.add_argument("--store", action="store_true", help=f"update {RESULTS.name}")
    options = parser.parse_args()
    root = Path(options.data_root)
    if not options.data_root or not (root / "cub20").is_dir():
        raise SystemExit("skipped: give --data-root or AUDITOR_DATA, a folder that holds cub20/ (1,155 photos)")
    import torch

    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for network in options.network.split(","):
        Z, logits, head, birds = photos_of(network, root)
        place = {bird: i for i, bird in enumerate(sorted(set(birds)))}
        for half in options.half.split(","):
            chosen = torch.tensor([place[bird] % 2 == "AB".index(half) for bird in birds])
            p = Photos(Z[chosen], logits[chosen], head)
            print(f"{network}, half {half}: {len(p.Z)} photos, {len(p.rows)} held out, {len(p.bases)} classes")
            for way, (kept, control) in measured(p).items():
                print(f"  {way:10} kept {kept:.3f}  control {control:.3f}", flush=True)
                results.setdefault(f"{network}, half {half}", {})[way] = {"kept": kept, "control": control}
            if options.store:
                RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
