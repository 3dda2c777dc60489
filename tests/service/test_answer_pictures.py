"""Pictures of an answer: pixels as PNG, and where a concept is seen in a crop."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from auditor.service.answer_pictures import picture, tinted


@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture_has_the_pixels_it_was_made_of(channels):
    pixels = torch.randint(0, 256, (channels, 5, 7), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    for image in (pixels, pixels.float() / 255, pixels.float() / 128 - 0.2):  # bytes, floats, and floats out of range
        head, _, content = picture(image).partition(",")
        assert head == "data:image/png;base64"
        with Image.open(io.BytesIO(base64.b64decode(content))) as opened:
            array = np.asarray(opened)
        assert array.shape == ((5, 7) if channels == 1 else (5, 7, 3))
        expected = (image.float() * (1 if image.dtype == torch.uint8 else 255)).clamp(0, 255).round().byte()
        assert (array == (expected[0] if channels == 1 else expected.permute(1, 2, 0)).numpy()).all()


def test_a_gallery_shows_where_only_when_it_is_known():
    crop = torch.arange(3 * 4 * 5, dtype=torch.uint8).view(3, 4, 5)
    everywhere = torch.full((4, 5), 255, dtype=torch.uint8)
    assert torch.equal(tinted(crop, everywhere), crop)
    somewhere = everywhere.clone()
    somewhere[0] = 0
    picture = tinted(crop, somewhere).int()
    assert int((picture[0, 1:] - picture[2, 1:]).min()) > 50, "red where the concept is seen"
    assert int((picture[0, 0] - picture[2, 0]).abs().max()) < 50
