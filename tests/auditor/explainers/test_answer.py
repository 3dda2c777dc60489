"""The one answer: against explainers and formulas asked alone, in any company, with what fails among them."""

import pytest
import torch

from auditor.errors import OptionError, TamperError, UnknownClassError, UnknownExplainerError
from auditor.explainers.answer import ExplainedModel, Question, answer, answer_images, chosen_names, explanations_of
from auditor.explainers.answer_options import AnswerOptions
from auditor.explainers.forward_pass import TorchPass, layers_read
from auditor.stability.decision import stabilities

OFF = {"stability": "off", "heatmaps": "none"}


@pytest.fixture(scope="module")
def explainers(concepts, heads):
    return {"concepts": concepts, "heads": heads}


def sums(e) -> float:
    return e["bias"] + sum(c["contribution"] for c in e["concepts"]) + e["others"] + e["residual"]


def test_it_says_what_explainers_and_stability_say_alone(digits, explainers, images):
    x = images[:1]
    (answer,) = answer_images(digits, explainers, x, target="4", stability="full", seed=3, noise_samples=5)
    document = answer.to_json()
    with torch.no_grad():
        logits = digits.logits(x)[0].double()
    assert document["target"] == {"index": 4, "label": "4", "logit": pytest.approx(float(logits[4]))}
    top = document["prediction"]
    assert [p["index"] for p in top["probabilities"]] == logits.argsort(descending=True).tolist()
    assert top["probability"] == pytest.approx(float(logits.softmax(0).max()), rel=1e-6)
    for e, (name, explainer) in zip(document["explanations"], explainers.items(), strict=True):
        alone = explainer.explain(digits, x, 4)[0]
        assert (e["name"], e["kind"], e["target_value_of"]) == (name, explainer.kind, "logit")
        assert [c["contribution"] for c in e["concepts"]] == pytest.approx([c.contribution for c in alone.concepts])
        assert sums(e) == pytest.approx(e["target_value"], rel=1e-4)
    layer = explainers["concepts"].layer_
    (alone,) = stabilities(digits, x, layer, [4], mode="full", seed=3, noise_samples=5)
    for key in ("c1", "c2", "score", "bound", "radius", "samples"):
        assert document["stability"][key] == pytest.approx(getattr(alone, key), rel=1e-6), key
    assert document["model"]["digest"] == digits.digest


def test_top_k_keeps_the_strongest_and_the_sum(digits, explainers, images):
    whole, short = (
        answer_images(digits, explainers, images[:1], top_k=k, **OFF)[0].to_json()["explanations"][0] for k in (None, 2)
    )
    assert short["concepts"] == sorted(whole["concepts"], key=lambda c: -abs(c["contribution"]))[:2]
    assert short["others"] == pytest.approx(
        sum(c["contribution"] for c in whole["concepts"]) - sum(c["contribution"] for c in short["concepts"])
    )
    assert sums(short) == pytest.approx(sums(whole), rel=1e-6)


def test_a_batch_of_different_questions_is_one_pass_and_each_gets_its_own_answer(digits, explainers, images):
    requests = [
        {"explainers": ["concepts"], **OFF},
        {"explainers": ["heads"], "target": 2, "heatmaps": "none", "noise_samples": 4},
        {"stability": "full", "seed": 1, "heatmaps": "array"},
        {"explainers": [], "heatmaps": "none", "noise_samples": 4},
    ]
    model = ExplainedModel.of(digits, explainers)
    sizes = []

    class Counting(TorchPass):
        def run(self, x):
            sizes.append(len(x))
            return super().run(x)

    counting = ExplainedModel.of(digits, explainers, forward=Counting(digits, explainers.values()))
    questions = [Question.of(model, x, AnswerOptions(**o)) for x, o in zip(images, requests, strict=False)]
    together = [a.to_json() for a in answer(counting, questions)]
    assert sizes == [4 + 2 * 3], "four images, and three of four copies of two of them"
    alone = [answer(model, [question])[0].to_json() for question in questions]
    assert len({a["target"]["logit"] for a in together}) == 4
    for a, b in zip(together, alone, strict=True):
        assert [e["name"] for e in a["explanations"]] == [e["name"] for e in b["explanations"]]
        assert a["target"]["logit"] == pytest.approx(b["target"]["logit"], rel=1e-6)
        for one, two in zip(a["explanations"], b["explanations"], strict=True):
            got, expected = ([c["contribution"] for c in e["concepts"]] for e in (one, two))
            assert got == pytest.approx(expected, rel=1e-5, abs=1e-5)  # float32 sums in another order
        assert (a["stability"] is None) == (b["stability"] is None)
        if a["stability"]:
            assert a["stability"]["c2"] == pytest.approx(b["stability"]["c2"], rel=1e-5)
    assert together[3]["explanations"] == []


