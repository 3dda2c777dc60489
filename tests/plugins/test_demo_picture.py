"""The picture of the story: three rows, from two versions that look at different places."""

import numpy as np
import pytest
import torch
from PIL import Image

from auditor import Subject
from auditor.demo.birds import birds, write
from auditor.plugins.demo_picture import LEFT, SIDE, story_picture


class ReadsCorner(torch.nn.Module):
    """Hawk is how dark a corner is: the lower right one, where the stamp is, or another."""

    def __init__(self, top: int, left: int) -> None:
        super().__init__()
        self.top, self.left = top, left
        self.conv = torch.nn.Conv2d(3, 1, 1)
        with torch.no_grad():
            self.conv.weight.fill_(-1 / 3)
            self.conv.bias.fill_(0.75)

    def forward(self, x):
        dark = self.conv(x).relu()[:, 0, self.top : self.top + 12, self.left : self.left + 24].mean((1, 2))
        return torch.stack([0.3 * torch.ones_like(dark), dark, torch.zeros_like(dark)], 1)


def judged(model: str, verdict: str, names: list[str]) -> dict:
    return {
        "model": model, "accuracy": 0.98, "gate": {"verdict": verdict},
        "found": [{"name": n, "verdict": "found"} for n in names],
    }  # fmt: skip


def test_three_rows_show_where_both_look_and_the_spot_moved(tmp_path):
    pictures = {"test": write(birds(18, 2, stamped=True), tmp_path / "test")}
    names = ["finch", "hawk", "heron"]
    versions = [
        (f"models:/birds/{i + 1}", Subject(ReadsCorner(*at), input_shape=(3, 64, 64), class_names=names))
        for i, at in enumerate([(2, 2), (51, 39)])
    ]
    verdicts = [judged("models:/birds/1", "pass", []), judged("models:/birds/2", "fail", ["hawk"])]
    path = story_picture(versions, verdicts, pictures, tmp_path / "why.png")
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    height = pixels.shape[0] // 3
    red = (pixels[..., 0] > 180) & (pixels[..., 1] < 70) & (pixels[..., 2] < 70)
    first, second = (red[i * height : (i + 1) * height, LEFT : LEFT + SIDE].nonzero() for i in (0, 1))
    assert first[0].mean() < SIDE / 2 < second[0].mean()  # the boxes: above in the first row, below in the second
    assert first[1].mean() < SIDE / 2 < second[1].mean()


@pytest.mark.parametrize("verdict", ["pass", "fail"])
def test_the_text_says_what_the_gate_said(verdict, tmp_path, monkeypatch):
    from auditor.plugins import demo_picture

    said = []
    monkeypatch.setattr(demo_picture, "_row", lambda text, pictures: said.extend(words for words, _, _ in text))
    regions = type("R", (), {"a": type("B", (), {"to_json": lambda self: []})()})()
    demo_picture._looks(judged("models:/birds/2", verdict, ["hawk"]), regions, [], "a")
    assert ("gate: passed" in said, "gate: stopped" in said) == (verdict == "pass", verdict == "fail")
    assert "hawk: hangs on one spot" in said
