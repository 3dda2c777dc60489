"""What a fit of heads says of itself: which heads had no images, and what is missing where they are not faithful."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from auditor.explainers.xnn.examples import Examples

GOOD = 0.95  # share of held-out images of a class that keep it when its head stands in
FAR = 0.5  # error of a logit in units of its spread, beyond which something is missing
ENOUGH = 30  # images of a class to learn from


def remarks(metrics: Mapping[str, float], examples: Examples, classes: Sequence[int]) -> list[str]:
    """Return sentences on classes without images and on faithfulness that is below what is good."""
    n_of_class = examples.positives(classes)[:, examples.parts.learn].sum(1)
    without = int((n_of_class == 0).sum())
    sentences = []
    if without:
        sentences.append(
            f"{without} of {len(classes)} heads are of classes without an image to learn from: they follow the logit "
            "on other images, and how faithful they are on images of the class is not known"
        )
    per_class = float(n_of_class[n_of_class > 0].double().mean()) if without < len(classes) else 0.0
    return sentences + _missing(metrics, per_class)


def _missing(metrics: Mapping[str, float], per_class: float) -> list[str]:
    same, far = metrics.get("f_cls_positive"), metrics.get("f_reg_relative", 0.0)
    if same is None:
        return ["no held-out image is of a class that has a head, so f_cls_positive is not known; give more images"]
    if same >= GOOD and far <= FAR:
        return []
    what = (
        f"heads keep their class on {same:.0%} of held-out images of it and miss the logit by {far:.2g} of its spread"
    )
    if per_class < ENOUGH:
        return [f"{what}; what is missing is images: {per_class:.0f} per class to learn from, give {ENOUGH} or more"]
    return [
        f"{what}; images are enough ({per_class:.0f} per class): try a layer nearer to the logits (auditor layers), "
        "more x-features (--set n=10), or more weight on faithfulness (--set beta=0.01 --set eta=0.01)"
    ]
