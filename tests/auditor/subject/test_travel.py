"""Travel: a subject arrives once, as the one that was sent, or not at all."""

import pytest
import torch
from torch import nn

from auditor.errors import TamperError
from auditor.subject import travel
from auditor.subject.subject import Subject
from tests.stores import travelled


@pytest.fixture(autouse=True)
def nothing_here(monkeypatch):
    monkeypatch.setattr(travel, "_here", type(travel._here)())


def made(seed=0, **options):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3))
    return Subject(net, input_shape=(1, 4, 5), class_names=["a", "b", "c"], mean=0.3, std=0.2, name="m", **options)


def test_a_built_subject_arrives_with_its_weights_words_and_layers():
    subject = made(layer="1")
    subject.layers()
    other = travelled(subject)
    x = torch.rand(3, 1, 4, 5)
    assert other is not subject
    assert torch.equal(other.logits(x), subject.logits(x))
    assert (other.digest, other.name, other.class_names) == (subject.digest, "m", ("a", "b", "c"))
    assert other.default_layer() == "1"
    assert other._layers == subject._layers


def test_it_arrives_once_and_stays():
    subject = made()
    assert travelled(subject) is travelled(subject)
    assert travelled([subject, subject])[1] is travelled(subject)
    assert travelled(made(1)) is not travelled(subject)


def test_another_model_than_was_sent_is_refused():
    subject = made()
    subject.origin = travel.Built(made(1).module, {"input_shape": (1, 4, 5), "class_names": ["a", "b", "c"]})
    with pytest.raises(TamperError, match=f"and the command that asks has {subject.digest[:12]}"):
        travelled(subject)


def test_a_twin_with_changed_weights_goes_by_the_digest_of_its_original():
    subject = made()
    twin = subject.twin()
    with torch.no_grad():
        twin.module[3].weight.add_(1.0)
    other = travelled(twin)
    x = torch.rand(3, 1, 4, 5)
    assert torch.equal(other.logits(x), twin.logits(x))
    assert other.digest == subject.digest
    with torch.no_grad():
        twin.module[3].weight.add_(1.0)
    assert torch.equal(travelled(twin).logits(x), twin.logits(x))  # never taken from what is here


def test_only_the_last_ones_stay(monkeypatch):
    monkeypatch.setattr(travel, "MOST", 2)
    first = travelled(made(0))
    travelled(made(1))
    travelled(made(2))
    assert travelled(made(0)) is not first
