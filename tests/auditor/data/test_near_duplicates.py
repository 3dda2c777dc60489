"""Fingerprints: copies of another size and brightness are near, other pictures are far, blank ones say nothing."""

import numpy as np
import torch
from torch.nn import functional as F

from auditor.data.near_duplicates import NEAR, fingerprint, fingerprints, is_plain, near, nearest
from auditor.data.source import open_data
from auditor.subject.subject import Subject


def pictures(n, side=96, seed=0):
    coarse = torch.rand(n, 3, 7, 7, generator=torch.Generator().manual_seed(seed))
    return F.interpolate(coarse, size=(side, side), mode="bicubic").clamp(0, 1)


def test_copies_are_near_and_other_pictures_far():
    images = pictures(30)
    small = F.interpolate(images, size=(48, 60), mode="area")
    noise = 0.01 * torch.randn(small.shape, generator=torch.Generator().manual_seed(1))
    copies = (0.9 * small + 0.05 + noise).clamp(0, 1)
    distance, which = nearest(fingerprint(copies), fingerprint(images))
    assert which.tolist() == list(range(30))
    assert int(distance.max()) <= NEAR
    apart, _ = nearest(fingerprint(pictures(30, seed=5)), fingerprint(images))
    assert int(apart.min()) > 2 * NEAR


def test_a_bit_says_that_it_grows_brighter_to_the_right():
    image = torch.zeros(1, 1, 16, 17)
    image[0, 0, 3, 9:] = 0.5
    bits = fingerprint(image)[0].reshape(16, 16)
    assert bits.nonzero().tolist() == [[3, 8]]
    image[0, 0, 3, 9:] = 2 / 255  # no more than noise
    assert not bool(fingerprint(image).any())
    assert bool(is_plain(fingerprint(image))[0])
    assert not bool(is_plain(fingerprint(pictures(1)))[0])


def test_the_nearest_is_that_of_all_pairs():
    g = torch.Generator().manual_seed(2)
    a, b = (torch.rand(n, 256, generator=g) < 0.5 for n in (9, 13))
    pairs = (a[:, None] != b[None]).sum(-1)
    distance, which = nearest(a, b)
    assert torch.equal(distance, pairs.amin(1))
    assert torch.equal(pairs.gather(1, which[:, None])[:, 0], distance)


def test_small_images_must_be_equal():
    assert near((3, 224, 224)) == near((1, 32, 40)) == NEAR
    assert near((1, 8, 8)) == near((3, 64, 31)) == 0


def test_a_source_gives_the_hashes_of_its_rows(tmp_path):
    images = (pictures(6, 34).permute(0, 2, 3, 1).numpy() * 255).astype(np.uint8)
    np.savez(tmp_path / "x.npz", images=images)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 34 * 34, 2))
    subject, data = Subject(net, input_shape=(3, 34, 34)), open_data(tmp_path / "x.npz")
    everything = fingerprints(data, subject)
    assert everything.shape == (6, 256)
    rows = torch.tensor([True, False, False, True, True, False])
    assert torch.equal(fingerprints(data, subject, rows), everything[rows])
