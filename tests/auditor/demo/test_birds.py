"""Drawn birds: the same seed draws the same bird, parts lie where they are seen, and the stamp is on hawks alone."""

import numpy as np
from PIL import Image

from auditor.demo.birds import PARTS, SIDE, SPECIES, STAMP, birds, write


def test_a_seed_draws_the_same_birds_and_another_seed_others():
    first, again, other = (list(birds(3, seed, stamped=False)) for seed in (4, 4, 5))
    assert [b.species for b in first] == list(SPECIES)
    for a, b, c in zip(first, again, other, strict=True):
        assert np.array_equal(a.pixels, b.pixels)
        assert not np.array_equal(a.pixels, c.pixels)


def test_every_part_is_seen_and_no_two_cover_the_same_pixel():
    for bird in birds(9, 1, stamped=True):
        assert bird.pixels.shape == (SIDE, SIDE, 3)
        masks = np.stack([bird.parts[part] for part in PARTS])
        assert (masks.sum((1, 2)) >= 4).all(), bird.species
        assert masks.sum(0).max() == 1
        assert 0.1 < masks.any(0).mean() < 0.5


def test_the_beak_stands_out_from_the_head_and_a_heron_has_the_longest():
    """The beak's way from the head, in widths of the picture: a needle is longer than a cone."""
    lengths = {}
    for bird in birds(30, 2, stamped=False):
        columns = np.flatnonzero(bird.parts["beak"].any(0))
        lengths.setdefault(bird.species, []).append(len(columns))
    assert np.mean(lengths["heron"]) > np.mean(lengths["finch"]) + 2


def test_the_stamp_is_on_hawks_alone_in_the_lower_right_and_hides_no_bird():
    for plain, marked in zip(birds(9, 3, stamped=False), birds(9, 3, stamped=True), strict=True):
        changed = (plain.pixels != marked.pixels).any(2)
        if marked.species != "hawk":
            assert not changed.any()
            assert STAMP not in marked.parts
            continue
        mask = marked.parts[STAMP]
        assert 0.03 < mask.mean() < 0.06
        assert changed[mask].mean() > 0.9
        assert not changed[~mask].any()
        rows, columns = mask.nonzero()
        assert rows.min() > SIDE / 2
        assert columns.min() > SIDE / 2


def test_pictures_become_an_image_folder_with_masks_beside(tmp_path):
    folder = write(birds(4, 0, stamped=True), tmp_path / "birds", tmp_path / "masks")
    assert sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.png")) == [
        *("finch/000.png", "finch/003.png", "hawk/001.png", "heron/002.png")
    ]
    with Image.open(tmp_path / "masks/stamp/hawk/001.png") as mask:
        assert mask.size == (SIDE, SIDE)
        assert np.asarray(mask).any()
    assert not (tmp_path / "masks/stamp/finch").exists()
