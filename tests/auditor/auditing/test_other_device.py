"""An audit on a second device: every check can be taken that can be taken on the CPU, and says the same."""

import pytest

from auditor import AuditConfig, audit, fit
from auditor.data.source import open_data
from auditor.subject.subject import Subject
from tests.auditor.explainers.test_other_device import OPTIONS, network, subject_of
from tests.other_device import ELSEWHERE, other_device

# not "layers": forward-mode derivatives know no device of ours
CHECKS = ("faithfulness", "flipping", "randomisation", "noise", "heatmaps", "groups", "reliance")


def audited(device):
    train, test = open_data("sklearn:digits?split=train", limit=60), open_data("sklearn:digits?split=test", limit=40)
    images = next(iter(train.batches(Subject(network(), input_shape=(1, 8, 8)), 8))).images
    subject = subject_of(images)
    explainers = {kind: fit(kind, subject, train, **OPTIONS[kind]) for kind in ("nmf", "xnn")}
    return audit(subject.to(device), test, explainers, AuditConfig(images=20, checks=CHECKS)).metrics


@pytest.mark.slow
def test_an_audit_there_takes_what_one_here_takes():
    here = audited("cpu")
    with other_device():
        there = audited(ELSEWHERE)
    assert {k: (m.status, m.reason) for k, m in there.items()} == {k: (m.status, m.reason) for k, m in here.items()}
    assert sum(m.status == "passed" for m in here.values()) > 20
    for name in ("explainer/nmf/faithfulness_deletion", "explainer/nmf/f_cls", "model/accuracy"):
        if name in here:
            assert there[name].value == pytest.approx(here[name].value, abs=0.02)
