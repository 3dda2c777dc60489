"""Training from the outside: settings that an optimizer knows, curves per seed, and pixels with their labels."""

import numpy as np
import pytest
import torch
from torch import nn

from auditor.errors import OptionError
from auditor.subject.preprocessing import Preprocessing
from auditor.training.optimizers import METHODS
from auditor.training.training_runs import open_pixels, train_seeds, training_settings
from tests.auditor.training.three_clouds import blobs

GREY = Preprocessing.of((1, 13, 17), mean=None, std=None, resize="stretch")


def test_a_mini_batch_suits_few_images_and_is_the_caller_s_where_they_say_so():
    with_batch = [name for name, method in METHODS.items() if "batch" in method[1].model_fields]
    assert with_batch
    for name in with_batch:
        assert training_settings(name, {}, None, 100)["batch"] == 16
        assert training_settings(name, {}, None, 5000)["batch"] == 100
        assert training_settings(name, {}, None, 10**6)["batch"] == 128
        assert training_settings(name, {"batch": 7}, None, 100)["batch"] == 7


def test_a_constraint_is_held_by_one_optimizer_only():
    settings = {"nu": 1e-6}
    assert training_settings("dladmm", settings, "non-negative", 100)["constraint"] == "non_negative"
    assert "constraint" not in training_settings("dladmm", settings, "none", 100)
    assert settings == {"nu": 1e-6}
    with pytest.raises(OptionError, match=r"held by optimizer dladmm, got adam; take that\.$"):
        training_settings("adam", {}, "non-negative", 100)
    with pytest.raises(OptionError, match=r"optimizer 'nosuch' is not known; choose from .*dladmm"):
        training_settings("nosuch", {}, None, 100)


def test_every_seed_trains_a_network_of_its_own_and_the_first_is_given():
    x, y = blobs(60)
    made = []

    def blocks(seed):
        torch.manual_seed(seed)
        made.append([nn.Linear(x.shape[1], 3)])
        return made[-1]

    network, curves = train_seeds(blocks, (x, y), (x, y), "adam", 2, [3, 4], {"batch": 16})
    assert network is made[0]
    assert len(curves) == 2
    assert not torch.equal(made[0][0].weight, made[1][0].weight)


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)

    def write(name, n, labels=None):
        path = tmp_path / f"{name}.npz"
        labels = rng.integers(0, 3, n) if labels is None else labels
        np.savez(path, images=rng.integers(0, 256, (n, 13, 17), dtype=np.uint8), labels=labels)
        return str(path)

    return write


def test_without_a_test_set_the_last_fifth_of_a_fixed_shuffle_is_held_out(folder):
    spec = folder("a", 41)
    (x, y), (held, held_y), names = open_pixels(spec, None, None, GREY)
    assert (len(x), len(held)) == (33, 8)
    assert (len(y), len(held_y)) == (33, 8)
    assert names == ("0", "1", "2")
    again = open_pixels(spec, None, None, GREY)
    assert torch.equal(again[1][0], held)
    rows = {image.numpy().tobytes() for image in torch.cat([x, held])}
    assert len(rows) == 41


def test_a_test_set_is_taken_whole_and_only_training_images_are_limited(folder):
    train, held, _ = open_pixels(folder("a", 40), folder("b", 11), 30, GREY)
    assert (len(train[0]), len(held[0])) == (30, 11)


def test_a_named_data_set_gives_its_own_test_split():
    pre = Preprocessing.of((1, 8, 8), None, None, "stretch")
    train, held, names = open_pixels("sklearn:digits", None, None, pre)
    assert len(train[0]) + len(held[0]) == 1797
    assert names == tuple("0123456789")


def test_an_image_without_a_label_is_refused_and_a_check_sees_every_source(folder):
    checked = []
    with pytest.raises(OptionError, match=r"2 images of .*a\.npz have no label; give a labelled set\."):
        open_pixels(folder("a", 5, np.array([0, -1, 1, -1, 2])), None, None, GREY, checked.append)
    assert len(checked) == 1
