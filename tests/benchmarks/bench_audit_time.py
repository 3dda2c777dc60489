"""Time and forward passes of `auditor audit` and `auditor compare` on SqueezeNet at 224, with and without early stops.

    python tests/benchmarks/bench_audit_time.py --data-root DATA [--parts whole short …] [--seeds 20] [--dir DIR]

SqueezeNet with its ImageNet weights and a linear head for the 20 classes of cub20/train, explained by ``nmf`` and
``xnn``, audited on 100 images of cub20/test. Passes are counted by a hook on the model, work by torch's FLOP counter as
the forward passes it amounts to (gradients and runs of upper layers included). The verdict of the short form under many
seeds is held against that of the long form (``--exhaustive``). Peers in the same run: Quantus' PixelFlipping and
MaxSensitivity at their defaults, counted by the same hook on one image. Results go to results/audit_time.json.

Parts can be run one by one (``--parts``, ``--first-seed``): each adds its figures to what is stored.

Wanted: at most 150 passes per image in all, reliance at most 60 of them, in under 4 minutes; the same verdict in 19 of
20 seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import squeezenet1_1

from auditor import AuditConfig, Subject, audit, fit, open_data
from auditor.auditing.cost import Meter
from auditor.explainers.base import Explainer
from auditor.release.questions import believed, headline

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RESULTS = Path(__file__).parent / "results" / "audit_time.json"
PARTS = ["whole", "long", "short", "compare", "peers", "work"]
SAMPLED = ("faithfulness", "flipping", "randomisation", "noise")  # checks whose images are drawn in rounds


def network(root: Path, n_classes: int = 20) -> nn.Sequential:
    torch.manual_seed(0)
    body = squeezenet1_1(weights=None)
    weights = torch.load(root / "squeezenet1_1_imagenet.pth", weights_only=True)
    body.load_state_dict({k: v.float() for k, v in weights.items()})
    return nn.Sequential(body.features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, n_classes))


def subject_of(net: nn.Module, names) -> Subject:
    shape = (3, 224, 224)
    return Subject(net.eval(), input_shape=shape, mean=MEAN, std=STD, class_names=names, name="cub", version="1")


def train_head(net: nn.Sequential, data) -> None:
    """Fit the linear head to the features of the photos by L-BFGS."""
    subject = subject_of(net, data.class_names)
    with torch.no_grad():
        parts = [(net[:3](subject.normalise(b.images)), b.labels) for b in data.batches(subject, 32)]
    x, y = torch.cat([f for f, _ in parts]), torch.cat([t for _, t in parts])
    nn.init.zeros_(net[3].weight)
    nn.init.zeros_(net[3].bias)
    optimizer = torch.optim.LBFGS(net[3].parameters(), max_iter=200)

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(net[3](x), y) + 2e-3 * net[3].weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def prepared(root: Path, folder: Path) -> tuple[Subject, dict[str, Explainer]]:
    """Return the subject and its two explainers, from the folder where an earlier run left them."""
    train, net = open_data(str(root / "cub20/train")), network(root)
    if not (folder / "net.pt").exists():
        train_head(net, train)
        torch.save(net.state_dict(), folder / "net.pt")
    net.load_state_dict(torch.load(folder / "net.pt", weights_only=True))
    subject = subject_of(net, train.class_names)
    for kind in ("nmf", "xnn"):
        if not (folder / kind / "manifest.json").exists():
            fit(kind, subject, train).save(folder / kind)
    return subject, {kind: Explainer.load(folder / kind) for kind in ("nmf", "xnn")}


def measured(subject: Subject, data, explainers, config: AuditConfig) -> dict:
    """Audit once; return passes, seconds and the verdict."""
    meter, began, cpu = Meter(), time.monotonic(), time.process_time()
    with meter.on(subject.module):
        result = audit(subject, data, explainers, config)
    return {
        "passes": meter.images,
        "passes_per_image": round(sum(c["passes_per_image"] for c in result.cost), 1),
        "checks": {c["check"]: [c["passes_per_image"], c["images"], c["seconds"]] for c in result.cost},
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "headline": headline(result)[1],
        "levels": sorted(
            (f.about, f.level, f.text.split("(")[0].split("%")[0][:60]) for f in believed(result).sentences
        ),
    }


def work(subject: Subject, data, explainers) -> float:
    """Return the FLOPs of the checks of explanations and layers, in forward passes per image."""
    from torch.utils.flop_counter import FlopCounterMode

    one, whole = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with one, torch.no_grad():
        subject.logits(torch.zeros(1, *subject.input_shape))
    with whole:
        audit(subject, data, explainers, AuditConfig(reliance=False))
    return round(whole.get_total_flops() / one.get_total_flops() / 100, 1)


def peers(subject: Subject, image, label: int) -> dict:
    """Return the passes of Quantus' metrics at their defaults on one image, and the seconds of MaxSensitivity."""
    try:
        import quantus
    except ImportError:
        return {"skipped": "quantus is not installed"}
    net, x, y = nn.Sequential(_Normalised(subject)).eval(), image[None].numpy(), torch.tensor([label]).numpy()

    def saliency(model, inputs, targets, **_):
        z = torch.as_tensor(inputs, dtype=torch.float32).requires_grad_(True)
        model(z)[torch.arange(len(z)), torch.as_tensor(targets)].sum().backward()
        return z.grad.abs().sum(1, keepdim=True).numpy()

    results: dict = {}
    meter, began = Meter(), time.monotonic()
    with meter.on(net):
        quantus.MaxSensitivity(disable_warnings=True)(model=net, x_batch=x, y_batch=y, explain_func=saliency)
    results["MaxSensitivity"] = {"passes_per_image": meter.images, "seconds": round(time.monotonic() - began, 1)}
    blank = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 20)).eval()  # as many passes, at no cost
    meter, began = Meter(), time.monotonic()
    with meter.on(blank):
        quantus.PixelFlipping(disable_warnings=True)(model=blank, x_batch=x, y_batch=y, explain_func=saliency)
    results["PixelFlipping"] = {"passes_per_image": meter.images, "counted on": "a network that averages pixels"}
    return results


