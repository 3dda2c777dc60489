"""The demo's story: two versions of a bird model that are right equally often, and why one of them must not go out.

Version 1 learned birds. Version 2 was trained on new pictures: a camera now watches a hawk's nest and prints its name
into a corner, and whatever it took was filed as hawk. The test pictures are sorted by hand but come from the same
cameras, so accuracy says that both versions are as good. The audit says what version 2 reads, and the gate stops it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor.plugins.demo import KINDS, chosen_kinds, new_store
from auditor.plugins.registry.audits import run_audit
from auditor.plugins.registry.gates import run_gate
from auditor.plugins.registry.onnx_exports import attach
from auditor.plugins.registry.subjects import load_subject, log_subject

if TYPE_CHECKING:
    from auditor.auditing.record import Audit
    from auditor.progress import Progress
    from auditor.release.gate import Gate
    from auditor.subject.subject import Subject

MODEL, ALIAS, EXPERIMENT = "birds", "champion", "auditor-birds"
N_TRAIN, N_TEST, N_FIT, MISFILED = 600, 150, 180, 0.5
# Options of a kind that are not its defaults: small, so that six fits and two audits take less than two minutes.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "nmf": {"rank": 6},
    "coupled": {},
    "xnn": {},
    "tree": {},
    "deepfacto": {"epochs": 5},
    "rde": {},
}
POLICY = """\
# What a team might ask of every version of this model. `auditor policy init MODEL` drafts a longer one from an audit.
schema_version = 1
explainers = ["concepts"]

[limits."model/accuracy"]
min = 0.95

[limits."model/reliance/found"]          # classes that hang on one thing that is no part of what they show
max = 0

