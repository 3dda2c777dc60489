"""The page of attribute fidelity: which unit stands for which attribute, with images for which it says yes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from auditor.data.source import Data
from auditor.explainers.concept_page import Section, sized
from auditor.explainers.tree.layer_fidelity import LayerFidelity
from auditor.pages.templates import render
from auditor.subject.subject import Subject

MOST, SHOTS = 60, 6  # attributes with pictures, pictures of each
SIDE, FRAME = 96, 4  # pixels of a picture and of its frame
RIGHT, WRONG = (38, 128, 60), (190, 40, 40)


def write_fidelity_page(result: LayerFidelity, subject: Subject, data: Data, path: Path, model: str) -> Path:
    """Write the page and return its path; the images that it shows are read once more."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(fidelity_page(result, subject, data, model), encoding="utf-8")
    return path


def fidelity_page(result: LayerFidelity, subject: Subject, data: Data, model: str) -> str:
    """Return the page as one HTML document: scores with their floors, then the attributes, the best first."""
    order = np.argsort(-result.by_f1.per_attribute, kind="stable").tolist()
    rows = [(i, shown_images(result, i)) for i in order[:MOST]]
    pictures = _pictures(subject, data, sorted({k for _, images in rows for k in images}))
    scores = [
        [name, *(f"{getattr(r, k):.3f}" for k in ("score", "floor", "honest", "honest_floor"))]
        for name, r in (
            ("F1", result.by_f1), ("accuracy", result.by_accuracy), ("distance (less is better)", result.by_distance)
        )
    ]  # fmt: skip
    units = [(_title(result, i), [_framed(pictures, result, i, k) for k in images]) for i, images in rows]
    left_out = f" The best {MOST} of {len(order)} are shown." if len(order) > MOST else ""
    return render(
        "concepts.html",
        title=f"{model}: attribute fidelity",
        heading=f"Do units of {result.layer} stand for attributes?",
        about=f"{model}; {result.units} units of {result.bits} bits on {result.images} images, {len(order)} attributes",
        remarks=[],
        runs=[],
        sections=[
            Section(
                "Scores",
                "The best unit and code is chosen on the images it is scored on; honest: chosen on one half of the "
                "images and scored on the other. A score near its floor, which a constant unit reaches, says nothing.",
                columns=["measure", "d_D", "floor", "honest", "its floor"],
                table=scores,
            ).values(),
            Section(
                "Attributes and their units",
                "Images for which the unit says yes, spread over all of them; a green frame where the attribute is "
                f"there, red where it is not.{left_out}",
                rows=units,
            ).values(),
        ],
    )


def shown_images(result: LayerFidelity, i: int) -> list[int]:
    """Return some images for which the unit of the i-th attribute says yes, evenly spread."""
    yes = np.flatnonzero(result.says(i))
    return [int(k) for k in yes[np.linspace(0, len(yes) - 1, min(SHOTS, len(yes))).round().astype(int)]]


def _title(result: LayerFidelity, i: int) -> str:
    f, said = result.by_f1, result.says(i)
    right = int((said & result.marks[:, i]).sum())
    return (
        f"{result.names[i]}: {result.unit_words(i)} (F1 {f.per_attribute[i]:.2f}; yes for {int(said.sum())} images, "
        f"{right} of them have it, as {result.frequency[i]:.0%} of all)"
    )


def _pictures(subject: Subject, data: Data, rows: list[int]) -> dict[int, Image.Image]:
    import torch

    mask = torch.zeros(len(data), dtype=torch.bool)
    mask[rows] = True
    images = (image for batch in data.only(mask).batches(subject, 32) for image in batch.images)
    return {k: sized(image, SIDE) for k, image in zip(rows, images, strict=True)}


def _framed(pictures: dict[int, Image.Image], result: LayerFidelity, i: int, k: int) -> tuple[Image.Image, str]:
    has = bool(result.marks[k, i])
    framed = Image.new("RGB", (SIDE + 2 * FRAME, SIDE + 2 * FRAME), RIGHT if has else WRONG)
    framed.paste(pictures[k], (FRAME, FRAME))
    return framed, f"{result.ids[k]}: {'has it' if has else 'has it not'}"
