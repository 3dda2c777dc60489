"""Training with the blocks above kept: what is trained, on which rows, and which state is kept."""

import pytest
import torch
from torch import nn

from auditor import Subject
from auditor.errors import LayerError
from auditor.explainers.deepfacto.block_settings import BlockSettings
from auditor.explainers.deepfacto.block_training import (
    BlockFit,
    SplitNetwork,
    error_of_difference,
    make_task,
    start_of_training,
    takes_mirrored,
)
from auditor.explainers.deepfacto.factor_admm import validated
from auditor.explainers.deepfacto.forms import reordered, score_head
from auditor.kernels.factorization.deepfacto import projected
from auditor.training.factorization import Factorization


def network():
    """Three convolutions of 20, 152 and 292 weights below layer 6; layer 1 takes twice the room of the image."""
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3),
        nn.Conv2d(8, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 2 * 3, 3),
    )  # fmt: skip


@pytest.fixture(scope="module")
def images():
    y = torch.arange(48) % 3
    x = 0.3 * torch.rand(48, 1, 7, 10, generator=torch.Generator().manual_seed(0))
    for k in range(3):
        x[y == k, :, :, 3 * k : 3 * k + 3] += 0.7
    return x, y


@pytest.fixture(scope="module")
def subject(images):
    """A network that tells the three classes apart, with channels that live."""
    torch.manual_seed(4)  # all four channels of layer 6 are alive after it
    net, (x, y) = network(), images
    adam = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(40):
        adam.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        adam.step()
    subject = Subject(net.eval(), input_shape=(1, 7, 10), class_names=["a", "b", "c"])
    assert bool((subject.logits(x).argmax(1) == y).all())
    return subject


def test_the_upper_half_of_the_weights_is_trained(subject):
    assert start_of_training(subject, "6") == "4"  # 292 of 464 weights come after the pooling
    assert start_of_training(subject, "3") == "1"  # 152 of 172; its output takes twice the room of the image, not more
    part = SplitNetwork.of(subject, "6")
    assert part.start == "4"
    assert sum(p.numel() for p in part.below.parameters()) == 8 * 4 * 9 + 4


def test_all_weights_are_trained_where_a_layers_output_would_not_fit():
    wide = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(48, 2),
    )
    subject = Subject(wide.eval(), input_shape=(1, 2, 3))
    assert start_of_training(subject, "3") is None  # after layer 1 come 224 of 254, but it takes three times the room


def test_a_start_that_does_not_lie_below_is_refused(subject):
    with pytest.raises(LayerError, match="'3' runs before '6'"):
        SplitNetwork.of(subject, "3", "6")


@pytest.mark.parametrize("start", [None, "4"])
def test_copies_carry_their_label_and_the_models_logits(subject, images, start):
    x, y = images
    part = SplitNetwork.of(subject, "6", start)
    task = make_task(subject, part, x, y, subject.logits(x), 3, False, BlockSettings(seed=1))
    assert len(task.x) == len(task.y) == 3 * 48
    assert torch.equal(task.labels, y.repeat(3))
    torch.testing.assert_close(task.y[:48, 1:], subject.logits(x))
    with torch.no_grad():  # every row is an image of its own whose logits are those in the row
        torch.testing.assert_close(part.above(part.below(task.x)), task.y[:, 1:], rtol=1e-4, atol=1e-4)
    assert int(task.checked.sum()) == int(validated(48).sum()) == 6
    assert not bool((task.learned & task.checked).any())
    of_image = torch.arange(144) % 48
    assert not set(of_image[task.learned].tolist()) & set(of_image[task.checked].tolist())


def test_mirrored_copies_where_the_model_takes_them_for_the_same(subject, images):
    x, y = images
    assert not takes_mirrored(subject, x, nn.functional.one_hot(y, 3).float())
    blind = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 3)).eval()
    fair = Subject(blind, input_shape=(1, 7, 10))
    assert takes_mirrored(fair, x, fair.logits(x))


def fitted(subject, images, **options):
    x, y = images
    part = SplitNetwork.of(subject, "6")
    settings = BlockSettings(epochs=3, warm_passes=10, batch=8, lr=1e-2, lr_above=1e-2, patience=9)
    settings = BlockSettings(**{**{k: getattr(settings, k) for k in settings.__dataclass_fields__}, **options})
    task = make_task(subject, part, x, y, subject.logits(x), 1, False, settings)
    with torch.no_grad():
        Z = part.below(task.x)
    scale = float(Z.square().mean().sqrt())
    run = BlockFit(part, Factorization.of(Z / scale, 3).basis, scale, task, settings)
    return part, task, run, scale


def test_the_warm_start_reproduces_the_network_up_to_the_factorization(subject, images):
    part, task, run, scale = fitted(subject, images)
    with torch.no_grad():
        Z = part.below(task.x)
        S = run.factors(Z / scale)
        product = run.factors.native(run.factors.basis @ run.factors.positions(S), Z) * scale
        torch.testing.assert_close(run.head.top(S), part.above(product), rtol=1e-4, atol=1e-4)


def test_what_is_kept_is_what_was_measured(subject, images):
    part, task, run, scale = fitted(subject, images, fidelity=0.0)
    best = run.train(lambda _: None)
    assert len(best.history) == 3
    assert len(best.valid) == 4
    head = {"lift.weight": best.lift[0], "lift.bias": best.lift[1], **{f"above.{k}": v for k, v in best.above.items()}}
    with torch.no_grad():
        positions = part.below(task.x).flatten(2) / scale
    S = projected(positions, best.M)
    expected = run.head.logits(S)
    torch.testing.assert_close(score_head(head, subject, "6").logits(S), expected, rtol=1e-5, atol=1e-5)
    order = [2, 0, 1]
    turned = score_head(reordered(head, order), subject, "6").logits(S[:, order])
    torch.testing.assert_close(turned, expected, rtol=1e-5, atol=1e-5)
    assert best.valid[-1][1] < best.valid[0][1]  # the objective of equation 4.13 falls
    assert set(best.weights) == {"5.weight", "5.bias"}
    assert set(best.above) == {"8.weight", "8.bias"}


def test_a_run_that_breaks_down_keeps_the_warm_start(subject, images):
    _, _, run, _ = fitted(subject, images, lr=1e30)
    best = run.train(lambda _: None)
    assert best.epoch == 0
    assert best.status.startswith("stopped after epoch")
    assert all(bool(torch.isfinite(v).all()) for v in best.weights.values())


def test_a_share_of_one_is_no_certainty():
    assert 0 < error_of_difference(1.0, 100) < error_of_difference(0.5, 100)
    assert error_of_difference(0.5, 400) < error_of_difference(0.5, 100)
