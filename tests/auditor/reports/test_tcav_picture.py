"""The concept x class figure."""

from PIL import Image

from auditor.metrics.concept_vectors import TcavScore
from auditor.metrics.tcav import Tcav
from auditor.reports.tcav_picture import MOST_CLASSES, tcav_picture


def test_it_has_a_row_per_concept_and_no_more_classes_than_fit(tmp_path):
    def result(n_concepts, n_classes):
        rows = [
            TcavScore(f"c{c}", f"class {k}", 0.9, 0.1, 0.5, 0.8, 0.001, 0.01, 20, True)
            for c in range(n_concepts)
            for k in range(n_classes)
        ]
        return Tcav("features", 20, 30, 600, 0.5, tuple(rows), {})

    one = Image.open(tcav_picture(result(1, 3), tmp_path / "one.png"))
    two = Image.open(tcav_picture(result(2, 3), tmp_path / "two.png"))
    many = Image.open(tcav_picture(result(1, MOST_CLASSES + 20), tmp_path / "many.png"))
    assert one.width == two.width
    assert two.height > one.height
    assert many.width == round((1.2 + 0.55 * MOST_CLASSES) * 130)
