"""Fills: known pixels stay, hidden ones lose their content, blur keeps the mean."""

import pytest
import torch

from auditor.reliance.fills import FILLS, blurred, combined, filled


@pytest.mark.parametrize("fill", FILLS)
def test_only_hidden_pixels_change_and_their_content_is_gone(fill):
    x = torch.rand(2, 3, 21, 30)
    spot = x.clone()
    masks = torch.zeros(2, 1, 21, 30)
    masks[:, :, 8:13, 10:16] = 1
    spot[:, :, 8:13, 10:16] = 5.0
    out = filled(spot, masks, fill)
    assert torch.allclose(out * (1 - masks), spot * (1 - masks))
    if fill != "inpaint":  # blur and mean see the image as it is: a spot of 5 shines through, by its share
        assert float(out[:, :, 8:13, 10:16].max()) < 3.0
    else:
        assert float(out[:, :, 8:13, 10:16].max()) <= 1.0


def test_blurred_keeps_a_constant_and_flattens_detail():
    assert torch.allclose(blurred(torch.full((1, 3, 13, 17), 0.4)), torch.full((1, 3, 13, 17), 0.4), atol=1e-6)
    x = torch.rand(1, 3, 32, 32)
    assert float(blurred(x).std()) < 0.2 * float(x.std())


def test_combined_takes_above_under_the_mask():
    mask = torch.zeros(1, 1, 4, 5)
    mask[..., 2:] = 1
    out = combined(torch.zeros(1, 3, 4, 5), torch.ones(1, 3, 4, 5), mask)
    assert out[..., :2].sum() == 0
    assert bool((out[..., 2:] == 1).all())


def test_an_unknown_fill_is_refused():
    with pytest.raises(ValueError, match="one of blur, mean, inpaint"):
        filled(torch.rand(1, 3, 8, 8), torch.zeros(1, 1, 8, 8), "black")
