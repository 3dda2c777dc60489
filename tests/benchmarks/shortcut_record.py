"""What is kept of a case beside its weights: facts of the model, and what was measured, so that judging takes no time.

Measures are taken again when the code that takes them has changed (every module of `auditor/reliance` but those that
only read them). So thresholds can be set on the tuning half in seconds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import auditor.reliance
from auditor.attribution.baselines import grad_cam
from auditor.auditing.model_reliance import PER_CLASS
from auditor.errors import LayerError
from auditor.reliance import Boxes, ClassReliance, Heat, Reliance, RelianceConfig, measure
from auditor.reliance.hiding import Survival
from auditor.reliance.measures import MIN_IMAGES, HeatOf, second_look
from auditor.reliance.transplant import Followed
from auditor.reliance.trials import Trial
from tests.benchmarks.shortcut_models import Case, Made, make, predict

IMAGES_PER_CLASS = PER_CLASS  # as in an audit
SAMPLES = 6  # of expected gradients, per image
READERS = ("judgement.py", "class_metrics.py")  # modules that take no measures
KEPT = (Reliance, ClassReliance, Followed, Survival, Boxes, Trial)


@dataclass(frozen=True)
class Record:
    """Facts of a model, its reliance, and that of the classes by the heat of other tools (None: not asked)."""

    facts: dict[str, Any]
    reliance: Reliance
    seconds: float
    by_other_heat: dict[str, tuple[ClassReliance, ...]] | None


def record(case: Case, keep: Path, with_peers: bool) -> Record:
    """Return the record of a case; what is missing is trained and measured."""
    facts_file, measured_file, peers_file = (keep / f"{case.name}.{end}" for end in ("json", "measured", "peers"))
    made: list[Made] = []

    def model() -> Made:
        made[:] = made or [make(case, keep)]
        return made[0]

    if not facts_file.exists():
        facts_file.write_text(json.dumps(facts_of(model())))
    reliance, seconds = _kept(measured_file, lambda: _measured(model()))
    peers = _kept(peers_file, lambda: _by_other_heat(model(), reliance)) if with_peers else None
    return Record(json.loads(facts_file.read_text()), reliance, seconds, peers)


def is_kept(case: Case, keep: Path) -> bool:
    """Whether the measures of a case are there, by whatever code."""
    return (keep / f"{case.name}.measured").exists()


@cache
def code() -> str:
    """Return the digest of the code that takes the measures."""
    files = sorted(Path(auditor.reliance.__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(f.read_bytes() for f in files if f.name not in READERS)).hexdigest()


def _kept(file: Path, take: Callable[[], Any]) -> Any:
    if file.exists():
        with torch.serialization.safe_globals(list(KEPT)):
            stored = torch.load(file, weights_only=True)
        if stored["code"] == code():
            return stored["value"]
    value = take()
    torch.save({"code": code(), "value": value}, file)
    return value


def _measured(made: Made) -> tuple[Reliance, float]:
    start = time.process_time()
    reliance = measure(made.subject, made.images, made.labels, RelianceConfig(images_per_class=IMAGES_PER_CLASS))
    return dataclasses.replace(reliance, heat=torch.zeros(0)), time.process_time() - start


def facts_of(made: Made) -> dict[str, Any]:
    """Return what is known of a model without the auditor, and what two other ways of looking say."""
    maps = heat_maps(made)
    return {
        "name": made.case.name,
        "network": made.case.network,
        "family": made.case.shortcut or "honest",
        "planted": made.case.is_planted,
        "learned": made.learned,
        "accuracy": made.accuracy,
        "clean": made.clean,
        "swapped": None if np.isnan(made.swapped) else made.swapped,
        "pulls": made.pulls,
        "relying": made.relying,
        "boxes": made.boxes,
        "concentration": concentration(maps),
        "spray": spray(maps),
    }


def _by_other_heat(made: Made, reliance: Reliance) -> dict[str, tuple[ClassReliance, ...]]:
    """Return the measured classes when the heat of another tool has the deciding boxes, by tool."""
    config = RelianceConfig(images_per_class=MIN_IMAGES)
    measured = [c.label for c in reliance.classes if not c.skipped]
    out = {}
    for name, heat_of in (("grad_cam", grad_cam_heat(made)), ("shap", shap_heat(made))):
        if heat_of is None:
            continue
        try:
            looks = [second_look(made.subject, made.images, reliance, k, heat_of, config)[0] for k in measured]
        except LayerError:
            continue
        out[name] = tuple(looks)
    return out


def heat_maps(made: Made) -> Tensor:
    """Return Grad-CAM maps of at most 20 images per class."""
    rows = torch.cat([(made.labels == k).nonzero()[:20, 0] for k in range(made.case.n_classes)])
    x = made.images[rows]
    maps = [grad_cam(made.subject, a, predict(made.subject, a)).mean(1) for a in torch.split(x, 32)]
    return torch.cat(maps)


def concentration(maps: Tensor) -> float:
    """Return the share of the heat that lies in its hottest 3%."""
    flat = maps.flatten(1)
    most = flat.topk(max(1, round(0.03 * flat.shape[1])), 1).values.sum(1)
    return float((most / flat.sum(1).clamp_min(1e-12)).mean())


def spray(maps: Tensor, neighbours: int = 8) -> float:
    """Return the largest gap among the first eigenvalues of the maps' neighbourhood graph [SpRAy]."""
    small = F.adaptive_avg_pool2d(maps[:, None], 16).flatten(1)
    rows = F.normalize(small, dim=1)
    products = rows @ rows.T
    near = products.topk(min(neighbours + 1, len(products)), 1).indices
    graph = torch.zeros_like(products).scatter_(1, near, 1.0).fill_diagonal_(0)
    graph = torch.maximum(graph, graph.T)
    scale = graph.sum(1).clamp_min(1).rsqrt()
    laplacian = torch.eye(len(graph)) - scale[:, None] * graph * scale[None]
    values = torch.linalg.eigvalsh(laplacian)[:11]
    return float((values[1:] - values[:-1]).max())


def grad_cam_heat(made: Made) -> HeatOf:
    """Return what gives Grad-CAM's heat, as it is."""
    return lambda x, targets: Heat(grad_cam(made.subject, x, targets).mean(1), "Grad-CAM", 3.0)


def shap_heat(made: Made) -> HeatOf | None:
    """Return what gives the positive expected gradients of `shap`; None where it is not installed."""
    try:
        import shap
    except ImportError:
        return None
    ground = made.images[:: max(1, len(made.images) // 16)]

    class Logits(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return made.subject.logits(x)

    def heat(x: Tensor, targets: Tensor) -> Heat:
        explainer = shap.GradientExplainer(Logits().eval(), ground, batch_size=16)
        values = np.asarray(explainer.shap_values(x, nsamples=SAMPLES, rseed=0))  # (images, c, h, w, classes)
        of_target = values[np.arange(len(x)), ..., targets.numpy()]
        return Heat(torch.from_numpy(of_target).float().sum(1).clamp_min(0), "shap", 3.0 * SAMPLES)

    return heat
