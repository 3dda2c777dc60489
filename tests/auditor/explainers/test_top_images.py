"""The images that hold most of a concept, by reading every explanation."""

import pytest

from auditor import open_data
from auditor.errors import DataError, OptionError
from auditor.explainers.top_images import top_images


def test_they_are_those_with_the_largest_activation(digits, concepts):
    data = open_data("sklearn:digits", limit=60)
    mask = top_images(concepts, digits, data, 1, 12)
    batch = next(data.batches(digits, 60))
    plain = [e.concepts for e in concepts.explain(digits, batch.images)]
    activation = [next((c.activation for c in row if c.index == 1), 0.0) for row in plain]
    assert int(mask.sum()) == 12
    assert min(a for a, top in zip(activation, mask, strict=True) if top) >= max(
        a for a, top in zip(activation, mask, strict=True) if not top
    )
    assert len(data.only(mask)) == 12


def test_bad_input(digits, concepts):
    data = open_data("sklearn:digits", limit=20)
    with pytest.raises(OptionError, match=f"concepts are 0 to {concepts.n_concepts - 1}, got 99"):
        top_images(concepts, digits, data, 99, 10)
    with pytest.raises(DataError, match=r"of 20 images; 11 that show it and as many others are needed"):
        top_images(concepts, digits, data, 0, 11)
