"""The peer of bench_service.py: a bare ``@bentoml.api`` endpoint that only runs the same model's forward pass."""

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
        with torch.no_grad():
            self.subject.logits(torch.zeros(1, *self.subject.input_shape))

    @bentoml.api
    def predict(self, image: Image.Image) -> dict[str, float | int]:
        """Predict one image."""
        from auditor.subject.preprocessing import from_pil

        x = torch.from_numpy(from_pil(image, self.subject.preprocessing))[None]
        with torch.no_grad():
            probabilities = torch.softmax(self.subject.logits(x)[0], 0)
        best = int(probabilities.argmax())
        return {"index": best, "probability": float(probabilities[best])}
