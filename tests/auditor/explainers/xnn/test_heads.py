"""Explanation heads: plain layers, batched over classes; what a shared pass may compute."""

import itertools
import math

import pytest
import torch

from auditor.explainers.xnn.heads import ChannelsFirst, XHeads


def test_batched_predictor_is_the_sum_of_contributions_on_random_inputs():
    heads = XHeads(3, 6, (8,), 4, generator=torch.Generator().manual_seed(0))
    Z = torch.rand(100, 6)
    E = heads.encode(Z)
    gap = heads.predict(E) - heads.c[:, None] - (heads.v[..., 0][:, None] * E[..., 0]).sum(-1)
    assert float(gap.detach().abs().max()) < 1e-5
    for k in range(3):  # the plain layers that heatmaps walk through are the same encoder
        torch.testing.assert_close(heads.encoder_of(k)(Z), E[k, ..., 0])


def plain_cells(maps, side):
    """Max over the cells of a grid, cell by cell."""
    h, w = maps.shape
    return [
        float(maps[i * h // side : -(-(i + 1) * h // side), j * w // side : -(-(j + 1) * w // side)].max())
        for i in range(side)
        for j in range(side)
    ]


@pytest.mark.parametrize("size", [(4, 4), (5, 7), (3, 2)])
def test_x_features_of_a_map_are_pooled_cell_by_cell(size):
    heads = XHeads(2, 3, (), 2, cells=4, generator=torch.Generator().manual_seed(1))
    Z = torch.rand(3, 3, *size, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        E = heads.encode(Z)
        for k in range(2):
            w, b = heads.encoder_w[0][k], heads.encoder_b[0][k, 0]
            maps = torch.relu(torch.einsum("fc,nchw->nfhw", w, Z) + b[:, None, None])
            for n in range(3):
                for f in range(2):
                    assert E[k, n, f].tolist() == pytest.approx(plain_cells(maps[n, f], 2), abs=1e-6)
        parts = heads.contributions(E)
        torch.testing.assert_close(parts[1, 2, 0], (E[1, 2, 0] * heads.v[1, 0]).sum())
        torch.testing.assert_close(heads.predict(E), heads.c[:, None] + parts.sum(-1))


@pytest.mark.parametrize(
    ("layout", "shape"), [("vector", (3,)), ("map", (3, 5, 7)), ("map-last", (5, 7, 3)), ("tokens", (6, 3))]
)
@pytest.mark.parametrize("pooling", ["max", "mean"])
def test_an_image_needs_the_head_of_its_own_class_only(layout, shape, pooling):
    cells = 1 if layout in ("vector", "tokens") else 4
    hidden = (4,) if layout == "vector" else ()
    heads = XHeads(3, 3, hidden, 2, cells=cells, pooling=pooling, generator=torch.Generator().manual_seed(1))
    z = torch.rand(5, *shape, generator=torch.Generator().manual_seed(2))
    Z, classes = ChannelsFirst(layout)(z), [2, 0, 2, 1, 2]
    with torch.no_grad():
        everything, each = heads.encode(Z), heads.encode_each(Z, classes)
        for i, k in enumerate(classes):
            torch.testing.assert_close(each[i], everything[k, i])
            plain = heads.encoder_of(k, layout)(z[i : i + 1])  # what heatmaps walk through
            torch.testing.assert_close(plain.reshape(2, cells), each[i])
    assert float(each.std()) > 1e-3


def test_mean_pooling_is_the_mean_of_each_cell():
    heads = random_heads(cells=4, pooling="mean")
    Z = torch.randn(2, 6, 5, 7, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        E = heads.encode(Z)
        maps = heads.embed(heads.rows(Z)).view(3, 2, 5, 7, 4)
        for cell, (i, j) in enumerate(itertools.product(cells_of(5, 2), cells_of(7, 2))):
            mean = torch.stack([maps[:, :, y, x] for y in i for x in j]).mean(0)
            torch.testing.assert_close(E[..., cell], mean)


def test_some_heads_are_copies_and_can_be_put_back():
    heads = random_heads()
    before = {k: v.clone() for k, v in heads.state_dict().items()}
    some = heads.select([2, 0])
    Z = torch.rand(4, 6)
    with torch.no_grad():
        torch.testing.assert_close(some.encode(Z), heads.encode(Z)[[2, 0]])
        for p in some.parameters():
            p.add_(1)
    assert all(torch.equal(before[k], v) for k, v in heads.state_dict().items())
    heads.replace([2, 0], some)
    with torch.no_grad():
        torch.testing.assert_close(heads.encode(Z)[[2, 0]], some.encode(Z))
        assert torch.equal(heads.v[1], before["v"][1])


@pytest.mark.parametrize("signed", [True, False])
def test_errors_of_dimensions_are_those_of_the_reconstruction(signed):
    heads = random_heads(signed_output=signed)
    rows = torch.randn(7, 6, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        E = heads.embed(rows)
        torch.testing.assert_close(heads.dimension_errors(E, rows), (heads.decode(E) - rows).square().mean(1))


def test_cell_mass_is_shared_by_positive_contributions():
    heads = XHeads(1, 2, (), 2, cells=4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        heads.v.copy_(torch.tensor([[[1.0, -1.0, 2.0, 0.0], [-1.0, -3.0, 0.0, 0.0]]]))
        mass = heads.cell_mass(torch.ones(1, 2, 4), 0)
    assert mass.shape == (1, 2, 2, 2, 2)
    assert mass[0, 0, 0].flatten().tolist() == pytest.approx([1 / 3, 0, 2 / 3, 0])
    assert mass[0, 1, 1].flatten().tolist() == pytest.approx([0.25, 0.75, 0, 0])  # none speaks for it: by magnitude
    assert float(mass[0, 0, 1].abs().sum()) == 0


def random_heads(seed=0, **options):
    g = torch.Generator().manual_seed(seed)
    heads = XHeads(3, 6, (8,), 4, generator=g, **options)
    with torch.no_grad():
        heads.scale.copy_(torch.rand(6, generator=g) + 0.5)
        for b in heads.encoder_b:
            b.copy_(torch.randn(b.shape, generator=g) * 0.1)
    return heads


def cells_of(size, side):
    """The rows or columns of each cell: cells of an uneven map overlap, and none is empty."""
    return [range(i * size // side, math.ceil((i + 1) * size / side)) for i in range(side)]


@pytest.mark.parametrize("activation", ["relu", "tanh", "identity"])
@pytest.mark.parametrize("cells", [1, 4, 9])
def test_a_map_is_read_position_by_position_and_pooled_by_its_maximum(cells, activation):
    heads = random_heads(cells=cells, activation=activation)
    Z = torch.randn(2, 6, 5, 7, generator=torch.Generator().manual_seed(1))
    side = math.isqrt(cells)
    act = {"relu": torch.relu, "tanh": torch.tanh, "identity": lambda x: x}[activation]
    with torch.no_grad():
        E = heads.encode(Z)
        assert E.shape == (3, 2, 4, cells)
        for k, i in itertools.product(range(3), range(2)):
            maps = torch.empty(4, 5, 7)
            for y, x in itertools.product(range(5), range(7)):
                row = Z[i, :, y, x] / heads.scale
                for w, b in zip(heads.encoder_w, heads.encoder_b, strict=True):
                    row = act(w[k] @ row + b[k, 0])
                maps[:, y, x] = row
            for cell, (rows, columns) in enumerate(itertools.product(cells_of(5, side), cells_of(7, side))):
                expected = maps[:, rows.start : rows.stop, columns.start : columns.stop].amax((1, 2))
                torch.testing.assert_close(E[k, i, :, cell], expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(
                heads.encoder_of(k, "map")(Z)[i].flatten(1), E[k, i], rtol=1e-4, atol=1e-5
            )  # float32, another order


def test_mass_is_shared_by_what_adds_to_the_logit():
    heads = random_heads(cells=4)
    with torch.no_grad():
        heads.v[1] = torch.tensor([[1.0, 2, -1, 0], [-1, -3, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    E = torch.tensor([[1.0, 1, 4, 9], [2, 2, 0, 0], [5, 5, 5, 5], [0, 0, 0, 0]])[None]
    mass = heads.cell_mass(E, 1).detach()
    assert mass.shape == (1, 4, 4, 2, 2)
    each = [mass[0, f, f].flatten().tolist() for f in range(4)]
    assert each[0] == pytest.approx([1 / 3, 2 / 3, 0, 0])  # what takes away has no share
    assert each[1] == pytest.approx([0.25, 0.75, 0, 0])  # nothing adds: by magnitude
    assert each[2] == each[3] == pytest.approx([0.25] * 4)  # nothing at all: evenly
    for f, other in itertools.permutations(range(4), 2):
        assert float(mass[0, f, other].abs().max()) == 0


def test_mass_of_random_embeddings_is_one_and_never_negative():
    heads = random_heads(cells=9)
    mass = heads.cell_mass(torch.randn(5, 4, 9, generator=torch.Generator().manual_seed(0)), 2).detach()
    assert float(mass.min()) >= 0
    torch.testing.assert_close(mass.sum((2, 3, 4)), torch.ones(5, 4))


@pytest.mark.parametrize("signed", [False, True])
def test_only_a_signed_reconstruction_may_be_negative(signed):
    heads = random_heads(signed_output=signed)
    with torch.no_grad():
        decoded = heads.decode(torch.rand(3, 20, 4, generator=torch.Generator().manual_seed(0)))
    assert decoded.shape == (3, 20, 6)
    assert (float(decoded.min()) < 0) == signed
