"""How explanations change with noise, with destroyed weights and with another fit."""

import pytest
import torch

from auditor import fit, open_data
from auditor.auditing.case import Case, Effort
from auditor.auditing.explanation_quality import take
from auditor.auditing.images import AuditImages
from tests.auditor.auditing.linear_case import PixelWise, case_of


def test_explanations_that_ignore_the_model_fail_the_randomisation_check(linear, chosen):
    honest = take("randomisation", case_of(linear, chosen, PixelWise()))["randomisation"]
    deaf = take("randomisation", case_of(linear, chosen, PixelWise(reads_model=False)))["randomisation"]
    assert honest.status == "passed"
    assert honest.value < 0.6
    assert (deaf.status, round(deaf.value, 6)) == ("failed", 1.0)
    assert "stay the same" in deaf.reason


def test_an_explainer_with_a_network_of_its_own_is_not_judged_by_the_models_weights(linear, chosen):
    class Carries(PixelWise):
        carries_network = True

    measure = take("randomisation", case_of(linear, chosen, Carries(reads_model=False)))["randomisation"]
    assert measure.status == "skipped"
    assert "a network of its own" in measure.reason


def test_stability_of_the_basis_is_that_of_the_fit_unless_refits_are_asked_for(linear, chosen):
    explainer = PixelWise()
    skipped = take("basis", case_of(linear, chosen, explainer))["basis_stability"]
    assert skipped.status == "skipped"
    assert "ask for re-fits" in skipped.reason
    explainer.metrics["basis_stability"] = 0.7
    assert take("basis", case_of(linear, chosen, explainer))["basis_stability"].value == 0.7
    none = take("basis", case_of(linear, chosen, explainer, refits=2))["basis_stability"]
    assert (none.status, "has no basis to re-fit" in none.reason) == ("skipped", True)


def test_refits_start_from_other_seeds_on_the_audits_data(tiny, tiny_npz, monkeypatch):
    data = open_data(tiny_npz)
    explainer = fit("nmf", tiny, data, rank=2, refits=1, seed=5)
    explainer.metrics["basis_stability"] = 0.123
    seeds, plain = [], type(explainer).fit

    def counted(self, *args):
        seeds.append((self.config.seed, self.config.init))
        return plain(self, *args)

    monkeypatch.setattr(type(explainer), "fit", counted)
    case = Case(tiny, explainer, images_of(tiny, tiny_npz), data, Effort(images=8, refits=2))
    measure = take("basis", case)["basis_stability"]
    assert seeds == [(6, "random"), (7, "random")]
    assert measure.n == 2
    assert measure.value != 0.123
    assert 0.5 < measure.value <= 1 + 1e-9  # random starts find about the same two concepts


def test_noise_that_is_larger_moves_explanations_more(linear, chosen):
    near, far = (take("noise", case_of(linear, chosen, PixelWise(), radius=r))["noise_similarity"] for r in (0.01, 0.3))
    assert near.value > 0.99 > far.value


def images_of(subject, path, n=8):
    x = next(open_data(path).batches(subject, n)).images
    with torch.no_grad():
        logits = subject.logits(x)
    return AuditImages(x, logits, logits.argmax(1), [str(i) for i in range(n)])


def test_every_stage_is_reported_and_the_last_destroys_all_weights(tiny, tiny_npz):
    explainer = fit("nmf", tiny, open_data(tiny_npz), rank=2, refits=1)
    chosen = images_of(tiny, tiny_npz)
    case = Case(tiny, explainer, chosen, None, Effort(images=8, random_stages=2))
    measures = take("randomisation", case)
    assert list(measures) == ["randomisation", "randomisation/fc", "randomisation/conv"]  # from the top down
    assert measures["randomisation"].per_image == measures["randomisation/conv"].per_image
    assert measures["randomisation/fc"].per_image != measures["randomisation/conv"].per_image
    assert all(m.null == 1.0 and m.direction == "down" for m in measures.values())
    single = take("randomisation", Case(tiny, explainer, chosen, None, Effort(images=8, random_stages=1)))
    assert list(single) == ["randomisation"]


def test_shuffled_weights_never_reach_the_explanations_they_are_compared_with(tiny, tiny_npz):
    explainer, chosen = fit("nmf", tiny, open_data(tiny_npz), rank=2, refits=1), images_of(tiny, tiny_npz)
    case = Case(tiny, explainer, chosen, None, Effort(images=8))
    take("randomisation", case)  # the first check to ask for explanations
    plain = explainer.explain(tiny, chosen.images)
    assert [e.target_value for e in case.explanations] == [e.target_value for e in plain]


def test_two_explainers_share_the_passes_on_noisy_images_and_destroyed_models(tiny, tiny_npz):
    from auditor.auditing.cost import Meter
    from auditor.auditing.shared_passes import SharedPasses

    explainer, chosen = fit("nmf", tiny, open_data(tiny_npz), rank=2, refits=1), images_of(tiny, tiny_npz)
    shared = SharedPasses(explainer.layers())
    cases = [Case(tiny, explainer, chosen, None, Effort(images=8), shared=shared) for _ in range(2)]
    counts, results = [], []
    for case in cases:
        meter = Meter()
        with meter.on(tiny.module):
            results.append(take("noise", case) | take("randomisation", case))
        counts.append(meter.images)
    assert counts[0] >= 8 * (1 + 2 + 3) > counts[1]
    assert results[0] == results[1]
    alone = take("noise", Case(tiny, explainer, chosen, None, Effort(images=8)))
    assert alone["noise_similarity"].value == pytest.approx(results[0]["noise_similarity"].value, abs=1e-6)


def test_sampling_stops_when_the_verdict_is_clear(linear, chosen):
    many = chosen.rows([i % 12 for i in range(60)])
    near, all_of_them = (
        take("noise", case_of(linear, many, PixelWise(), images=60, radius=0.01, is_sequential=s))["noise_similarity"]
        for s in (True, False)
    )
    assert (near.n, all_of_them.n) == (12, 40)
    assert near.value == pytest.approx(all_of_them.value, abs=0.01)
