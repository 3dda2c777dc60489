"""The search behind an rde explanation: cells, objective, budget, and certificates that can be recomputed."""

import pytest
import torch
from torch import nn

from auditor import Subject
from auditor.attribution.baselines import METHODS
from auditor.errors import OptionError
from auditor.explainers.rde.relevance_map import Budget
from auditor.explainers.rde.search import RdeConfig, Search, cells
from auditor.perturbation.distortion import Problems
from auditor.perturbation.gaussian_moments import ClosedFormError
from auditor.perturbation.replacement import Obfuscation

BUDGET = Budget(max_steps=8)


def subject_of(pool=None, channels=1, size=(6, 5)):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = [nn.Conv2d(channels, 4, 3, padding=1), nn.ReLU(), *([pool] if pool is not None else [])]
        net = nn.Sequential(*body, nn.Flatten(), nn.LazyLinear(3))
        net(torch.zeros(1, channels, *size))
    return Subject(net.eval(), input_shape=(channels, *size))


def search_of(subject, **options):
    shape = subject.input_shape
    empty = torch.zeros(0, *shape)
    noise = Obfuscation("gaussian", torch.full(shape, 0.4), torch.full(shape, 0.02), empty, empty)
    defaults = {"rates": (3, 8), "draws": 6, "eval_draws": 12, "timeout_s": None}
    return Search(RdeConfig(**{**defaults, **options}), noise, subject)


def images_of(subject, n=2, seed=0):
    return torch.rand(n, *subject.input_shape, generator=torch.Generator().manual_seed(seed))


def run(subject, budget=BUDGET, draws=None, **options):
    x = images_of(subject)
    targets = subject.logits(x).argmax(1).detach()
    return search_of(subject, **options).run(x, targets, budget, draws)


@pytest.mark.parametrize(
    ("options", "shape", "size"),
    [
        ({"cells": "component"}, (3, 40, 30), 3600),
        ({"cells": "pixel"}, (3, 40, 30), 1200),
        ({"cells": "grid", "grid": 7}, (3, 40, 30), 49),
        ({"cells": "grid", "grid": 35}, (3, 40, 30), 35 * 30),  # no more cells than pixels
        ({"cells": "superpixel", "grid": 5}, (3, 40, 30), 24),  # 6 x 4: about 25, with the image's proportions
        ({}, (3, 32, 32), 1024),  # up to 1024 pixels each is a cell
        ({}, (3, 33, 32), 784),
        ({}, (1, 32, 32), 1024),
    ],
    ids=str,
)
def test_the_cells_that_the_options_ask_for(options, shape, size):
    assert cells(RdeConfig(**options), shape, torch.rand(2, *shape)).size == size


@pytest.mark.parametrize("budget", [Budget(5, 0.0), Budget(5, -1.0), Budget(0, None)])
def test_a_budget_must_be_positive(budget):
    with pytest.raises(OptionError, match="time and steps must be positive"):
        run(subject_of(), budget)


def test_certificates_can_be_recomputed():
    maps = run(subject_of())
    assert maps.score.shape == (2, 30)
    assert maps.notes == []
    assert maps.fresh.noise.shape[1] == 12
    for image, certificate in enumerate(maps.solver):
        assert [rate["cells"] for rate in certificate["rates"]] == [3, 8]
        for rate in certificate["rates"]:
            assert rate["gap"] >= -1e-5
            assert rate["status"] in ("converged", "step_limit")
            assert rate["distortion"] >= 0
        small, large = certificate["rates"]
        blank = float(maps.fresh.value(torch.zeros(1, 30), torch.tensor([image])))
        assert 0 <= large["monte_carlo"] <= small["monte_carlo"] <= blank
    again = run(subject_of())
    assert torch.equal(again.score, maps.score)  # the seed decides everything
    assert not torch.equal(run(subject_of(), seed=5, distortion="monte-carlo").score, maps.score)


def test_fresh_draws_are_not_those_of_the_search():
    one, other = run(subject_of(), draws=6), run(subject_of(), draws=6, seed=1)
    assert one.fresh.noise.shape[1] == 6
    assert not torch.equal(one.fresh.noise, other.fresh.noise)


def test_the_objective_is_closed_where_the_network_has_closed_forms():
    assert run(subject_of()).objective == "adf"
    assert run(subject_of(), distortion="adf-low-rank").objective == "adf-low-rank"
    assert run(subject_of(), distortion="monte-carlo").objective == "monte-carlo"
    pooled = subject_of(nn.MaxPool2d(2))
    automatic = run(pooled)
    assert automatic.objective == "monte-carlo"
    assert automatic.notes == []  # nothing else was asked for
    by_adf = run(pooled, distortion="adf")
    assert by_adf.objective == "monte-carlo"
    assert by_adf.notes[0].startswith("fell back to Monte Carlo: ")
    with pytest.raises(ClosedFormError):
        run(pooled, distortion="adf", strict=True)
    assert run(pooled, strict=True).objective == "monte-carlo"


def test_the_lagrangian_says_what_it_kept_and_what_that_costs():
    maps = run(subject_of(), method="lagrangian", penalty=1e-5, distortion="monte-carlo")
    dearer = run(subject_of(), method="lagrangian", penalty=1e-2, distortion="monte-carlo")
    sampled = maps.fresh.value(maps.score, torch.arange(2))
    for i, row in enumerate(maps.solver):
        assert row["kept"] == pytest.approx(float(maps.score[i].sum()), rel=1e-5)
        assert row["monte_carlo"] == pytest.approx(float(sampled[i]), rel=1e-4, abs=1e-7)
        assert row["penalty"] == 1e-5
        assert row["kept"] > dearer.solver[i]["kept"]


