import pytest
import torch

from auditor import fit
from auditor.explainers.base import Explainer
from auditor.explainers.fitted_images import FittedImages
from auditor.explainers.xnn.examples import Examples
from auditor.explainers.xnn.fit_remarks import remarks


def examples(per_class, n_classes=3):
    labels = torch.arange(n_classes).repeat(per_class)
    n = len(labels)
    return Examples(torch.rand(n, 2), torch.rand(n, n_classes + 1), labels, FittedImages.each(n, 1000))


@pytest.mark.parametrize(
    ("same", "far", "per_class", "says"),
    [
        (0.95, 0.5, 5, []),
        (0.94, 0.1, 5, ["what is missing is images: 5 per class to learn from, give 30 or more"]),
        (0.99, 0.6, 5, ["miss the logit by 0.6 of its spread; what is missing is images"]),
        (0.8, 0.1, 40, ["on 80% of held-out images", "(40 per class): try a layer nearer to the logits"]),
    ],
)
def test_what_is_missing_is_one_sentence(same, far, per_class, says):
    sentences = remarks({"f_cls_positive": same, "f_reg_relative": far}, examples(per_class), [0, 1, 2])
    assert len(sentences) == min(1, len(says))
    assert all(part in sentences[0] for part in says)


def test_heads_without_images_are_counted():
    sentences = remarks({"f_cls_positive": 1.0}, examples(4), [0, 3])
    assert len(sentences) == 1
    assert sentences[0].startswith("1 of 2 heads are of classes without an image")
    assert "f_cls_positive is not known" in remarks({}, examples(4), [0])[0]


def test_remarks_travel_with_the_artifact(subject, digits, tmp_path):
    poor = fit("xnn", subject, digits, targets=[1, 2], start="random", max_epochs=1, lr=1e-9)
    assert "heads keep their class on" in poor.remarks()[0]
    poor.save(tmp_path / "a")
    assert Explainer.load(tmp_path / "a", subject).remarks() == poor.remarks()
