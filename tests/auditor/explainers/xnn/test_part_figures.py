"""The figure of parts: which heat lies on which part, what is drawn, and where it is written."""

from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from auditor.explainers.xnn.part_figures import cells, heat_per_part, is_point, peak, write_part_figure
from auditor.explainers.xnn.table_methods import Heat, Shown
from auditor.metrics.locality import voronoi_parts

SIZE = (13, 17)


@pytest.fixture
def masks():
    points = torch.tensor([[3.0, 2.0], [12.0, 9.0]], dtype=torch.float64)
    return voronoi_parts(points, SIZE, (1.0, 1.0, 14.0, 11.0))


def test_the_peak_of_a_cell_is_its_point(masks):
    assert [peak(m) for m in masks[:2]] == [(2, 3), (9, 12)]
    assert [is_point(m) for m in masks] == [True, True, False]


def test_heat_at_points_and_on_cells_is_that_of_a_plain_sum(masks):
    maps = torch.rand(3, *SIZE, generator=torch.Generator().manual_seed(0))
    at_points, on_cells = heat_per_part(maps, masks, [2, 0])
    for row, f in enumerate((2, 0)):
        whole = float(maps[f].sum())
        assert float(at_points[row, 1]) == pytest.approx(float(maps[f, 9, 12]) / whole)
        plain = sum(float(masks[0, y, x]) * float(maps[f, y, x]) for y in range(13) for x in range(17)) / whole
        assert float(on_cells[row, 0]) == pytest.approx(plain)
    assert heat_per_part(maps, masks, [])[0].shape == (0, 3)


def test_cells_have_a_colour_each_and_the_context_is_pale(masks):
    picture = torch.from_numpy(cells(masks))
    assert picture.shape == (*SIZE, 3)
    assert not torch.equal(picture[2, 3], picture[9, 12])
    torch.testing.assert_close(picture[0, 0], torch.full((3,), 0.85, dtype=picture.dtype))


def test_a_figure_per_class_and_method(masks, tmp_path):
    x = torch.rand(2, 3, *SIZE, generator=torch.Generator().manual_seed(1))
    shown = Shown(x, torch.zeros(2, 4), [masks, masks])
    maps = SimpleNamespace(maps=torch.rand(2, 3, *SIZE, generator=torch.Generator().manual_seed(2)))
    heat = Heat(0, maps, torch.tensor([[False, False, False], [True, False, True]]))
    path = write_part_figure(heat, shown, tmp_path / "new", "srae", "Jay / blue", ("beak", "tail"))
    assert path == tmp_path / "new" / "Jay_blue-srae.png"
    with Image.open(path) as picture:
        assert picture.width > 800
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 200
    nothing = Heat(0, maps, torch.zeros(2, 3, dtype=torch.bool))
    assert write_part_figure(nothing, shown, tmp_path, "nn", "Jay").exists()
