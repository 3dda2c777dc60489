"""Identity: each part of a model counts, and only what differs is named."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from auditor import Subject
from auditor.subject.identity import Identity


def subject(**options) -> Subject:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 11 * 15, 3))
    return Subject(net, input_shape=(1, 13, 17), **options)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"mean": 0.5}, "preprocessing"),
        ({"std": 0.5}, "preprocessing"),
        ({"resize": "crop"}, "preprocessing"),
        ({"output": "multilabel"}, "preprocessing"),
        ({"class_names": ["a", "b", "c"]}, "class names"),
    ],
)
def test_every_part_of_a_description_counts(options, part):
    plain, other = subject().identity, subject(**options).identity
    assert plain.differences(other) == [part]
    assert plain.digest != other.digest
    assert plain.digest == subject().identity.digest


def test_the_order_of_class_names_counts():
    a, b = subject(class_names=["a", "b", "c"]), subject(class_names=["c", "b", "a"])
    assert a.identity.differences(b.identity) == ["class names"]


def test_a_graph_counts_where_both_have_one():
    a, b = subject(graph="1" * 64), subject(graph="2" * 64)
    assert a.identity.differences(b.identity) == ["graph"]
    assert a.identity.differences(subject().identity) == []


def test_a_twin_and_a_moved_subject_keep_their_identity():
    a = subject(graph="1" * 64)
    before = a.identity
    assert a.twin().identity == before
    assert a.to("cpu", torch.float64).identity == before


def test_json_goes_round_and_anything_else_is_none():
    identity = subject().identity
    assert Identity.from_json(identity.to_json()) == identity
    for odd in (None, [], "x", {}, identity.to_json() | {"version": 1}, identity.to_json() | {"graph": 7}):
        assert Identity.from_json(odd) is None
    assert replace(identity, graph="g").digest != identity.digest
