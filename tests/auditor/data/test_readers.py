"""Readers: .npz members, idx files, digits and torchvision, streamed and never unpickled."""

import gzip
import struct
import sys
import types
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from auditor import open_data
from auditor.errors import DataError
from auditor.subject.preprocessing import Preprocessing
from tests.auditor.data.test_source import GREY, refused


def test_a_pickled_array_is_refused(tmp_path):
    np.savez(tmp_path / "x.npz", images=np.array([{"a": 1}, None], dtype=object))
    refused(tmp_path / "x.npz", "holds Python objects")


def write_idx(path, array, opener=gzip.open):
    with opener(path, "wb") as stream:
        stream.write(struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes())


@pytest.mark.parametrize("packed", [True, False])
def test_mnist_layout_is_streamed(tmp_path, packed):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (11, 13, 17), dtype=np.uint8), np.arange(11, dtype=np.uint8)
    end, opener = (".gz", gzip.open) if packed else ("", open)
    write_idx(raw / f"t10k-images-idx3-ubyte{end}", images, opener)
    write_idx(raw / f"t10k-labels-idx1-ubyte{end}", labels, opener)
    data = open_data(f"torchvision:MNIST?root={tmp_path}&split=test")
    got = torch.cat([b.images for b in data.batches(GREY, 4)])
    torch.testing.assert_close(got[:, 0], torch.from_numpy(images).float() / 255)
    assert len(data) == 11


def mnist(folder, images, labels):
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    write_idx(raw / "train-images-idx3-ubyte.gz", images)
    write_idx(raw / "train-labels-idx1-ubyte.gz", labels)
    return f"torchvision:MNIST?root={folder}&split=train"


def test_idx_files_that_do_not_fit_are_refused(tmp_path):
    images, labels = np.zeros((5, 13, 17), np.uint8), np.arange(5, dtype=np.uint8)
    refused(mnist(tmp_path, images, labels[:4]), "5 images and 4 labels do not match")
    spec = mnist(tmp_path, images, labels)
    raw = tmp_path / "MNIST" / "raw"
    refused(spec.replace("train", "validation"), "split must be train or test, got 'validation'")
    with gzip.open(raw / "train-images-idx3-ubyte.gz", "wb") as stream:
        stream.write(struct.pack(">4B3I", 0, 0, 8, 3, 5, 13, 17) + images.tobytes()[:-1])
    refused(spec, "ends early; fetch the file again")
    with gzip.open(raw / "train-images-idx3-ubyte.gz", "wb") as stream:
        stream.write(struct.pack(">4B3I", 0, 0, 9, 3, 5, 13, 17) + images.tobytes())  # 9: signed bytes
    refused(spec, "not an idx file of bytes")


def test_an_npz_streams_every_row_once_and_says_where_it_ends_early(tmp_path):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (11, 13, 17), dtype=np.uint8), rng.integers(0, 3, 11)
    np.savez(tmp_path / "x.npz", images=images, labels=labels)
    for size in (1, 4, 11, 64):
        batches = list(open_data(tmp_path / "x.npz").batches(GREY, size))
        assert [len(b) for b in batches] == [size] * (11 // size) + ([11 % size] if 11 % size else [])
        torch.testing.assert_close(torch.cat([b.images for b in batches])[:, 0], torch.from_numpy(images).float() / 255)
        assert torch.cat([b.labels for b in batches]).tolist() == labels.tolist()
        assert [name for b in batches for name in b.ids] == [str(i) for i in range(11)]
    np.savez(tmp_path / "f.npz", images=np.asfortranarray(images))
    refused(tmp_path / "f.npz", "is in Fortran order")
    np.savez(tmp_path / "one.npz", images=np.float32(1))
    refused(tmp_path / "one.npz", "is one number")
    np.savez(tmp_path / "l.npz", images=images, labels=labels.astype(float))
    refused(tmp_path / "l.npz", "labels must be 11 integers")
    with zipfile.ZipFile(tmp_path / "short.npz", "w") as archive, zipfile.ZipFile(tmp_path / "x.npz") as whole:
        archive.writestr("images.npy", whole.read("images.npy")[:-1])
    refused(tmp_path / "short.npz", "the file ends early at image 0")


def test_digits_are_split_by_every_fifth_image():
    pre = Preprocessing.of((1, 8, 8), None, None, "stretch")
    parts = {
        s: torch.cat([b.images for b in open_data(f"sklearn:digits?split={s}").batches(pre)])
        for s in ("all", "train", "test")
    }
    row = torch.arange(1797)
    assert torch.equal(parts["test"], parts["all"][row % 5 == 4])
    assert torch.equal(parts["train"], parts["all"][row % 5 != 4])
    assert 0 <= float(parts["all"].min()) < float(parts["all"].max()) == 1
    assert open_data("sklearn:digits").class_names == tuple("0123456789")
    refused("sklearn:digits?size=3", "unknown option size; only split is known here")


class Shapes:
    """A data set as torchvision's are: items are an image and a class number."""

    classes = ("dark", "light")

    def __init__(self, root, train=True, download=True, split="none"):
        assert not download
        self.train, self.split = train, split

    def __len__(self):
        return 5

    def __getitem__(self, i):
        return Image.new("L", (17, 13), 40 * i + int(self.train)), (i % 2 if i else "no number")


def test_any_torchvision_set_is_read_by_name(tmp_path, monkeypatch):
    module = types.ModuleType("torchvision")
    module.datasets = types.SimpleNamespace(Shapes=Shapes)
    monkeypatch.setitem(sys.modules, "torchvision", module)
    data = open_data(f"torchvision:Shapes?root={tmp_path}&split=test")
    assert (data.source.train, data.source.split) == (False, "test")
    assert open_data(f"torchvision:Shapes?root={tmp_path}&split=train").source.train
    batches = list(data.batches(GREY, 2))
    assert [len(b) for b in batches] == [2, 2, 1]
    assert [round(float(b.images[0].max()) * 255) for b in batches] == [0, 80, 160]
    assert torch.cat([b.labels for b in batches]).tolist() == [-1, 1, 0, 1, 0]
    assert data.class_names == ("dark", "light")
    assert len(data) == 5
    train = open_data(f"torchvision:Shapes?root={tmp_path}&split=train")
    assert train.digest != data.digest == open_data(f"torchvision:Shapes?root={tmp_path}&split=test").digest
    refused(f"torchvision:Shapes?root={tmp_path}/none", "no such folder")


def test_labels_may_be_sets(tmp_path):
    sets = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 1]])
    images = np.zeros((4, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "s.npz", images=images, labels=sets)
    batch = next(iter(open_data(tmp_path / "s.npz").batches(Preprocessing.of((1, 8, 8), None, None, "stretch"))))
    assert batch.label_sets is not None
    assert batch.label_sets.tolist() == sets.astype(bool).tolist()
    assert batch.labels.tolist() == [0, -1, -1, 2]
    assert batch.take(batch.labels >= 0).label_sets.tolist() == [[True, False, False], [False, False, True]]
    np.savez(tmp_path / "two.npz", images=images, labels=sets * 2)
    with pytest.raises(DataError, match="must be 0 or 1, got 0 to 2"):
        open_data(tmp_path / "two.npz")
