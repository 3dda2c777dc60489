"""Planted shortcuts found and honest models left alone: figures on models that set no threshold, beside other ways.

    python tests/benchmarks/bench_shortcuts.py --data-root DATA --keep FOLDER [--half report] [--only NAME] [--out FILE]

Every case of `tests/benchmarks/shortcut_models.py` is trained (or taken from --keep), measured and judged. A planted
case counts where the model learned the shortcut, an honest one where the model is better than chance. Two other ways
look at the same Grad-CAM maps: how much of the heat lies in its hottest 3%, and SpRAy, by the eigengap of a spectral
clustering of the maps. Both are given their best threshold after the fact, which flatters them. Grad-CAM alone and
expected gradients (`pip install shap`; left out where it is not installed) are judged by the auditor's own rules: their
heat has the deciding boxes, everything else is as before.

A shortcut counts as learned where it pulls at least 40% of the other classes' images over; the figures with all that
pull at least 20% stand beside (``half_learned``).
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch import Tensor

from auditor.attribution.baselines import grad_cam
from auditor.auditing.second_opinions import looked_again
from auditor.errors import LayerError
from auditor.reliance import Finding, Heat, Reliance, RelianceConfig, judge, measure
from auditor.reliance.judgement import FOUND_FROM, NEEDED
from auditor.reliance.measures import MIN_IMAGES, HeatOf, second_look
from tests.benchmarks.shortcut_cases import case_options, cases
from tests.benchmarks.shortcut_models import Case, Made, make, predict
from tests.benchmarks.shortcut_plants import Box

IMAGES_PER_CLASS = 20
OVERLAP = 0.3
WITH_BOX = ("plate", "sticker", "watermark", "ruler", "pixel")
HALF_LEARNED = 0.2  # pull from which a shortcut is half learned
SAMPLES = 6  # of expected gradients, per image
POINT = 16  # pixels: a mark of so few has no box to overlap, it has to lie in the box


def overlap(box: tuple[int, int, int, int], planted: Box) -> float:
    """Return intersection over union of (top, left, height, width) and (top, left, bottom, right).

    >>> overlap((0, 0, 2, 4), (0, 2, 2, 6))
    0.3333333333333333
    """
    top, left, height, width = box
    tall = max(0, min(top + height, planted[2]) - max(top, planted[0]))
    wide = max(0, min(left + width, planted[3]) - max(left, planted[1]))
    area = (planted[2] - planted[0]) * (planted[3] - planted[1])
    if area <= POINT:
        return float(tall * wide == area)
    return tall * wide / (height * width + area - tall * wide)


def boxes_overlap(finding: Finding, planted: list[Box | None]) -> float | None:
    """Return the mean overlap over the finding's pictures that carry a mark; None where either has no box."""
    if finding.boxes is None:
        return None
    rows = [[int(v) for v in row[:4]] for row in finding.boxes.to_json()]
    pairs = [(row, planted[i]) for row, i in zip(rows, finding.rows, strict=True)]
    values = [overlap((row[0], row[1], row[2], row[3]), box) for row, box in pairs if box is not None]
    return float(np.mean(values)) if values else None


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


def by_other_heat(made: Made, reliance: Reliance, heat_of: HeatOf | None) -> dict[str, Any] | None:
    """Return the worst verdict by the auditor's rules when another heat has the deciding boxes; None without one."""
    if heat_of is None:
        return None
    config = RelianceConfig(images_per_class=MIN_IMAGES)
    measured = [c.label for c in reliance.classes if not c.skipped]
    try:
        looked = [second_look(made.subject, made.images, reliance, k, heat_of, config)[0] for k in measured]
    except LayerError:
        return None
    worst = judge(looked_again(reliance, looked))[0]
    overlap_planted = boxes_overlap(worst, made.boxes) if made.case.is_planted else None
    return {"verdict": worst.verdict, "score": worst.score, "cause": worst.cause, "overlap": overlap_planted}


def row_of(made: Made, reliance: Reliance, seconds: float) -> dict[str, Any]:
    """Return what is stored of one case."""
    worst = judge(reliance)[0]
    maps = heat_maps(made)
    planted = made.case.is_planted
    return {
        "name": made.case.name,
        "network": made.case.network,
        "family": made.case.shortcut or "honest",
        "planted": planted,
        "counts": made.learned if planted else not reliance.is_right_by_chance,
        "accuracy": made.accuracy,
        "clean": made.clean,
        "swapped": None if np.isnan(made.swapped) else made.swapped,
        "pulls": made.pulls,
        "verdict": worst.verdict,
        "score": worst.score,
        "cause": worst.cause,
        "label": worst.label,
        "right_class": worst.label in made.relying if planted else None,
        "overlap": boxes_overlap(worst, made.boxes) if planted else None,
        "passes_per_image": reliance.passes_per_image,
        "concentration": concentration(maps),
        "spray": spray(maps),
        "grad_cam": by_other_heat(made, reliance, grad_cam_heat(made)),
        "shap": by_other_heat(made, reliance, shap_heat(made)),
        "seconds": round(seconds, 1),
        "sentence": worst.sentence,
    }


