"""The picture of the demo's story: where both versions look, and what happens when the deciding spot is moved."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from auditor.release.version_changes import Regions
    from auditor.subject.subject import Subject

SIDE, GAP, LEFT, COLUMNS = 132, 10, 240, 6
INK, PALE, PAPER, GOOD, BAD = (28, 32, 36), (87, 96, 106), (255, 255, 255), (12, 107, 47), (194, 38, 31)
LINE, NAME = 19, 22  # pixels of a line of text, and of the line below a picture


def story_picture(
    versions: Sequence[tuple[str, Subject]],
    judged: Sequence[Mapping[str, Any]],
    pictures: Mapping[str, Path],
    path: Path,
) -> Path:
    """Draw three rows: deciding regions of the first version, of the second, and its spot pasted into other birds."""
    from PIL import Image

    from auditor.data.source import open_data
    from auditor.demo.birds import STAMPED
    from auditor.release.version_changes import deciding_regions

    (_, first), (_, second) = versions
    regions = deciding_regions(first, second, open_data(pictures["test"]), 8 * first.n_classes, 0)
    about = [i for i, target in enumerate(regions.targets) if target == STAMPED][:COLUMNS]
    others = [i for i, target in enumerate(regions.targets) if target != STAMPED]
    others = others[:: max(1, len(others) // COLUMNS)][:COLUMNS]
    rows = [
        _looks(judged[0], regions, about, "a"),
        _looks(judged[1], regions, about, "b"),
        _moved(first, second, regions, about[0], others),
    ]
    sheet = Image.new("RGB", (rows[0].width, sum(row.height for row in rows) + GAP), PAPER)
    top = GAP
    for row in rows:
        sheet.paste(row, (0, top))
        top += row.height
    sheet.save(path)
    return path


def _looks(judged: Mapping[str, Any], regions: Regions, rows: Sequence[int], side: str) -> Image.Image:
    """Draw one version's deciding regions, with what it is right on and what the gate said."""
    from auditor.auditing.pictures import with_box

    boxes = (regions.a if side == "a" else regions.b).to_json()
    passed = judged["gate"]["verdict"] == "pass"
    relying = [f["name"] for f in judged["found"] if f["verdict"] == "found"]
    text = [
        (f"Version {judged['model'].rpartition('/')[2]}", INK, 20),
        (f"right on {judged['accuracy']:.0%} of the test pictures", INK, 14),
        ("gate: passed" if passed else "gate: stopped", GOOD if passed else BAD, 16),
        *([(f"{', '.join(relying)}: hangs on one spot", BAD, 14)] if relying else []),
        ("the box holds what decides for hawk", PALE, 12),
    ]
    return _row(text, [(with_box(regions.images[i], boxes[i][:4], SIDE), regions.targets[i], INK) for i in rows])


def _moved(first: Subject, second: Subject, regions: Regions, source: int, rows: Sequence[int]) -> Image.Image:
    """Draw pictures of other birds with the second version's deciding spot of one hawk pasted in, and both answers."""
    import torch

    from auditor.auditing.pictures import resized

    top, left, height, width = (round(v) for v in regions.b.to_json()[source][:4])
    spot = regions.images[source][:, top : top + height, left : left + width]
    images = regions.images[torch.tensor(list(rows))].clone()
    images[:, :, top : top + height, left : left + width] = spot
    answers = [_names(subject, images) for subject in (first, second)]
    named = sum(name == regions.targets[source] for name in answers[1])
    text = [
        ("The spot, moved", INK, 20),
        ("pasted into pictures of other birds", INK, 14),
        (f"version 2 calls {named} of {len(rows)} of them {regions.targets[source]}", BAD, 14),
        ("below: version 1 / version 2", PALE, 12),
    ]
    shown = [
        (resized(images[i], SIDE), f"{a} / {b}", BAD if b != regions.targets[row] else INK)
        for i, (row, a, b) in enumerate(zip(rows, *answers, strict=True))
    ]
    return _row(text, shown)


def _names(subject: Subject, images: Tensor) -> list[str]:
    return [subject.class_names[k] for k in subject.logits(images).argmax(1).tolist()]


def _row(
    text: Sequence[tuple[str, tuple[int, int, int], int]],
    pictures: Sequence[tuple[Image.Image, str, tuple[int, int, int]]],
) -> Image.Image:
    from PIL import Image, ImageDraw, ImageFont

    row = Image.new("RGB", (LEFT + COLUMNS * (SIDE + GAP), SIDE + NAME + GAP), PAPER)
    draw = ImageDraw.Draw(row)
    y = 2
    for words, colour, size in text:
        for line in textwrap.wrap(words, 420 // size):
            draw.text((GAP, y), line, colour, ImageFont.load_default(size))
            y += max(LINE, size + 6)
    for column, (picture, words, colour) in enumerate(pictures):
        x = LEFT + column * (SIDE + GAP)
        row.paste(picture, (x, 0))
        draw.text((x, SIDE + 3), words, colour, ImageFont.load_default(13))
    return row
