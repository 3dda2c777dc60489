"""Lineage: the network inside an explainer as the next version, which says where it came from."""

import json
from contextlib import contextmanager

import pytest
import torch

from auditor import Subject, plugins
from auditor.errors import OptionError
from auditor.plugins.registry.lineage import check_has_network, register_network
from auditor.plugins.registry.location import resolve
from auditor.plugins.registry.tags import LINEAGE
from tests.conftest import Tiny


class WithNetwork:
    """What an explainer answers that carries a network: here a new one, of the shape of the model it was fitted to."""

    kind, name, layer_, digest_ = "halves", "h", "relu", "e" * 64
    makes_network = True

    @contextmanager
    def network(self, subject):
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.made = Tiny()
        yield Subject(self.made, input_shape=subject.input_shape, class_names=subject.class_names)


class Without(WithNetwork):
    kind, makes_network = "none", False


def test_the_next_version_is_the_network_and_names_its_source(registry, tiny):
    uri = plugins.log_subject(tiny, "factored", experiment="tests")
    source = plugins.load_subject(uri)
    digest, x = source.digest, torch.rand(3, 1, 13, 17)
    explainer = WithNetwork()
    new = register_network(explainer, uri, subject=source)
    assert new == "models:/factored/2"
    tag = json.loads(resolve(new).tags[LINEAGE])
    assert {k: v for k, v in tag.items() if k not in ("time", "checksum")} == {
        "source": uri,
        "source_digest": digest,
        "explainer": "h",
        "explainer_digest": "e" * 64,
        "kind": "halves",
        "layer": "relu",
        "change": "",
    }
    with torch.no_grad():
        torch.testing.assert_close(plugins.load_subject(new).logits(x), explainer.made.eval()(x))
    assert resolve(new).experiment_id == resolve(uri).experiment_id


def test_what_has_no_network_or_is_not_attached_is_refused(registry, tiny):
    with pytest.raises(OptionError, match="kind none makes no network of its own"):
        check_has_network(Without)
    with pytest.raises(OptionError, match="kind none makes no network of its own"):
        register_network(Without(), "models:/nosuch/1", subject=tiny)
    unstored = WithNetwork()
    unstored.digest_ = None
    with pytest.raises(OptionError, match="is not stored yet; attach it first"):
        register_network(unstored, "models:/nosuch/1", subject=tiny)
