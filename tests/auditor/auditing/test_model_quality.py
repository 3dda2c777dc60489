"""Metrics of the model against closed forms, the plain loop, and themselves on awkward networks."""

import contextlib
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from auditor import Subject
from auditor.metrics.ablation import Ablation, ablate, perceptron_above
from auditor.stability.certified_bound import bounds_at, certified_bound
from auditor.metrics.measure import Measure
from auditor.auditing.model_quality import model_metrics
from auditor.network.untrained_twin import untrained, untrained_graph
from auditor.subject_graph import graph_of
from auditor.network.weight_layers import weight_layers
from auditor.metrics.weights import ALPHA, Cosines, weight_metrics


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.b, self.d = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1, bias=False)

    def forward(self, x):
        return torch.relu(x + self.b(self.c(self.d(torch.relu(x)))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.twice, self.top = nn.Linear(30, 5), nn.Linear(5, 5), nn.Linear(5, 4)

    def forward(self, x):
        h = torch.relu(self.a(x.flatten(1)))
        return self.top(torch.relu(self.twice(torch.tanh(self.twice(h)))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, 6, (5, 2), stride=(5, 2))
        self.attention, self.top = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        t = self.patch(x).flatten(2).transpose(1, 2)
        return self.top(self.attention(t, t, t, need_weights=False)[0].mean(1))


def perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


NETWORKS = {
    "two hidden layers": lambda: perceptron(30, 40, 25, 6),
    "three hidden layers": lambda: perceptron(30, 12, 25, 17, 6),
    "tanh": lambda: nn.Sequential(nn.Flatten(), nn.Linear(30, 20), nn.Tanh(), nn.Dropout(), nn.Linear(20, 4)),
    "residual": lambda: nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), Residual(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 4)
    ),
    "tied weights": Tied,
    "attention": Transformer,
}


def subject_of(name: str) -> Subject:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        net = NETWORKS[name]()
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(2)  # away from the flat start, so that ablation matters
    return Subject(net.eval(), input_shape=(1, 5, 6), mean=0.2, std=0.4)


def examples(subject: Subject, n: int = 23):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(n, 1, 5, 6, generator=generator), torch.randint(0, subject.n_classes, (n,), generator=generator)


def plain_loop(subject: Subject, weight, x, y):
    """Zero one row at a time and run the whole network: plainly right, hopelessly slow."""
    with torch.no_grad():
        base, found = F.cross_entropy(subject.logits(x).double(), y), []
        for i in range(len(weight)):
            kept = weight[i].clone()
            weight[i] = 0
            found.append(F.cross_entropy(subject.logits(x).double(), y) - base)
            weight[i] = kept
    return torch.stack(found)


@pytest.mark.parametrize("name", NETWORKS)
def test_ablation_equals_the_plain_loop(name):
    subject = subject_of(name)
    x, y = examples(subject)
    graph = graph_of(subject)
    state = dict(subject.module.named_parameters())
    fast = 0
    for layer in weight_layers(graph):
        (weight,) = [p for p in state.values() if p.data_ptr() == layer.rows.data_ptr()]
        with subject.at_rest():
            truth = plain_loop(subject, weight, x, y)
            found = ablate(graph, layer, subject.normalise(x), y)
        assert float(truth.abs().max()) > 1e-4
        torch.testing.assert_close(found.increase, truth, rtol=0, atol=1e-6)  # the promise; float32 gives 1e-8
        fast += perceptron_above(graph, layer) is not None
    assert fast == {"two hidden layers": 2, "three hidden layers": 2}.get(name, 0)


def test_ablation_of_some_neurons_equals_theirs_among_all():
    subject = subject_of("three hidden layers")
    x, y = examples(subject)
    graph = graph_of(subject)
    some = torch.tensor([1, 4, 7])
    for layer in weight_layers(graph)[:3]:
        few, all_of_them = ablate(graph, layer, x, y, some), ablate(graph, layer, x, y)
        torch.testing.assert_close(few.increase, all_of_them.increase[some], rtol=0, atol=1e-12)
        torch.testing.assert_close(few.norms, all_of_them.norms[some])


def test_ablation_in_chunks_is_the_same(monkeypatch):
    subject = subject_of("residual")
    x, y = examples(subject)
    layer = weight_layers(graph_of(subject))[0]
    whole = ablate(graph_of(subject), layer, x, y)
    monkeypatch.setattr("auditor.metrics.ablation.MOST_NUMBERS", 3000)
    torch.testing.assert_close(ablate(graph_of(subject), layer, x, y).increase, whole.increase, rtol=0, atol=1e-8)


def test_faithfulness_known_answer():
    two_and_one = Ablation(torch.arange(3), torch.tensor([0.1, 0.2, 0.3]).double(), torch.tensor([1.0, 2.0, 3.0]), 5)
    assert two_and_one.faithfulness().value == pytest.approx(1, abs=1e-7)  # float32 norms
    assert two_and_one.faithfulness().null == pytest.approx(1.96 / math.sqrt(3))


@pytest.mark.parametrize(
    ("increase", "norms", "why"),
    [
        ([0.1, 0.2, 0.3], [2.0, 2.0, 2.0], "same norm"),
        ([0.0, 0.0, 0.0], [1.0, 2.0, 3.0], "alike"),
        ([0.1, 0.2], [1.0, 2.0], "at least 3 neurons"),
        ([0.1, math.nan, 0.2], [1.0, 2.0, 3.0], "not finite"),
    ],
)
def test_undefined_faithfulness_fails_with_a_reason(increase, norms, why):
    found = Ablation(
        torch.arange(len(norms)), torch.tensor(increase, dtype=torch.float64), torch.tensor(norms), 5
    ).faithfulness()
    assert math.isnan(found.value)
    assert found.status == "failed"
    assert why in found.reason


def test_cosines_of_all_pairs():
    w = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [-2.0, 0.0]])
    values = Cosines.of(w).values.sort().values
    torch.testing.assert_close(values, torch.tensor([0.5, 0.5, 1.0]).double().sqrt())
    found = weight_metrics(w)
    assert found["zero_rows"].value == 1
    assert found["cosine_max"].value == pytest.approx(1)
    assert found["cosine_max"].n == 3
    assert found["cosine_share_below"].value == 0
    assert sum(found["cosine_histogram"].per_image) == pytest.approx(1)
    assert len(found["cosine_histogram"].per_image) == 50


