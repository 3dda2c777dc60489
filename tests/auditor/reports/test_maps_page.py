"""The page of maps: a picture per map, the reason where there is none, nothing unescaped."""

import torch
from torch import nn

from auditor import Subject
from auditor.auditing.map_comparison import compare_maps
from auditor.reports.maps_page import write_maps_page


def test_the_page_shows_maps_best_first_and_names_what_is_missing(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(), nn.Flatten(), nn.Linear(60, 2))
    subject = Subject(net, input_shape=(3, 5, 7), class_names=["<b>cat</b>", "dog"])
    compared = compare_maps(subject, torch.rand(3, 5, 7), methods=("gradient", "occlusion", "deep Taylor"), target=0)
    page = write_maps_page(compared, subject, tmp_path / "a" / "maps.html", "x by 3 methods").read_text()
    assert page.count("<img") == 3
    assert "&lt;b&gt;cat" in page
    assert "<b>cat" not in page
    assert "networks of ReLU" in page
    drawn = sorted((m for m in compared.maps if m.heat is not None), key=lambda m: m.flip_area)
    assert page.index(f"<b>{drawn[0].name}</b>") < page.index(f"<b>{drawn[1].name}</b>")
