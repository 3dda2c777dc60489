"""Groups of concepts taken out: a class that hangs on one group is lost with it, whatever any single concept does."""

import pytest
import torch
from torch import nn

from auditor import Subject
from auditor.auditing.case import Case, Effort
from auditor.auditing.group_ablation import group_ablation
from auditor.auditing.images import AuditImages

SIDE = 6


class Sums(nn.Module):
    """Four channels of the image; class 0 where channels 0 and 1 together outweigh channels 2 and 3."""

    def __init__(self):
        super().__init__()
        self.features = nn.Conv2d(4, 4, 1, bias=False)
        self.features.weight.data = torch.eye(4)[:, :, None, None]
        self.fc = nn.Linear(4, 2, bias=False)
        self.fc.weight.data = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])

    def forward(self, x):
        return self.fc(self.features(x).mean((2, 3)))


class Channels:
    """Concepts that are the channels themselves, or only the first three of them: then the fourth is residual."""

    kind, layer_ = "channels", "features"

    def __init__(self, n=4, groups=((0, 1), (2, 3))):
        self.n, self.groups = n, [list(g) for g in groups]

    def concept_directions(self):
        return torch.eye(4)[:, : self.n]

    @property
    def contributions_by_class(self):
        return torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])[: self.n]

    def layer_scores(self, subject, z):
        return subject.layout("features"), z.flatten(2)[:, : self.n]


def case(explainer, images):
    subject = Subject(Sums().eval(), input_shape=(4, SIDE, SIDE))
    with torch.no_grad():
        logits = subject.logits(images)
    sample = AuditImages(images, logits, logits.argmax(1), [str(i) for i in range(len(images))])
    made = Case(subject, explainer, sample, None, Effort())
    made.__dict__["sample"] = sample
    return made


def images_of_class(k, n=40):
    generator = torch.Generator().manual_seed(k)
    x = torch.full((n, 4, SIDE, SIDE), 0.1) + 0.01 * torch.rand(n, 4, SIDE, SIDE, generator=generator)
    x[:, 2 * k : 2 * k + 2] += 0.5
    return x


def test_the_group_of_the_class_is_what_it_hangs_on():
    measures = group_ablation(case(Channels(), torch.cat([images_of_class(0), images_of_class(1)])))
    assert measures["group_dominance"].value == 1.0
    assert measures["group_ablation"].value == 1.0
    assert measures["group_ablation"].null == 0.0  # the other two concepts
    assert measures["group_ablation_without_residual"].null == 0.0  # there is no residual to miss


def test_a_residual_that_carries_the_same_keeps_the_class_until_it_goes_too():
    x = images_of_class(1)
    measures = group_ablation(case(Channels(3, ((0,), (1,), (2,))), x))
    assert measures["group_ablation"].value == 0.0  # channel 3 is left, unexplained
    assert measures["group_ablation_without_residual"].value == 1.0
    assert measures["group_ablation_without_residual"].null == 0.0  # channel 2 alone suffices


def test_a_kind_without_directions_is_skipped_with_the_reason():
    class Rules(Channels):
        kind = "rules"

        def concept_directions(self):
            return None

    measures = group_ablation(case(Rules(), images_of_class(0)))
    assert {m.status for m in measures.values()} == {"skipped"}
    assert measures["group_ablation"].reason == "concepts of kind rules are no directions of a layer"


@pytest.mark.parametrize("n", [1, 3])
def test_the_null_takes_as_many_others(n):
    from auditor.auditing.group_ablation import _others

    mask = torch.tensor([1.0] * n + [0.0] * (6 - n))
    other = _others(mask, torch.Generator().manual_seed(0))
    assert float(other.sum()) == n
    assert float((other * mask).sum()) == 0
