"""What the classes of a model hang on, as one PNG: a row of pictures per finding, the deciding regions below."""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from auditor.auditing.record import Audit
from auditor.release.gate import label_of
from auditor.release.questions import to_look_at

INK, PAPER, BAD, WARN = (28, 32, 36), (255, 255, 255), (194, 38, 31), (150, 88, 0)
MOST_FINDINGS = 4
SIDE, SPOT, GAP = 144, 56, 12
WIDTH = GAP + 6 * (SIDE + GAP)
LINE = 20  # pixels of a line of text
CHARACTERS = 118  # of a sentence on one line


def finding_picture(audit: Audit) -> bytes | None:
    """Return a PNG of the findings to look at, the worst first; None where there is none with pictures."""
    entries = [f for f in to_look_at(audit) if audit.finding_pictures.get(f["name"])][:MOST_FINDINGS]
    if not entries:
        return None
    rows = [_row(f, audit.finding_pictures[f["name"]]) for f in entries]
    sheet = Image.new("RGB", (WIDTH, 40 + sum(row.height for row in rows)), PAPER)
    title = f"{label_of(audit)}: what its classes hang on"
    ImageDraw.Draw(sheet).text((GAP, 10), title, INK, ImageFont.load_default(18))
    top = 40
    for row in rows:
        sheet.paste(row, (0, top))
        top += row.height
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def picture_of(data_url: str) -> Image.Image:
    """Return the picture inside a data URL that an audit made."""
    return Image.open(io.BytesIO(base64.b64decode(data_url.partition(",")[2]))).convert("RGB")


def _row(finding: Mapping[str, Any], pictures: Sequence[Mapping[str, Any]]) -> Image.Image:
    lines = textwrap.wrap(str(finding["sentence"]), CHARACTERS)
    below = SPOT + GAP if any(p["spot"] for p in pictures) else 0
    row = Image.new("RGB", (WIDTH, 30 + LINE * len(lines) + SIDE + GAP + below + GAP), PAPER)
    draw = ImageDraw.Draw(row)
    word, colour = ("Found", BAD) if finding["verdict"] == "found" else ("Look at these pictures", WARN)
    draw.text((GAP, 4), f"{word}: {finding['name']}"[:100], colour, ImageFont.load_default(16))
    for i, line in enumerate(lines):
        draw.text((GAP, 28 + LINE * i), line, INK, ImageFont.load_default(14))
    top = 34 + LINE * len(lines)
    for column, entry in enumerate(pictures[:6]):
        left = GAP + column * (SIDE + GAP)
        whole = picture_of(entry["whole"])
        whole.thumbnail((SIDE, SIDE))
        row.paste(whole, (left, top))
        if entry["spot"]:
            spot = picture_of(entry["spot"])
            spot.thumbnail((SIDE, SPOT))
            row.paste(spot, (left, top + SIDE + 6))
    return row
