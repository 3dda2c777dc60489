"""Convolutions of one pixel by the library that is faster on one thread give what torch's own do."""

import pytest
import torch
import torch.nn.functional as F

from auditor.network.pointwise_convolution import conv2d


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def case(images, inputs, outputs, side, kernel=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(images + inputs)
    x = torch.randn(images, inputs, side, side + 1, generator=generator, dtype=dtype)
    return x, torch.randn(outputs, inputs, kernel, kernel, generator=generator, dtype=dtype), torch.randn(outputs).to(x)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", [(1, 3, 5, 4), (5, 17, 2, 7), (15, 8, 8, 1), (16, 8, 8, 3), (0, 4, 3, 2)])
def test_gives_the_convolution_and_its_gradient(one_thread, shape, channels_last):
    x, w, b = case(*shape)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    ours, theirs = x.clone().requires_grad_(True), x.clone().requires_grad_(True)
    computed, expected = conv2d(ours, w, b), F.conv2d(theirs, w, b)
    torch.testing.assert_close(computed, expected, rtol=1e-5, atol=1e-5)
    g = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (by_x,), (wanted,) = torch.autograd.grad(computed, ours, g), torch.autograd.grad(expected, theirs, g)
    torch.testing.assert_close(by_x, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"stride": (2, 1)},
        {"padding": (1, 0)},
        {"padding": "same"},
        {"groups": 2},
    ],
)
def test_other_convolutions_are_left_to_torch(one_thread, options):
    x, w, b = case(2, 4, 6, 5)
    w = w[:, : 4 // options.get("groups", 1)]
    torch.testing.assert_close(conv2d(x, w, b, **options), F.conv2d(x, w, b, **options))
    wide = case(2, 4, 6, 5, kernel=3)[1][:, : w.shape[1]]
    torch.testing.assert_close(conv2d(x, wide, None, **options), F.conv2d(x, wide, None, **options))


def test_takes_doubles_and_weights_that_learn(one_thread):
    x, w, b = case(2, 4, 6, 5, dtype=torch.float64)
    torch.testing.assert_close(conv2d(x, w, b), F.conv2d(x, w, b))
    x, w, b = case(2, 4, 6, 5)
    w.requires_grad_(True)
    (gradient,) = torch.autograd.grad(conv2d(x, w, b).sum(), w)
    torch.testing.assert_close(gradient, x.sum((0, 2, 3)).expand(6, 4)[:, :, None, None], rtol=1e-4, atol=1e-4)
