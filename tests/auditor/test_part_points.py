import pytest
import torch
from PIL import Image

from auditor import open_data
from auditor.errors import DataError, OptionError
from auditor.part_points import part_masks
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
