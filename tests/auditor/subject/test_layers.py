"""Layouts against plain loops over positions; the suggested layer against a table of networks."""

import pytest
import torch

from auditor.errors import ShapeError
from auditor.subject.layers import Deviations, Layer, Layout, layout_of, reading_of, suggest


@pytest.mark.parametrize(
    ("shape", "size", "name", "grid", "prefix"),
    [
        ((512, 7, 7), (224, 224), "map", (7, 7), 0),
        ((7, 7, 768), (224, 224), "map-last", (7, 7), 0),
        ((197, 768), (224, 224), "tokens", (14, 14), 1),
        ((196, 768), (224, 224), "tokens", (14, 14), 0),
        ((201, 768), (224, 224), "tokens", (14, 14), 5),
        ((33, 8), (32, 64), "tokens", (4, 8), 1),
        ((9,), (8, 8), "vector", (1, 1), 0),
    ],
)
def test_layouts(shape, size, name, grid, prefix):
    layout = layout_of(shape, size)
    assert (layout.name, layout.grid, layout.prefix) == (name, grid, prefix)
    z = torch.rand(3, *shape)
    p = layout.to_positions(z)
    assert p.shape == (3, layout.channels, layout.n_positions)
    torch.testing.assert_close(layout.from_positions(p, z), z)


def test_positions_are_read_cell_by_cell():
    z = torch.rand(2, 3, 4, 5)
    by_hand = torch.stack([torch.stack([z[:, :, i, j] for i in range(4) for j in range(5)], -1)])[0]
    assert torch.equal(Layout("map", 3, (4, 5)).to_positions(z), by_hand)
    assert torch.equal(Layout("map-last", 3, (4, 5)).to_positions(z.permute(0, 2, 3, 1)), by_hand)
    tokens = torch.cat([torch.full((2, 2, 3), 9.0), by_hand.transpose(1, 2)], 1)
    assert torch.equal(Layout("tokens", 3, (4, 5), prefix=2).to_positions(tokens), by_hand)


def test_a_class_token_is_lent_to_every_copy_of_its_image():
    layout = Layout("tokens", 3, (2, 2), prefix=1)
    like = torch.rand(2, 5, 3)
    positions = torch.rand(6, 3, 4)
    z = layout.from_positions(positions, like)
    assert torch.equal(layout.to_positions(z), positions)
    assert torch.equal(z[:, 0], like[[0, 1, 0, 1, 0, 1], 0])


@pytest.mark.parametrize(
    ("shape", "size", "layout"),
    [
        ((7, 7, 7), (224, 224), Layout("map", 7, (7, 7))),  # all sides alike: channels first
        ((8, 8, 3), (8, 10), Layout("map-last", 3, (8, 8))),  # as large as the image is still a map
        ((9, 9, 3), (8, 10), Layout("map", 9, (9, 3))),  # larger than the image: these are channels
        ((4, 7, 4), (224, 224), Layout("map", 4, (7, 4))),
        ((1, 6), (8, 8), Layout("tokens", 6, (1, 1), 0)),  # one token is a position, not a class token
        ((2, 6), (8, 8), Layout("tokens", 6, (1, 1), 1)),
        ((3, 6), (8, 8), Layout("tokens", 6, (1, 1), 2)),
        ((18, 6), (8, 8), Layout("tokens", 6, (4, 4), 2)),  # class and distillation token
        ((8, 6), (16, 32), Layout("tokens", 6, (2, 4), 0)),
        ((7, 6), (8, 8), Layout("tokens", 6, (1, 7), 0)),  # no grid with the image's proportions: one row
        ((12, 6), (8, 8), Layout("tokens", 6, (1, 12), 0)),
    ],
)
def test_awkward_shapes(shape, size, layout):
    assert layout_of(shape, size) == layout


def test_a_video_layer_is_refused():
    with pytest.raises(ShapeError, match=r"output shape \(3, 4, 5, 6\) per image cannot be read"):
        layout_of((3, 4, 5, 6), (8, 8))


def layer(name, channels, grid=(4, 4), *, nonnegative=True, explainable=True, same_as=""):
    layout = Layout("map" if grid != (1, 1) else "vector", channels, grid)
    return Layer(name, "Any", (), layout, nonnegative, explainable, same_as=same_as)


