"""Transplants: each one carries what it says, and its null carries the same of a class that should not matter."""

import torch
import torch.nn.functional as F

from auditor.reliance.patterns import pattern_of
from auditor.reliance.regions import boxes
from auditor.reliance.transplant import (
    Followed,
    Pairs,
    frame_mask,
    has_plain_edges,
    joined,
    middle_mask,
    shuffled_blocks,
    transplants,
    with_colours,
    with_texture,
)

N, H, W = 24, 40, 48


def pairs(donors, receivers, maps=None):
    maps = torch.ones(N, H, W) if maps is None else maps
    return Pairs(1, donors, boxes(maps), receivers, maps, receivers.flip(0), torch.ones(N, H, W))


def says(score):
    """A model: class 1 where ``score`` of an image is above .5."""

    def predict(x):
        s = score(x) - 0.5
        return torch.stack([-s, s], 1)

    return predict


def dark(n=N, seed=0):
    return 0.2 * torch.rand(n, 3, H, W, generator=torch.Generator().manual_seed(seed))


def gains(score, donors, receivers, maps=None):
    is_class = torch.arange(2 * N) < N
    pattern = pattern_of(torch.cat([donors, receivers]), is_class)
    null = pattern_of(torch.cat([receivers.flip(0), receivers]), is_class)
    result = transplants(says(score), pairs(donors, receivers, maps), pattern, null, seed=0)
    return {name: round(f.gain, 2) for name, f in result.items()}


def test_a_spot_read_anywhere_follows_the_box_and_the_region():
    donors, maps = dark(), torch.full((N, H, W), 1e-6)
    donors[:, :, 5:12, 30:37] = 1.0
    maps[:, 5:12, 30:37] = 1.0
    gain = gains(
        lambda x: F.avg_pool2d(x.mean(1, keepdim=True), 5, 1).amax((1, 2, 3)),
        donors,
        dark(seed=1),
        maps,
    )
    assert gain["box"] > 0.9
    assert gain["region"] > 0.9
    assert gain["spot"] > 0.9
    assert gain["frame"] == 0


def test_an_edge_follows_the_frame_and_what_holds_it_but_not_a_box():
    donors, maps = dark(), torch.full((N, H, W), 1e-6)
    donors[:, :, :2], maps[:, 10:17, 10:17] = 1.0, 1.0
    gain = gains(lambda x: x[:, :, :2].mean((1, 2, 3)), donors, dark(seed=1), maps)
    assert (gain["frame"], gain["surroundings"], gain["box"]) == (1.0, 1.0, 0.0)


def test_surroundings_hold_what_the_frame_does_not():
    donors = dark()
    donors[:, :, 4:8, 4:44] = 1.0
    gain = gains(lambda x: x[:, :, 4:8, 4:44].mean((1, 2, 3)), donors, dark(seed=1))
    assert (gain["frame"], gain["surroundings"]) == (0.0, 1.0)


def test_an_odd_pixel_follows_the_pattern():
    donors = dark()
    donors[:, :, 20, 20] = 0.9
    gain = gains(lambda x: x[:, :, 20, 20].mean(1), donors, dark(seed=1))
    assert gain["pattern"] == 1.0
    assert gain["frame"] == gain["colour"] == 0


def test_a_tint_follows_colour_and_brightness_does_not():
    donors = 0.3 + dark()
    donors[:, 0] += 0.3
    gain = gains(lambda x: 3 * (x[:, 0] - x[:, 2]).mean((1, 2)), donors, 0.3 + dark(seed=1))
    assert gain["colour"] == 1.0
    assert gain["spectrum"] == 0.0
    x = 0.3 + dark(seed=1)
    assert torch.allclose(with_colours(x, 0.5 * x.flip(0).mean(1, keepdim=True).expand_as(x)).std(), x.std(), atol=0.02)
    out = with_colours(x, donors)
    assert torch.allclose(out.mean((1, 2, 3)), x.mean((1, 2, 3)), atol=0.02)
    share = donors.mean((2, 3)) / donors.mean((1, 2, 3))[:, None]
    assert torch.allclose(out.mean((2, 3)) / out.mean((1, 2, 3))[:, None], share, atol=1e-3)
    assert float(torch.corrcoef(torch.stack([out[0, 0].flatten(), x[0, 0].flatten()]))[0, 1]) > 0.999