def test_stages_name_who_worked_for_which_rows(digits, explainers, images):
    model = ExplainedModel.of(digits, explainers)
    requests = [{"explainers": ["heads"], **OFF}, {"explainers": ["concepts", "heads"], "heatmaps": "none"}]
    stages = []
    answer(
        model,
        [Question.of(model, x, AnswerOptions(**o)) for x, o in zip(images, requests, strict=False)],
        lambda stage, kind, rows: stages.append((stage, kind, list(rows))),
    )
    assert stages == [
        ("forward", "-", [0, 1]),
        ("concepts", "nmf", [1]),
        ("heads", "xnn", [0, 1]),
        ("stability", "-", [1]),
    ]


def test_a_class_that_cannot_be_explained_is_an_error_only_where_both_were_named(digits, heads, images, monkeypatch):
    monkeypatch.setattr(heads, "classes_", [0, 5])
    model = ExplainedModel.of(digits, {"heads": heads})
    loose, strict = (
        answer(model, [Question.of(model, images[0], AnswerOptions(target=3, explainers=names, **OFF))])[0]
        for names in (None, ["heads"])
    )
    sentence = "heads cannot explain class '3'; it was fitted for: 0, 5."
    assert loose.to_json()["explanations"][0]["problem"] == sentence
    assert loose.to_json()["explanations"][0]["concepts"] == []
    assert isinstance(strict, OptionError)
    assert str(strict) == sentence
    with pytest.raises(OptionError, match="cannot explain class"):
        answer_images(digits, {"heads": heads}, images[:1], target=3, explainers=["heads"], **OFF)


def test_one_image_that_breaks_an_explainer_hurts_no_other(digits, concepts, images, monkeypatch):
    plain = concepts.explain_from

    def moody(subject, x, *args, **options):
        if bool((x == images[2]).flatten(1).all(1).any()):
            raise RuntimeError("this image")
        return plain(subject, x, *args, **options)

    monkeypatch.setattr(concepts, "explain_from", moody)
    model = ExplainedModel.of(digits, {"concepts": concepts})
    results = answer(model, [Question.of(model, x, AnswerOptions(**OFF)) for x in images])
    assert [isinstance(r, RuntimeError) for r in results] == [i == 2 for i in range(7)]


def test_a_kind_that_loses_an_image_hurts_only_those_who_asked_it(digits, concepts, heads, images, monkeypatch):
    monkeypatch.setattr(heads, "explain_from", lambda *args, **options: [])
    model = ExplainedModel.of(digits, {"concepts": concepts, "heads": heads})
    names = [["concepts"], ["heads"], ["concepts"]]
    results = answer(
        model, [Question.of(model, x, AnswerOptions(**OFF, explainers=n)) for x, n in zip(images, names, strict=False)]
    )
    assert [isinstance(r, RuntimeError) for r in results] == [False, True, False]
    assert "kind xnn: explain_from gave 0 explanations for 1 images" in str(results[1])


