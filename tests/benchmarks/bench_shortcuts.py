"""Planted shortcuts found and honest models left alone: figures on models that set no threshold, beside other ways.

    python -m tests.benchmarks.bench_shortcuts --data-root DATA --keep FOLDER [--half report] [--rounds 0 1] [--peers]
        [--only NAME] [--out FILE]

Every case of `tests/benchmarks/shortcut_models.py` is trained, measured and judged; weights and measures are kept in
--keep, so that judging again takes seconds (`--half tune` is what thresholds are set on). A planted case counts where
the model learned the shortcut, an honest one where the model is better than chance. Two other ways look at the same
Grad-CAM maps: how much of the heat lies in its hottest 3%, and SpRAy, by the eigengap of a spectral clustering of the
maps. Both are given their best threshold after the fact, which flatters them. With --peers, Grad-CAM alone and
expected gradients (`pip install shap`; left out where it is not installed) are judged by the auditor's own rules: their
heat has the deciding boxes, everything else is as before.

A shortcut counts as learned where it pulls at least 40% of the other classes' images over; the figures with all that
pull at least 20% stand beside (``half_learned``). Intervals are 95%: by Wilson's formula for shares, by drawing models
again for areas under the curve.
"""

from __future__ import annotations

import json
import math
import subprocess
from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score

from auditor.auditing.second_opinions import looked_again
from auditor.reliance import Finding, judge
from auditor.reliance.judgement import FOUND_FROM, NEEDED
from tests.benchmarks.shortcut_cases import case_options, cases
from tests.benchmarks.shortcut_plants import Box
from tests.benchmarks.shortcut_record import IMAGES_PER_CLASS, Record, is_kept, record

OVERLAP = 0.3
WITH_BOX = ("plate", "sticker", "watermark", "ruler", "pixel")
HALF_LEARNED = 0.2  # pull from which a shortcut is half learned
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


def by_other_heat(r: Record, name: str) -> dict[str, Any] | None:
    """Return the worst verdict by the auditor's rules when another heat has the deciding boxes; None without one."""
    looked = (r.by_other_heat or {}).get(name)
    if not looked:
        return None
    worst = judge(looked_again(r.reliance, looked))[0]
    overlap_planted = boxes_overlap(worst, r.facts["boxes"]) if r.facts["planted"] else None
    return {"verdict": worst.verdict, "score": worst.score, "cause": worst.cause, "overlap": overlap_planted}


def row_of(r: Record) -> dict[str, Any]:
    """Return what is stored of one case."""
    worst = judge(r.reliance)[0]
    facts = {k: v for k, v in r.facts.items() if k not in ("boxes", "learned", "relying")}
    planted = facts["planted"]
    return facts | {
        "counts": r.facts["learned"] if planted else not r.reliance.is_right_by_chance,
        "verdict": worst.verdict,
        "score": worst.score,
        "cause": worst.cause,
        "label": worst.label,
        "right_class": worst.label in r.facts["relying"] if planted else None,
        "overlap": boxes_overlap(worst, r.facts["boxes"]) if planted else None,
        "passes_per_image": r.reliance.passes_per_image,
        "grad_cam": by_other_heat(r, "grad_cam"),
        "shap": by_other_heat(r, "shap"),
        "seconds": round(r.seconds, 1),
        "sentence": worst.sentence,
    }


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


def share(hits: list[bool]) -> float | None:
    """Return the share of hits; None of none."""
    return round(float(np.mean(hits)), 3) if hits else None


def wilson(hits: list[bool], z: float = 1.96) -> tuple[float, float] | None:
    """Return the interval of a share by Wilson's formula.

    >>> wilson([True] * 9 + [False])
    (0.596, 0.982)
    """
    if not hits:
        return None
    n, p = len(hits), float(np.mean(hits))
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return round((middle - half) / (1 + z * z / n), 3), round((middle + half) / (1 + z * z / n), 3)


def auc_interval(rows: list[dict[str, Any]], draws: int = 2000) -> tuple[float, float] | None:
    """Return the interval of the area under the curve over models drawn again, planted and honest apart."""
    scores = [np.array([r["score"] for r in rows if r["planted"] is side]) for side in (True, False)]
    if not all(len(s) for s in scores):
        return None
    rng = np.random.default_rng(0)
    truth = [True] * len(scores[0]) + [False] * len(scores[1])
    values = [roc_auc_score(truth, np.concatenate([rng.choice(s, len(s)) for s in scores])) for _ in range(draws)]
    low, high = np.quantile(values, (0.025, 0.975))
    return round(float(low), 3), round(float(high), 3)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures over the cases that count."""
    counted = [r for r in rows if r["counts"]]
    half = [r for r in rows if r["planted"] and max(r["pulls"]) >= HALF_LEARNED]
    planted, honest = [r for r in counted if r["planted"]], [r for r in counted if not r["planted"]]
    reported = [r for r in planted if r["verdict"] == "found"]
    boxed = [r["overlap"] or 0.0 for r in reported if r["family"] in WITH_BOX]  # no box in the finding: no overlap
    truth = [r["planted"] for r in counted]

    def auc(key: str) -> float | None:
        values = [r[key] for r in counted]
        return round(float(roc_auc_score(truth, values)), 3) if len(set(truth)) == 2 else None

    found, accused = ([r["verdict"] == "found" for r in rows] for rows in (planted, honest))

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
        "auc_interval": auc_interval(counted),
        "planted_found": share(found),
        "planted_found_interval": wilson(found),
        "planted_found_or_look": share([r["verdict"] in ("found", "look") for r in planted]),
        "half_learned": len(half),
        "half_learned_found": share([r["verdict"] == "found" for r in half]),
        "honest_accused": share(accused),
        "honest_accused_interval": wilson(accused),
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
    options = case_options(__doc__, peers=True)
    rows = []
    for case in cases(options.half, options.rounds):
        if options.only and not any(part in case.name for part in options.only):
            continue
        if options.kept_only and not is_kept(case, options.keep):
            continue
        row = row_of(record(case, options.keep, options.peers))
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
            "rounds": options.rounds,
            "images_per_class": IMAGES_PER_CLASS,
            "needed": NEEDED,
            "found_from": FOUND_FROM,
            "commit": commit,
            "torch": torch.__version__,
        }
        options.out.write_text(json.dumps({"settings": settings, "figures": figures, "cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
