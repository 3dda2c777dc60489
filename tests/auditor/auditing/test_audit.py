"""Audit: fixed images, explanation metrics with known answers, NaN, randomised twins, the cache, the sealed JSON."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import auditor
from auditor import AuditConfig, Subject, open_data
from auditor.auditing.audit import Audit
from auditor.auditing.case import Case, Effort, correlations, relevance
from auditor.auditing.images import AuditImages, answers, choose, spread
from auditor.errors import DataError, NumericsError, TamperError
from auditor.explainers.base import Explainer
from auditor.explainers.explanation import Concept, Explanation, class_scores
from auditor.auditing.explanation_quality import GROUPS, NAMES, take
from auditor.metrics.names import EXPLAINER, WORDS
from auditor.auditing.performance import expected_calibration_error
from auditor.network.shuffled_twin import shuffled, stages, weighted_layers

SHAPE = (1, 5, 7)
WEIGHTS = 0.15 * torch.linspace(-1, 2, 35)  # small, so that probabilities are not all 0 and 1


class Linear(nn.Module):
    """Logit 0 is w x, logit 1 is its negative."""

    def __init__(self):
        super().__init__()
        self.w = nn.Linear(35, 2, bias=False)
        with torch.no_grad():
            self.w.weight.copy_(torch.stack([WEIGHTS, -WEIGHTS]))

    def forward(self, x):
        return self.w(x.flatten(1))


class Told(Explainer):
    """Explains pixel by pixel by the weights: exact for the linear model, or ``scale`` of it."""

    kind = "nmf"

    def __init__(self, scale=1.0, reads_model=True, **options):
        super().__init__(**options)
        self.scale, self.reads_model = scale, reads_model

    def fit(self, subject, data, progress=None):
        return self

    def explain(self, subject, images, target=None):
        x = subject.pixels(images)
        with torch.no_grad():
            logits = subject.logits(x)
        targets = self._targets(subject, logits, target)
        predictions, wanted = class_scores(logits, subject.class_names, targets)
        found = []
        for i, t in enumerate(targets):
            w = subject.module.w.weight[t].detach() if self.reads_model else WEIGHTS * (1 if t == 0 else -1)
            parts = self.scale * w * (x[i].flatten() - 0.5)  # against grey, the mean of what flipping puts in
            bias = float(self.scale * 0.5 * w.sum())
            maps = torch.eye(35).view(35, 5, 7)
            concepts = tuple(Concept(k, str(k), float(x[i].flatten()[k]), float(parts[k]), maps[k]) for k in range(35))
            total = wanted[i].logit
            told = sum(c.contribution for c in concepts)
            found.append(
                Explanation(
                    kind=self.kind, prediction=predictions[i], target=wanted[i], target_value=total, concepts=concepts,
                    bias=bias, residual=total - bias - told,
                )
            )  # fmt: skip
        return found

    def tensors(self):
        return {}

    def restore(self, tensors, state, files):
        pass


@pytest.fixture
def linear():
    return Subject(Linear(), input_shape=SHAPE, class_names=["yes", "no"])


@pytest.fixture
def chosen(linear):
    # bright where the weights speak for a class, so that noise in their place matters
    bright = torch.stack([WEIGHTS > 0.15, WEIGHTS < 0]).float().view(2, *SHAPE).repeat(6, 1, 1, 1)
    x = 0.8 * bright + 0.2 * torch.rand(12, *SHAPE, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logits = linear.logits(x)
    return AuditImages(x, logits, logits.argmax(1), [str(i) for i in range(12)])


def case_of(linear, chosen, explainer, **effort):
    explainer.subject_digest_ = linear.digest
    return Case(linear, explainer, chosen, None, Effort(**{"images": 12, "noise_samples": 2} | effort))


def test_an_exact_explanation_is_faithful_complete_and_moves_as_the_weights_say(linear, chosen):
    case = case_of(linear, chosen, Told())
    found = take("faithfulness", case)
    assert found["f_cls"].value == 1.0
    assert found["f_reg"].value == pytest.approx(0, abs=1e-5)  # float32 sum of 35 products
    assert found["completeness_gap"].value < 1e-6
    noise = take("noise", case)
    # contributions are w_k x_k, so the change per change of the image lies between the least and the largest |w|
    assert float(WEIGHTS.abs().min()) <= noise["noise_c2"].value <= float(WEIGHTS.abs().max())
    assert noise["noise_similarity"].value > 0.99 > noise["noise_similarity"].null


def test_half_an_explanation_leaves_half_unexplained(linear, chosen):
    found = take("faithfulness", case_of(linear, chosen, Told(scale=0.5)))
    value = chosen.logits.max(1).values.abs()
    expected = (0.5 * value / value.clamp_min(1)).mean()
    assert found["residual_share"].value == pytest.approx(float(expected), rel=1e-4)
    assert found["f_reg"].value == pytest.approx(float(0.5 * value.mean()), rel=1e-4)


def test_the_true_map_flips_better_than_chance_and_its_opposite_worse(linear, chosen):
    good = take("pixel flipping", case_of(linear, chosen, Told()))
    bad = take("pixel flipping", case_of(linear, chosen, Told(scale=-1.0)))
    assert good["flip_area"].value < good["flip_area"].null < good["deletion_area"].value
    assert bad["flip_area"].value > bad["flip_area"].null
    assert good["flip_gain"].low > 0 > bad["flip_gain"].high
    assert good["flip_area"].value == pytest.approx(bad["deletion_area"].value, rel=1e-5)


def test_one_pixel_maps_are_local_and_apart(linear, chosen):
    found = take("heatmaps", case_of(linear, chosen, Told()))
    assert 0 < found["locality"].value < math.log(16) == found["locality"].null
    # 35 maps of one pixel each correlate with -1/34: the least overlap there is
    n, r = 35, 1 / 34
    assert found["orthogonality"].value == pytest.approx(
        (math.sqrt(n + n * (n - 1) * r * r) - math.sqrt(n)) / math.sqrt(n)
    )


def test_explanations_that_ignore_the_model_fail_the_randomisation_check(linear, chosen):
    honest = take("randomisation", case_of(linear, chosen, Told()))["randomisation"]
    deaf = take("randomisation", case_of(linear, chosen, Told(reads_model=False)))["randomisation"]
    assert honest.status == "passed"
    assert honest.value < 0.6
    assert (deaf.status, round(deaf.value, 6)) == ("failed", 1.0)
    assert "stay the same" in deaf.reason


def test_an_explainer_with_a_network_of_its_own_is_not_judged_by_the_models_weights(linear, chosen):
    class Carries(Told):
        carries_network = True

    found = take("randomisation", case_of(linear, chosen, Carries(reads_model=False)))["randomisation"]
    assert found.status == "skipped"
    assert "a network of its own" in found.reason


def test_nan_contributions_never_pass(linear, chosen):
    case = case_of(linear, chosen, Told(scale=math.nan))
    for group in ("faithfulness", "pixel flipping", "noise"):
        for name, measure in take(group, case).items():
            assert measure.status in ("failed", "skipped"), name
            assert math.isnan(measure.value), name


def test_a_group_that_cannot_be_taken_has_failed_with_the_reason(linear, chosen):
    class Broken(Told):
        def explain(self, subject, images, target=None):
            raise NumericsError("no numbers today.")

    for group, entry in GROUPS.items():
        if group != "basis":
            found = take(group, case_of(linear, chosen, Broken()))
            assert set(found) == set(entry.names)
            assert all(m.status == "failed" and "no numbers today" in m.reason for m in found.values())


def test_every_metric_has_words():
    assert NAMES == EXPLAINER
    assert set(WORDS) >= NAMES


def test_weights_are_shuffled_for_a_while_and_come_back(tiny):
    before = {k: v.clone() for k, v in tiny.module.state_dict().items()}
    assert weighted_layers(tiny) == ["conv", "fc"]
    assert stages(tiny, 3) == [["fc"], ["fc", "conv"]]
    assert stages(tiny, 1) == [["fc", "conv"]]

    def look():
        with shuffled(tiny, ["fc"], 1) as twin:
            assert twin.digest == tiny.digest
            weight = twin.module.fc.weight
            assert not torch.equal(weight, before["fc.weight"])
            assert torch.equal(weight.flatten().sort().values, before["fc.weight"].flatten().sort().values)
            assert torch.equal(twin.module.conv.weight, before["conv.weight"])
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        look()
    assert all(torch.equal(v, before[k]) for k, v in tiny.module.state_dict().items())


def test_correlations_by_hand():
    a = torch.tensor([[1.0, 2.0, 4.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    b = torch.tensor([[3.0, 2.0, 0.0], [1.0, 2.0, 3.0]], dtype=torch.float64)
    found = correlations(a, b)
    assert float(found[0]) == pytest.approx(np.corrcoef(a[0], b[0])[0, 1])
    assert math.isnan(float(found[1]))


def test_relevance_is_the_weighted_sum_of_unit_maps():
    score, _ = class_scores(torch.tensor([[1.0, 0.0]]), ("a", "b"), [0])
    maps = (torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]]), None)
    concepts = tuple(Concept(k, "", 1.0, c, m) for k, (c, m) in enumerate(zip((3.0, -2.0, 9.0), maps, strict=True)))
    e = Explanation("nmf", score[0], score[0], 1.0, concepts, 0.0, 0.0)
    torch.testing.assert_close(relevance(e, (2, 2)), torch.tensor([[3.0, -1.0], [-1.0, 0.0]]))


def test_calibration_error_by_hand():
    # two bins: 0.95 sure and right 3 of 4 times; 0.55 sure and right once of twice
    confidence = np.array([0.95] * 4 + [0.55] * 2)
    right = np.array([1, 1, 1, 0, 1, 0.0])
    assert expected_calibration_error(confidence, right) == pytest.approx((4 * 0.2 + 2 * 0.05) / 6)


# the images


def test_images_are_a_fixed_choice_of_held_out_ones(digits, digits_data, concepts):
    found = answers(digits, digits_data)
    picked = choose(digits, digits_data, found, {"concepts": concepts}, 30)
    assert all(int(i) % 5 == 4 for i in picked.ids)  # the concepts were fitted on this data and held these out
    assert picked.ids == choose(digits, digits_data, found, {"concepts": concepts}, 30).ids
    assert sorted(picked.labels.bincount().tolist()) == [3] * 10
    with torch.no_grad():
        torch.testing.assert_close(digits.logits(picked.images), picked.logits, rtol=1e-4, atol=1e-4)
    other = choose(digits, open_data("sklearn:digits?split=test"), found, {"concepts": concepts}, 30)
    assert other.ids != picked.ids  # other data: nothing was fitted on it


def test_spread_keeps_the_order_and_never_repeats():
    for n in range(1, 40):
        for k in range(1, n + 1):
            rows = spread(n, k)
            assert rows == sorted(set(rows))
            assert len(rows) == k
            assert 0 <= rows[0] <= rows[-1] < n


def test_data_that_is_too_small_or_of_other_classes_is_refused(digits, tmp_path):
    with pytest.raises(DataError, match=r"12 images are too few for an interval; give at least 20"):
        auditor.auditing.audit(digits, open_data("sklearn:digits", limit=12))
    path = tmp_path / "other.npz"
    np.savez(path, images=np.zeros((30, 8, 8), np.uint8), labels=np.full(30, 11))
    with pytest.raises(DataError, match="labels must be 0 to 9 like the model's classes, got 11"):
        answers(digits, open_data(path))
    from PIL import Image

    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / "pets" / name / "1.png")
    with pytest.raises(DataError, match="classes the model does not know"):
        answers(digits, open_data(tmp_path / "pets"))


def test_a_model_that_says_nan_is_refused(tiny, tiny_npz):
    with torch.no_grad():
        tiny.module.fc.weight[0, 0] = math.nan
    with pytest.raises(NumericsError, match="NaN or infinite logits"):
        answers(tiny, open_data(tiny_npz))


# the whole


def test_an_audit_measures_model_layers_and_explanations(audited):
    names = set(audited.metrics)
    assert {f"explainer/concepts/{name}" for name in NAMES} <= names
    assert {"model/accuracy", "model/ece", "model/nll", "model/accuracy/7", "model/worst_class_accuracy"} <= names
    assert any(name.startswith("model/head.3/") for name in names)
    assert audited.metrics["model/accuracy"].n == audited.data["n"] == 1797  # all images, not only the explained
    for name, m in audited.metrics.items():
        assert m.status == "passed" or not name.startswith("explainer/"), (name, m)
        assert math.isfinite(m.value) == (m.status == "passed"), name
        if m.low is not None:
            assert m.low <= m.value <= m.high, name
    f_cls = audited.metrics["explainer/concepts/f_cls"]
    assert (f_cls.direction, f_cls.n, len(f_cls.per_image)) == ("up", 30, 30)
    assert f_cls.value > 2 * f_cls.null
    assert audited.metrics["explainer/concepts/randomisation"].value < 0.6


def test_the_nmf_stand_in_is_the_reconstruction(digits, concepts, audited, digits_data):
    """f_cls of the audit against the plain definition, image by image."""
    found = answers(digits, digits_data)
    picked = choose(digits, digits_data, found, {"concepts": concepts}, 30)
    layout = digits.layout(concepts.layer_)
    same = []
    with torch.no_grad():
        for x in picked.images:
            z = digits.activations(x[None], [concepts.layer_])[concepts.layer_]
            z_hat = layout.from_positions(concepts.W_ @ concepts.scores(layout, z), z)
            same.append(float(digits.forward_from(concepts.layer_, z_hat).argmax() == digits.logits(x[None]).argmax()))
    assert list(audited.metrics["explainer/concepts/f_cls"].per_image) == same


def test_the_sealed_audit_comes_back_and_any_edit_is_found(audited):
    sealed = audited.sealed()
    again = Audit.from_json(sealed)
    assert again.sealed() == sealed
    assert again.metrics["model/accuracy"] == audited.metrics["model/accuracy"]
    edited = sealed.replace(b'"seed": 0', b'"seed": 1', 1)
    assert edited != sealed
    with pytest.raises(TamperError, match=r"checksum does not match; run the audit again"):
        Audit.from_json(edited)
    with pytest.raises(TamperError, match="not an audit"):
        Audit.from_json({"schema_version": 1})
    with pytest.raises(TamperError, match="newer version"):
        Audit.from_json({"schema_version": 99})


def test_without_labels_accuracy_is_skipped_with_the_reason(tiny, tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "bare.npz", images=rng.integers(0, 256, (24, 13, 17), dtype=np.uint8))
    found = auditor.auditing.audit(tiny, open_data(tmp_path / "bare.npz"), config=AuditConfig(images=20))
    assert found.metrics["model/accuracy"].status == "skipped"
    assert "no labels" in found.metrics["model/accuracy"].reason


def test_an_interrupted_audit_goes_on_where_it_stopped(tiny, tiny_npz, tmp_path, monkeypatch):
    from auditor.auditing import audit as module

    data, config = open_data(tiny_npz), AuditConfig(images=20)
    concepts = auditor.fit("nmf", tiny, open_data(tiny_npz, limit=30), rank=2, refits=1)
    concepts.save(tmp_path / "artifact")
    runs = []
    real = module.take

    def counted(group, case):
        runs.append(group)
        return real(group, case)

    monkeypatch.setattr(module, "take", counted)

    def stop(stage, done, total):
        if stage == "audit" and done == 5:
            raise KeyboardInterrupt

    def run(progress=lambda *_: None, cache=tmp_path / "cache"):
        return module.audit(tiny, data, {"concepts": concepts}, config, cache=cache, progress=progress)

    with pytest.raises(KeyboardInterrupt):
        run(stop)
    first = list(runs)
    assert first == list(GROUPS)[:3]
    runs.clear()
    found = run()
    assert runs == list(GROUPS)[3:]
    assert not list((tmp_path / "cache").iterdir())  # a finished audit leaves nothing behind
    whole = run(cache=None)
    assert set(found.metrics) == set(whole.metrics)
    for name, m in whole.metrics.items():
        got = found.metrics[name]
        assert (got.status, got.n, got.direction) == (m.status, m.n, m.direction), name
        assert got.value == pytest.approx(m.value, nan_ok=True), name


def test_a_cached_part_that_was_edited_counts_for_nothing(tmp_path):
    from auditor.auditing.cache import AuditCache
    from auditor.metrics.measure import of_value

    cache = AuditCache(tmp_path, {"a": 1})
    cache.put("part", {"m": of_value(0.5, "up")})
    assert cache.get("part") == {"m": of_value(0.5, "up")}
    assert AuditCache(tmp_path, {"a": 2}).get("part") is None
    (file,) = cache.folder.iterdir()
    file.write_bytes(file.read_bytes().replace(b"0.5", b"0.9"))
    assert cache.get("part") is None


def test_other_seeds_move_little_and_look_at_the_same_images(tiny, tiny_npz):
    data = open_data(tiny_npz)
    concepts = auditor.fit("nmf", tiny, open_data(tiny_npz, limit=30), rank=2, refits=1)
    a, b = (auditor.auditing.audit(tiny, data, {"c": concepts}, AuditConfig(images=20, seed=s)).metrics for s in (0, 7))
    assert a["explainer/c/f_reg"].per_image == b["explainer/c/f_reg"].per_image
    assert a["explainer/c/flip_area"].per_image != b["explainer/c/flip_area"].per_image
