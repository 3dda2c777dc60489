"""Where heads attach: the last non-negative vector below the logits, past what hands its input on."""

import pytest
import torch
from torch import nn

from auditor import Subject
from auditor.errors import LayerError
from auditor.explainers.xnn.head_layer import head_layer, source_of


def subject_of(*layers, side=6):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(*layers)
        with torch.no_grad():
            net(torch.zeros(1, 1, side, side))
    return Subject(net.eval(), input_shape=(1, side, side))


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (
            [nn.Flatten(), nn.Linear(36, 9), nn.ReLU(), nn.Linear(9, 3)],
            "2",
        ),  # above the linear layer, whose sign varies
        ([nn.Flatten(), nn.Linear(36, 9), nn.ReLU(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3)], "2"),
        ([nn.Flatten(), nn.Linear(36, 9), nn.Tanh(), nn.Linear(9, 3)], "2"),  # none is non-negative: the last vector
        (
            [nn.Flatten(), nn.Linear(36, 9), nn.ReLU(), nn.Linear(9, 3), nn.ReLU(), nn.Linear(3, 3)],
            "2",
        ),  # not as logits
        ([nn.Flatten(), nn.Linear(36, 9), nn.ReLU(), nn.Dropout(), nn.Identity(), nn.Linear(9, 3)], "2"),
    ],
)
def test_the_default_layer(layers, expected):
    assert head_layer(subject_of(*layers)) == expected


def test_a_network_without_a_vector_gets_heads_on_a_map():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 4), nn.Flatten())
    subject = Subject(net.eval(), input_shape=(1, 6, 6))
    assert head_layer(subject) == subject.default_layer()


def test_a_named_layer_is_taken_and_a_dropout_stands_for_the_layer_below():
    subject = subject_of(nn.Flatten(), nn.Linear(36, 9), nn.ReLU(), nn.Dropout(), nn.Identity(), nn.Linear(9, 3))
    assert head_layer(subject, "1") == "1"
    assert [source_of(subject, name) for name in ("1", "2", "3", "4")] == ["1", "2", "2", "2"]
    assert head_layer(subject, "4") == "2"
    with pytest.raises(LayerError, match="nosuch"):
        head_layer(subject, "nosuch")


def test_what_hands_on_the_image_itself_has_no_layer_below():
    subject = subject_of(nn.Identity(), nn.Flatten(), nn.Linear(36, 9), nn.ReLU(), nn.Linear(9, 3))
    assert source_of(subject, "0") == "0"


class Same(nn.Module):
    """A dropout of our own: no name tells that it computes nothing."""

    def forward(self, x):
        return x.clone()


CONV = (nn.Conv2d(1, 5, 3), nn.ReLU())


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([*CONV, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3)], "2"),
        ([*CONV, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(5, 3)], "2"),
        ([nn.Flatten(), nn.Linear(36, 6), nn.ReLU(), Same(), nn.Linear(6, 3)], "2"),
        ([*CONV, nn.Flatten(), nn.Linear(5 * 16, 3)], "2"),  # of several positions: the vector it is
    ],
)
def test_heads_read_what_computes_and_not_what_hands_on(layers, expected):
    assert head_layer(subject_of(*layers)) == expected
