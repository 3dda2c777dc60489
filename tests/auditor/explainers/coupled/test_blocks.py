"""Blocks of the coupled factorization: pooling by plain loops, and ways there and back."""

import numpy as np
import pytest
import torch

from auditor.explainers.coupled.blocks import (
    Block,
    WholeLayout,
    layer_rows,
    pixel_rows,
    pooled_grid,
    scale_of,
    unpooled,
)
from auditor.subject.layers import layout_of


def test_a_block_counts_its_rows_and_survives_json():
    block = Block("4", "4", 7, (3, 2), signed=True, scale=2.5)
    assert block.rows == 42
    assert Block.from_json(block.to_json()) == block
    assert block.to_json()["grid"] == [3, 2]
    assert Block("pixels 0", None, 1, (5, 4)).scale == 1.0


def test_no_side_of_a_grid_is_longer_than_the_pool():
    assert pooled_grid((13, 9), 10) == (10, 9)
    assert pooled_grid((4, 9), 7) == (4, 7)
    assert pooled_grid((3, 2), 7) == (3, 2)


def test_pixels_are_averaged_channel_by_channel():
    images = torch.rand(4, 3, 6, 8)
    rows = pixel_rows(images, 2, (3, 2))
    assert rows.shape == (6, 4)
    for n in range(4):
        plain = [float(images[n, 2, 2 * i : 2 * i + 2, 4 * j : 4 * j + 4].mean()) for i in range(3) for j in range(2)]
        np.testing.assert_allclose(rows[:, n].numpy(), plain, rtol=1e-5)


@pytest.mark.parametrize("shape", [(5, 4, 6), (1 + 24, 5), (5,)])
def test_activations_are_averaged_over_the_cells_of_every_channel(shape):
    layout = layout_of(shape, (16, 24))
    z = torch.rand(3, *shape)
    grid = (2, 3) if layout.n_positions > 1 else (1, 1)
    rows = layer_rows(z, layout, grid)
    positions = layout.to_positions(z).reshape(3, layout.channels, *layout.grid)
    high, wide = layout.grid[0] // grid[0], layout.grid[1] // grid[1]
    for n in range(3):
        plain = [
            float(positions[n, c, i * high : (i + 1) * high, j * wide : (j + 1) * wide].mean())
            for c in range(layout.channels)
            for i in range(grid[0])
            for j in range(grid[1])
        ]
        np.testing.assert_allclose(rows[:, n].numpy(), plain, rtol=1e-5)


def test_unpooling_repeats_every_cell_and_pooling_takes_it_back():
    basis = torch.rand(5 * 2 * 3, 4)
    full = unpooled(basis, 5, (2, 3), (4, 6))
    assert full.shape == (5 * 24, 4)
    maps = full.T.reshape(4, 5, 4, 6)
    for k in range(4):
        for c in range(5):
            for i in range(4):
                for j in range(6):
                    assert maps[k, c, i, j] == basis[c * 6 + (i // 2) * 3 + j // 2, k]
    again = torch.nn.functional.adaptive_avg_pool2d(maps, (2, 3)).flatten(1).T
    torch.testing.assert_close(again, basis)
    assert torch.equal(unpooled(basis, 5, (2, 3), (2, 3)), basis)


def test_a_whole_layer_is_one_position_and_comes_back():
    layout = layout_of((5, 4, 6), (16, 24))
    whole = WholeLayout(layout.name, layout.channels, layout.grid, layout.prefix)
    z = torch.rand(3, 5, 4, 6)
    p = whole.to_positions(z)
    assert p.shape == (3, 120, 1)
    assert torch.equal(p[:, :, 0], z.flatten(1))
    assert torch.equal(whole.from_positions(p * 2, z), z * 2)


def test_scales():
    X = torch.tensor([[3.0, -4.0], [0.0, 5.0], [0.0, 0.0]])
    assert scale_of(X, "norm") == pytest.approx((50 / 2) ** 0.5)  # the root mean square norm of an example
    assert scale_of(X, "mean") == pytest.approx(12 / 6)
    assert scale_of(X, "none") == 1.0
    assert scale_of(torch.zeros(3, 2), "norm") == scale_of(torch.zeros(3, 2), "mean") == 1.0
