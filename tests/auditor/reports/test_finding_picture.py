"""The picture of what classes hang on: a row per finding, nothing where there is none."""

import io
from dataclasses import replace

import numpy as np
import torch
from PIL import Image

from auditor.auditing.pictures import cut_out, data_url, with_box
from auditor.reports.finding_picture import SIDE, WIDTH, finding_picture, picture_of

RED = torch.tensor([0.9, 0.1, 0.1])[:, None, None].expand(3, 40, 40)


def finding(name: str, verdict: str) -> dict:
    return {
        "name": name, "verdict": verdict, "score": 0.9, "sentence": f"Class {name} hangs on one spot. " * 8,
        "advice": "Look.", "images": ["a"], "concepts": [],
    }  # fmt: skip


def pictures(n: int) -> list[dict]:
    box = (4, 6, 8, 20)
    return [
        {"id": str(i), "whole": data_url(with_box(RED, box)), "spot": data_url(cut_out(RED, box))} for i in range(n)
    ]


def test_each_finding_is_a_row_with_its_pictures(audited):
    about = {"status": "measured", "findings": [finding("hawk", "found"), finding("finch", "look")]}
    audit = replace(audited, reliance=about, finding_pictures={"hawk": pictures(6), "finch": pictures(2)})
    with Image.open(io.BytesIO(finding_picture(audit))) as sheet:
        both = np.asarray(sheet.convert("RGB"))
    assert both.shape[1] == WIDTH
    one = finding_picture(replace(audit, finding_pictures={"hawk": pictures(6)}))
    with Image.open(io.BytesIO(one)) as sheet:
        assert sheet.height < both.shape[0] < 2 * sheet.height
    reddish = (both[..., 0] > 200) & (both[..., 1] < 60)
    assert reddish.sum() > 7 * SIDE * SIDE  # eight pictures less their boxes


def test_there_is_no_picture_of_nothing(audited):
    assert finding_picture(audited) is None
    nothing = {"status": "measured", "findings": [finding("hawk", "nothing")]}
    assert finding_picture(replace(audited, reliance=nothing, finding_pictures={"hawk": pictures(1)})) is None
    found = {"status": "measured", "findings": [finding("hawk", "found")]}
    assert finding_picture(replace(audited, reliance=found)) is None  # an audit read back has no pixels


def test_a_data_url_gives_the_picture_back():
    assert picture_of(data_url(with_box(RED, None))).size == (144, 144)
