"""Partitions of an image: labels against plain loops, adjoint maps, superpixels that follow edges."""

from __future__ import annotations

import pytest
import torch

from auditor.errors import OptionError
from auditor.perturbation.cells import Partition, Regions, components, grid, pixels, refined, superpixels

SHAPE = (2, 13, 17)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


PARTITIONS = {
    "component": lambda: components(SHAPE),
    "pixel": lambda: pixels(SHAPE),
    "grid": lambda: grid(SHAPE, 4, 5),
    "superpixel": lambda: superpixels(torch.rand(2, *SHAPE, generator=generator(5)), 20),
}


@pytest.mark.parametrize("kind", list(PARTITIONS))
def test_expand_and_gather_are_adjoint(kind: str) -> None:
    partition = PARTITIONS[kind]()
    rows = torch.tensor([1, 0, 1])
    s = torch.rand(3, partition.size, generator=generator(1))
    g = torch.randn(3, *SHAPE, generator=generator(2))
    left = (partition.expand(s, rows) * g).flatten(1).sum(1)
    torch.testing.assert_close(left, (s * partition.gather(g, rows)).sum(1))
    assert partition.gather(torch.ones(3, *SHAPE), rows).sum() == 3 * 2 * 13 * 17


def test_superpixels_follow_edges() -> None:
    image = torch.zeros(1, 1, 24, 30)
    image[..., 13:] = 1  # an edge that no grid of 5 columns meets
    p = superpixels(image, 20, compactness=0.1)
    assert p.labels is not None
    for cell in p.labels[0].unique():
        inside = image.flatten()[p.labels[0] == cell]
        assert inside.std(unbiased=False) == 0, "a cell crosses the edge"
    assert 10 <= p.labels.unique().numel() <= 24


def test_refined_masks_keep_the_budget() -> None:
    coarse, fine = grid(SHAPE, 3, 4), pixels(SHAPE)
    s = torch.zeros(1, 12)
    s[0, [1, 6]] = 1
    area = coarse.expand(s, torch.tensor([0]))[0, 0].sum()
    finer = refined(coarse, fine, s, torch.tensor([0]), torch.tensor([1000]))
    torch.testing.assert_close(finer.sum(), area)
    less = refined(coarse, fine, s, torch.tensor([0]), torch.tensor([10]))
    assert float(less.sum()) == pytest.approx(10, rel=1e-5)


def test_the_cell_of_every_component_is_where_it_should_be() -> None:
    masks = {
        "component": components(SHAPE).expand(torch.arange(2 * 13 * 17.0)[None], torch.tensor([0])),
        "pixel": pixels(SHAPE).expand(torch.arange(13 * 17.0)[None], torch.tensor([0])),
        "grid": grid(SHAPE, 4, 5).expand(torch.arange(20.0)[None], torch.tensor([0])),
    }
    for c in range(2):
        for i in range(13):
            for j in range(17):
                assert masks["component"][0, c, i, j] == (c * 13 + i) * 17 + j
                assert masks["pixel"][0, c, i, j] == i * 17 + j
                assert masks["grid"][0, c, i, j] == i * 4 // 13 * 5 + j * 5 // 17


def test_the_cells_of_a_grid_differ_by_at_most_one_row_and_column() -> None:
    area = grid(SHAPE, 4, 5).gather(torch.ones(1, *SHAPE), torch.tensor([0]))[0] / 2
    assert set(area.tolist()) <= {float(a * b) for a in (3, 4) for b in (3, 4)}


@pytest.mark.parametrize(("shape", "layout"), [((1, 3, 4), (3, 4)), ((2, 3, 4), None)])
def test_components_are_a_grid_only_with_one_channel(
    shape: tuple[int, int, int], layout: tuple[int, int] | None
) -> None:
    assert components(shape).layout == layout
    assert pixels(shape).layout == (3, 4)
    assert (pixels(shape).labels is None) == (shape[0] == 1)
    assert grid(shape, 3, 4).size == 12
    assert torch.equal(
        grid(shape, 3, 4).expand(torch.arange(12.0)[None], torch.tensor([0])),
        pixels(shape).expand(torch.arange(12.0)[None], torch.tensor([0])),
    )


@pytest.mark.parametrize(("rows", "columns"), [(14, 5), (0, 5), (4, 18), (4, 0)])
def test_grids_that_do_not_fit(rows: int, columns: int) -> None:
    with pytest.raises(OptionError, match=f"{rows}x{columns} cells do not fit an image of 13x17"):
        grid(SHAPE, rows, columns)


@pytest.mark.parametrize("count", [0, 222])
def test_numbers_of_superpixels_that_do_not_fit(count: int) -> None:
    with pytest.raises(OptionError, match=f"{count} cells do not fit an image of 13x17 pixels; ask for 1 to 221"):
        superpixels(torch.rand(1, *SHAPE), count)


def test_one_cell_and_one_cell_per_pixel() -> None:
    image = torch.rand(1, *SHAPE, generator=generator(1))
    one = superpixels(image, 1)
    assert one.size == 1
    assert one.labels is not None
    assert not one.labels.any()
    assert superpixels(image, 13 * 17).size == 13 * 17


