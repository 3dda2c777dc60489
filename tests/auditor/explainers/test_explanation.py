"""An explanation: its identity, its order, its JSON; classes with their probabilities."""

import json
import math

import pytest
import torch
from torch import nn

from auditor import Subject
from auditor.explainers.explanation import ClassScore, Concept, Explanation, class_scores

SCORE = ClassScore(1, "b", 0.7, 2.0)


def explained(*contributions, **other):
    concepts = tuple(Concept(i, f"c{i}", 0.1 * i, c) for i, c in enumerate(contributions))
    values = {"target_value": 2.0, "bias": 0.5, "residual": -0.25} | other
    return Explanation("kind", SCORE, SCORE, concepts=concepts, **values)


@pytest.mark.parametrize(("value", "scale"), [(2.0, 2.0), (-40.0, 40.0), (0.01, 1.0)])
def test_the_gap_is_relative_to_the_value_but_never_below_one(value, scale):
    e = explained(1.0, -3.0, target_value=value)
    assert e.gap() == pytest.approx(abs(0.5 + 1.0 - 3.0 - 0.25 - value) / scale)


def test_parts_that_add_up_have_no_gap():
    assert explained(1.0, 0.75).gap() == 0
    assert explained(1.0, 0.75, target_value=2.5).gap() == pytest.approx(0.5 / 2.5)


@pytest.mark.parametrize("missing", ["bias", "residual"])
def test_relevance_alone_has_no_gap(missing):
    with pytest.raises(ValueError, match="gives no contributions"):
        explained(1.0, **{missing: None}).gap()


def test_the_strongest_of_either_sign_comes_first_and_zero_is_a_contribution():
    assert [c.index for c in explained(0.5, -2.0, 1.0).ranked()] == [1, 2, 0]
    # concept 2 has the largest activation and a contribution of exactly 0: it comes last all the same
    assert [c.index for c in explained(0.01, -0.02, 0.0).ranked()] == [1, 0, 2]
    assert [c.index for c in explained(None, None, None).ranked()] == [2, 1, 0]


def test_json_is_plain_and_leaves_out_what_is_not_there():
    concept = Concept(0, "c", 0.5, None, heatmap=torch.tensor([[0.12345678, 1.0]], dtype=torch.float32), note="dead")
    e = Explanation("kind", SCORE, SCORE, 2.0, (concept, Concept(1, "d", 0.0, 1.0)), extra={"a": 1})
    document = json.loads(json.dumps(e.to_json()))
    assert document["concepts"][0] == {
        "index": 0, "label": "c", "activation": 0.5, "contribution": None, "heatmap": [[0.123457, 1.0]], "note": "dead",
    }  # fmt: skip
    assert document["concepts"][1]["heatmap"] is None
    assert "note" not in document["concepts"][1]
    assert document["extra"] == {"a": 1}
    assert "extra" not in explained(1.0).to_json()
    assert e.to_json(heatmaps=False)["concepts"][0]["heatmap"] is None


def subject_of(*names: str) -> Subject:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, len(names)))
    return Subject(net, input_shape=(1, 2, 2), class_names=names)


def test_probabilities_are_softmax_and_one_logit_is_a_sigmoid():
    logits = torch.tensor([[1.0, 3.0, -2.0], [0.0, -1.0, 0.5]])
    predictions, targets = class_scores(logits, subject_of("a", "b", "c"), [2, 0])
    assert [p.index for p in predictions] == [1, 2]
    total = sum(math.exp(v) for v in (1.0, 3.0, -2.0))
    assert predictions[0].probability == pytest.approx(math.exp(3.0) / total)
    assert targets[0] == ClassScore(2, "c", pytest.approx(math.exp(-2.0) / total), -2.0)
    assert (targets[1].index, targets[1].label, targets[1].logit) == (0, "a", 0.0)
    ((one,), _) = class_scores(torch.tensor([[0.3]]), subject_of("yes"), [0])
    assert one.probability == pytest.approx(1 / (1 + math.exp(-0.3)))


def test_the_share_explained_counts_what_is_shown_against_all_that_moves_the_value():
    e = explained(3.0, -1.0, 0.5, residual=-0.5)
    assert e.explained_share(e.ranked()[:2]) == pytest.approx(4 / 5)
    assert e.explained_share(e.concepts) == pytest.approx(4.5 / 5)
    assert explained(1.0, None).explained_share([]) is None
    assert explained(residual=0.0).explained_share([]) == 1.0