def test_cosines_of_random_rows_are_those_of_the_null_model():
    w = torch.randn(400, 784, generator=torch.Generator().manual_seed(1))
    found = weight_metrics(w)
    assert found["cosine_max"].value == pytest.approx(found["cosine_max"].null, abs=0.03)
    assert found["cosine_histogram"].value == pytest.approx(math.sqrt(2 / math.pi / 784), rel=0.02)
    assert found["cosine_share_below"].value == 1
    assert ALPHA == 0.2


def test_sparsity_known_answers():
    w = torch.tensor([[3.0, -4.0], [0.0, 0.001]])
    found = weight_metrics(w)
    assert found["norm_1_1"].value == pytest.approx(7.001)
    assert found["norm_2_1"].value == pytest.approx(5.001)
    assert found["norm_2_2"].value == pytest.approx(math.sqrt(25 + 1e-6))
    assert found["norm_2_inf"].value == 5
    assert found["mean_abs_weight"].value == pytest.approx(7.001 / 4)
    assert found["near_zero_share"].value == 0.5
    gaussian = 0.1 * torch.randn(500, 784, generator=torch.Generator().manual_seed(0))
    assert weight_metrics(gaussian)["mean_abs_weight"].value == pytest.approx(0.07979, abs=4 * 0.0603 / 626)


def test_a_single_neuron_has_no_pairs_and_zero_weights_are_sparse():
    found = weight_metrics(torch.zeros(1, 5))
    assert found["cosine_max"].status == "skipped"
    assert found["near_zero_share"].value == 1


def test_a_sample_of_rows_says_so(monkeypatch):
    monkeypatch.setattr("auditor.metrics.weights.MOST_ROWS", 20)
    w = torch.randn(50, 9, generator=torch.Generator().manual_seed(0))
    found = weight_metrics(w, seed=3)
    assert found["cosine_max"].n == 190
    assert found["cosine_max"].reason == "20 of 50 neurons, drawn at random"
    assert found["norm_2_1"].null == pytest.approx(50 / math.sqrt(3), rel=0.1)  # scaled to all 50 rows
    assert weight_metrics(w, seed=3) == found


def test_an_untrained_model_forgets_its_weights_and_gets_them_back():
    subject = subject_of("residual")
    x, _ = examples(subject)
    before, state = subject.logits(x), {k: v.clone() for k, v in subject.module.state_dict().items()}
    bound = certified_bound(subject, "")
    with contextlib.suppress(KeyError), untrained(subject, seed=1) as new:
        blank = {k: v.clone() for k, v in subject.module.state_dict().items()}
        assert not torch.equal(subject.logits(x), before)
        graph = untrained_graph(graph_of(subject), new)
        torch.testing.assert_close(graph.run(subject.normalise(x))[graph.output], subject.logits(x))
        assert bounds_at(graph, graph.output, subject.preprocessing.std)[0].value < bound.value
        raise KeyError  # whatever happens inside
    assert not torch.equal(state["0.weight"], blank["0.weight"])
    assert float(blank["0.weight"].abs().max()) <= 1 / 3
    assert torch.equal(blank["1.weight"], torch.ones(3))
    assert torch.equal(blank["1.running_var"], torch.ones(3))
    for name, value in subject.module.state_dict().items():
        assert torch.equal(value, state[name])
    assert torch.equal(subject.logits(x), before)


