"""Judgement: only the class with the planted thing is named, chance accuses nobody, words carry the numbers."""

import json
import math
from dataclasses import replace

import pytest
import torch

from auditor.reliance import Boxes, ClassReliance, Finding, Reliance, RelianceConfig, judge, measure
from auditor.reliance.hiding import Survival
from auditor.reliance.judgement import NEEDED, discoveries, most_telling, p_value, standard_error
from auditor.reliance.transplant import Followed
from tests.auditor.reliance.planted import ReadsBlock, ReadsColour, images, subject
from tests.auditor.reliance.test_measures import block_heat

CONFIG = RelianceConfig(images_per_class=20)


@pytest.fixture(scope="module")
def block():
    x, y = images()
    return measure(subject(ReadsBlock(anywhere=True)), x, y, CONFIG, heat_of=block_heat)


def test_only_the_class_with_the_planted_block_is_found(block):
    findings = judge(block, ["dog", "cat"])
    assert [(f.name, f.verdict) for f in findings] == [("cat", "found"), ("dog", "nothing")]
    cat = findings[0]
    assert cat.cause in ("box", "best_box", "spot", "pattern")
    assert cat.sentence.startswith("Class cat hangs on ")
    assert "from 100% to 0%" in cat.sentence
    assert "pictures of dog" in cat.sentence
    assert cat.advice
    assert len(cat.rows) == len(cat.boxes) == 6
    assert set(cat.rows) <= set(block.classes[1].rows)


def test_a_tint_is_found_as_colour():
    x, y = images(marked=False)
    x[y == 1, 0] += 0.1
    x[y == 0, 2] += 0.1
    findings = judge(measure(subject(ReadsColour()), x, y, CONFIG, heat_of=block_heat))
    assert {f.cause for f in findings if f.verdict == "found"} <= {"colour", "surroundings"}
    assert any(f.verdict == "found" for f in findings)


@pytest.mark.parametrize("seed", range(2))
def test_a_model_that_guesses_gives_no_finding(seed):
    class Dither(ReadsColour):
        """Class by a fine dither of all pixels: nothing that can be moved decides."""

        def forward(self, x):
            weight = torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(8))
            score = torch.sin((x * weight).sum((1, 2, 3)) * self.scale)
            return torch.stack([-score, score], 1)

    x, _ = images(60, marked=False, seed=seed)
    result = measure(subject(Dither()), x, None, CONFIG, heat_of=block_heat)
    assert {f.verdict for f in judge(result)} <= {"nothing", "look"}
    assert not any(f.verdict == "found" for f in judge(result))


def test_a_skipped_class_comes_last_with_its_reason():
    x, y = images(24)
    y[y == 1] = torch.tensor([1] * 6 + [0] * 6)
    findings = judge(measure(subject(ReadsBlock()), x, y, CONFIG, heat_of=block_heat))
    assert [f.verdict for f in findings] == ["skipped"] * 2 or findings[-1].verdict == "skipped"
    assert "only 6 images" in next(f for f in findings if f.label == 1).sentence
    assert math.isnan(findings[-1].score)


def test_a_finding_comes_back_from_json(block):
    for f in judge(block):
        again = Finding.from_json(json.loads(json.dumps(f.to_json())))
        assert again.to_json() == f.to_json()
        assert (again.boxes is None) == (f.boxes is None)
    blank = Finding(0, "a", "skipped", math.nan)
    assert math.isnan(Finding.from_json(blank.to_json()).score)


def test_false_discoveries_by_the_definition():
    p = [0.03, 0.011, 0.5, 0.02, 0.9, 0.024]
    ordered = sorted(p)
    largest = max(k for k in range(1, 7) if ordered[k - 1] <= 0.05 * k / 6)
    assert discoveries(p, 0.05) == [v <= ordered[largest - 1] for v in p]
    assert discoveries([], 0.05) == []
    assert discoveries([0.6, 0.7], 0.05) == [False, False]


def test_the_error_of_a_gain_shrinks_with_images_and_is_never_zero():
    def followed(n, hits):
        return (torch.arange(n) < hits).double()

    assert standard_error(followed(40, 20)) == pytest.approx(math.sqrt((0.25 + 0.5 / 40) / 40))
    assert standard_error(followed(40, 40)) > 0
    assert standard_error(followed(400, 200)) < standard_error(followed(40, 20)) / 3


def test_p_values_are_small_for_the_planted_class_only(block):
    assert p_value(block.classes[1]) < 1e-6
    assert p_value(block.classes[0]) > 0.01