def test_an_ordering_has_a_score_for_every_cell():
    maps = run(subject_of(size=(4, 3)), method="ordering", rates=(3,))
    assert maps.score.shape == (2, 12)
    assert float(maps.score.min()) >= -1e-6
    assert float(maps.score.max()) <= 1 + 1e-6
    torch.testing.assert_close(maps.score.sum(1), torch.full((2,), 6.0))  # P is doubly stochastic: sum of (1, ..., 0)
    assert {row["status"] for row in maps.solver} <= {"converged", "step_limit"}


class Clock:
    """A clock that a pass of the network moves, in place of ``time``."""

    def __init__(self, monkeypatch, seconds_per_pass):
        self.now, self.step = 100.0, seconds_per_pass
        for module in (
            "auditor.explainers.rde.search",
            "auditor.explainers.rde.relevance_map",
            "auditor.kernels.frank_wolfe.solver",
        ):
            monkeypatch.setattr(f"{module}.time", self)

    def monotonic(self):
        return self.now


@pytest.mark.parametrize(("timeout_s", "fresh"), [(1e6, 12), (1.0, 4), (1000.0, 8)])
def test_a_slow_network_is_measured_on_fewer_draws(timeout_s, fresh, monkeypatch):
    """A pass of four images takes 2 s, so one of both images 1 s, and a measurement 13 + 2 * 2 + 8 = 25 of those.

    A fifth of the time is for measuring: 0.2 * 1000 / 25 = 8 draws; never fewer than 4 or more than the options say.
    """
    subject = subject_of()
    clock = Clock(monkeypatch, 2.0)
    x = images_of(subject)
    targets = subject.logits(x).argmax(1).detach()
    search = search_of(subject, distortion="monte-carlo")
    real, passes = Subject.logits, []

    def slow(self, images):
        passes.append(len(images))
        clock.now += clock.step if len(images) == 4 and 4 not in passes[:-1] else 0  # the pass that is timed
        return real(self, images)

    monkeypatch.setattr(Subject, "logits", slow)
    assert search.run(x, targets, Budget(4, timeout_s)).fresh.noise.shape[1] == fresh


def test_large_images_are_solved_on_coarser_grids_first():
    subject = subject_of(size=(40, 30))
    fine = run(subject, rates=(0.1, 0.5), distortion="monte-carlo", draws=2, eval_draws=4, grid=28)
    plain = run(subject, rates=(0.1, 0.5), distortion="monte-carlo", draws=2, eval_draws=4, grid=28, coarse_first=False)
    assert fine.score.shape == plain.score.shape == (2, 784)
    assert not torch.equal(fine.score, plain.score)


@pytest.mark.parametrize("variant", ["stochastic", "away", "pairwise"])
def test_variants_stay_within_their_rates(variant):
    rule = "non-convex" if variant == "stochastic" else "short"
    maps = run(subject_of(), variant=variant, rule=rule, distortion="monte-carlo", rates=(5,))
    assert float(maps.score.sum(1).max()) <= 5 + 1e-3
    assert float(maps.score.min()) >= -1e-6


@pytest.mark.parametrize("start", ["grad-cam", "occlusion", "both"])
def test_a_search_may_begin_at_the_first_cells_of_a_map(start):
    subject = subject_of()
    x = images_of(subject)
    targets = subject.logits(x).argmax(1).detach()
    search = search_of(subject, warm_start=start, distortion="monte-carlo")
    problems = Problems.of(search._network, x, targets, cells(search.config, subject.input_shape, x))
    masks = search._warm(problems, (3, 8))
    assert masks.sum(2).tolist() == [[3, 8]] * 2
    assert bool((masks[:, 0] <= masks[:, 1]).all())
    heat = {name: METHODS[name](subject, x, targets).sum(1).flatten(1) for name in ("Grad-CAM", "occlusion")}
    if start == "occlusion":
        inside, outside = (heat["occlusion"][0][masks[0, 0] == on] for on in (1, 0))
        assert float(inside.min()) >= float(outside.max())
    maps = search.run(x, targets, BUDGET)
    assert maps.score.shape == (2, 30)
    assert maps.notes == []


def test_without_a_layer_for_the_start_it_says_so_and_goes_on():
    torch.manual_seed(0)
    flat = Subject(nn.Sequential(nn.Flatten(), nn.Linear(30, 3)).eval(), input_shape=(1, 6, 5))
    maps = run(flat, warm_start="grad-cam")
    assert maps.notes[-1].startswith("no warm start: ")


def test_masks_of_soft_regions_are_smoother_and_within_the_rate():
    plain, soft = (run(subject_of(), distortion="monte-carlo", smooth=w) for w in (0.0, 1.0))

    def roughness(maps):
        return float(maps.score.view(-1, 6, 5).diff(dim=1).abs().sum())

    assert roughness(soft) < roughness(plain)
    assert float(soft.score.max()) <= 1 + 1e-5
    again = run(subject_of(), variant="stochastic", rule="non-convex", warm_start="occlusion", smooth=1.0)
    assert bool(again.score.isfinite().all())