class Searching:
    """An explainer that searches: it keeps the options and the sizes of its calls."""

    kind, searches, per_request, layer_, digest_ = "search", True, frozenset({"timeout_s", "max_steps"}), None, None
    target_value_of = "logit"

    def __init__(self, timeout_s):
        self.search_s, self.config = timeout_s, AnswerOptions()
        self.calls = []

    def reads(self):
        from auditor.explainers.base import Reads

        return Reads()

    def can_explain(self, target):
        return True

    def explain_from(self, subject, images, logits, activations, targets, *, heatmaps=True, **options):
        from auditor.explainers.explanation import Explanation, class_scores

        self.calls.append((len(images), options))
        (prediction, *_), (expected, *_) = class_scores(logits, subject.class_names, logits.argmax(1).tolist())
        return [Explanation(self.kind, prediction, expected, 0.0, ()) for _ in targets]


@pytest.mark.parametrize(
    ("fitted", "requested", "limit", "used"),
    [(10.0, None, None, {}), (10.0, 3.0, None, {"timeout_s": 3.0}), (10.0, None, 10.0, {}),
     (10.0, None, 4.0, {"timeout_s": 4.0}), (10.0, 20.0, 4.0, {"timeout_s": 4.0}),
     (None, None, 4.0, {"timeout_s": 4.0}),
     (10.0, 3.0, 4.0, {"timeout_s": 3.0})],
)  # fmt: skip
def test_who_searches_answers_when_named_image_by_image_within_the_limit(
    digits, concepts, images, fitted, requested, limit, used
):
    slow = Searching(fitted)
    model = ExplainedModel.of(digits, {"concepts": concepts, "slow": slow}, search_limit_s=limit)
    assert model.default_names == ["concepts"]
    assert ExplainedModel.of(digits, {"slow": slow}).default_names == ["slow"]
    for names, calls in ((None, []), (["*"], [(1, used), (1, used)])):
        slow.calls.clear()
        options = AnswerOptions(explainers=names, timeout_s=requested, **OFF)
        answer(model, [Question.of(model, x, options) for x in images[:2]])
        assert slow.calls == calls


def test_names_and_classes_that_are_not_there(digits, explainers, images):
    with pytest.raises(
        UnknownExplainerError, match=r"explainers: there is no explainer 'x'; attached are: concepts, heads\."
    ):
        answer_images(digits, explainers, images[:1], explainers=["heads", "x"])
    for target in ("dog", "²", 10, "99"):
        with pytest.raises(UnknownClassError):
            answer_images(digits, explainers, images[:1], target=target)
    assert chosen_names(["a", "b"], ["*", "b"], ["a"]) == ["a", "b"]
    assert chosen_names([], None, []) == []
    assert answer_images(digits, explainers, images[:0]) == []


def test_a_tie_is_one_class_everywhere(tiny, concepts):
    for parameter in tiny.module.fc.parameters():
        torch.nn.init.zeros_(parameter)
    (answer,) = answer_images(tiny, {}, torch.rand(1, 1, 13, 17), **OFF)
    assert answer.prediction["index"] == answer.target["index"] == 0
    assert [p["probability"] for p in answer.prediction["probabilities"]] == pytest.approx([1 / 3] * 3)


def test_layers_are_read_once(concepts, heads):
    assert layers_read([concepts, concepts, heads]) == sorted({concepts.layer_, heads.layer_})
    assert layers_read([]) == []


def test_what_an_audit_measures_is_part_of_the_answer(digits, explainers, images, tiny):
    targets = [None, 4, 2, None]
    for name, explainer in explainers.items():
        measured = explanations_of(explainer, digits, images[:4], targets)
        for i, (explanation, target) in enumerate(zip(measured, targets, strict=True)):
            (one,) = answer_images(digits, explainers, images[i : i + 1], target=target, **OFF)
            same = one.explanations[name]
            assert explanation.target.index == same.target.index
            assert [c.contribution for c in explanation.concepts] == pytest.approx(
                [c.contribution for c in same.concepts], rel=1e-5, abs=1e-6
            )  # float32 sums of a batch come in another order
        with pytest.raises(TamperError, match="was made for a model with other weights"):
            explanations_of(explainer, tiny, torch.rand(1, 1, 13, 17), [None])
