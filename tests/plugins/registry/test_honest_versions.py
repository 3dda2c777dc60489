"""Which versions give the noise of retraining: earlier ones that passed on the same data, of the same architecture."""

import pytest
import torch
from torch import nn

from auditor import Subject
from auditor.errors import OptionError
from auditor.plugins import log_subject
from auditor.plugins.registry import tags
from auditor.plugins.registry.honest_versions import honest_subjects, passed_before, same_architecture
from auditor.plugins.registry.location import resolve, set_tag
from auditor.plugins.registry.tags import AuditTag, GateTag


def subject(seed, width=3):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Conv2d(1, width, 3), nn.ReLU(), nn.Flatten(), nn.Linear(width * 36, 2))
    return Subject(net.eval(), input_shape=(1, 8, 8), class_names=["a", "b"])


@pytest.fixture(scope="module")
def versions(store):
    uris = [log_subject(subject(k), "retrained", experiment="tests") for k in range(5)]
    for uri, verdict, data in zip(
        uris, ("pass", "pass", "fail", "pass", "pass"), ("d", "x", "d", "d", "d"), strict=True
    ):
        version = resolve(uri)
        set_tag(
            version, tags.AUDIT, AuditTag("0" * 64, f"audits/{12 * chr(48)}", "", data="s", data_digest=data).encode()
        )
        set_tag(version, tags.GATE, GateTag(verdict, "").encode())
    return uris


def test_only_earlier_versions_that_passed_on_the_same_data_count(versions, registry):
    new, base = resolve(versions[4]), resolve(versions[3])
    assert passed_before(new, base, "d") == [versions[0]]  # 1: other data, 2: failed, 3: the baseline
    assert passed_before(new, base, "x") == [versions[1]]
    assert passed_before(base, new, "d") == [versions[0]]  # later ones do not count
    assert passed_before(new, base, "nothing") == []


def test_given_versions_must_differ_by_training_only(versions, registry):
    a = subject(0)
    assert list(honest_subjects(a, [versions[1], versions[2]])) == [versions[1], versions[2]]
    with pytest.raises(OptionError, match="it is the same model as another one given"):
        honest_subjects(a, [versions[0]])
    wide = log_subject(subject(7, width=4), "wide", experiment="tests")
    with pytest.raises(OptionError, match="give versions of the same architecture"):
        honest_subjects(a, [wide])
    assert list(honest_subjects(a, [], [wide, versions[0], versions[1], versions[1]])) == [versions[1]]
    assert not same_architecture(a, subject(1, width=4))
    assert same_architecture(a, subject(1))
