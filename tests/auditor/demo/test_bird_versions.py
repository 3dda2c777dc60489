"""The versions of the story: what training changes, and that the seed alone decides."""

import pytest
import torch

from auditor import open_data
from auditor.demo import bird_versions
from auditor.demo.bird_versions import BirdNet, accuracy, train_birds
from auditor.demo.birds import birds, write


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return open_data(write(birds(30, 0, stamped=True), tmp_path_factory.mktemp("birds") / "train"))


def test_the_network_answers_each_picture_by_itself():
    net, x = BirdNet().eval(), torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(net(x), torch.cat([net(row[None]) for row in x]), rtol=1e-4, atol=1e-5)


def test_the_seed_decides_and_nothing_else_random_is_touched(monkeypatch, pictures):
    monkeypatch.setattr(bird_versions, "EPOCHS", 1)
    steps = []
    before = torch.get_rng_state()
    first = train_birds(pictures, 3, "training", lambda *step: steps.append(step))
    assert torch.equal(torch.get_rng_state(), before)
    assert train_birds(pictures, 3, "training").digest == first.digest
    assert train_birds(pictures, 4, "training").digest != first.digest
    assert steps == [("training", 1, 1)]
    assert first.class_names == ("finch", "hawk", "heron")


def test_accuracy_counts_pictures(pictures):
    class AlwaysHawk(torch.nn.Module):
        def forward(self, x):
            return torch.tensor([[0.0, 1.0, 0.0]]).expand(len(x), 3)

    from auditor import Subject

    subject = Subject(AlwaysHawk(), input_shape=(3, 64, 64), class_names=["finch", "hawk", "heron"])
    assert accuracy(subject, pictures) == pytest.approx(1 / 3)
