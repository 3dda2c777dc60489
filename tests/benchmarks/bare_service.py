"""The peer of bench_service.py: a bare ``@bentoml.api`` endpoint that only runs the same model's forward pass.

BARE_ENGINE=onnx runs the graph that ``auditor export`` made instead of torch.
"""

from __future__ import annotations

import os

import bentoml
import torch
from PIL import Image


@bentoml.service(name="bare", workers=1, traffic={"timeout": 60}, logging={"access": {"enabled": False}})
class Bare:
    """Decodes an image as the service does, runs the model, returns the prediction."""

    def __init__(self) -> None:
        from auditor.plugins import load_subject

        torch.set_num_threads(1)
        self.subject = load_subject(os.environ["BARE_MODEL"])
        self.session = None
        if os.environ.get("BARE_ENGINE") == "onnx":
            from auditor.explainers.onnx_export import open_session
            from auditor.plugins.registry.location import resolve
            from auditor.plugins.registry.onnx_exports import load_export

            self.session = open_session(load_export(resolve(os.environ["BARE_MODEL"]), self.subject).content)
        self._logits(torch.zeros(1, *self.subject.input_shape))

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        if self.session is not None:
            return torch.from_numpy(self.session.run(["logits"], {"pixels": x.numpy()})[0])
        with torch.no_grad():
            return self.subject.logits(x)

    @bentoml.api
    def predict(self, image: Image.Image) -> dict[str, float | int]:
        """Predict one image."""
        from auditor.subject.preprocessing import from_pil

        x = torch.from_numpy(from_pil(image, self.subject.preprocessing))[None]
        probabilities = torch.softmax(self._logits(x)[0], 0)
        best = int(probabilities.argmax())
        return {"index": best, "probability": float(probabilities[best])}
