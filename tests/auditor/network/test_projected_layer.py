"""Directions taken out of a layer: nothing of them is left, all else stays, and the network can be exported."""

import pytest
import torch
from torch import nn

from auditor.errors import ShapeError
from auditor.network.projected_layer import ProjectedLayer, ProjectedNetwork, orthonormal
from auditor.subject.layers import Layout


def layer(layout, n=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    directions = torch.rand(layout.channels, n, generator=g)
    return ProjectedLayer(directions, torch.rand(layout.channels, generator=g), layout), directions


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (Layout("map", 5, (2, 3)), (4, 5, 2, 3)),
        (Layout("map-last", 5, (2, 3)), (4, 2, 3, 5)),
        (Layout("tokens", 5, (2, 3), 1), (4, 7, 5)),
        (Layout("vector", 5, (1, 1)), (4, 5)),
    ],
)
def test_the_directions_say_the_mean_and_the_rest_is_untouched(layout, shape):
    projected, directions = layer(layout)
    z = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    out = projected(z)
    assert out.shape == z.shape
    before, after = layout.to_positions(z), layout.to_positions(out)
    expected = (directions.T @ projected.mean)[None, :, None].expand(4, 2, before.shape[2])
    torch.testing.assert_close(directions.T @ after, expected, atol=1e-5, rtol=0)  # float32 sums of five terms
    others = torch.linalg.svd(directions, full_matrices=True)[0][:, 2:]
    torch.testing.assert_close(others.T @ after, others.T @ before, atol=1e-5, rtol=0)
    torch.testing.assert_close(projected(out), out, atol=1e-5, rtol=0)  # a projection
    if layout.prefix:
        assert torch.equal(out[:, :1], z[:, :1])  # the class token stays


def test_dependent_directions_count_once():
    V = orthonormal(torch.tensor([[1.0, 2.0, 0.0], [1.0, 2.0, 0.0], [0.0, 0.0, 3.0]]))
    assert V.shape == (3, 2)
    torch.testing.assert_close(V.T @ V, torch.eye(2))


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ShapeError, match=r"want directions \(5, n\)"):
        ProjectedLayer(torch.rand(4, 2), torch.rand(4), Layout("map", 5, (2, 3)))


def test_the_network_is_exported_and_its_body_is_left_alone():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 5, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 6, 3))
    projected, _ = layer(Layout("map", 5, (2, 3)))
    net = ProjectedNetwork(body, "1", projected).eval()
    x = torch.rand(2, 1, 2, 3)
    expected = body[3](body[2](projected(body[1](body[0](x)))))
    torch.testing.assert_close(net(x), expected)
    assert not torch.allclose(body(x), expected)
    assert not body[1]._forward_hooks
    program = torch.export.export(net, (x,))
    torch.testing.assert_close(torch.export.unflatten(program)(x), expected)
