"""Kind rde on scikit-learn's digits: the whole way from fit to artifact to explanation."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import auditor
from auditor import Subject
from auditor.errors import AuditError, DataError, NumericsError, OptionError, TamperError
from auditor.explainers.base import Explainer
from auditor.explainers.rde.explainer import Calibration, RdeExplainer
from auditor.explainers.rde.relevance_map import multi_rate
from auditor.perturbation.gaussian_moments import ClosedFormError

FAST: dict[str, Any] = {"rates": (4, 12, 24), "max_steps": 15, "draws": 8, "eval_draws": 16, "calibration_images": 4}


def digits() -> tuple[Tensor, Tensor]:
    bunch = load_digits()
    return torch.tensor(bunch.images / 16, dtype=torch.float32)[:, None], torch.tensor(bunch.target)


def trained(pool: nn.Module) -> Subject:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        pool,
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )
    x, y = digits()
    optimiser = torch.optim.Adam(net.parameters(), 5e-3)
    for _ in range(6):
        for batch in torch.randperm(1500).split(50):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
            optimiser.step()
    assert (net(x[1500:]).argmax(1) == y[1500:]).float().mean() > 0.85
    return Subject(net.eval(), input_shape=(1, 8, 8))


@pytest.fixture(scope="module")
def subject() -> Subject:
    return trained(nn.AvgPool2d(2))


@pytest.fixture(scope="module")
def fitted(subject: Subject) -> RdeExplainer:
    return auditor.fit("rde", subject, auditor.open_data("sklearn:digits"), **FAST)


@pytest.fixture(scope="module")
def images() -> Tensor:
    return digits()[0][1600:1604]


def test_contributions_add_up_to_the_logit(fitted: RdeExplainer, subject: Subject, images: Tensor) -> None:
    with torch.no_grad():
        logits = subject.logits(images)
    for i, e in enumerate(fitted.explain(subject, images)):
        assert e.gap() < 1e-5
        assert e.target_value == pytest.approx(float(logits[i].max()), rel=1e-5)
        assert abs(e.residual or 0) < 1e-4 * max(1, abs(e.target_value)), "bands cover the image: nothing is left over"
        assert [c.label for c in e.concepts][:2] == [
            "cells 1 to 4 of 64, by relevance",
            "cells 5 to 12 of 64, by relevance",
        ]
        heat = torch.stack([c.heatmap for c in e.concepts if c.heatmap is not None])
        assert torch.equal(heat.sum(0), torch.ones(8, 8)), "every cell is in one band"
        json.dumps(e.to_json())


def test_what_an_explanation_says_can_be_checked_on_the_network(
    fitted: RdeExplainer, subject: Subject, images: Tensor
) -> None:
    (e,) = fitted.explain(subject, images[:1])
    extra = e.extra
    assert sorted(extra["ordering"]) == list(range(64))
    relevance = torch.tensor(extra["relevance"]).flatten()
    assert (relevance[extra["ordering"]].diff() <= 1e-6).all(), "the ordering follows the map"
    smallest = extra["smallest_set"]
    assert smallest["distortion"] <= extra["max_distortion"]
    mask = torch.zeros(64)
    mask[extra["ordering"][: smallest["cells"]]] = 1
    noise = fitted.obfuscation_.draw(images[:1], 400, torch.Generator().manual_seed(99))[0]
    mask = mask.view(1, 8, 8)
    with torch.no_grad():
        out = subject.logits(mask * images[0] + (1 - mask) * noise)
    d = 0.5 * (out[:, e.target.index] - e.target_value).square()
    assert float(d.mean()) <= smallest["distortion"] + 4 * float(d.std()) * (1 / 16 + 1 / 400) ** 0.5
    assert float((out.argmax(1) == e.target.index).float().mean()) > 0.75
    rates = extra["solver"]["rates"]
    assert [r["cells"] for r in rates] == [4, 12, 24]
    assert all(r["gap"] >= -1e-4 and r["monte_carlo"] >= 0 and r["status"] for r in rates)
    curve = extra["curve"]
    assert curve[0]["cells"] == 0
    assert curve[-1] == {
        "cells": 64,
        "distortion": 0.0,
        "standard_error": 0.0,
        "kept": 1.0,
        "logit": pytest.approx(e.target_value),
    }


def test_maps_beat_chance(fitted: RdeExplainer) -> None:
    assert fitted.metrics["flip_area"] < 0.7 * fitted.metrics["flip_area_random"]
    assert 0 < fitted.metrics["smallest_share"] < 0.8
    assert fitted.metrics["distortion_share"] < 0.5


def test_artifact_round_trip_gives_the_same_answer_and_the_same_bytes(
    fitted: RdeExplainer, subject: Subject, images: Tensor, tmp_path: Path
) -> None:
    digest = fitted.save(tmp_path / "a")
    loaded = Explainer.load(tmp_path / "a", subject)
    assert isinstance(loaded, RdeExplainer)
    one, two = (explainer.explain(subject, images[:2]) for explainer in (fitted, loaded))
    for a, b in zip(one, two, strict=True):
        assert [c.contribution for c in a.concepts] == [c.contribution for c in b.concepts]
        assert a.extra["ordering"] == b.extra["ordering"]
    again = auditor.fit("rde", subject, auditor.open_data("sklearn:digits"), **FAST)
    assert again.save(tmp_path / "b") == digest
    other = trained(nn.MaxPool2d(2))
    with pytest.raises(TamperError):
        loaded.explain(other, images)


def test_a_target_may_be_named_and_a_batch_is_its_images(
    fitted: RdeExplainer, subject: Subject, images: Tensor
) -> None:
    together = fitted.explain(subject, images, target=3)
    assert all(e.target.index == 3 for e in together)
    alone = fitted.explain(subject, images[2:3], target=3)[0]
    assert torch.tensor(alone.extra["relevance"]).std() > 0
    torch.testing.assert_close(
        torch.tensor(together[2].extra["relevance"]), torch.tensor(alone.extra["relevance"]), rtol=0, atol=1e-3
    )


@pytest.mark.parametrize("distortion", ["adf", "adf-low-rank"])
def test_max_pooling_falls_back_with_a_message_or_fails_when_strict(
    distortion: str, caplog: pytest.LogCaptureFixture, images: Tensor
) -> None:
    subject = trained(nn.MaxPool2d(2))
    data = auditor.open_data("sklearn:digits", limit=60)
    with caplog.at_level(logging.WARNING):
        explainer = auditor.fit("rde", subject, data, distortion=distortion, **FAST)
    assert "fell back to Monte Carlo" in caplog.text
    assert "max_pool2d" in caplog.text
    (e,) = explainer.explain(subject, images[:1])
    assert e.extra["objective"] == "monte-carlo"
    assert "max_pool2d" in e.extra["notes"][0]
    with pytest.raises(ClosedFormError, match="max_pool2d"):
        auditor.fit("rde", subject, data, distortion=distortion, strict=True, **FAST)


@pytest.mark.parametrize(
    "options",
    [
        {"cells": "grid", "grid": 5},
        {"cells": "superpixel", "grid": 4, "rates": (2, 6)},
        {"cells": "component", "obfuscation": "uniform"},
        {"obfuscation": "blur", "blur_sigma": 1.5, "distortion": "monte-carlo"},
        {"obfuscation": "reference", "distortion": "adf-low-rank"},
        {"rank": 6, "distortion": "adf-low-rank"},
        {"method": "ordering", "max_steps": 10, "cells": "grid", "grid": 4, "rates": (4, 8)},
        {"method": "lagrangian"},
        {"variant": "pairwise", "rule": "backtracking"},
        {"variant": "away", "lazy": True},
        {"variant": "stochastic", "rule": "non-convex", "distortion": "monte-carlo"},
        {"variant": "stochastic", "rule": "non-convex", "distortion": "monte-carlo", "path": "cold"},
        {"path": "cold", "distortion": "monte-carlo", "rates": (0.1, 0.3)},
    ],
    ids=str,
)
def test_every_option_explains(options: dict[str, Any], subject: Subject, images: Tensor) -> None:
    data = auditor.open_data("sklearn:digits", limit=80)
    explainer = auditor.fit("rde", subject, data, **{**FAST, **options})
    for e in explainer.explain(subject, images[:2]):
        assert e.gap() < 1e-5
        assert len(e.extra["ordering"]) == e.extra["cells"]
        assert torch.tensor(e.extra["relevance"]).std() > 0


def test_the_reference_set_may_be_given(subject: Subject, images: Tensor, tmp_path: Path) -> None:
    grey = np.full((12, 8, 8), 0.25, dtype=np.float32) + np.linspace(0, 0.1, 12, dtype=np.float32)[:, None, None]
    np.savez(tmp_path / "grey.npz", images=grey, labels=np.zeros(12, dtype=np.int64))
    data = auditor.open_data("sklearn:digits", limit=60)
    values = {"obfuscation": "reference", "reference": str(tmp_path / "grey.npz"), **FAST}
    explainer = auditor.fit("rde", subject, data, **values)
    assert explainer.obfuscation_.reference.std((1, 2, 3)).max() < 1e-6, "grey images, not digits"
    assert explainer.explain(subject, images[:1])[0].gap() < 1e-5
    with pytest.raises(OptionError, match="needs obfuscation=reference"):
        auditor.fit("rde", subject, data, reference=str(tmp_path / "grey.npz"), **FAST)


def test_budgets_are_kept(fitted: RdeExplainer, subject: Subject, images: Tensor) -> None:
    (e,) = fitted.explain(subject, images[:1], max_steps=2)
    assert {r["status"] for r in e.extra["solver"]["rates"]} <= {"step_limit", "converged"}
    assert "step_limit" in {r["status"] for r in e.extra["solver"]["rates"]}
    (e,) = fitted.explain(subject, images[:1], timeout_s=1e-4)  # no time at all: what is always made is reported
    assert [r["status"] for r in e.extra["solver"]["rates"]] == ["time_limit"]
    assert e.extra["notes"] == ["time was up before 2 of 3 rates had their turn"]
    assert e.gap() < 1e-5
    with pytest.raises(OptionError, match="must be positive"):
        fitted.explain(subject, images[:1], timeout_s=-1.0)


def test_a_large_image_goes_coarse_to_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 7, stride=4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 4),
    )
    subject = Subject(net, input_shape=(3, 96, 80))
    x = torch.rand(4, 3, 96, 80, generator=torch.Generator().manual_seed(0))
    explainer = RdeExplainer(cells="pixel", draws=4, max_steps=2, rates=(0.1, 0.3), timeout_s=None)
    from auditor.perturbation.replacement import Obfuscation, Statistics

    explainer.obfuscation_ = Obfuscation.fitted("gaussian", Statistics.of(x, torch.Generator().manual_seed(0)))
    explainer.limit_, explainer.subject_digest_ = 1.0, subject.digest
    solved = []

    def recorded(distortion: Any, n: int, size: int, *args: Any, **options: Any) -> Any:
        result = multi_rate(distortion, n, size, *args, **options)
        start = options["start"]
        solved.append((size, options["path"], None if start is None else tuple(start.shape)))
        return result

    monkeypatch.setattr("auditor.explainers.rde.search.multi_rate", recorded)
    (e,) = explainer.explain(subject, x[:1])
    sizes = [49, 196, 784, 96 * 80]
    assert solved == [(size, "down", None if size == 49 else (1, 2, size)) for size in sizes]
    assert e.extra["cells"] == 96 * 80
    assert torch.tensor(e.extra["relevance"]).shape == (96, 80)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rates": (0,)}, "1 of 1 rates are out of range"),
        ({"rates": (10, 65, 70)}, "2 of 3 rates are out of range"),
        ({"layer": "0"}, "takes no layer"),
        ({"rates": ()}, "no rate given"),
        ({"variant": "stochastic"}, "stochastic steps need a rule"),
        ({"target": 11}, "class index must be 0 to 9"),
        ({"cells": "voxel"}, "cells"),
        ({"sparkle": 1}, "unknown option 'sparkle'"),
    ],
    ids=str,
)
def test_bad_options_are_one_sentence(options: dict[str, Any], sentence: str, subject: Subject) -> None:
    with pytest.raises(OptionError, match=sentence) as caught:
        auditor.fit("rde", subject, auditor.open_data("sklearn:digits", limit=20), **options)
    assert "\n" not in str(caught.value)


def test_images_out_of_range_are_counted(fitted: RdeExplainer, subject: Subject, images: Tensor) -> None:
    bad = images.clone()
    bad[1] += 2
    bad[3, 0, 0, 0] = torch.nan
    with pytest.raises(DataError, match="2 of 4 images"):
        fitted.explain(subject, bad)


class _Cliff(torch.autograd.Function):
    """A layer whose backward pass is broken below black."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp_min(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.where(x < 0, torch.nan, grad)


