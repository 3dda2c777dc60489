"""The untrained twin has weights of torch's own initialisation, and the true ones come back whatever happens."""

import contextlib

import torch

from auditor.network.aten_graph import graph_of
from auditor.network.untrained_twin import untrained, untrained_graph
from auditor.stability.certified_bound import bounds_at, certified_bound
from tests.auditor.metrics.small_networks import examples, subject_of


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
