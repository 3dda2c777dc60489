"""The demo: train, register, fit, attach, explain, in an embedded MLflow (SQLite)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor.errors import OptionError
from auditor.plugins.models import load_subject, log_subject
from auditor.plugins.registry import attach

if TYPE_CHECKING:
    from auditor.explainer import Progress

MODEL = "digits"


def run_demo(folder: Path, *, seed: int, progress: Progress) -> dict[str, Any]:
    """Do the whole path in ``folder`` and return what was made, ready for JSON."""
    import mlflow
    import torch
    from PIL import Image

    from auditor.data import open_data
    from auditor.demo import train_digits
    from auditor.explainer import fit
    from auditor.heatmap import to_rgb
    from auditor.sheet import contact_sheet

    folder = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise OptionError(f"--dir {folder}: there is a file of this name; give a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    subject, accuracy = train_digits(seed, progress)
    client = mlflow.MlflowClient()
    if client.get_experiment_by_name("auditor-demo") is None:
        client.create_experiment("auditor-demo", artifact_location=(folder / "artifacts").as_uri())
    progress("registering", 0, None)
    model = log_subject(subject, MODEL, experiment="auditor-demo")
    subject = load_subject(model)
    concepts = fit("nmf", subject, open_data("sklearn:digits?split=train"), rank=10, seed=seed, progress=progress)
    attached = attach(concepts, model, "concepts", subject=subject)

    test = next(open_data("sklearn:digits?split=test").batches(subject, 400))
    rows = [int((test.labels == digit).nonzero()[0, 0]) for digit in (7, 3, 8, 0, 5)]
    images = test.images[torch.tensor(rows)]
    sheet = contact_sheet(images, concepts.explain(subject, images), folder / "explained.png")
    image = folder / "seven.png"
    Image.fromarray(to_rgb(images[0])[..., 0]).save(image)
    result = {
        "tracking_uri": uri,
        "model": model,
        "accuracy": accuracy,
        "layer": concepts.layer_,
        "explainer": attached.to_json(),
        "metrics": concepts.metrics,
        "sheet": str(sheet),
        "image": str(image),
    }
    (folder / "demo.json").write_text(json.dumps(result, indent=1))
    return result
