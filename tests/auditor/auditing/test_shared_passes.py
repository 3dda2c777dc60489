"""One pass for all explainers, by condition and image."""

import torch

from auditor.auditing.cost import Meter
from auditor.auditing.shared_passes import SharedPasses


def images(n, shape, seed=0):
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(seed))


def test_an_image_is_run_once_per_condition_and_the_numbers_are_those_of_a_pass(tiny):
    x, passes, meter = images(5, tiny.input_shape), SharedPasses(["conv", "conv"]), Meter()
    with meter.on(tiny.module):
        passes.run(tiny, "as it is", x[[0, 3]], [0, 3])
        logits, taken = passes.run(tiny, "as it is", x, range(5))
        assert meter.images == 5
        passes.run(tiny, "moved", x[:2], [0, 1])
        assert meter.images == 7
    wanted, activations = tiny.run(x, ["conv"])
    torch.testing.assert_close(logits, wanted)
    torch.testing.assert_close(taken["conv"], activations["conv"])


def test_what_does_not_fit_is_run_again(tiny):
    x, meter = images(4, tiny.input_shape), Meter()
    one = tiny.run(x[:1], ["conv"])
    size = 4 * (one[0].numel() + one[1]["conv"].numel())
    passes = SharedPasses(["conv"], most_bytes=2 * size + 1)
    with meter.on(tiny.module):
        for _ in range(2):
            logits, _ = passes.run(tiny, "as it is", x, [0, 1, 2, 3])
    assert meter.images == 4 + 2
    torch.testing.assert_close(logits, tiny.logits(x))
    passes = SharedPasses(["conv"], most_bytes=2 * size + 1)
    with meter.on(tiny.module):
        passes.run(tiny, "moved", x[:2], [0, 1])
        passes.run(tiny, "moved", x[:2], [0, 1])
    assert meter.images == 8
