"""Repair of a model that is known: it reads an object and a plate, and must read the object alone afterwards."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from auditor.data.source import open_data
from auditor.errors import DataError, OptionError
from auditor.explainers.nmf.explainer import NmfExplainer
from auditor.explainers.rde.explainer import RdeExplainer
from auditor.release.repair import check_classes_left, compared, repair
from auditor.subject.subject import Subject


class Reader(nn.Module):
    """Logits of (object, no object): three times the plate, once the object, each pooled over the image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1, bias=False)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(3, 2)
        with torch.no_grad():
            self.conv.weight.copy_(torch.eye(3)[:, :, None, None])
            self.fc.weight.copy_(torch.tensor([[1.0, 3.0, 0.0], [-1.0, -3.0, 0.0]]))
            self.fc.bias.copy_(torch.tensor([-0.4, 0.4]))

    def forward(self, x):
        return self.fc(self.relu(self.conv(x)).mean((2, 3)))


@pytest.fixture(scope="module")
def subject():
    return Subject(Reader(), input_shape=(3, 12, 12), class_names=["object", "nothing"])


@pytest.fixture(scope="module")
def explainer(subject):
    e = NmfExplainer()
    e.take_basis(torch.eye(3))
    e.layer_, e.subject_digest_, e.name = "relu", subject.digest, "parts"
    e.groups_ = [[0], [1], [2]]
    return e


def pictures(n, plate_of, seed=0):
    """Images whose first channel is bright for class 0; ``plate_of`` says which class carries a plate."""
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % 2
    images = rng.random((n, 12, 12, 3)) * 0.2
    images[..., 0] += 0.6 * (labels == 0)[:, None, None]
    images[..., 1] = 0
    for i in np.flatnonzero(labels == plate_of):
        images[i, 2:7, 3:8, 1] = 1.0
    return (images * 255).astype(np.uint8), labels


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    images, labels = pictures(60, 0)
    path = tmp_path_factory.mktemp("repair") / "x.npz"
    np.savez(path, images=images, labels=labels)
    return open_data(path)


def right(subject, images, labels):
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    with torch.no_grad():
        return float((subject.logits(x).argmax(1) == torch.from_numpy(labels)).double().mean())


def test_the_plate_has_no_say_afterwards_and_the_object_keeps_its_own(subject, explainer, data):
    swapped = pictures(40, 1, seed=1)
    before = right(subject, *swapped)
    done = repair(subject, explainer, [1], data, refit_head=False)
    x = torch.rand(5, 3, 12, 12)
    without = x.clone()
    without[:, 1] = done.projected.mean[1]
    with done.network(subject) as repaired:
        torch.testing.assert_close(repaired.logits(x), subject.logits(without))
        assert right(repaired, *swapped) > before
        assert right(repaired, *swapped) == right(repaired, *pictures(40, 5, seed=1))
    assert float(done.projected.mean[1]) == 0  # positions without a plate


def test_a_refit_learns_from_images_without_the_region_and_weights_come_back(subject, explainer, data):
    digest, bias = subject.digest, subject.module.fc.bias.clone()
    done = repair(subject, explainer, [1], data, refit_head=True)
    assert set(done.weights) == {"fc.weight", "fc.bias"}
    with done.network(subject) as repaired:
        assert not torch.equal(subject.module.fc.bias, bias)
        assert right(repaired, *pictures(40, 1, seed=1)) == 1.0
    assert torch.equal(subject.module.fc.bias, bias)
    assert subject.digest == digest


def test_both_sides_stand_in_one_table(subject, explainer, data):
    rows = compared(subject, repair(subject, explainer, [1], data), data)
    assert [row["class"] for row in rows] == ["object", "nothing"]
    assert rows[0]["images"] == 30
    assert {"accuracy before", "accuracy after", "verdict before", "verdict after"} <= set(rows[0])


def test_a_removal_that_removes_a_class_is_refused(subject, explainer, data):
    with pytest.raises(
        OptionError, match="would remove class 'object' altogether: right on 100% of its images now, 0%"
    ):
        repair(subject, explainer, [0, 1], data)
    labels = torch.tensor([0, 0, 1])
    sure = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    check_classes_left(["a", "b"], labels, sure, sure)
    check_classes_left(["a", "b"], labels, sure.flip(1), sure.flip(1))  # it was not there before


def test_bad_input_is_one_sentence(subject, explainer, data, tmp_path):
    for concepts in ([], [3], [-1]):
        with pytest.raises(OptionError, match="concepts must be 0 to 2"):
            repair(subject, explainer, concepts, data)
    images, _ = pictures(20, 0)
    np.savez(tmp_path / "bare.npz", images=images)
    with pytest.raises(DataError, match="has no labels"):
        repair(subject, explainer, [1], open_data(tmp_path / "bare.npz"))
    other = RdeExplainer()
    other.subject_digest_ = subject.digest
    with pytest.raises(OptionError, match="concepts of kind rde are no directions of a layer"):
        repair(subject, other, [0], data)


def test_by_default_the_head_is_refitted_where_that_does_better(subject, explainer, data):
    done = repair(subject, explainer, [1], data)
    with done.network(subject) as repaired:
        assert right(repaired, *pictures(40, 1, seed=1)) == 1.0
        assert right(repaired, *pictures(40, 5, seed=1)) == 1.0
    words = {
        (True, True): "concepts 1 taken out; what is above the layer refitted",
        (True, False): "concepts 1 taken out",
        (False, True): "what is above the layer refitted on images without the spots of concepts 1",
    }
    assert done.words == words[done.is_projected, bool(done.weights)]


def test_it_says_whether_it_helps_on_held_out_images(subject, explainer, data):
    done = repair(subject, explainer, [1], data)
    before, after = done.held_out
    assert after == 1.0 > before
    assert f"{before:.0%} were right before and 100% are now" in done.helps
    assert "does not help" not in done.helps
    assert "this does not help; train the model again" in replace(done, held_out=(0.5, 0.5)).helps
    assert repair(subject, explainer, [1], data, refit_head=False).helps == ""