@pytest.fixture(scope="module")
def of_digits(trained, digits_data):
    batch = next(digits_data.batches(trained[0], 60))
    stages = []
    found = model_metrics(trained[0], batch.images, batch.labels, progress=lambda *step: stages.append(step))
    return found, stages


def test_metrics_of_the_digits_network(of_digits):
    found, stages = of_digits
    assert all(isinstance(m, Measure) for m in found.values())
    layers = {"features.0", "features.2", "features.5", "head.1", "head.3"}
    assert {k.split("/")[1] for k in found if k.count("/") == 2} == layers
    for layer in layers:
        assert -1 <= found[f"model/{layer}/faithfulness"].value <= 1
        assert found[f"model/{layer}/cosine_max"].null is not None
    assert found["model/accuracy"].value > 0.9
    assert found["model/accuracy"].null == 0.1
    sampled, local, proof = (found[f"model/c1_{k}"] for k in ("sampled", "local", "certified"))
    assert 0 < sampled.value <= local.value <= proof.value
    assert 0 < sampled.null <= local.null <= proof.null < proof.value  # never trained: hardly moves
    assert 0 < found["model/c2_sampled"].value <= found["model/c2_local"].value
    assert found["model/c2_certified"].status == "skipped"
    assert "relu in features.1" in found["model/c2_certified"].reason
    assert {s for s, _, _ in stages} == {"weights of every layer", "neurons ablated", "stability"}
    assert all(done <= total for _, done, total in stages)


def test_metrics_repeat(of_digits, trained, digits_data):
    batch = next(digits_data.batches(trained[0], 60))
    assert model_metrics(trained[0], batch.images, batch.labels) == of_digits[0]


def test_a_tight_budget_draws_neurons_and_says_so(monkeypatch, trained, digits_data):
    monkeypatch.setattr("auditor.auditing.model_quality.BUDGET", 1e9)
    batch = next(digits_data.batches(trained[0], 20))
    found = model_metrics(trained[0], batch.images, batch.labels)
    assert found["model/features.0/faithfulness"].n == 21
    assert found["model/features.0/faithfulness"].reason == "21 of 24 neurons, drawn at random, on 8 of 20 images"
    assert found["model/head.1/faithfulness"].reason == ""  # a perceptron above: all at once


def test_without_labels_only_what_needs_them_is_skipped():
    subject = subject_of("tanh")
    found = model_metrics(subject, examples(subject)[0], None)
    skipped = {k for k, m in found.items() if m.status == "skipped"}
    assert skipped == {"model/accuracy", "model/cross_entropy", "model/1/faithfulness", "model/4/faithfulness"}
    assert found["model/c2_certified"].value >= found["model/c2_local"].value  # tanh is smooth


def test_attention_is_measured_but_not_certified():
    subject = subject_of("attention")
    found = model_metrics(subject, *examples(subject))
    assert found["model/attention/mean_abs_weight"].n == 18 * 6
    assert found["model/attention:2/mean_abs_weight"].n == 36
    assert found["model/c1_certified"].status == "skipped"
    assert "attention" in found["model/c1_certified"].reason
    assert found["model/c1_local"].value >= found["model/c1_sampled"].value > 0


def test_what_cannot_be_traced_or_read_is_skipped_with_a_reason():
    class Undecided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(30, 3)

        def forward(self, x):
            z = self.a(x.flatten(1))
            return z if float(z.sum()) > 0 else -z  # export cannot follow a branch on data

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.linspace(-1, 1, 90).view(3, 30))

        def forward(self, x):
            return F.linear(x.flatten(1), self.w)

    for module, why in ((Undecided(), "torch.export could not follow"), (Functional(), "no module of its own")):
        subject = Subject(module, input_shape=(1, 5, 6))
        found = model_metrics(subject, *examples(subject, 5))
        assert found["model/accuracy"].status == "passed"
        assert found["model/c1_local"].status == "skipped"
        assert why in found["model/c1_local"].reason


def test_a_model_from_a_pt2_file_gives_the_same(tmp_path):
    subject = subject_of("residual")
    x, y = examples(subject, 8)
    path = tmp_path / "model.pt2"
    program = torch.export.export(subject.module, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    torch.export.save(program, path)
    back = Subject(torch.export.unflatten(torch.export.load(path)), input_shape=(1, 5, 6), mean=0.2, std=0.4)
    ours, theirs = model_metrics(subject, x, y), model_metrics(back, x, y)
    assert ours.keys() == theirs.keys()
    for name, m in ours.items():
        if m.status == "passed":
            assert theirs[name].value == pytest.approx(m.value, rel=1e-4, abs=1e-6), name
            assert theirs[name].null == pytest.approx(m.null, rel=1e-4), name
