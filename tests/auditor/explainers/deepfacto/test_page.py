"""Which factor follows which attribute, on the page and in the artifact."""

import numpy as np
import pytest
import torch

from auditor import fit
from auditor.explainers.base import Explainer
from auditor.explainers.deepfacto.page import MOST, areas, followed_attributes
from auditor.metrics.attribute_probe import Attributes


def test_areas_are_the_share_of_pairs_in_order():
    rng = np.random.default_rng(0)
    amounts, marks = rng.integers(0, 4, (17, 3)).astype(float), rng.random(17) < 0.4
    for column, area in zip(amounts.T, areas(amounts, marks), strict=True):
        pairs = [(a > b) + 0.5 * (a == b) for a in column[marks] for b in column[~marks]]
        assert area == pytest.approx(np.mean(pairs))


def test_the_factor_is_chosen_on_images_of_the_fit_and_judged_on_others():
    marks = np.arange(40) % 2 == 0
    held = torch.arange(40) >= 20
    S = torch.zeros(40, 3)
    S[:, 1] = torch.from_numpy(marks).float()
    S[held, 1] = 0.5  # on held-out images it says nothing
    S[held, 2] = torch.from_numpy(marks)[held].float()  # and this one knows, but nothing chose it
    never = np.zeros(40, dtype=bool)
    attributes = Attributes(("even", "never"), np.stack([marks, never], 1).astype(np.int64))
    (result,) = followed_attributes(S, held, attributes)
    assert (result.attribute, result.factor, result.auc, result.frequency) == ("even", 1, 0.5, 0.5)
    many = Attributes(tuple(f"a{i}" for i in range(40)), np.repeat(marks[:, None], 40, 1).astype(np.int64))
    assert len(followed_attributes(S, held, many)) == MOST


def test_page_and_artifact_name_the_attributes(trained, digits, digits_data, tmp_path):
    rows = [f"{k}," + ",".join(str(int(j == k)) for j in range(10)) for k in range(10)]
    (tmp_path / "a.csv").write_text("\n".join(["class," + ",".join(f"<is {k}>" for k in range(10)), *rows]) + "\n")
    options = {"head": "linear", "epochs": 1, "max_images": 200, "attributes": str(tmp_path / "a.csv")}
    factors = fit("deepfacto", trained[0], digits_data, rank=4, refits=0, **options)
    best = factors.followed_[0]
    assert len(factors.followed_) == 10
    assert best.auc > 0.7
    assert len(best.has) == len(factors.gallery.shots[best.factor])
    text = factors.write_page(digits, tmp_path / "page.html").read_text()
    digit = best.attribute.strip("<>")
    assert f"&lt;{digit}&gt;: factor {best.factor}, area under the curve {best.auc:.2f} on held-out images" in text
    assert f"<{digit}>" not in text
    assert text.count("has it") >= len(best.has)
    factors.save(tmp_path / "saved")
    assert Explainer.load(tmp_path / "saved", digits).followed_ == factors.followed_
