"""What the options say of themselves: re-fits from other starts, and of every kind the same questions."""

import pytest
import torch

from auditor.explainers.base import available_kinds, explainer_class
from auditor.explainers.nmf.config import NmfConfig


def test_a_refit_has_another_seed_and_a_random_start():
    config = NmfConfig(rank=3, seed=4, refits=5)
    again = config.with_another_start(2)
    assert (again.seed, again.init) == (6, "random")
    assert again.model_dump(exclude={"seed", "init"}) == config.model_dump(exclude={"seed", "init"})
    assert (config.seed, config.init) == (4, "nndsvda")
    assert config.n_refits == 5


@pytest.mark.parametrize("kind", available_kinds())
def test_every_kind_answers(kind):
    config = explainer_class(kind).Config()
    again = config.with_another_start(3)
    assert again.seed == config.seed + 3
    assert type(again) is type(config)
    assert getattr(again, "init", "random") == "random"
    assert config.n_refits == getattr(config, "refits", 1)
    explainer = explainer_class(kind)()
    assert (explainer.search_s is not None) <= explainer.searches


@pytest.mark.parametrize("kind", ["nmf", "coupled", "xnn", "tree", "deepfacto", "rde"])
def test_what_our_kinds_held_out_before_they_kept_a_record(kind):
    guess = explainer_class(kind).Config(held_out_every=3).guessed_held_out(8)
    assert guess.nonzero()[:, 0].tolist() == [2, 5]
    assert guess.dtype == torch.bool
