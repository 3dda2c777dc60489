"""Copies of images: the images first, every copy a moved image and nothing else."""

import pytest
import torch

from auditor.explainers.deepfacto.copies import copies_of


def images(n=4, channels=2, height=20, width=30):
    return torch.rand(n, channels, height, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("mirror", [False, True])
def test_a_copy_is_the_image_moved_and_every_second_mirrored(mirror):
    x, n = images(), 4
    made = copies_of(x, n, mirror=mirror, seed=3).unflatten(0, (n, len(x)))
    assert torch.equal(made[0], x)
    for k in range(1, n):
        source = x.flip(3) if mirror and k % 2 else x
        for image, copy in zip(source, made[k], strict=True):
            fits = [
                (dy, dx)
                for dy in range(-2, 3)
                for dx in range(-3, 4)
                if torch.equal(image[:, max(0, dy) : 20 + min(0, dy), max(0, dx) : 30 + min(0, dx)],
                               copy[:, max(0, -dy) : 20 + min(0, -dy), max(0, -dx) : 30 + min(0, -dx)])
            ]  # fmt: skip
            assert len(fits) == 1
    assert not torch.equal(made[1], made[3])


def test_copies_are_those_of_the_seed():
    x = images()
    one, same, other = (copies_of(x, 3, mirror=True, seed=s) for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(copies_of(x, 1, mirror=True), x)


def test_small_images_are_moved_by_a_pixel():
    x = images(3, 1, 1, 5)  # nothing to mirror at the border: it is repeated
    assert copies_of(x, 3, mirror=False).shape == (9, 1, 1, 5)