def slow_superpixels(image: torch.Tensor, rows: int, columns: int, compactness: float, n_steps: int) -> torch.Tensor:
    """K-means pixel by pixel, each among the cells at most one row and one column from its first."""
    _, h, w = image.shape
    home = {(i, j): (i * rows // h, j * columns // w) for i in range(h) for j in range(w)}
    feature = {
        (i, j): torch.cat([image[:, i, j], compactness * torch.tensor([i * rows / h, j * columns / w])])
        for i, j in home
    }
    label = dict(home)
    for _ in range(n_steps):
        members: dict[tuple[int, int], list[torch.Tensor]] = {}
        for pixel, cell in label.items():
            members.setdefault(cell, []).append(feature[pixel])
        centre = {cell: torch.stack(parts).mean(0) for cell, parts in members.items()}
        for pixel, (r, c) in home.items():
            near = [n for n in centre if abs(n[0] - r) <= 1 and abs(n[1] - c) <= 1]
            label[pixel] = min(near, key=lambda n: float((feature[pixel] - centre[n]).square().sum()))
    return torch.tensor([[label[i, j][0] * columns + label[i, j][1] for j in range(w)] for i in range(h)])


def test_superpixels_are_k_means_on_colour_and_position() -> None:
    images = torch.rand(2, 2, 8, 11, generator=generator(3))
    partition = superpixels(images, 12, compactness=0.5, n_steps=3)  # 3 rows and 4 columns
    assert partition.size == 12
    assert partition.labels is not None
    for image, labels in zip(images, partition.labels, strict=True):
        slow = slow_superpixels(image, 3, 4, 0.5, 3)
        assert torch.equal(labels.view(2, 8, 11)[0], slow)
        assert torch.equal(labels.view(2, 8, 11)[1], slow)
    assert not torch.equal(*partition.labels)


def test_pictures_of_cells() -> None:
    s = torch.rand(20, generator=generator(1))
    assert torch.equal(grid(SHAPE, 4, 5).heatmap(s), s.view(4, 5))
    full = torch.rand(2 * 13 * 17, generator=generator(2))
    mean = full.view(SHAPE).mean(0)
    assert torch.equal(components(SHAPE).heatmap(full), mean)
    assert torch.equal(components(SHAPE).heatmap(full, side=17), mean)
    thin = components((2, 12, 16)).heatmap(full[: 2 * 12 * 16], side=8)
    assert thin.shape == (8, 8)
    wide = full[: 2 * 12 * 16].view(2, 12, 16).mean(0)
    narrow = components((2, 12, 16)).heatmap(full[: 2 * 12 * 16], side=12)
    assert narrow.shape == (12, 12)  # the height is left as it is
    torch.testing.assert_close(narrow[:, 0], wide[:, :2].mean(1))
    torch.testing.assert_close(thin.mean(), wide.mean(), rtol=0.1, atol=0)


def test_each_image_has_its_superpixels() -> None:
    labels = torch.tensor([[0, 0, 1, 1], [1, 0, 0, 1]])
    partition = Partition((1, 2, 2), 2, labels)
    s = torch.tensor([0.25, 0.75])
    assert partition.heatmap(s, image=0).flatten().tolist() == [0.25, 0.25, 0.75, 0.75]
    assert partition.heatmap(s, image=1).flatten().tolist() == [0.75, 0.25, 0.25, 0.75]
    sums = partition.gather(
        torch.tensor([1.0, 2.0, 4.0, 8.0]).view(1, 1, 2, 2).expand(2, -1, -1, -1), torch.tensor([1, 0])
    )
    assert sums.tolist() == [[6.0, 9.0], [3.0, 12.0]]


def test_a_refined_mask_is_the_mean_over_its_cell_and_empty_cells_get_nothing() -> None:
    fine = Partition((1, 2, 2), 3, torch.tensor([[0, 0, 0, 2]]))  # cell 1 is empty
    s = torch.tensor([[1.0, 0.5, 0.0, 0.25]])
    rows = torch.tensor([0])
    assert refined(pixels((1, 2, 2)), fine, s, rows, torch.tensor([9])).tolist() == [[0.5, 0.0, 0.25]]
    half = refined(pixels((1, 2, 2)), fine, s, rows, torch.tensor([0.375]))
    assert half.tolist() == [[0.25, 0.0, 0.125]]
    assert refined(pixels((1, 2, 2)), fine, torch.zeros(1, 4), rows, torch.tensor([1])).tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize(("layout", "width"), [((5, 7), 0.7), ((3, 4), 2.5), ((1, 6), 1.0)])
def test_soft_regions_keep_the_sum_and_stay_in_the_box(layout, width):
    cells = grid((2, 10, 14), *layout)
    regions = Regions.around(cells, width)
    eye = regions.spread(torch.eye(cells.size))
    torch.testing.assert_close(eye, eye.T)
    torch.testing.assert_close(eye.sum(0), torch.ones(cells.size))
    assert float(eye.min()) >= 0
    s = torch.rand(3, cells.size, generator=torch.Generator().manual_seed(0))
    rows = torch.zeros(3, dtype=torch.long)
    mask = regions.expand(s, rows)
    torch.testing.assert_close(mask, cells.expand(regions.spread(s), rows))
    other = torch.rand(mask.shape, generator=torch.Generator().manual_seed(1))  # adjoint: <expand s, g> = <s, gather g>
    torch.testing.assert_close((mask * other).sum((1, 2, 3)), (s * regions.gather(other, rows)).sum(1))


def test_a_narrow_region_is_a_cell_and_cells_without_a_grid_have_none():
    cells = grid((1, 6, 6), 3, 3)
    s = torch.rand(2, 9, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(Regions.around(cells, 0.05).spread(s), s)
    with pytest.raises(OptionError, match="soft regions need cells in a grid"):
        Regions.around(components((3, 4, 4)), 1.0)
