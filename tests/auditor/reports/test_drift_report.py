"""The page of a comparison: both sides, names escaped."""

import numpy as np

from auditor import open_data
from auditor.release.drift import compare
from auditor.release.version_changes import version_changes
from auditor.reports.drift_report import drift_html
from tests.auditor.auditing.test_model_reliance import SIDE, marked_images
from tests.auditor.release.test_version_changes import reads


def test_the_page_shows_both_sides_and_escapes_names(tmp_path):
    images, labels = marked_images(48, np.random.default_rng(0))
    images[labels == 1, -6:-1, -6:-1] = 240
    np.savez(tmp_path / "marked.npz", images=images, labels=labels)
    data = open_data(tmp_path / "marked.npz")
    a, b = reads(1), reads(SIDE - 6)
    drift = compare(a, b, data, layer="layer", rank=1, refits=5)
    page = drift_html(drift, version_changes(a, b, data, n_images=6), ("models:/<m>/1", "models:/m/2"))
    assert "models:/&lt;m&gt;/1" in page
    assert "<m>" not in page
    assert page.count("data:image/png") == 12
    assert "hang on one thing that did not before" in page
