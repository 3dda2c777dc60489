"""A network in blocks: chained they are the model, they learn on their own, cuts that do not compose are refused."""

import pytest
import torch
from torch import nn

from auditor import Subject
from auditor.errors import LayerError
from auditor.network.network_blocks import FromPixels, split
from auditor.training.cycle import forward


class Residual(nn.Module):
    """A block with a shortcut, a batch norm that was trained, and a dropout."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.relu, self.pool = nn.ReLU(), nn.MaxPool2d(2)
        self.inner, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(4 * 3 * 4, 3)

    def forward(self, x):
        z = self.pool(self.relu(self.norm(self.first(x))))
        z = self.last(self.inner(z) + z)
        return self.head(self.drop(z.flatten(1)))


@pytest.fixture(scope="module")
def subject():
    torch.manual_seed(0)
    net = Residual()
    with torch.no_grad():
        net.norm.running_mean.normal_()
        net.norm.running_var.uniform_(0.5, 2)
    return Subject(net.eval(), input_shape=(1, 7, 9), class_names=["a", "b", "c"], mean=(0.3,), std=(0.2,))


def pixels(n=5):
    return torch.rand(n, 1, 7, 9, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("cuts", ["pool", "last", ["pool", "last"], ["relu", "pool", "last"]])
@pytest.mark.parametrize("n", [1, 5])
def test_chained_blocks_are_the_model(subject, cuts, n):
    blocks = split(subject, cuts)
    assert len(blocks) == 1 + (1 if isinstance(cuts, str) else len(cuts))
    with torch.no_grad():
        torch.testing.assert_close(forward(blocks, pixels(n)), subject.logits(pixels(n)), rtol=1e-5, atol=1e-5)
        between = subject.activations(pixels(n), ["pool"])["pool"]
        if cuts == "pool":
            torch.testing.assert_close(blocks[0](pixels(n)), between, rtol=1e-5, atol=1e-6)
    normalised = split(subject, cuts, pixels=False)
    assert not isinstance(normalised[0], FromPixels)
    with torch.no_grad():
        torch.testing.assert_close(
            forward(normalised, subject.normalise(pixels(n))), subject.logits(pixels(n)), rtol=1e-5, atol=1e-5
        )


def test_every_parameter_is_in_one_block_under_its_own_name(subject):
    blocks = split(subject, ["pool", "last"])
    names = [sorted(part.names[n] for n, _ in part.named_parameters()) for part in
             (blocks[0].block, blocks[1], blocks[2].block)]  # fmt: skip
    assert names == [
        ["first.bias", "first.weight", "norm.bias", "norm.weight"],
        ["inner.bias", "inner.weight"],
        ["head.bias", "head.weight"],
    ]


def test_training_a_block_changes_it_and_nothing_in_the_model(subject):
    before = {k: v.clone() for k, v in subject.module.state_dict().items()}
    below, above = split(subject, "last")
    adam = torch.optim.Adam(above.parameters(), 0.05)
    x, y = pixels(), torch.arange(5) % 3
    z = below(x).detach()
    values = []
    for _ in range(20):
        adam.zero_grad()
        value = nn.functional.cross_entropy(above(z), y)
        value.backward()
        adam.step()
        values.append(float(value.detach()))
    assert values[-1] < 0.3 * values[0]
    for name, value in subject.module.state_dict().items():
        assert torch.equal(value, before[name]), name
    grads = torch.autograd.grad(below(x).square().sum(), list(below.parameters()))
    assert all(float(g.abs().max()) > 0 for g in grads)


def test_a_model_from_pt2_is_cut_as_well(subject, tmp_path):
    """From an exported program only the graph is known; its batch is dynamic or frozen, blocks take any rows."""
    for name, dynamic in (("dynamic", ({0: torch.export.Dim("n", min=1, max=64)},)), ("frozen", None)):
        program = torch.export.export(subject.module, (pixels(3 if dynamic else 1),), dynamic_shapes=dynamic)
        torch.export.save(program, tmp_path / f"{name}.pt2")
        module = torch.export.unflatten(torch.export.load(tmp_path / f"{name}.pt2"))
        exported = Subject(module, input_shape=(1, 7, 9), mean=(0.3,), std=(0.2,))
        blocks = split(exported, exported.default_layer())
        with torch.no_grad():
            for n in (1, 3, 5):
                torch.testing.assert_close(
                    forward(blocks, pixels(n)), subject.logits(pixels(n)), rtol=1e-5, atol=1e-5, msg=f"{name} {n}"
                )
        assert sum(p.numel() for block in blocks for p in block.parameters()) == sum(
            p.numel() for p in subject.module.parameters()
        )


def test_a_block_above_can_be_exported(subject):
    above = split(subject, "last")[1]
    z = torch.rand(4, 4, 3, 4)
    program = torch.export.export(above, (z,), dynamic_shapes=({0: torch.export.Dim("n", min=1, max=64)},))
    torch.testing.assert_close(program.module()(z[:3]), above(z[:3]))


def test_one_output_is_a_column_of_logits():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 5 * 7, 1)).eval()
    subject = Subject(net, input_shape=(1, 7, 9))
    blocks = split(subject, "1")
    with torch.no_grad():
        torch.testing.assert_close(forward(blocks, pixels()), subject.logits(pixels()), rtol=1e-5, atol=1e-5)


def test_cuts_that_do_not_compose_are_one_sentence(subject):
    with pytest.raises(LayerError, match="no layer is named"):
        split(subject, [])
    with pytest.raises(LayerError, match=r"'pool' runs before 'last', so the cuts do not compose.*pool, last"):
        split(subject, ["last", "pool"])
    with pytest.raises(LayerError, match="'last' and 'last' give the same output"):
        split(subject, ["last", "last"])
    with pytest.raises(LayerError, match="nosuch"):
        split(subject, ["nosuch"])
    with pytest.raises(LayerError):  # the shortcut passes it by
        split(subject, ["inner"])