def strong(**gains):
    """A class with such gains over 40 receivers, and boxes without a context."""
    follow = {
        name: Followed((torch.arange(40) < round(40 * g)).double(), torch.zeros(40, dtype=torch.float64))
        for name, g in gains.items()
    }
    n = torch.zeros(12)
    at = Boxes(*(torch.full((12,), v) for v in (1, 2, 3, 4)), torch.ones(12))
    alone = {"hidden": (Survival(0.03, "blur", n, n, n + 1, n),), "rows": tuple(range(12)), "boxes": at}
    return ClassReliance(
        1, "cat", 12, 0.9, followed=follow, sameness=n + 0.5, sameness_null=n + 0.5, context=n, context_null=n, **alone
    )


def verdict(c, accuracy=0.9):
    other = ClassReliance(0, "dog", 12, 0.9, skipped="for this test")
    return judge(Reliance((other, c), "any", 1.0, False, accuracy, 40))[0]


@pytest.mark.parametrize("cause", list(NEEDED))
def test_each_cause_is_found_from_what_it_needs_and_worth_a_look_below(cause):
    assert verdict(strong(**{cause: NEEDED[cause] + 0.05})).verdict == "found"
    assert verdict(strong(**{cause: NEEDED[cause] + 0.05})).cause == cause
    assert verdict(strong(**{cause: NEEDED[cause] - 0.08})).verdict == "look"
    assert verdict(strong(**{cause: 0.1})).verdict == "nothing"
    assert verdict(strong(**{cause: 1.0})).score == 1.0
    text = verdict(strong(**{cause: 0.975}))
    assert "98% into cat" in text.sentence
    assert (text.boxes is not None) == (cause in ("box", "best_box", "spot", "pattern"))


def test_spots_that_look_alike_need_to_be_followed_less():
    c = strong(spot=0.6)
    assert verdict(c).verdict == "look"
    assert verdict(replace(c, sameness=torch.full((12,), 0.9))).verdict == "found"
    assert verdict(replace(strong(spot=0.1), sameness=torch.full((12,), 1.0))).verdict == "nothing"


def test_a_spot_that_is_part_of_something_in_the_middle_is_only_worth_a_look():
    c = replace(strong(box=0.9, spot=0.9), context=torch.full((12,), 0.3))
    assert verdict(c).verdict == "look"
    assert "part of what it shows" in verdict(c).sentence
    outside = replace(strong(box=0.9, spot=0.9, surroundings=0.4), context=torch.full((12,), 0.3), edge_distance=0.15)
    assert verdict(outside).verdict == "found"
    assert verdict(replace(outside, edge_distance=0.25)).verdict == "look"  # the spots lie in the middle after all
    assert verdict(replace(c, edge_distance=0.15)).verdict == "look"  # nothing is followed from the edges


def test_spots_that_are_alike_in_an_early_layer_need_less_and_so_does_a_texture_that_tells_the_class():
    c = strong(box=NEEDED["box"] - 0.1)
    assert verdict(c).verdict == "look"
    early = {"sameness_early": torch.full((12,), 0.9), "sameness_early_null": torch.full((12,), 0.3)}
    assert verdict(replace(c, **early)).verdict == "found"
    part = {"sameness_early": torch.full((12,), 0.6), "sameness_early_null": torch.full((12,), 0.3)}
    assert verdict(replace(c, **part)).verdict == "look"  # as parts of objects are
    texture = strong(spectrum=NEEDED["spectrum"] - 0.1)
    assert verdict(texture).verdict == "look"
    assert verdict(replace(texture, spectrum_leak=1.0)).verdict == "found"


def test_of_causes_about_as_strong_the_most_specific_is_named():
    assert verdict(strong(surroundings=1.0, frame=0.95, spot=1.0)).cause == "spot"
    assert verdict(strong(surroundings=1.0, frame=0.2, spot=0.2)).cause == "surroundings"


def moving(cause, way, share=0.0, erased=None, n=40):
    """A class whose transplant turns such a share of the receivers, and moves the margin so far."""
    hits = (torch.arange(n) < round(n * share)).double()
    none, far = torch.zeros(n, dtype=torch.float64), torch.full((n,), way, dtype=torch.float64)
    return replace(strong(), followed={cause: Followed(hits, none, None if erased is None else none + erased, far)})


WHOLE = ("pattern", "frame", "colour", "spectrum", "surroundings")


