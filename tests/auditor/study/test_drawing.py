"""A study drawn from a real model: the digits CNN, its concepts and heads, and one heatmap per image."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from auditor.errors import StudyError
from auditor.explainers.shown_concepts import shown_concepts
from auditor.study.design import checked_config
from auditor.study.drawing import Source, alike, draw_study


@pytest.fixture(scope="module")
def drawn(trained, digits_data, concepts, heads):
    config = checked_config(conditions=("none", "one-heatmap", "concepts", "heads"), sets=4, per_batch=6, seed=1)
    source = Source("digits", trained[0], digits_data, {"concepts": concepts, "heads": heads}, "models:/digits/1")
    return draw_study([source], config), config


def test_sets_are_disjoint_balanced_and_of_the_chosen_classes(drawn, trained, digits_data):
    (study, _), config = drawn
    (data,) = study.data
    every = [key for one in data.sets for key in one]
    assert len(set(every)) == len(every) == 24
    assert set(study.images) == set(every)
    for s in range(config.sets):
        classes = study.classes_of(0, s)
        assert sorted(classes.count(c) for c in data.classes) == [1, 1, 2, 2]
        assert study.levels(0, s)[1] == 1.0
    total = [sum(study.classes_of(0, s).count(c) for s in range(4)) for c in data.classes]
    assert total == [6, 6, 6, 6]  # which classes have one more turns from set to set


def test_predictions_and_values_are_the_models_and_the_explainers_own(drawn, trained, digits_data, concepts):
    (study, _), _ = drawn
    subject = trained[0]
    by_name = {}
    for batch in digits_data.batches(subject, 200):
        by_name |= dict(zip(batch.ids, batch.images, strict=True))
    keys = list(study.images)[:8]
    pixels = torch.stack([by_name[study.images[k].source] for k in keys])
    assert [subject.class_names[i] for i in subject.logits(pixels).argmax(1)] == [
        study.images[k].predicted for k in keys
    ]
    for key, e in zip(keys, concepts.explain(subject, pixels), strict=True):
        shares = {round(c.contribution / sum(abs(x.contribution) for x in e.concepts), 4) for c in e.concepts}
        assert set(study.images[key].values["concepts"]) <= {s + 0.0 for s in shares} | {-0.0}


def test_every_picture_is_there_and_nothing_else(drawn):
    (study, pictures), _ = drawn
    expected = {f"image/{k}" for k in [*study.images, *study.practice]}
    for key, image in study.images.items():
        for condition, there in image.heats.items():
            expected |= {f"heat/{key}/{condition}/{slot}" for slot, has in enumerate(there) if has}
    assert set(pictures) == expected
    picture = Image.open(io.BytesIO(pictures[f"image/{next(iter(study.images))}"]))
    assert picture.size == (160, 160)  # 8 x 8, enlarged
    layer = Image.open(io.BytesIO(pictures[f"heat/{next(iter(study.images))}/one-heatmap/0"])).convert("RGBA")
    opacity = np.asarray(layer)[..., 3]
    assert opacity.max() > 150 > opacity.min()


def test_heads_of_classes_are_shown_by_rank_so_that_a_slot_gives_no_class_away(drawn):
    (study, _), _ = drawn
    slots = study.data[0].slots
    assert slots["heads"]["by_rank"]
    assert not slots["concepts"]["by_rank"]
    for image in study.images.values():
        sizes = [abs(v) for v in image.values["heads"]]
        assert sizes == sorted(sizes, reverse=True)


def test_the_same_seed_draws_the_same_and_ids_say_nothing(drawn, trained, digits_data, concepts, heads):
    (study, pictures), config = drawn
    source = Source("digits", trained[0], digits_data, {"concepts": concepts, "heads": heads}, "models:/digits/1")
    again, same = draw_study([source], config)
    assert again.images == study.images
    assert same == pictures
    assert all(len(k) == 16 and int(k, 16) >= 0 for k in study.images)


@pytest.mark.parametrize(
    ("options", "classes", "said"),
    [
        ({"sets": 50, "per_batch": 40}, "alike", "need 500 images of each class, by the model's predictions on"),
        ({}, ("1", "2", "3"), "want 4 different classes of digits, got 3"),
        ({}, ("1", "2", "3", "nosuch"), "no class is called 'nosuch'"),
        ({}, "strange", "alike, random, or by their names, got 'strange'"),
    ],
)
def test_too_little_or_wrong_is_one_sentence(trained, digits_data, options, classes, said):
    config = checked_config(**options)
    source = Source("digits", trained[0], digits_data, {}, "models:/digits/1", classes)
    with pytest.raises(Exception, match=said) as error:
        draw_study([source], config)
    assert "\n" not in str(error.value)


def test_a_class_that_an_explainer_does_not_explain_is_named(trained, digits_data, heads, monkeypatch):
    monkeypatch.setattr(heads, "classes_", [1, 2, 3, 4, 5])
    config = checked_config(conditions=("none", "heads"))
    source = Source("digits", trained[0], digits_data, {"heads": heads}, "", ("1", "2", "3", "7"))
    with pytest.raises(StudyError, match=r"heads does not explain class '7'; it was fitted for: 1, 2, 3, 4, 5"):
        draw_study([source], config)
    monkeypatch.setattr(heads, "classes_", [1, 2])
    source = Source("digits", trained[0], digits_data, {"heads": heads}, "")
    with pytest.raises(StudyError, match="8 classes have no explanation by heads"):
        draw_study([source], config)


def test_alike_takes_the_closest_pair_first():
    p = np.array([[0.5, 0.0, 0.5], [0.0, 1.0, 0.0], [0.4, 0.1, 0.5]])
    assert sorted(alike(p, np.array([0, 1, 2]), [0, 1, 2], 2)) == [0, 2]


def test_slots_of_shared_concepts_are_the_strongest_and_add_up_to_at_most_one(trained, concepts, images):
    explanations = concepts.explain(trained[0], images)
    shown = shown_concepts(explanations, is_of_class=False, most=3)
    assert shown.values.shape == (7, 3)
    assert not shown.is_by_rank
    assert (np.abs(shown.values).sum(1) <= 1 + 1e-9).all()
    strength = {}
    for e in explanations:
        whole = sum(c.strength for c in e.concepts)
        for c in e.concepts:
            strength[c.index] = strength.get(c.index, 0) + c.strength / whole
    best = sorted(strength, key=lambda k: -strength[k])[:3]
    assert [c.index for c in shown.concepts[0]] == best
    ranked = shown_concepts(explanations, is_of_class=True, most=3)
    assert ranked.is_by_rank == (len({e.target.index for e in explanations}) > 1)
    assert [c.index for c in ranked.concepts[2]] == [c.index for c in explanations[2].ranked()[:3]]
