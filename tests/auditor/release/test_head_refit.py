"""Head refit: images lose their spot or get another class's, and a head that is fitted to them reads the object."""

import torch

from auditor.release import head_refit
from auditor.release.head_refit import Examples, examples, has_weights_above, refit, right, with_spots_of_others
from auditor.reliance.regions import Boxes
from auditor.subject.subject import Subject
from tests.auditor.release.test_repair import Reader, pictures


def given(plate_of=0, n=40):
    images, labels = pictures(n, plate_of)
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255, torch.from_numpy(labels)


def reader():
    return Subject(Reader(), input_shape=(3, 12, 12), class_names=["object", "nothing"])


def test_every_image_gets_the_spot_of_another_class_where_there_is_one():
    x, y = given()
    rows = (y == 0).nonzero()[:, 0]
    n = len(rows)
    at = Boxes(*(torch.full((n,), v) for v in (2, 3, 5, 5)), torch.ones(n))
    receivers, swapped = with_spots_of_others(torch.zeros_like(x), y, rows, at, x, seed=0)
    assert set(y[receivers].tolist()) == {1}  # only class 0 has plates, and its images get none of their own
    assert len(receivers) == int((y == 1).sum())
    assert float(swapped[:, 1, 2:7, 3:8].min()) == 1.0
    assert float(swapped[:, :, 8:].max()) == 0.0
    none, empty = with_spots_of_others(x, torch.zeros_like(y), rows, at, x, seed=0)
    assert (len(none), len(empty)) == (0, 0)


def test_carriers_count_by_label_without_their_spot_and_all_others_by_the_old_logits():
    subject = reader()
    x, y = given()
    with torch.no_grad():
        logits = subject.logits(x)
    made = examples(subject, "relu", x, y, logits, y == 0)
    assert made.by_label[: len(x)].tolist() == (y == 0).tolist()
    assert not bool(made.by_label[len(x) :].any())  # class 1 carries nothing: with a spot it stays what it was
    assert len(made.z) == len(x) + int((y == 1).sum())
    assert not torch.equal(made.z[: len(x)][y == 0], subject.activations(x[y == 0], ["relu"])["relu"])
    assert torch.equal(made.z[: len(x)][y == 1], subject.activations(x[y == 1], ["relu"])["relu"])
    assert int(made.held_out[: len(x)].sum()) == len(x) // 4
    assert made.bare.tolist() == [i < len(x) for i in range(len(made.z))]


def test_a_new_head_is_right_on_held_out_images_where_the_old_one_was_not(monkeypatch):
    monkeypatch.setattr(head_refit, "RATE", 0.05)  # this head has weights of 3
    subject = reader()
    x, y = given(n=80)
    swapped, _ = given(plate_of=1, n=80)
    z = subject.activations(torch.cat([x, swapped]), ["relu"])["relu"]
    labels = torch.cat([y, y])
    held_out = torch.arange(len(labels)) % 4 == 3
    made = Examples(
        z,
        labels,
        torch.zeros(len(labels), 2),
        torch.ones(len(labels), dtype=torch.bool),
        held_out,
        torch.arange(160) < 80,
    )
    before = right(subject, "relu", lambda z: z, made)
    weights, after = refit(subject, "relu", lambda z: z, made)
    assert set(weights) == {"fc.weight", "fc.bias"}
    assert before < 0.8 < after
    assert after == right(subject, "relu", lambda z: z, made, weights)
    assert torch.equal(subject.module.fc.bias, torch.tensor([-0.4, 0.4]))  # the model itself is as it was


def test_a_head_that_loses_clean_images_goes_back_towards_the_old_one(monkeypatch):
    monkeypatch.setattr(head_refit, "RATE", 0.05)
    subject = reader()
    x, y = given(n=80)
    z = subject.activations(torch.cat([x, x]), ["relu"])["relu"]
    held_out = torch.arange(160) % 4 == 3
    labels = torch.cat([y, y])
    wrong = torch.where(held_out, labels, 1 - labels)  # what is fitted says the opposite of what is held out
    made = Examples(z, wrong, torch.zeros(160, 2), torch.ones(160, dtype=torch.bool), held_out, torch.arange(160) < 80)
    monkeypatch.setattr(head_refit, "STEPS", (1.0,))
    far, after = refit(subject, "relu", lambda z: z, made)
    monkeypatch.setattr(head_refit, "STEPS", (1.0, 0.01))
    near, kept = refit(subject, "relu", lambda z: z, made)
    assert after < 0.5
    assert kept == right(subject, "relu", lambda z: z, made) == 1.0
    old = subject.module.fc.weight.detach()
    torch.testing.assert_close(near["fc.weight"] - old, 0.01 * (far["fc.weight"] - old), rtol=0, atol=1e-5)


def test_a_layer_with_nothing_above_it_has_no_head():
    assert has_weights_above(reader(), "relu")
    assert not has_weights_above(reader(), "fc")
