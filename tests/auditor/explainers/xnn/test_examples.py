"""Activations held in memory, in half precision, in a file: the same numbers each way."""

import errno
import os

import pytest
import torch

from auditor.errors import DataError
from auditor.explainers.xnn.examples import ActivationRows


def batches(n=7, shape=(3, 2, 5), seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(size, *shape, generator=g) for size in (4, n - 4)]


@pytest.mark.parametrize(
    ("in_memory", "dtype", "mapped"),
    [(7 * 30 * 4, torch.float32, False), (7 * 30 * 2, torch.float16, False), (10, torch.float16, True)],
)
def test_what_is_put_in_comes_out(in_memory, dtype, mapped):
    store = ActivationRows(7, in_memory=in_memory)
    parts = batches()
    for part in parts:
        store.put(part)
    Z = store.tensor()
    assert Z.dtype == dtype
    assert Z.shape == (7, 3, 2, 5)
    rtol = 0 if dtype == torch.float32 else 1e-3  # ten bits of mantissa
    torch.testing.assert_close(Z.float(), torch.cat(parts), rtol=rtol, atol=rtol)
    assert (Z.numpy().base is not None and not Z.numpy().flags.owndata) or not mapped


@pytest.mark.parametrize("in_memory", [7 * 30 * 2, 10])
def test_numbers_beyond_half_precision_widen_the_store(in_memory):
    store, parts = ActivationRows(7, in_memory=in_memory), batches()
    parts[1][0, 0, 0, 0] = 1e6
    for part in parts:
        store.put(part)
    assert store.tensor().dtype == torch.float32
    assert float(store.tensor()[4, 0, 0, 0]) == 1e6
    torch.testing.assert_close(store.tensor(), torch.cat(parts), rtol=1e-3, atol=1e-3)


def test_fewer_images_than_expected_are_fewer_rows():
    store = ActivationRows(9)
    store.put(torch.ones(2, 3))
    assert store.tensor().shape == (2, 3)
    assert ActivationRows(9).tensor().numel() == 0


def test_a_full_disk_is_one_sentence(monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DataError, match=r"activations of 7 images take .* set TMPDIR .* or lower max_images"):
        ActivationRows(7, in_memory=10).put(batches()[0])
