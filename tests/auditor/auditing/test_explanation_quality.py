"""Metrics of explanations on a model with known answers, NaN, and measures that cannot be taken."""

import math

import pytest
import torch

from auditor.auditing.explanation_quality import GROUPS, NAMES, take
from auditor.auditing.fit_metrics import ALSO
from auditor.auditing.images import answers, choose, held_out
from auditor.errors import NumericsError
from auditor.metrics.names import EXPLAINER, WORDS
from tests.auditor.auditing.linear_case import WEIGHTS, PixelWise, case_of


def test_an_exact_explanation_is_faithful_complete_and_moves_as_the_weights_say(linear, chosen):
    case = case_of(linear, chosen, PixelWise())
    measures = take("faithfulness", case)
    assert measures["f_cls"].value == 1.0
    assert measures["f_reg"].value == pytest.approx(0, abs=1e-5)  # float32 sum of 35 products
    assert measures["completeness_gap"].value < 1e-6
    noise = take("noise", case)
    # contributions are w_k x_k, so the change per change of the image lies between the least and the largest |w|
    assert float(WEIGHTS.abs().min()) <= noise["noise_c2"].value <= float(WEIGHTS.abs().max())
    assert noise["noise_similarity"].value > 0.99 > noise["noise_similarity"].null


def test_half_an_explanation_leaves_half_unexplained(linear, chosen):
    measures = take("faithfulness", case_of(linear, chosen, PixelWise(scale=0.5)))
    value = chosen.logits.max(1).values.abs()
    expected = (0.5 * value / value.clamp_min(1)).mean()
    assert measures["residual_share"].value == pytest.approx(float(expected), rel=1e-4)
    assert measures["f_reg"].value == pytest.approx(float(0.5 * value.mean()), rel=1e-4)


def test_the_true_map_flips_better_than_chance_and_its_opposite_worse(linear, chosen):
    good = take("flipping", case_of(linear, chosen, PixelWise()))
    bad = take("flipping", case_of(linear, chosen, PixelWise(scale=-1.0)))
    assert good["flip_area"].value < good["flip_area"].null < good["deletion_area"].value
    assert bad["flip_area"].value > bad["flip_area"].null
    assert good["flip_gain"].low > 0 > bad["flip_gain"].high
    assert good["flip_area"].value == pytest.approx(bad["deletion_area"].value, rel=1e-5)


def test_one_pixel_maps_are_local_and_apart(linear, chosen):
    measures = take("heatmaps", case_of(linear, chosen, PixelWise()))
    assert 0 < measures["heatmap_spread"].value < math.log(16) == measures["heatmap_spread"].null
    # 35 maps of one pixel each correlate with -1/34: the least overlap there is
    n, r = 35, 1 / 34
    assert measures["heatmap_overlap"].value == pytest.approx(
        (math.sqrt(n + n * (n - 1) * r * r) - math.sqrt(n)) / math.sqrt(n)
    )


def test_nan_contributions_never_pass(linear, chosen):
    case = case_of(linear, chosen, PixelWise(scale=math.nan))
    for group in ("faithfulness", "flipping", "noise"):
        for name, measure in take(group, case).items():
            assert measure.status in ("failed", "skipped"), name
            assert math.isnan(measure.value), name


def test_a_group_that_cannot_be_taken_has_failed_with_the_reason(linear, chosen):
    class Broken(PixelWise):
        def explain(self, subject, images, target=None):
            raise NumericsError("no numbers today.")

    for group, entry in GROUPS.items():
        if group not in ("basis", "groups"):  # these do not explain
            measures = take(group, case_of(linear, chosen, Broken()))
            assert set(measures) == set(entry.names)
            assert all(m.status == "failed" and "no numbers today" in m.reason for m in measures.values())


def test_every_metric_has_words():
    assert NAMES | set(ALSO) == EXPLAINER  # one of the metrics of a fit stands beside those of an audit
    assert set(WORDS) >= NAMES


def test_the_nmf_stand_in_is_the_reconstruction(digits, concepts, audited, digits_data):
    """f_cls of the audit against the plain definition, image by image."""
    model_answers = answers(digits, digits_data)
    picked = choose(
        digits, digits_data, model_answers, {"concepts": held_out(concepts, digits_data, model_answers)}, 30
    )
    layout = digits.layout(concepts.layer_)
    same = []
    with torch.no_grad():
        for x in picked.images:
            z = digits.activations(x[None], [concepts.layer_])[concepts.layer_]
            z_hat = layout.from_positions(concepts.W_ @ concepts.scores(layout, z), z)
            same.append(float(digits.forward_from(concepts.layer_, z_hat).argmax() == digits.logits(x[None]).argmax()))
    assert list(audited.metrics["explainer/concepts/f_cls"].per_image) == same
