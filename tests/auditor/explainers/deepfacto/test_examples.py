"""What a deepfacto fit works on: the layer, the rank, the images and what is refused."""

import numpy as np
import pytest
import torch
from torch import nn

from auditor import Subject, open_data
from auditor.errors import DataError, LayerError, NumericsError, OptionError
from auditor.explainers.deepfacto.examples import (
    DeepFactoConfig,
    check_activations,
    factorizable_layer,
    gather,
    rank_for,
)
from auditor.progress import silent


def config(**options):
    return DeepFactoConfig(**options)


def written(tmp_path, labels, n=None):
    rng = np.random.default_rng(0)
    n = n or len(labels)
    images = rng.integers(0, 256, (n, 13, 17), dtype=np.uint8)
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.npz"
    np.savez(path, images=images, **({"labels": np.array(labels)} if labels is not None else {}))
    return open_data(path)


def test_options_reach_the_training_under_their_names():
    settings = config(beta=2.0, l1=0.3, train_batch=7, lr=0.5, trust=0.2, pooled=0.0).settings(11, 3)
    assert (settings.beta, settings.l1, settings.lr, settings.trust, settings.pooled) == (2.0, 0.3, 0.5, 0.2, 0.0)
    assert (settings.batch, settings.epochs, settings.seed) == (7, 3, 11)
    assert (settings.gamma, settings.anchor) == (config().gamma, config().anchor)


def test_the_layer_is_the_one_asked_for_or_the_last_without_negative_values(tiny):
    assert factorizable_layer(tiny, "relu") == "relu"
    assert factorizable_layer(tiny, None) == "relu"
    with pytest.raises(LayerError, match=r"layer 'conv' gives negative values.*take one after a ReLU, such as 'relu'"):
        factorizable_layer(tiny, "conv")
    signed = Subject(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 4 * 5, 3)), input_shape=(1, 6, 7)
    )
    with pytest.raises(LayerError, match="this model has none after a ReLU"):
        factorizable_layer(signed, None)


def test_a_signed_suggestion_gives_way_to_the_last_map_without_negative_values():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(1, 6, 3),
            nn.ReLU(),
            nn.Conv2d(6, 5, 3),
            nn.Tanh(),
            nn.Conv2d(5, 4, 3),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(4 * 7 * 11, 8),
            nn.ReLU(),
            nn.Linear(8, 3),
        )
        subject = Subject(net, input_shape=(1, 13, 17))
    assert factorizable_layer(subject, None) == "1"


def test_the_rank_is_at_most_the_width(tiny):
    layout = tiny.layout("relu")
    assert rank_for(None, "relu", layout) == 5
    assert rank_for(5, "relu", layout) == 5
    assert rank_for(2, "relu", layout) == 2
    with pytest.raises(OptionError, match="at most the 5 channels of layer 'relu', got 6"):
        rank_for(6, "relu", layout)


def test_images_come_with_labels_logits_and_every_fifth_held_out(tiny, tmp_path):
    labels = [i % 3 for i in range(30)]
    data = written(tmp_path, labels)
    steps = []
    examples = gather(tiny, data, 30, config(batch_size=8), lambda *step: steps.append(step))
    assert examples.labels.tolist() == labels
    assert examples.labelled
    assert examples.held.nonzero()[:, 0].tolist() == [4, 9, 14, 19, 24, 29]
    with torch.no_grad():
        torch.testing.assert_close(examples.logits, tiny.logits(examples.batch.images))
    assert steps == [("reading images", n, 30) for n in (8, 16, 24, 30)]
    task = examples.task(0.3)
    assert (len(task.images), task.fidelity) == (24, 0.3)
    assert task.labels.tolist() == [y for i, y in enumerate(labels) if i % 5 != 4]
    torch.testing.assert_close(task.teacher, examples.logits[~examples.held])


def test_a_seed_draws_the_images_evenly(tiny, tmp_path):
    data = written(tmp_path, [i % 3 for i in range(60)])
    one, same, other = (gather(tiny, data, 20, config(seed=seed), silent) for seed in (0, 0, 1))
    assert one.batch.ids == same.batch.ids != other.batch.ids
    assert len(one.batch) == 20
    assert len(set(one.batch.ids)) == 20
    order = [i for batch in data.batches(tiny, 60) for i in batch.ids]
    places = [order.index(i) for i in one.batch.ids]
    assert places == sorted(places)  # the order of the data
    assert places != list(range(20))


def test_unknown_labels_are_the_models_predictions(tiny, tmp_path):
    data = written(tmp_path, None, 30)
    with torch.no_grad():
        predicted = tiny.logits(next(data.batches(tiny, 30)).images).argmax(1)
    if len(set(predicted.tolist())) < 2:
        with pytest.raises(DataError, match="every image is predicted"):
            gather(tiny, data, 30, config(), silent)
        return
    examples = gather(tiny, data, 30, config(), silent)
    assert not examples.labelled
    assert torch.equal(examples.labels, predicted)


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        ([1] * 12, "every image is labelled 'b', and a head needs at least two classes"),
        ([0, 3] * 6, "label 3 is beyond the model's 3 classes"),
        ([0, 1, 0, 1], "4 images are too few to train on some and measure on others"),
        ([0, 0, 0, 0, 1, 0, 0, 0, 0, 1], "10 images are too few"),  # the second class is in the held-out part only
    ],
)
def test_data_that_cannot_be_learned(tiny, tmp_path, labels, sentence):
    with pytest.raises(DataError, match=sentence):
        gather(tiny, written(tmp_path, labels), len(labels), config(), silent)


def test_logits_that_are_not_finite(tiny, tmp_path):
    with torch.no_grad():
        tiny.module.fc.bias[1] = torch.nan
    with pytest.raises(NumericsError, match="NaN or infinite logits"):
        gather(tiny, written(tmp_path, [0, 1, 2] * 5), 15, config(), silent)


def test_activations_must_be_finite_and_not_negative():
    Z = torch.rand(2, 3, 4)
    Z[0, 0, 0] = 0
    check_activations(Z, "relu")
    Z[1, 2, 3] = -0.25
    with pytest.raises(LayerError, match=r"negative values on these images \(down to -0\.25\)"):
        check_activations(Z, "relu")
    Z[1, 2, 3] = torch.inf
    with pytest.raises(NumericsError, match="layer 'relu' gives NaN or infinite values"):
        check_activations(Z, "relu")


@pytest.mark.parametrize(
    ("cost", "refits", "expected"), [(10**5, 1, 12), (10**8, 0, 10), (10**8, 1, 5), (10**11, 1, 2)]
)
def test_passes_left_open_are_what_the_operations_allow(cost, refits, expected):
    """3e12 operations over three times the forward passes of 1,000 images, for the fit and every re-fit."""
    assert config(refits=refits).passes(cost, 1000) == expected
    assert config(refits=refits, epochs=7).passes(cost, 1000) == 7
