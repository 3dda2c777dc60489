"""Activations of a layer as columns, sampled evenly in bounded memory."""

import pytest
import torch
from torch import nn

from auditor import Subject, fit, open_data
from auditor.errors import NumericsError
from auditor.explainers.layer_activations import Reservoir, as_columns, harvest


def test_nan_activations_are_counted(tiny, tiny_npz):
    with torch.no_grad():
        tiny.module.conv.weight[0, 0, 0, 0] = float("nan")
    subject = Subject(tiny.module, input_shape=(1, 13, 17))
    with pytest.raises(NumericsError, match="40 of 40 images give NaN or infinite activations"):
        fit("nmf", subject, open_data(tiny_npz))


def test_reservoir_is_uniform_and_does_not_depend_on_batches():
    columns = torch.arange(10_000.0)[None]
    samples = []
    for size in (7, 1000):
        reservoir = Reservoir(500, seed=3)
        for part in torch.split(columns, size, dim=1):
            reservoir.put(part)
        samples.append(reservoir.columns())
    assert torch.equal(*samples)
    assert samples[0].shape == (1, 500)
    assert abs(float(samples[0].mean()) - 4999.5) < 4 * 2887 / 500**0.5  # four standard errors of a uniform sample


def test_columns_keep_positions_of_an_image_together():
    subject = Subject(nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten(), nn.Linear(18, 2)), input_shape=(1, 3, 3))
    z = torch.rand(4, 2, 3, 3)
    torch.testing.assert_close(as_columns(subject.layout("0"), z)[:, 9:18], z[1].flatten(1))


def test_a_reservoir_that_never_filled_keeps_everything_in_order():
    reservoir = Reservoir(10, seed=0)
    for part in (torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]])):
        reservoir.put(part)
    assert reservoir.columns().tolist() == [[1.0, 2.0, 3.0]]


def test_a_reservoir_keeps_columns_whole_and_the_smallest_keys():
    import numpy as np

    columns = torch.stack([torch.arange(300.0), torch.arange(300.0) + 1000])
    reservoir = Reservoir(20, seed=5)
    for part in torch.split(columns, 11, dim=1):
        reservoir.put(part)
    keys = np.random.default_rng(5).random(300)
    chosen = sorted(np.argsort(keys)[:20].tolist())
    assert reservoir.columns().tolist() == columns[:, chosen].tolist()


def test_rows_are_read_once_in_order_with_progress(tiny, tiny_npz):
    data, reports = open_data(tiny_npz), []
    rows = list(
        harvest(tiny, data, "relu", batch_size=16, progress=lambda stage, done, total: reports.append((done, total)))
    )
    assert [len(batch) for batch, *_ in rows] == [16, 16, 8]
    assert reports == [(16, 40), (32, 40), (40, 40)]
    x = torch.cat([batch.images for batch, *_ in rows])
    with torch.no_grad():
        torch.testing.assert_close(torch.cat([row[-1] for row in rows]), tiny.activations(x, ["relu"])["relu"])
        torch.testing.assert_close(torch.cat([row[-2] for row in rows]), tiny.logits(x))
