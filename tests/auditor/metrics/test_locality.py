import math

import numpy as np
import pytest
import torch
from PIL import Image

from auditor import open_data
from auditor.errors import DataError, OptionError
from auditor.metrics.locality import (
    box_mask,
    context_share,
    entropy,
    grid_parts,
    locality,
    object_masks,
    part_masks,
    part_masses,
    voronoi_parts,
)
from auditor.subject.preprocessing import Preprocessing

PRE = Preprocessing.of((3, 10, 8), 0.0, 1.0, "stretch")


@pytest.fixture
def birds(tmp_path):
    """Two photos of 32 x 20 pixels, which the model sees at 8 x 10; beaks, one tail, and boxes."""
    for name in ("a", "b"):
        (tmp_path / "birds" / name).mkdir(parents=True)
        Image.new("RGB", (32, 20)).save(tmp_path / "birds" / name / f"{name}1.png")
    (tmp_path / "parts.csv").write_text(
        "image,part,x,y\ntest/a/a1.png,beak,8,4\ntest/a/a1.png,tail,24,16\ntest/b/b1.png,beak,16,10\n"
    )
    (tmp_path / "boxes.csv").write_text("image,x,y,width,height\na/a1.png,4,2,24,16\nb/b1.png,0,0,32,20\n")
    return tmp_path


def test_points_and_boxes_are_scaled_to_the_size_the_model_sees(birds):
    masks = part_masks(open_data(str(birds / "birds")), PRE, birds / "parts.csv", birds / "boxes.csv")
    a = masks("a/a1.png", (10, 8))
    assert a.shape == (3, 10, 8)  # beak, tail, context
    assert a[0].flatten().argmax() == 2 * 8 + 2  # the beak at (8, 4) of 32 x 20 is at (2, 2) of 8 x 10
    assert a[1].flatten().argmax() == 8 * 8 + 6
    outside = torch.ones(10, 8, dtype=torch.bool)
    outside[1:9, 1:7] = False
    assert torch.equal(a[2] == 1, outside)
    b = masks("b/b1.png", (10, 8))
    assert not b[1].any()  # a tail that is not visible
    assert not b[2].any()
    whole = part_masks(open_data(str(birds / "birds")), PRE, birds / "parts.csv")
    assert not whole("a/a1.png", (10, 8))[2].any()


def test_bad_annotations_are_one_clear_sentence(birds):
    data = open_data(str(birds / "birds"))
    with pytest.raises(DataError, match="no column 'part'"):
        part_masks(data, PRE, birds / "boxes.csv")
    with pytest.raises(DataError, match=r"nope\.csv: cannot be read"):
        part_masks(data, PRE, birds / "nope.csv")
    (birds / "few.csv").write_text("image,part,x,y\na1.png,beak,8,much\n")
    with pytest.raises(DataError, match=r"few\.csv: cannot be read"):
        part_masks(data, PRE, birds / "few.csv")
    (birds / "few.csv").write_text("image,part,x,y\na1.png,beak,8,4\n")
    with pytest.raises(DataError, match=r"b/b1\.png has no parts"):
        part_masks(data, PRE, birds / "few.csv")("b/b1.png", (10, 8))
    with pytest.raises(OptionError, match="no image folder"):
        part_masks(open_data("sklearn:digits"), PRE, birds / "parts.csv")
    with pytest.raises(OptionError, match="crops the centre"):
        part_masks(data, Preprocessing.of((3, 10, 8), 0.0, 1.0, "crop"), birds / "parts.csv")


def test_locality_known_answers():
    assert round(entropy(torch.ones(16)), 6) == 2.772589
    parts = voronoi_parts(torch.tensor([[0.0, 0], [4, 4]]), (5, 5))
    masses = part_masses(torch.ones(5, 5) / 25, parts)
    # the diagonal ties go to the first point, so symmetry holds up to those five pixels
    assert abs(float(masses[0] - masses[1])) <= 5 * float(parts.max()) / 25
    odd = voronoi_parts(torch.tensor([[0.0, 2], [3, 2]]), (5, 4))  # no ties
    m = part_masses(torch.ones(5, 4) / 20, odd)
    assert abs(float(m[0] - m[1])) < 1e-12
    assert locality([None, torch.zeros(5, 5)], parts) is None
    one = torch.zeros(8, 8)
    one[1, 1] = 1
    result = locality([one, None], grid_parts((8, 8)))
    assert result.entropy == 0
    assert result.skipped == 1
    uniform = locality([torch.ones(13, 17)], grid_parts((13, 17)))
    assert 2.7 < uniform.entropy <= math.log(16)