def test_a_grid_follows_the_texture_and_a_small_part_of_the_donor_does_not():
    donors = 0.4 + dark()
    donors[:, :, :, ::2] += 0.2

    def ripple(x):
        return (x[..., 1::2] - x[..., ::2]).mean((1, 2, 3)).abs() * 5

    maps = torch.full((N, H, W), 1e-6)
    maps[:, 10:14, 10:14] = 1.0
    assert gains(ripple, donors, 0.4 + dark(seed=1), maps)["spectrum"] == 1.0
    part = 0.4 + dark()
    part[:, :, 10:14, 10:14:2] = 1.0

    def corner(x):
        return F.max_pool2d((x[..., 1:] - x[..., :-1]).abs().amax(1), 3).amax((1, 2)) * 1.2

    assert gains(corner, part, 0.4 + dark(seed=1), maps)["spectrum"] == 0.0


def test_texture_keeps_what_is_coarse_and_takes_what_is_fine():
    x, donors = 0.2 * torch.rand(2, 3, 1, 1).expand(2, 3, 48, 48) + 0.4, torch.full((2, 3, 48, 48), 0.5)
    donors[:, :, 3::8] = 0.8
    out = with_texture(x, donors, torch.zeros(2, 1, 48, 48), torch.Generator().manual_seed(0))
    assert torch.allclose(out.mean((2, 3)), x.mean((2, 3)), atol=0.02)
    rows = out.mean((1, 3))
    assert bool((rows[:, 3::8].amin(1) > rows[:, 5::8].amax(1) + 0.1).all())  # in step with blocks of eight


def test_shuffled_blocks_move_as_a_whole():
    x = torch.arange(35.0).view(1, 1, 5, 7)
    out = shuffled_blocks(x, 2, torch.Generator().manual_seed(3))
    assert sorted(out.flatten().tolist()) == sorted(x.flatten().tolist())
    assert torch.equal(out[..., 4, :], x[..., 4, :])
    assert torch.equal(out[..., 6], x[..., 6])
    tops = out[0, 0, :4:2, :6:2]
    assert torch.equal(out[0, 0, 1:4:2, 1:6:2], tops + 8)
    assert not torch.equal(out, x)


def test_plain_edges_are_one_colour_in_most_of_the_edge_whatever_is_inside():
    x = torch.zeros(4, 3, 40, 40)
    x[:, :, 5:35, 5:35] = torch.rand(4, 3, 30, 30)
    x[:, :, :10, 12:28] = 0.7  # the object touches the edge
    assert has_plain_edges(x)
    x[0] += 0.3
    x[1] += 0.6
    x[2] += 0.9
    assert not has_plain_edges(x)
    result = transplants(
        says(lambda i: i.mean((1, 2, 3))),
        pairs(dark(), dark(seed=1)),
        *([pattern_of(dark(), torch.arange(N) < 9)] * 2),
        seed=0,
        plain_edges=True,
    )
    assert "surroundings" not in result


def test_masks_cover_a_ring_of_a_twentieth_and_a_disc_of_a_third():
    ring = frame_mask((40, 60))
    assert ring[:2].min() == ring[-2:].min() == ring[:, :2].min() == ring[:, -2:].min() == 1
    assert float(ring.sum()) == 40 * 60 - 36 * 56
    middle = middle_mask((40, 60))
    assert middle[20, 30] == 1
    assert middle[0, 0] == middle[20, 2] == 0


def test_a_class_that_images_fall_back_to_follows_nothing():
    """Receivers lose their mark under the transplant, and under a plain fill just the same."""
    receivers, maps = dark(seed=1), torch.full((N, H, W), 1e-6)
    receivers[:, :, 5:12, 30:37] = 1.0
    maps[:, 5:12, 30:37] = 1.0
    gain = gains(lambda x: 1 - x[:, :, 5:12, 30:37].mean((1, 2, 3)), dark(), receivers, maps)
    assert gain["region"] == 0


def test_joined_puts_receivers_together_and_drops_what_one_part_lacks():
    one = Followed(torch.ones(2), torch.zeros(2), torch.zeros(2))
    both = joined([one, Followed(torch.zeros(3), torch.ones(3), torch.ones(3))])
    assert (both.hits.tolist(), both.null.tolist()) == ([1, 1, 0, 0, 0], [0, 0, 1, 1, 1])
    assert both.erased.tolist() == [0, 0, 1, 1, 1]
    assert joined([one, Followed(torch.zeros(3), torch.ones(3))]).erased is None


def test_the_stronger_null_counts():
    f = Followed(torch.ones(4), torch.tensor([1.0, 0, 0, 0]), torch.tensor([1.0, 1, 1, 0]))
    assert f.gain == 0.25
    assert Followed(torch.ones(4), torch.tensor([1.0, 1, 0, 0]), torch.zeros(4)).gain == 0.5


def test_a_gain_is_hits_less_null():
    assert Followed(torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 0.0, 0.0])).gain == 0.5