NETWORKS = {
    "the last spatial layer with no negative value": (
        [layer("a", 4), layer("b", 5), layer("c", 6), layer("d", 6, nonnegative=False), layer("fc", 9, (1, 1))],
        "c",
    ),
    "not a map with one channel per class": ([layer("a", 4), layer("b", 5), layer("classes", 7)], "b"),
    "unless there is nothing else": ([layer("classes", 7), layer("fc", 7, (1, 1))], "classes"),
    "signed, where only the first half is non-negative": (
        [layer("a", 4), layer("b", 5), *(layer(n, 6, nonnegative=False) for n in "cd"), layer("fc", 9, (1, 1))],
        "d",
    ),
    "the middle of four layers belongs to the second half": (
        [layer("a", 4), layer("b", 4), layer("c", 4), layer("d", 4, nonnegative=False)],
        "c",
    ),
    "the second of four layers does not": (
        [layer("a", 4), layer("b", 4), layer("c", 4, nonnegative=False), layer("d", 4, nonnegative=False)],
        "d",
    ),
    "not one that cannot be explained": ([layer("a", 4), layer("b", 5), layer("c", 6, explainable=False)], "b"),
    "the outermost name of an output": ([layer("block", 4), layer("block.1", 4, same_as="block")], "block"),
    "the last hidden layer of a perceptron": (
        [layer("fc1", 9, (1, 1)), layer("fc2", 8, (1, 1)), layer("fc3", 7, (1, 1))],
        "fc2",
    ),
    "none": ([layer("fc", 7, (1, 1))], None),
    "none of none": ([], None),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_suggested_layer(name):
    layers, expected = NETWORKS[name]
    best = suggest(layers, n_classes=7)
    assert (best and best.name) == expected


def test_one_position_is_not_spatial_and_neither_is_a_layer_without_layout():
    assert layer("a", 4, (1, 2)).is_spatial
    assert layer("a", 4, (2, 1)).is_spatial
    assert not layer("a", 4, (1, 1)).is_spatial
    assert not Layer("a", "Any", (), None, True, False).is_spatial


@pytest.mark.parametrize("kind", ["Dropout", "Dropout2d", "Identity", "ZeroPad2d", "ReflectionPad2d", "Flatten"])
def test_what_computes_nothing_is_not_suggested(kind):
    layout = layout_of((8, 5, 5), (20, 20))
    conv = Layer("conv", "ReLU", (8, 5, 5), layout, True, True)
    passive = Layer("passive", kind, (8, 5, 5), layout, True, True)
    assert suggest([conv, passive], 3) is conv
    assert suggest([passive], 3) is passive  # nothing else is there


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((3, 4, 5), Layout("map", 3, (4, 5))),
        ((4, 4, 3), Layout("map-last", 3, (4, 4))),
        ((22, 3), Layout("tokens", 3, (4, 5), 2)),
        ((7,), Layout("vector", 7, (1, 1))),
    ],
)
def test_deviations_begin_at_the_mean_and_come_back(shape, layout):
    z = torch.randn(6, *shape, generator=torch.Generator().manual_seed(0))
    reading = Deviations.from_mean(layout, z)
    p = reading.to_positions(z)
    assert p.shape == (6, layout.channels, layout.n_positions + layout.prefix)
    torch.testing.assert_close(reading.from_positions(p, z), z)
    torch.testing.assert_close(
        p.mean(0) if layout.prefix else p.mean((0, 2)),
        torch.zeros(p.shape[1:] if layout.prefix else p.shape[1]),
        atol=1e-6,
        rtol=0,
    )
    start = reading.from_positions(torch.zeros_like(p[:2]), z[:2])
    assert torch.equal(start[0], start[1])  # the same for every image, class token included
    torch.testing.assert_close(reading.gradient_to_positions(z), p + reading.start)
    cells = reading.on_grid(p)
    assert cells.shape[-1] == layout.n_positions
    torch.testing.assert_close(cells + reading.on_grid(reading.start), layout.to_positions(z))
    assert (layout.keeps_tokens, reading.keeps_tokens) == (layout.prefix > 0, False)
    assert (layout.has_start, reading.has_start) == (False, True)
    assert torch.equal(layout.on_grid(p), p)


def test_only_what_is_signed_in_earnest_is_read_as_deviations():
    layout, x = Layout("map", 2, (1, 50)), torch.linspace(-4, 4, 200).reshape(2, 2, 1, 50)
    assert reading_of(layout, x).has_start
    assert reading_of(layout, torch.nn.functional.silu(x)) is layout  # rests at zero, a little below here and there
    assert reading_of(layout, x.abs()) is layout
