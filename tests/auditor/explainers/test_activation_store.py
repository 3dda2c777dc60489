"""Activations on disk: what was put in comes back, at most so many of a class, each with the same chance."""

import pytest
import torch

from auditor.errors import DataError
from auditor.explainers.activation_store import ActivationStore


def test_rows_come_back_in_any_order_and_shape():
    z = torch.randn(7, 3, 5, 2, generator=torch.Generator().manual_seed(0))
    with ActivationStore(100, 0) as store:
        store.put([0, 2, 4], [1, 0, 1], z[:3])
        store.put([5, 6, 8, 9], [0, 2, 1, 1], z[3:])
        assert store.classes == [0, 1, 2]
        assert store.rows_of(1) == [0, 4, 8, 9]
        assert store.rows_of(7) == []
        assert (4 in store, 3 in store, len(store)) == (True, False, 7)
        torch.testing.assert_close(store.read([9, 2, 0]), z[[6, 1, 0]], rtol=0, atol=0)
        assert store.read([]).shape == (0, 3, 5, 2)


def test_of_a_class_at_most_so_many_are_stored_each_with_the_same_chance():
    met = torch.zeros(30)
    for seed in range(300):
        with ActivationStore(5, seed) as store:
            for row in range(30):
                store.put([row], [0], torch.full((1, 2), float(row)))
            rows = store.rows_of(0)
            assert len(rows) == len(set(rows)) == len(store) == 5
            assert store.counts[0] == 30
            assert store.read(rows)[:, 0].tolist() == rows
            met[rows] += 1
    assert float(met.min()) > 50 - 4 * (300 / 6 * 5 / 6) ** 0.5  # 300 * 5 / 30, within four standard errors
    assert float(met.max()) < 50 + 4 * (300 / 6 * 5 / 6) ** 0.5


def test_a_full_disk_is_one_sentence(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with ActivationStore(5, 0) as store:
        monkeypatch.setattr("auditor.explainers.activation_store.os.pwrite", full)
        with pytest.raises(DataError, match=r"do not fit into .* set TMPDIR to a folder with more room"):
            store.put([0], [0], torch.zeros(1, 4))