def test_nan_gradients_are_counted() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(_Cliff.apply(x).flatten(1))

    subject = Subject(Broken(), input_shape=(1, 8, 8))
    data = auditor.open_data("sklearn:digits", limit=40)
    with pytest.raises(NumericsError, match=r"12 of 12 solves met NaN or infinite gradients, on 4 of 4 images"):
        auditor.fit("rde", subject, data, distortion="monte-carlo", **FAST)


def test_one_image_is_not_enough(subject: Subject) -> None:
    with pytest.raises(AuditError, match="at least 2 images"):
        auditor.fit("rde", subject, auditor.open_data("sklearn:digits", limit=1), **FAST)


def test_at_the_command_line(cli: Any, tmp_path: Path) -> None:
    from PIL import Image

    path = tmp_path / "seven.png"
    pixels = (digits()[0][7, 0] * 255).byte().numpy()
    Image.fromarray(pixels).save(path)
    options = [f"{key}={json.dumps(list(v) if isinstance(v, tuple) else v)}" for key, v in FAST.items()]
    settings = [word for option in options for word in ("--set", option)]
    answer = cli.json("fit", "rde", "models:/digits/1", "--data", "sklearn:digits", "--name", "suffices", *settings)
    assert answer["kind"] == "rde"
    assert answer["metrics"]["flip_area"] < answer["metrics"]["flip_area_random"]
    explained = cli.json("explain", "models:/digits/1", path, "--explainers", "suffices", "--timeout-s", "2")
    (e,) = explained["explanations"]
    assert e["kind"] == "rde"
    assert e["bias"] + sum(c["contribution"] for c in e["concepts"]) + e["residual"] == pytest.approx(e["target_value"])
    output = cli("explain", "models:/digits/1", path, "--explainers", "suffices", "--out", tmp_path / "out")
    assert "cells keep" in output.output
    assert (tmp_path / "out" / "suffices.png").is_file()
    assert "out of range" in cli.fails(
        "fit", "rde", "models:/digits/1", "--data", "sklearn:digits", "--set", "rates=[0]"
    )
    cli("detach", "models:/digits/1", "suffices")


@pytest.mark.parametrize("cost", [10**3, 10**7, 82 * 10**6, 10**9])
def test_a_calibration_takes_what_the_operations_allow(cost):
    allowed = Calibration.of(cost, 7, 12)
    spent = cost * allowed.images * (allowed.steps * 7 * 12 + allowed.draws * 36)
    least = cost * 6 * (4 * 7 * 12 + 8 * 36)
    assert spent <= max(10**12, least)
    assert 6 <= allowed.images <= 12
    assert allowed.steps >= 4
    assert allowed.draws >= 8
