"""A stack of affine layers: the same network as the blocks, and only for blocks of that form."""

import numpy as np
import pytest
import torch
from torch import nn

from auditor.errors import OptionError, ShapeError
from auditor.training import block_variables
from auditor.training.affine_stack import AffineStack, Inputs, with_ones
from auditor.training.cycle import forward
from tests.auditor.training.three_clouds import blobs, mlp


def test_it_runs_as_the_blocks_do_and_writes_back():
    x, y = blobs()
    blocks = mlp(13, 11, 7, 3)
    net = AffineStack(blocks, x, y, "here", n_kept=2)
    z, a = net.run()
    assert (len(net), len(z), len(a)) == (3, 3, 3)
    assert torch.equal(a[0], x)
    for layer in range(2):
        torch.testing.assert_close(a[layer + 1], z[layer].relu())
    torch.testing.assert_close(z[-1], forward(blocks, x).detach())
    plain = x.numpy() @ net.W[0].numpy().T + net.b[0].numpy()
    np.testing.assert_allclose(net.affine(0, x).numpy(), plain, rtol=1e-4, atol=1e-5)
    net.W[1] = net.W[1] + 1
    net.b[2] = net.b[2] - 2
    assert not torch.equal(blocks[1][0].weight, net.W[1])  # the modules change on demand only
    net.write_back()
    torch.testing.assert_close(forward(blocks, x).detach(), net.run()[0][-1])


def test_images_are_flattened():
    x, y = torch.randn(6, 2, 3, 5), torch.arange(6) % 2
    net = AffineStack([nn.Sequential(nn.Flatten(), nn.Linear(30, 4), nn.ReLU()), nn.Linear(4, 2)], x, y, "here", 2)
    assert net.x.shape == (6, 30)


@pytest.mark.parametrize(
    ("blocks", "sentence"),
    [
        ([nn.Linear(13, 5), nn.Linear(5, 3)], "here: block 1 must be a Linear with bias and a ReLU, since"),
        ([nn.Sequential(nn.Linear(13, 3), nn.ReLU())], "block 1 must be a Linear with bias, since .* got Sequential"),
        ([nn.Linear(13, 3, bias=False)], "block 1 must be a Linear with bias, since"),
        ([nn.Sequential(nn.Linear(13, 5), nn.ReLU()), nn.Bilinear(5, 5, 3)], "block 2"),
    ],
)
def test_other_blocks_are_refused(blocks, sentence):
    x, y = blobs()
    with pytest.raises(ShapeError, match=sentence):
        AffineStack(blocks, x, y, "here", 2)


@pytest.mark.parametrize("n_kept", [2, 4])
def test_room_is_asked_for_every_layer_and_two_temporaries(n_kept, monkeypatch):
    x, y = blobs()
    needed = 90 * (11 + 3) * (n_kept + 2) * 4
    monkeypatch.setattr(block_variables, "room", lambda like, folder: needed)
    AffineStack(mlp(13, 11, 3), x, y, "here", n_kept)
    monkeypatch.setattr(block_variables, "room", lambda like, folder: needed - 1)
    with pytest.raises(OptionError, match="train by block-admm, which needs fewer"):
        AffineStack(mlp(13, 11, 3), x, y, "here", n_kept)


def test_draws_are_of_their_kind_size_and_seed():
    x, y = blobs()
    net = AffineStack(mlp(13, 400, 3), x, y, "here", 2)

    def draw(kind, seed=0):
        net.draw(kind, 0.1, torch.Generator().manual_seed(seed))
        return net.W[0], net.b[0]

    W, b = draw("uniform")
    for drawn in (W, b):
        assert 0 <= float(drawn.min()) < 0.01 < 0.09 < float(drawn.max()) <= 0.1
    assert torch.equal(W, draw("uniform")[0])
    assert not torch.equal(W, draw("uniform", 1)[0])
    W, b = draw("normal")
    assert float(W.std()) == pytest.approx(0.1, rel=4 / (2 * W.numel()) ** 0.5)  # four standard errors
    assert float(W.mean()) == pytest.approx(0, abs=4 * 0.1 / W.numel() ** 0.5)
    assert torch.equal(b, torch.zeros(400))
    assert W.shape == (400, 13)


def test_inputs_have_a_column_of_ones_and_one_gram_matrix():
    x, other = torch.randn(5, 3), torch.randn(5, 4)
    inputs = Inputs(x)
    ones, gram = inputs.of(x)
    np.testing.assert_array_equal(ones.numpy(), np.hstack([x.numpy(), np.ones((5, 1), np.float32)]))
    torch.testing.assert_close(gram, ones.T @ ones)
    made, unknown = inputs.of(other)
    assert unknown is None
    assert torch.equal(made, with_ones(other))
    assert inputs.of(x.clone())[1] is None  # equal numbers are another tensor: only the input itself is remembered