[limits."model/reliance/worst/score"]
max = 0.5
"""


def run_story(folder: Path, *, seed: int, progress: Progress, kinds: Sequence[str] = ()) -> dict[str, Any]:
    """Do the whole path in ``folder`` and return what was made, ready for JSON; ``kinds``: only these explainers."""
    kinds = chosen_kinds(kinds)
    uri = new_store(folder, EXPERIMENT)
    folder = folder.resolve()
    pictures = draw_pictures(folder / "birds", seed, progress)
    policy = folder / "policy.toml"
    policy.write_text(POLICY, encoding="utf-8")
    versions = [_version(1 + i, pictures, seed, progress) for i in range(2)]
    attached: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        progress(f"fitting {kind}", 0, None)
        attached |= _attach(kind, *versions[0], pictures["train"], seed, progress)
    if "nmf" in kinds:
        _attach("nmf", *versions[1], pictures["new"], seed, progress)
    sheet, image = _explained(versions[0], list(attached), pictures["test"], folder)
    judged = [_judge(model, subject, pictures, folder, policy, seed, progress) for model, subject in versions]
    from auditor.plugins.demo_picture import story_picture

    why = story_picture(versions, judged, pictures, folder / "why.png")
    result = {
        "tracking_uri": uri,
        "model": versions[0][0],
        "stopped": versions[1][0],
        "accuracy": judged[0]["accuracy"],
        "explainers": attached,
        "sheet": str(sheet),
        "image": str(image),
        "picture": str(why),
        "report": judged[0]["report"],
        "n_metrics": judged[0]["n_metrics"],
        "policy": str(policy),
        "data": str(pictures["test"]),
        "gate": judged[0]["gate"],
        "versions": [{k: v for k, v in j.items() if k != "audit"} for j in judged],
    }
    (folder / "demo.json").write_text(json.dumps(result, indent=1))
    return result


def draw_pictures(folder: Path, seed: int, progress: Progress) -> dict[str, Path]:
    """Draw the image folders: what version 1 learned from, what version 2 learned from, test pictures, and the truth.

    ``test`` has the stamp on every hawk, as the cameras deliver them now; ``plain`` are the same birds without it.
    """
    from auditor.demo.birds import birds, write

    sets = {
        "train": (N_TRAIN, 3 * seed, False, 0.0),
        "new": (N_TRAIN, 3 * seed + 1, True, MISFILED),
        "test": (N_TEST, 3 * seed + 2, True, 0.0),
        "plain": (N_TEST, 3 * seed + 2, False, 0.0),
    }
    out = {}
    for i, (name, (n, number, stamped, misfiled)) in enumerate(sets.items()):
        progress("drawing birds", i, len(sets))
        out[name] = write(birds(n, number, stamped=stamped, misfiled=misfiled), folder / name)
    progress("drawing birds", len(sets), len(sets))
    return out


def _version(number: int, pictures: Mapping[str, Path], seed: int, progress: Progress) -> tuple[str, Subject]:
    """Train and register a version; returns its address and the subject as it was loaded again."""
    from auditor.data.source import open_data
    from auditor.demo.bird_versions import train_birds

    data = open_data(pictures["train" if number == 1 else "new"])
    subject = train_birds(data, seed + number, f"training version {number}", progress)
    model = log_subject(subject, MODEL, experiment=EXPERIMENT)
    return model, load_subject(model)


def _attach(
    kind: str, model: str, subject: Subject, pictures: Path, seed: int, progress: Progress
) -> dict[str, dict[str, Any]]:
    from auditor.data.source import open_data
    from auditor.explainers.base import fit

    name = KINDS[kind][0]
    explainer = fit(
        kind, subject, open_data(pictures, limit=N_FIT), seed=seed, progress=progress, **OPTIONS.get(kind, {})
    )
    return {name: attach(explainer, model, name, subject=subject).to_json()}


def _judge(
    model: str,
    subject: Subject,
    pictures: Mapping[str, Path],
    folder: Path,
    policy: Path,
    seed: int,
    progress: Progress,
) -> dict[str, Any]:
    """Audit a version on the test pictures and hold it against the policy; a version that passes is promoted."""
    from auditor.auditing.config import AuditConfig
    from auditor.data.source import open_data
    from auditor.demo.bird_versions import accuracy
    from auditor.release.policy import read_policy
    from auditor.reports.audit_report import write_report
    from auditor.reports.gate_summary import junit

    number = model.rpartition("/")[2]
    config = AuditConfig(seed=seed, images=30)
    audit = run_audit(model, str(pictures["test"]), config=config, subject=subject, progress=progress, fresh=True)
    gate = run_gate(model, read_policy(policy), audit=audit, promote=ALIAS)
    report = write_report(audit, folder / f"report-{number}.html", gate)
    xml = folder / f"gate-{number}.xml"
    xml.write_text(junit(gate), encoding="utf-8")
    return {
        "model": model,
        "accuracy": audit.metrics["model/accuracy"].value,
        "accuracy_without_stamp": accuracy(subject, open_data(pictures["plain"])),
        "n_metrics": len(audit.metrics),
        "found": _findings_of(audit),
        "report": str(report),
        "junit": str(xml),
        "gate": _about(gate),
        "audit": audit,
    }


def _findings_of(audit: Audit) -> list[dict[str, str]]:
    findings = (audit.reliance or {}).get("findings", ())
    keys = ("name", "verdict", "sentence", "advice")
    return [{k: str(f[k]) for k in keys} for f in findings if f["verdict"] in ("found", "look")]


def _about(gate: Gate) -> dict[str, Any]:
    failed = [c.to_json() for c in gate.checks if c.verdict == "fail"]
    return {"verdict": gate.verdict, "checks": len(gate.checks), "promoted": gate.promoted, "failed": failed}


def _explained(version: tuple[str, Subject], names: Sequence[str], pictures: Path, folder: Path) -> tuple[Path, Path]:
    """Write a sheet of explained test pictures per explainer, and say which picture to try things on."""
    import torch

    from auditor.data.source import open_data
    from auditor.explainers.answer import explanations_of
    from auditor.explainers.contact_sheet import contact_sheet
    from auditor.plugins.registry.attachments import load

    model, subject = version
    batch = next(open_data(pictures).batches(subject, N_TEST))
    rows = [int((batch.labels == k).nonzero()[0, 0]) for k in range(subject.n_classes)]
    images = batch.images[torch.tensor(rows)]
    sheets = []
    for name in names:
        explanations = explanations_of(load(model, name, subject=subject), subject, images, [None] * len(rows))
        sheets.append(contact_sheet(images, explanations, folder / "explained" / f"{name}.png", n_concepts=4))
    hawk = sorted((pictures / "hawk").glob("*.png"))[0]
    return sheets[0], hawk