@pytest.mark.parametrize("cause", WHOLE)
def test_of_what_lies_over_all_images_the_way_of_the_margin_counts_as_much_as_the_share(cause):
    found = verdict(moving(cause, 1.0, 0.95))
    assert (found.verdict, found.cause) == ("found", cause)
    assert "100% of the way to cat on average" in found.sentence
    assert verdict(moving(cause, 0.0, 0.5)).verdict in ("look", "nothing")
    assert verdict(moving(cause, 0.3)).verdict == "nothing"
    assert p_value(moving(cause, 1.0, 0.95)) < 1e-6


def test_a_class_that_images_fall_back_to_does_not_follow_by_its_margin():
    assert verdict(moving("pattern", 0.9, 0.3)).verdict == "found"
    assert verdict(moving("pattern", 0.9, 0.3, erased=1.0)).verdict == "nothing"


@pytest.mark.parametrize("cause", ["box", "best_box", "spot"])
def test_of_spots_only_what_becomes_the_class_counts(cause):
    assert verdict(moving(cause, 0.9)).verdict == "nothing"


def test_spots_anywhere_in_the_frame_need_to_be_followed_less_and_are_no_part_of_an_object():
    c = strong(box=NEEDED["box"] - 0.1)
    assert verdict(c).verdict == "look"
    assert verdict(replace(c, place_entropy=0.85)).verdict == "found"
    assert verdict(replace(c, place_entropy=0.5)).verdict == "look"  # where objects are
    part = replace(strong(box=0.9), context=torch.full((12,), 0.3))
    assert verdict(replace(part, place_entropy=0.4)).verdict == "look"
    assert verdict(replace(part, place_entropy=0.85)).verdict == "found"
    assert verdict(replace(part, place_entropy=0.0)).verdict == "found"  # always at the very same place


def test_spots_in_the_middle_may_well_be_alike():
    c = replace(strong(spot=0.6), sameness=torch.full((12,), 0.9), edge_distance=0.1)
    assert verdict(c).verdict == "found"
    assert verdict(replace(c, edge_distance=0.4)).verdict == "look"


def test_what_lies_in_the_surroundings_is_named_before_them():
    f = verdict(strong(surroundings=1.0, pattern=NEEDED["pattern"] + 0.05))
    assert (f.cause, f.score) == ("pattern", 1.0)


def test_boxes_apart_from_the_pattern_are_replaced_by_its_own():
    divergence = torch.zeros(40, 60)
    divergence[30:37, 40:55] = 50.0
    at = verdict(replace(strong(pattern=1.0), divergence=divergence)).boxes
    assert int(at.top.min()) >= 25
    assert int(at.left.min()) >= 35


def test_a_model_that_is_right_by_chance_is_not_accused_and_says_so():
    f = verdict(strong(frame=1.0), accuracy=0.55)
    assert f.verdict == "look"
    assert "about as often as by chance (50%)" in f.sentence


def test_the_box_of_a_fixed_mark_is_widened_to_all_of_it():
    c = strong(pattern=1.0)
    divergence = torch.zeros(40, 60)
    divergence[1:8, 1:16] = 50.0
    at = verdict(replace(c, divergence=divergence)).boxes
    assert (int(at.height[0]), int(at.width[0])) != (3, 4)
    assert int(at.width[0]) >= 10


def test_the_share_to_speak_of_is_small_unless_a_larger_one_takes_much_more():
    def hidden(share, *still):
        return [
            Survival(share, "blur", torch.tensor([s]).double(), torch.zeros(1), torch.ones(1).double(), torch.zeros(1))
            for s in still
        ]

    assert most_telling([*hidden(0.03, 0.2, 0.2, 0.9), *hidden(0.10, 0.0)]) == (0.03, pytest.approx(0.2), 1.0)
    assert most_telling([*hidden(0.03, 0.8), *hidden(0.10, 0.0)])[0] == 0.10
    assert most_telling([]) == (0.0, 1.0, 1.0)


def test_a_spot_that_is_followed_weakly_and_not_missed_is_nothing():
    c = strong(box=NEEDED["box"] - 0.08)
    still = torch.ones(12)
    unmissed = (Survival(0.03, "blur", still, still, still, still),)
    assert verdict(c).verdict == "look"
    assert verdict(replace(c, hidden=unmissed)).verdict == "nothing"
    assert verdict(replace(c, hidden=())).verdict == "look"  # not tried
    assert verdict(replace(strong(box=0.9), hidden=unmissed)).verdict == "found"  # images fall back to it
    assert verdict(replace(strong(frame=NEEDED["frame"] - 0.08), hidden=unmissed)).verdict == "look"
