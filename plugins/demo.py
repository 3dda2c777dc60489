"""The demo on digits: train, register, fit and attach every kind, explain, audit and gate, in an embedded MLflow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor.errors import OptionError
from auditor.plugins.registry.audits import run_audit
from auditor.plugins.registry.gates import run_gate
from auditor.plugins.registry.onnx_exports import attach
from auditor.plugins.registry.subjects import load_subject, log_subject

if TYPE_CHECKING:
    from auditor.progress import Progress

MODEL, ALIAS = "digits", "champion"
TRAIN, TEST = "sklearn:digits?split=train", "sklearn:digits?split=test"
# kind -> the name under which it is attached, and its options
KINDS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "nmf": ("concepts", {"rank": 10}),
    "coupled": ("latent", {}),
    "xnn": ("heads", {}),
    "tree": ("rules", {}),
    "deepfacto": ("factors", {}),
    "rde": ("suffices", {}),
}


def run_demo(folder: Path, *, seed: int, progress: Progress, kinds: Sequence[str] = ()) -> dict[str, Any]:
    """Do the whole path in ``folder`` and return what was made, ready for JSON; ``kinds``: only these explainers."""
    from auditor.auditing.config import AuditConfig
    from auditor.data.source import open_data
    from auditor.demo.digits import train_digits
    from auditor.explainers.base import fit
    from auditor.release.policy import parse_policy
    from auditor.release.policy_draft import draft_policy
    from auditor.reports.audit_report import write_report

    kinds = chosen_kinds(kinds)
    folder = folder.resolve()
    uri = new_store(folder, "auditor-demo")
    subject, accuracy = train_digits(seed, progress)
    progress("registering", 0, None)
    model = log_subject(subject, MODEL, experiment="auditor-demo")
    subject = load_subject(model)

    train = open_data(TRAIN)
    explainers, attached = {}, {}
    for kind in kinds:
        name, options = KINDS[kind]
        explainers[name] = fit(kind, subject, train, seed=seed, progress=progress, **options)
        attached[name] = attach(explainers[name], model, name, subject=subject).to_json()
    first = next(iter(explainers))
    sheet, image = _pictures(subject, explainers[first], folder)

    config = AuditConfig(seed=seed, images=50)
    audit = run_audit(model, TEST, config=config, subject=subject, progress=progress, fresh=True)
    (folder / "audit.json").write_bytes(audit.sealed())
    report = write_report(audit, folder / "report.html")
    policy = folder / "policy.toml"
    policy.write_text(draft_policy(audit), encoding="utf-8")
    gate = run_gate(model, parse_policy(policy.read_text(encoding="utf-8"), policy.name), promote=ALIAS)
    result = {
        "tracking_uri": uri,
        "model": model,
        "accuracy": accuracy,
        "layer": explainers[first].layer_,
        "explainers": attached,
        "metrics": {name: e.metrics for name, e in explainers.items()},
        "sheet": str(sheet),
        "image": str(image),
        "report": str(report),
        "n_metrics": len(audit.metrics),
        "policy": str(policy),
        "gate": {"verdict": gate.verdict, "checks": len(gate.checks), "promoted": gate.promoted},
    }
    (folder / "demo.json").write_text(json.dumps(result, indent=1))
    return result


def new_store(folder: Path, experiment: str) -> str:
    """Make an embedded MLflow in a folder, the one that is used from here on, and return its address."""
    import mlflow

    folder = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise OptionError(f"--dir {folder}: there is a file of this name; give a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    client = mlflow.MlflowClient()
    if client.get_experiment_by_name(experiment) is None:
        client.create_experiment(experiment, artifact_location=(folder / "artifacts").as_uri())
    return uri


def chosen_kinds(kinds: Sequence[str]) -> list[str]:
    """Return the kinds that were named, or all that are installed."""
    from auditor.explainers.base import available_kinds

    installed = [kind for kind in KINDS if kind in available_kinds()]
    unknown = [kind for kind in kinds if kind not in installed]
    if unknown:
        raise OptionError(f"demo: there is no kind {unknown[0]!r}; the kinds are {', '.join(installed)}.")
    return list(kinds) or installed


def _pictures(subject: Any, explainer: Any, folder: Path) -> tuple[Path, Path]:
    """Write a sheet of five explained test digits, and one digit as a PNG to try things on."""
    import torch
    from PIL import Image

    from auditor.attribution.heatmap import to_rgb
    from auditor.data.source import open_data
    from auditor.explainers.contact_sheet import contact_sheet

    test = next(open_data(TEST).batches(subject, 400))
    rows = [int((test.labels == digit).nonzero()[0, 0]) for digit in (7, 3, 8, 0, 5)]
    images = test.images[torch.tensor(rows)]
    sheet = contact_sheet(images, explainer.explain(subject, images), folder / "explained.png")
    image = folder / "seven.png"
    Image.fromarray(to_rgb(images[0])[..., 0]).save(image)
    return sheet, image
