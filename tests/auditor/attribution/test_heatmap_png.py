"""Heat as transparent layers: the colour says for or against, the opacity how much."""

import base64
import io

import pytest
import torch
from PIL import Image

from auditor.attribution.heatmap import BLUE, RED
from auditor.attribution.heatmap_png import LEVELS, OPACITY, SIDE, heat_layers


def opened(url: str) -> torch.Tensor:
    head, _, content = url.partition(",")
    assert head == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(content))) as image:
        return torch.tensor(list(image.convert("RGBA").getdata())).view(*image.size[::-1], 4)


def test_colour_is_the_sign_and_opacity_the_share_of_the_largest():
    fine = torch.zeros(2, SIDE, SIDE)  # as fine as the layer: nothing is interpolated
    fine[0, 3, 5], fine[0, 10, 60] = 4.0, 1.0
    fine[1, 0, 0] = 0.5
    for url, heat, colour in zip(heat_layers(fine, [False, True], (13, 13)), fine, (RED, BLUE), strict=True):
        picture = opened(url)
        assert picture.shape == (SIDE, SIDE, 4)
        assert all(tuple(p) == colour for p in picture[..., :3].reshape(-1, 3).unique(dim=0).tolist())
        share = (heat / heat.max() * (LEVELS - 1)).round() / (LEVELS - 1)
        assert (picture[..., 3] - 255 * OPACITY * share).abs().max() <= 0.5  # whole levels


@pytest.mark.parametrize(("size", "drawn"), [((20, 10), (64, 32)), ((10, 20), (32, 64)), ((224, 224), (64, 64))])
def test_a_layer_has_the_proportions_of_the_image(size, drawn):
    (url,) = heat_layers(torch.rand(1, 4, 4), [False], size)
    assert opened(url).shape[:2] == drawn


def test_nothing_and_what_is_no_number_are_transparent():
    maps = torch.stack([torch.zeros(4, 4), torch.full((4, 4), float("nan"))])
    for url in heat_layers(maps, [False, False], (8, 8)):
        assert opened(url)[..., 3].max() == 0