def run(case: Case, keep: Path) -> dict[str, Any]:
    """Make, measure and judge one case; its row is kept beside its weights."""
    file = keep / f"{case.name}.json"
    if file.exists():
        row: dict[str, Any] = json.loads(file.read_text())
        return row
    made = make(case, keep)
    start = time.process_time()
    reliance = measure(made.subject, made.images, made.labels, RelianceConfig(images_per_class=IMAGES_PER_CLASS))
    row = row_of(made, reliance, time.process_time() - start)
    file.write_text(json.dumps(row))
    return row


def same_rules(rows: list[dict[str, Any]], key: str) -> dict[str, Any] | None:
    """Return what the auditor's rules say with another heat, over the cases in which there is one."""
    some = [r for r in rows if r["counts"] and r.get(key)]
    planted = [r[key]["verdict"] == "found" for r in some if r["planted"]]
    honest = [r[key]["verdict"] == "found" for r in some if not r["planted"]]
    if not planted or not honest:
        return None
    boxed = [r[key]["overlap"] for r in some if r[key]["verdict"] == "found" and r[key]["overlap"] is not None]
    return {
        "models": len(some),
        "planted_found": round(float(np.mean(planted)), 3),
        "honest_accused": round(float(np.mean(honest)), 3),
        "auc": round(float(roc_auc_score([r["planted"] for r in some], [r[key]["score"] for r in some])), 3),
        "overlap_at_least_.3": round(float(np.mean([v >= OVERLAP for v in boxed])), 3) if boxed else None,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures over the cases that count."""
    counted = [r for r in rows if r["counts"]]
    half = [r for r in rows if r["planted"] and max(r["pulls"]) >= HALF_LEARNED]
    planted, honest = [r for r in counted if r["planted"]], [r for r in counted if not r["planted"]]
    reported = [r for r in planted if r["verdict"] == "found"]
    boxed = [r["overlap"] or 0.0 for r in reported if r["family"] in WITH_BOX]  # no box in the finding: no overlap
    truth = [r["planted"] for r in counted]

    def share(hits: list[bool]) -> float | None:
        return round(float(np.mean(hits)), 3) if hits else None

    def auc(key: str) -> float | None:
        values = [r[key] for r in counted]
        return round(float(roc_auc_score(truth, values)), 3) if len(set(truth)) == 2 else None

    def at_best(key: str) -> float | None:
        """Share of planted cases above the value that 5% of honest ones exceed."""
        if not honest or not planted:
            return None
        limit = float(np.quantile([r[key] for r in honest], 0.95))
        return share([r[key] > limit for r in planted])

    return {
        "planted": len(planted),
        "honest": len(honest),
        "not_counted": [r["name"] for r in rows if not r["counts"]],
        "auc": auc("score"),
        "planted_found": share([r["verdict"] == "found" for r in planted]),
        "planted_found_or_look": share([r["verdict"] in ("found", "look") for r in planted]),
        "half_learned": len(half),
        "half_learned_found": share([r["verdict"] == "found" for r in half]),
        "honest_accused": share([r["verdict"] == "found" for r in honest]),
        "honest_look": share([r["verdict"] == "look" for r in honest]),
        "overlap_at_least_.3": share([v >= OVERLAP for v in boxed]),
        "with_a_box": len(boxed),
        "right_class": share([r["right_class"] for r in reported]),
        "most_passes_per_image": max((r["passes_per_image"] for r in rows), default=None),
        "concentration_auc": auc("concentration"),
        "concentration_found_at_5%": at_best("concentration"),
        "spray_auc": auc("spray"),
        "spray_found_at_5%": at_best("spray"),
        "by_grad_cam": same_rules(rows, "grad_cam"),
        "by_shap": same_rules(rows, "shap"),
        "missed": [r["name"] for r in planted if r["verdict"] != "found"],
        "accused": [r["name"] for r in honest if r["verdict"] == "found"],
    }


def main() -> None:
    """Run the cases and print a row for each, then the figures."""
    options = case_options(__doc__)
    rows = []
    for case in cases(options.half):
        if options.only and not any(part in case.name for part in options.only):
            continue
        if options.rows_only and not (options.keep / f"{case.name}.json").exists():
            continue
        row = run(case, options.keep)
        rows.append(row)
        overlap_text = "" if row["overlap"] is None else f"overlap {row['overlap']:.2f}"
        counts = "" if row["counts"] else "(does not count)"
        print(
            f"{row['name']:36s} {row['verdict']:8s} {row['score']:.2f} {row['cause']:12s} {overlap_text} {counts}",
            flush=True,
        )
    figures = summary(rows)
    print(json.dumps(figures, indent=1))
    if options.out:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        settings = {
            "half": options.half,
            "images_per_class": IMAGES_PER_CLASS,
            "needed": NEEDED,
            "found_from": FOUND_FROM,
            "commit": commit,
            "torch": torch.__version__,
        }
        options.out.write_text(json.dumps({"settings": settings, "figures": figures, "cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
