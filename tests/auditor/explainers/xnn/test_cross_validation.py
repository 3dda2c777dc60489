import torch

from auditor.explainers.fitted_images import FittedImages
from auditor.explainers.xnn.cross_validation import choose, split
from auditor.explainers.xnn.examples import Examples


def test_every_example_is_left_out_once():
    Z = torch.arange(23.0)[:, None]
    examples = Examples(Z, Z, torch.zeros(23, dtype=torch.long), FittedImages.each(23, 5))
    pairs = split(examples, 3)
    assert sorted(torch.cat([rest.Z[:, 0] for _, rest in pairs]).tolist()) == list(range(23))
    for part, rest in pairs:
        assert not set(part.Z[:, 0].tolist()) & set(rest.Z[:, 0].tolist())
        assert len(part.Z) + len(rest.Z) == 23
        assert not bool((part.parts.learn & part.parts.choose).any())


def test_the_strongest_within_one_standard_error_is_taken():
    errors = {1: [1.0, 1.4], 2: [1.1, 1.5], 3: [2.0, 2.1]}  # the best is 1.2 with a standard error of .2
    assert choose([{"beta": b} for b in errors], lambda o: errors[o["beta"]]) == {"beta": 2}
    sure = {1: [1.2, 1.2], 2: [1.3, 1.3]}
    assert choose([{"beta": b} for b in sure], lambda o: sure[o["beta"]]) == {"beta": 1}