def test_voronoi_puts_everything_outside_the_box_into_context_and_ignores_hidden_points():
    points = torch.tensor([[2.0, 2.0], [math.nan, math.nan], [6.0, 5.0]])
    parts = voronoi_parts(points, (9, 11), box=(1, 1, 8, 6))
    assert parts.shape == (4, 9, 11)
    assert float(parts[1].sum()) == 0
    assert float(parts[0, 2, 2]) == 1
    assert float(parts[:3].sum(0)[0].sum()) == 0
    assert float(parts[3, 0, 0]) == 1
    heat = torch.zeros(9, 11)
    heat[0, 0], heat[3, 3] = 1, 3
    assert context_share(heat, (1, 1, 8, 6)) == 0.25
    assert math.isnan(context_share(heat * 0, (1, 1, 8, 6)))


def test_a_box_holds_the_pixels_whose_centres_lie_in_it():
    mask = box_mask((1.5, 0.5, 2.0, 3.0), (5, 6))
    want = torch.zeros(5, 6, dtype=torch.bool)
    for y in range(5):
        for x in range(6):
            want[y, x] = 1.5 <= x + 0.5 <= 3.5 and 0.5 <= y + 0.5 <= 3.5
    assert torch.equal(mask, want)
    assert int(mask.sum()) == 12


def test_a_grid_shares_out_every_pixel_once():
    parts = grid_parts((5, 7), 2, 3)
    assert parts.shape == (6, 5, 7)
    assert torch.equal(parts.sum(0), torch.ones(5, 7).double())
    assert [int(part.sum()) for part in parts] == [9, 6, 6, 6, 4, 4]
    assert parts[0, 0, 0] == parts[2, 0, 6] == parts[3, 4, 0] == parts[5, 4, 6] == 1
    assert len(grid_parts((8, 8))) == 16


def test_parts_fade_with_the_distance_to_their_point():
    points = torch.tensor([[1.0, 1.0], [6.0, 4.0]])
    parts = voronoi_parts(points, (6, 8))
    distance = [[[math.hypot(x - px, y - py) for x in range(8)] for y in range(6)] for px, py in points.tolist()]
    for k in (0, 1):
        cell = [(y, x) for y in range(6) for x in range(8) if distance[k][y][x] == min(d[y][x] for d in distance)]
        farthest = max(distance[k][y][x] for y, x in cell)
        for y in range(6):
            for x in range(8):
                want = 1 - distance[k][y][x] / farthest if (y, x) in cell else 0
                if k == 0 or distance[0][y][x] != distance[1][y][x]:
                    assert float(parts[k, y, x]) == pytest.approx(want, abs=1e-12)
    assert not parts[2].any()
    alone = voronoi_parts(torch.tensor([[0.0, 0.0]]), (1, 1))
    assert alone[0, 0, 0] == 1  # a cell of one pixel


def test_masses_are_averaged_over_images_before_the_entropy():
    parts = grid_parts((2, 2), 2, 2)
    corner, other = torch.zeros(2, 2), torch.zeros(2, 2)
    corner[0, 0], other[1, 1] = 3.0, 9.0  # each scaled to mass 1 first
    result = locality([corner, None, other, torch.zeros(2, 2)], parts)
    assert result.masses == (0.5, 0, 0, 0.5)
    assert result.entropy == pytest.approx(math.log(2))
    assert result.skipped == 2
    own_parts = [parts, parts, parts.flip(0), parts]
    assert locality([corner, None, other, None], own_parts).masses == (1.0, 0, 0, 0)
    assert entropy(torch.tensor([1.0, 3.0])) == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75))
    assert locality([corner], parts * 0) is None


def test_object_masks_are_the_same_parts_in_all_images(tmp_path):
    for name in ("a/one", "a/two"):
        for folder in ("images", "masks"):
            (tmp_path / folder / "a").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 6), (90, 90, 90)).save(tmp_path / "images" / f"{name}.png")
    left = np.zeros((6, 8), np.uint8)
    left[:, :4] = 7
    Image.fromarray(left).save(tmp_path / "masks" / "a" / "one.png")
    Image.fromarray(3 * (left == 0).astype(np.uint8)).save(tmp_path / "masks" / "a" / "two.png")
    data, pre = open_data(str(tmp_path / "images")), Preprocessing.of((3, 6, 8), mean=0.5, std=0.25, resize="stretch")
    masks = object_masks(data, pre, tmp_path / "masks")
    one, two = masks("a/one.png", (3, 4)), masks("a/two.png", (3, 4))
    assert one.shape == two.shape == (2, 3, 4)  # objects 3 and 7
    assert [int(m.sum()) for m in (*one, *two)] == [0, 6, 6, 0]
    Image.fromarray(left[:5]).save(tmp_path / "masks" / "a" / "two.png")
    with pytest.raises(DataError, match=r"two.png is 8 x 5 and its image 8 x 6; a mask is as large as its image"):
        object_masks(data, pre, tmp_path / "masks")("a/two.png", (3, 4))
    (tmp_path / "masks" / "a" / "two.png").unlink()
    with pytest.raises(DataError, match=r"there is none for a/two.png"):
        object_masks(data, pre, tmp_path / "masks")("a/two.png", (3, 4))
    with pytest.raises(DataError, match="there is no PNG"):
        object_masks(data, pre, tmp_path / "nothing")