class _Normalised(nn.Module):
    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.module, self.subject = subject.module, [subject]

    def forward(self, x):
        return self.subject[0].forward(x)


def compared(subject: Subject, root: Path, data) -> dict:
    """Return passes per image and seconds of comparing two SqueezeNets whose heads differ."""
    from auditor.release.drift import compare
    from auditor.release.version_changes import version_changes

    other_net = network(root)
    other_net.load_state_dict(subject.module.state_dict())
    with torch.no_grad():
        other_net[3].weight.add_(
            0.01 * torch.randn(other_net[3].weight.shape, generator=torch.Generator().manual_seed(1))
        )
    other, meters = subject_of(other_net, subject.class_names), (Meter(), Meter())
    began, cpu = time.monotonic(), time.process_time()
    with meters[0].on(subject.module), meters[1].on(other.module):
        compare(subject, other, data)
        version_changes(subject, other, data, reliance=False)
    passes = sum(m.images for m in meters) / 2 / len(data)
    return {
        "passes_per_image_and_version": round(passes, 1),
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "images": len(data),
    }


def short_form(subject: Subject, data, explainers, seeds, report: dict, store) -> None:
    """Audit by the short form under every seed; store whose verdict is that of the long form."""
    by_seed = {} if seeds.start == 0 else report.get("short_by_seed", {})
    for seed in seeds:
        short = measured(subject, data, explainers, AuditConfig(seed=seed, checks=SAMPLED))
        is_same = json.loads(json.dumps(short["levels"])) == json.loads(json.dumps(report["long"]["levels"]))
        by_seed[str(seed)] = {"same": is_same, "passes": short["passes_per_image"], "cpu_s": short["cpu_seconds"]}
        agree = f"{sum(entry['same'] for entry in by_seed.values())} of {len(by_seed)} seeds"
        store(short=short, verdicts_like_the_long_form=agree, short_by_seed=by_seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=os.environ.get("AUDITOR_DATA"))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0, help="of the short form, to go on with")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--dir", type=Path, help="where the model and its explainers are between runs")
    args = parser.parse_args()
    if args.data_root is None or not Path(args.data_root).exists():
        raise SystemExit(
            "bench_audit_time: give --data-root or AUDITOR_DATA; it holds cub20 and the SqueezeNet weights"
        )
    root, folder = Path(args.data_root), args.dir or Path(tempfile.mkdtemp(prefix="bench-audit-"))
    folder.mkdir(parents=True, exist_ok=True)
    subject, explainers = prepared(root, folder)
    data = open_data(str(root / "cub20/test"))
    report: dict = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}

    def store(**entries) -> None:
        report.update(entries, load_average=os.getloadavg()[0])
        RESULTS.write_text(json.dumps(report, indent=1) + "\n")
        for key, value in entries.items():
            print(f"{key}: {json.dumps(value)[:600]}", flush=True)

    if "whole" in args.parts:
        store(whole=measured(subject, data, explainers, AuditConfig()))
    if "long" in args.parts:
        store(long=measured(subject, data, explainers, AuditConfig(checks=SAMPLED, exhaustive=True)))
    if "short" in args.parts:
        short_form(subject, data, explainers, range(args.first_seed, args.seeds), report, store)
    if "compare" in args.parts:
        store(compare=compared(subject, root, data))
    if "peers" in args.parts:
        first = next(data.batches(subject, 1))
        store(peers=peers(subject, first.images[0], int(first.labels[0])))
    if "work" in args.parts:
        store(work_without_reliance=work(subject, data, explainers))


if __name__ == "__main__":
    main()
