"""What is said of the images of a fit: classes that were never met, a model that is unsure of everything."""

import torch
from torch import nn

from auditor import Subject
from auditor.explainers.predicted_classes import PredictedClasses


def counted(logits, learned, n=4):
    subject = Subject(nn.Sequential(nn.Flatten(), nn.Linear(4, n)), input_shape=(1, 2, 2))
    predicted = PredictedClasses(subject)
    classes = predicted.add(torch.as_tensor(logits, dtype=torch.float32), torch.as_tensor(learned))
    return predicted, classes


def test_held_out_images_of_classes_that_were_not_learned_are_counted():
    predicted, classes = counted(torch.eye(4)[[0, 1, 0, 2, 3]] * 20, [True, True, False, False, False])
    assert classes.tolist() == [0, 1, 0, 2, 3]
    assert predicted.unmet == 2 / 3
    assert "67% of the held-out images are of classes that the fit has no image of (5 images, 4 predicted" in (
        predicted.too_thin()
    )
    assert predicted.remarks() == []


def test_nothing_is_said_where_every_class_was_met():
    predicted, _ = counted(torch.eye(4)[[0, 1, 0, 1]] * 20, [True, True, False, False])
    assert predicted.unmet == 0
    assert predicted.too_thin() == ""
    assert counted(torch.eye(4) * 20, [True] * 4)[0].unmet == 0  # nothing held out


def test_a_model_that_is_unsure_of_every_image_is_said():
    predicted, _ = counted(torch.eye(4) * 0.3, [True] * 4)
    assert predicted.unsure == 1
    assert "unsure of 100% of these images" in predicted.remarks()[0]
    assert "auditor describe" in predicted.remarks()[0]


def test_one_logit_is_sure_on_either_side():
    assert counted([[8.0], [-8.0]], [True, False], n=1)[0].unsure == 0
    assert counted([[0.1], [-0.1]], [True, False], n=1)[0].unsure == 1


def test_classes_that_the_model_sees_in_no_image_are_named():
    predicted, _ = counted(torch.eye(4)[[0, 2, 0]] * 20, [True, True, False])
    (remark,) = predicted.remarks()
    assert "sees 2 of its 4 classes in none of these images (1, 3)" in remark
    many, _ = counted(torch.eye(20)[:2] * 20, [True, True], n=20)
    assert "18 of its 20 classes in none of these images (2, 3, 4, 5, 6, 7, …)" in many.remarks()[0]
