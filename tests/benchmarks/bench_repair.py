"""Repair of models that rely on a planted shortcut: what swapped shortcuts cost before and after, what clean ones lose.

    python -m tests.benchmarks.bench_repair --data-root DATA --keep FOLDER [--half report] [--only NAME] [--out FILE]

For every planted case of `tests/benchmarks/shortcut_models.py` whose model learned its shortcut and is better than
chance without it: concepts are fitted to planted training images, the concepts to remove are those that the audit names
beside its findings, and `auditor.release.repair` takes them out: by projection alone, with the head refitted, and as it
chooses by default. Accuracy is measured on test images: with the shortcut, clean, and with the shortcut of another
class. *Recovered* is the share of what swapped shortcuts cost against clean images that is right again.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from auditor import Subject, fit, open_data
from auditor.auditing.second_opinions import Passes, involved
from auditor.errors import AuditError
from auditor.release.repair import repair
from auditor.reliance import RelianceConfig, judge, measure
from tests.benchmarks.shortcut_cases import case_options, cases
from tests.benchmarks.shortcut_models import Case, Made, make, photos, planted, predict

WITH_SPOT = ("plate", "sticker", "watermark", "ruler", "pixel")  # concepts of a layer have a place
PER_CLASS = 40  # planted training images that are given for the repair
RANK = 10
WAYS = {"projected": False, "refitted": True, "default": None}


def accuracies(subject: Subject, images: dict[str, Tensor], labels: Tensor) -> dict[str, float]:
    """Return the share of images that are right, by name."""
    return {name: round(float((predict(subject, x) == labels).double().mean()), 3) for name, x in images.items()}


def some_of_each(labels: Tensor, n: int) -> Tensor:
    """Return the first ``n`` rows of every class."""
    return torch.cat([(labels == k).nonzero()[:n, 0] for k in labels.unique()])


def repaired(made: Made) -> dict[str, Any]:
    """Repair one model both ways and return its accuracies before and after."""
    case = made.case
    test, train = photos(case, "test"), photos(case, "train")
    rows = some_of_each(train[1], PER_CLASS)
    train = (train[0][rows], train[1][rows], train[2][rows])
    given = planted(case, train, case.seed + 6)[0]
    swap = (test[1] + 1) % case.n_classes
    views = {
        "with": made.images,
        "clean": test[0],
        "swapped": planted(case, test, case.seed + 3, swap)[0],
    }
    row: dict[str, Any] = {"name": case.name, "network": case.network, "family": case.shortcut}
    row["before"] = accuracies(made.subject, views, test[1])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "given.npz"
        pixels = (given * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
        np.savez(file, images=pixels, labels=train[1].numpy())
        data = open_data(file)
        concepts = fit("nmf", made.subject, data, rank=RANK, refits=1, seed=0)
        reliance = measure(made.subject, given, train[1], RelianceConfig(images_per_class=20))
        passes = Passes(1e9, 0.0)
        entries = [e for f in judge(reliance) for e in involved(made.subject, {"c": concepts}, given, f, passes)]
        row["removed"] = sorted({e["index"] for e in entries})
        for name, refit in WAYS.items():
            row[name] = after(made.subject, concepts, row["removed"], data, refit, views, test[1], row["before"])
    return row


def after(
    subject: Subject,
    concepts: Any,
    removed: list[int],
    data: Any,
    refit: bool | None,
    views: dict[str, Tensor],
    labels: Tensor,
    before: dict[str, float],
) -> dict[str, Any]:
    """Return accuracies after a repair, the share recovered and the loss on clean images; a reason where it failed."""
    if not removed:
        return {"failed": "no concept shows the spot"}
    try:
        done = repair(subject, concepts, removed, data, refit_head=refit)
    except AuditError as error:
        return {"failed": str(error)}
    with done.network(subject) as network:
        right = accuracies(network, views, labels)
    cost = before["clean"] - before["swapped"]
    recovered = (right["swapped"] - before["swapped"]) / cost if cost > 0 else None
    return {
        **right,
        "recovered": None if recovered is None else round(recovered, 3),
        "clean_loss": round(before["clean"] - right["clean"], 3),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many models each way repairs: half of the cost recovered, at most 3 points lost on clean images."""
    out: dict[str, Any] = {"models": len(rows)}
    for way in WAYS:
        done = [r[way] for r in rows if "failed" not in r[way]]
        good = [d for d in done if (d["recovered"] or 0) >= 0.5 and d["clean_loss"] <= 0.03]
        out[way] = {
            "repaired": len(done),
            "recovered_at_least_half": sum((d["recovered"] or 0) >= 0.5 for d in done),
            "clean_loss_at_most_3_points": sum(d["clean_loss"] <= 0.03 for d in done),
            "both": len(good),
            "median_recovered": round(float(np.median([d["recovered"] or 0.0 for d in done])), 3) if done else None,
            "median_clean_loss": round(float(np.median([d["clean_loss"] for d in done])), 3) if done else None,
        }
    return out


def wanted(case: Case, only: list[str]) -> bool:
    """Whether a case is planted with something that has a place, and was asked for."""
    return case.is_planted and case.shortcut in WITH_SPOT and (not only or any(part in case.name for part in only))


def main() -> None:
    """Repair the models and print a row for each, then the figures."""
    options = case_options(__doc__)
    rows = []
    for case in (c for c in cases(options.half, options.rounds) if wanted(c, options.only)):
        file = options.keep / f"{case.name}.repair.json"
        if not file.exists():
            if options.kept_only:
                continue
            made = make(case, options.keep)
            chance = 1 / case.n_classes
            knows = made.clean > chance + 2 * (chance * (1 - chance) / len(made.labels)) ** 0.5
            file.write_text(json.dumps(repaired(made) if made.learned and knows else {"name": case.name, "skip": True}))
        row = json.loads(file.read_text())
        if row.get("skip"):
            continue
        rows.append(row)
        print(
            row["name"],
            row["before"],
            "projected",
            row["projected"],
            "refitted",
            row["refitted"],
            "default",
            row["default"],
            flush=True,
        )
    figures = summary(rows)
    print(json.dumps(figures, indent=1))
    if options.out:
        head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        settings = {"half": options.half, "rank": RANK, "per_class": PER_CLASS, "commit": head.stdout.strip()}
        options.out.write_text(json.dumps({"settings": settings, "figures": figures, "models": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
