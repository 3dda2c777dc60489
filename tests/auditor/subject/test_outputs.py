"""Outputs of a model: what stands at its end is recognised and undone, and probabilities are the model's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auditor import Subject
from auditor.commands import describe
from auditor.errors import OptionError
from auditor.network.aten_graph import graph_of
from auditor.subject.outputs import OUTPUTS, Output, ending_by_numbers

SHAPE = (2, 7, 9)


def by_hand(z: Tensor) -> Tensor:
    e = (z - z.amax(1, keepdim=True)).exp()
    return e / e.sum(1, keepdim=True)


ENDS = {
    "nothing": lambda z: z,
    "module": nn.Softmax(1),
    "function": lambda z: F.softmax(z, dim=-1),
    "by keyword": lambda z: torch.softmax(input=z, dim=1),
    "method": lambda z: z.softmax(1),
    "log module": nn.LogSoftmax(1),
    "log function": lambda z: F.log_softmax(z, 1),
    "sigmoid": lambda z: torch.sigmoid(z),
    "sigmoid module": nn.Sigmoid(),
    "in place": lambda z: z.sigmoid_(),
    "in a mapping": lambda z: {"logits": z.softmax(1)},
    "in a tuple": lambda z: (z.softmax(1), z),
}


class Net(nn.Module):
    """A gate inside, which must stay, and logits large enough that a softmax of them is nearly one-hot."""

    def __init__(self, end, classes: int = 4, scale: float = 9.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.conv, self.gate, self.head = nn.Conv2d(2, 5, 3), nn.Conv2d(2, 5, 3), nn.Linear(5, classes)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator)
        self.scale, self.end = scale, end

    def forward(self, x: Tensor):
        y = torch.sigmoid(self.gate(x)) * self.conv(x).relu()
        return self.end(self.scale * self.head(y.mean((2, 3))))


def pixels(n: int = 3) -> Tensor:
    return torch.rand(n, *SHAPE, generator=torch.Generator().manual_seed(1))


def as_pt2(net: nn.Module) -> nn.Module:
    example = torch.rand(2, *SHAPE)
    program = torch.export.export(net.eval(), (example,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    return torch.export.unflatten(program)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("stored", ["in memory", "pt2"])
def test_logits_are_those_without_the_end(end, stored):
    net = Net(ENDS[end])
    if stored == "pt2":
        net = as_pt2(net)
    subject, plain = Subject(net, input_shape=SHAPE), Subject(Net(ENDS["nothing"]), input_shape=SHAPE)
    x = pixels()
    torch.testing.assert_close(subject.logits(x), plain.logits(x), rtol=0, atol=1e-5)
    p = plain.logits(x).double()
    expected = p.sigmoid() if "sigmoid" in end or end == "in place" else p.softmax(1)
    torch.testing.assert_close(subject.probabilities(subject.logits(x)), expected, rtol=0, atol=1e-6)
    graph = graph_of(subject)
    torch.testing.assert_close(graph.run(subject.normalise(x))[graph.output], subject.logits(x), rtol=1e-4, atol=1e-4)
    assert (subject.output.ending == "none") == (end == "nothing")


def test_a_softmax_without_a_call_is_turned_back_by_numbers():
    net = Net(by_hand)
    subject, plain = Subject(net, input_shape=SHAPE), Subject(Net(ENDS["nothing"]), input_shape=SHAPE)
    assert (subject.output.name, subject.output.call) == ("softmax", None)
    assert "rows sum to one" in subject.output.evidence
    x = pixels()
    difference = subject.logits(x) - plain.logits(x)
    torch.testing.assert_close(difference, difference[:, :1].expand_as(difference), rtol=0, atol=1e-4)
    p = subject.probabilities(subject.logits(x))
    torch.testing.assert_close(p, net(x).double(), rtol=0, atol=1e-6)


def test_a_sigmoid_without_a_call_needs_to_be_recorded():
    net = Net(lambda z: 1 / (1 + torch.exp(-z)), scale=1.0)
    measured = Subject(net, input_shape=SHAPE)
    assert measured.output.name == "logits"
    assert "--output sigmoid" in measured.output.evidence
    subject, plain = (
        Subject(net, input_shape=SHAPE, output="sigmoid"),
        Subject(Net(ENDS["nothing"], scale=1.0), input_shape=SHAPE),
    )
    torch.testing.assert_close(subject.logits(pixels()), plain.logits(pixels()), rtol=0, atol=1e-4)


def test_a_gate_or_attention_inside_is_left_alone():
    subject = Subject(Net(lambda z: z * torch.sigmoid(z)), input_shape=SHAPE)
    assert subject.output == Output(evidence="the model's outputs are logits")


@pytest.mark.parametrize("end", ["nothing", "sigmoid", "squeezed"])
def test_one_logit_has_two_sides(end):
    ends = {**ENDS, "squeezed": lambda z: torch.sigmoid(z).squeeze(1)}
    z = Net(ENDS["nothing"], classes=1)(pixels()).detach()
    subject = Subject(Net(ends[end], classes=1), input_shape=SHAPE, class_names=["cat", "dog"])
    logits = subject.logits(pixels())
    torch.testing.assert_close(logits, torch.cat([-z, z], 1), rtol=0, atol=1e-5)
    p = subject.probabilities(logits)
    torch.testing.assert_close(p[:, 1], z[:, 0].double().sigmoid(), rtol=0, atol=1e-6)
    torch.testing.assert_close(p.sum(1), torch.ones(3, dtype=torch.float64))
    assert Subject(Net(ends[end], classes=1), input_shape=SHAPE).class_names == ("0", "1")


@pytest.mark.parametrize("end", ["nothing", "sigmoid"])
def test_labels_of_a_multilabel_model_stand_alone(end):
    subject = Subject(Net(ENDS[end]), input_shape=SHAPE, output="multilabel")
    z = Net(ENDS["nothing"])(pixels()).detach()
    torch.testing.assert_close(subject.probabilities(subject.logits(pixels())), z.double().sigmoid(), rtol=0, atol=1e-6)
    assert subject.twin().output == subject.output


def test_what_is_recorded_must_agree_with_the_model():
    soft, plain = Net(ENDS["function"]), Net(ENDS["nothing"])
    as_they_are = Subject(soft, input_shape=SHAPE, output="logits")
    assert as_they_are.logits(pixels()).sum() == pytest.approx(3, abs=1e-5)
    assert as_they_are.output.evidence == "the model's outputs are a softmax, and taken as logits as recorded"
    for net, output, sentence in [
        (plain, "softmax", "output softmax: the model's outputs are none, they lie in"),
        (plain, "sigmoid", "output sigmoid: the model's outputs are none"),
        (soft, "multilabel", "record --output softmax"),
        (soft, "sigmoid", "output sigmoid"),
        (plain, "percent", "output must be one of logits, softmax"),
    ]:
        with pytest.raises(OptionError, match=sentence):
            Subject(net, input_shape=SHAPE, output=output)
    assert Subject(soft, input_shape=SHAPE, output="softmax").output.call == 2  # after the gate


@pytest.mark.parametrize(
    ("rows", "ending"),
    [
        ([[0.5, 0.5], [1.0, 0.0]], "softmax"),
        ([[0.5, 0.5], [0.5, 0.4]], "none"),
        ([[1.5, -0.5]], "none"),
        ([[-0.6931472, -0.6931472]], "log-softmax"),
        ([[-0.6931472, -0.8]], "none"),
        ([[1.0]], "none"),
        ([[float("nan"), 0.5]], "none"),
    ],
)
def test_rows_by_their_numbers(rows, ending):
    assert ending_by_numbers(torch.tensor(rows)) == ending


def test_another_way_through_the_model_is_turned_back_by_numbers():
    class Moody(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if len(x) < 3 else by_hand(Net.forward(self.plain[0], x))

    net = Moody(ENDS["function"])
    net.plain = [Net(ENDS["nothing"])]
    subject = Subject(net, input_shape=SHAPE)
    assert subject.output.call == 2
    torch.testing.assert_close(
        subject.probabilities(subject.logits(pixels())), net(pixels()).double(), rtol=0, atol=1e-6
    )


def test_the_command_knows_every_output():
    assert describe.OUTPUTS == OUTPUTS
