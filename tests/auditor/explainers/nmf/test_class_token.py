"""A class token that reads one patch: its part of the concepts is put there; parts add up, stored ones come back."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from auditor import Subject, fit, open_data
from auditor.explainers.base import Explainer
from auditor.explainers.explanation import Explanation
from auditor.explainers.nmf.class_token import token_heat, with_token_heat
from auditor.subject.layers import Deviations, Layout
from tests.auditor.subject.test_layer_discovery import small_vit


class Reader(nn.Module):
    """4 x 4 patches of two pixels a side; the class token attends to the brightest. Little else counts."""

    def __init__(self):
        super().__init__()
        self.patch, self.layer, self.head = nn.Conv2d(1, 4, 2, 2), nn.Linear(4, 4), nn.Linear(4, 3)
        for m, w in ((self.patch, torch.ones(4, 1, 2, 2) / 4), (self.layer, torch.eye(4))):
            m.weight.data = w * (torch.tensor([1.0, 2.0, 3.0, 0.5]).view(4, *[1] * (w.dim() - 1)) if w.dim() > 2 else 1)
            nn.init.zeros_(m.bias)
        self.register_buffer("token", torch.ones(1, 1, 4))

    def forward(self, x):
        v = self.patch(x).flatten(2).transpose(1, 2)
        read = F.scaled_dot_product_attention(20 * self.token.expand(len(x), -1, -1), v, v)
        z = self.layer(torch.cat([read, v], 1))
        return self.head(F.layer_norm(z[:, 0] + 0.01 * z[:, 1:].mean(1), (4,)))


def bright(n, seed=0):
    """Return dim images with one bright patch, and where it is."""
    g = torch.Generator().manual_seed(seed)
    x, at = 0.1 * torch.rand(n, 1, 8, 8, generator=g), torch.randint(16, (n,), generator=g)
    for i, k in enumerate(at.tolist()):
        x[i, 0, 2 * (k // 4) : 2 * (k // 4) + 2, 2 * (k % 4) : 2 * (k % 4) + 2] = 1.0
    return x, at


def test_heat_is_where_the_token_read():
    subject, (x, at) = Subject(Reader().eval(), input_shape=(1, 8, 8)), bright(5)
    z = subject.activations(x, ["layer"])["layer"]
    reading = Deviations.of(Layout("tokens", 4, (4, 4), 1), torch.zeros(4, 17))
    heat, why = token_heat(subject, "layer", reading, x, z, torch.rand(4, 2))
    assert why == ""
    assert heat.shape == (5, 2, 16)
    torch.testing.assert_close(heat.sum(-1), torch.ones(5, 2))
    assert heat.argmax(-1).tolist() == [[k, k] for k in at.tolist()]
    assert float(heat.amax(-1).min()) > 0.5


def test_a_token_that_holds_nothing_of_a_concept_has_no_heat():
    subject, (x, _) = Subject(Reader().eval(), input_shape=(1, 8, 8)), bright(2)
    z = subject.activations(x, ["layer"])["layer"]
    reading = Deviations.of(Layout("tokens", 4, (4, 4), 1), torch.zeros(4, 17))
    heat, _ = token_heat(subject, "layer", reading, x, z, torch.stack([torch.ones(4), -torch.ones(4)], 1))
    assert float(heat[:, 1].abs().max()) == 0
    S = torch.rand(2, 2, 17)
    maps = with_token_heat(reading, S, torch.ones(2, 2), heat)
    cells = S[..., 1:]
    torch.testing.assert_close(
        maps[:, 1], cells[:, 1] / cells[:, 1].sum(-1, keepdim=True) * S[:, 1].sum(-1, keepdim=True)
    )
    torch.testing.assert_close(maps[:, 0], heat[:, 0] * S[:, 0].sum(-1, keepdim=True))


def test_an_operation_without_a_rule_leaves_the_patches_and_says_so():
    class Sorted(Reader):
        def forward(self, x):
            return super().forward(x.flatten(1).sort(1).values.view_as(x))

    subject, (x, _) = Subject(Sorted().eval(), input_shape=(1, 8, 8)), bright(2)
    z = subject.activations(x, ["layer"])["layer"]
    reading = Deviations.of(Layout("tokens", 4, (4, 4), 1), torch.zeros(4, 17))
    heat, why = token_heat(subject, "layer", reading, x, z, torch.rand(4, 2))
    assert heat is None
    assert why.startswith("what the class token read is not on the map: ")
    assert "sort" in why


@pytest.fixture(scope="module")
def vit():
    return Subject(small_vit(), input_shape=(3, 32, 32))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    file = tmp_path_factory.mktemp("vit") / "x.npz"
    np.savez(file, images=np.random.default_rng(0).random((30, 32, 32, 3), dtype=np.float32))
    return open_data(file)


@pytest.fixture(scope="module")
def fitted(vit, photos):
    return fit("nmf", vit, photos, rank=5, refits=1)


def test_a_transformer_is_explained_with_its_class_token(vit, photos, fitted):
    x = next(photos.batches(vit, 6)).images
    explanations = fitted.explain(vit, x, target=2)
    assert fitted.start_.shape == (24, 17)
    assert len({round(e.bias, 5) for e in explanations}) == 1  # the mean activation is the same for every image
    for e in explanations:
        assert e.gap() < 1e-6
        assert 0 < e.extra["by_class_token"] < 1
        assert e.extra["integration_error"] < 0.01 * max(1, abs(e.target_value))
        assert fitted.lines(e)[0].endswith("come by the class token; maps show where it read them")
        assert all(c.heatmap.shape == (4, 4) and float(c.heatmap.min()) >= 0 for c in e.concepts)


def test_the_sum_of_a_map_is_that_of_the_scores(vit, photos, fitted):
    x = next(photos.batches(vit, 3)).images
    z = vit.activations(x, [fitted.layer_])[fitted.layer_]
    layout, S = fitted.layer_scores(vit, z)
    assert S.shape == (3, 5, 17)
    assert torch.equal(fitted.score_maps(vit, z), S[..., 1:])
    for e, scores in zip(fitted.explain(vit, x), S, strict=True):
        got = torch.tensor([float(c.heatmap.sum()) for c in e.concepts])
        torch.testing.assert_close(got, scores.sum(-1), rtol=1e-4, atol=1e-5)
    p = layout.to_positions(z)
    assert float((p - fitted.W_ @ S).norm()) < float(p.norm())


def test_an_artifact_keeps_its_start_and_one_without_is_read_as_before(vit, photos, fitted, tmp_path):
    digest = fitted.save(tmp_path / "a")
    loaded = Explainer.load(tmp_path / "a", vit)
    assert loaded.save(tmp_path / "b") == digest
    x = next(photos.batches(vit, 2)).images

    def numbers(e: Explanation):
        return [c.contribution for c in e.concepts] + [e.bias, e.residual]

    assert [numbers(e) for e in loaded.explain(vit, x)] == [numbers(e) for e in fitted.explain(vit, x)]
    loaded.start_ = None  # an earlier release: the class token stays and belongs to the bias
    one, other = loaded.explain(vit, x, target=2)
    assert one.bias != other.bias
    assert "by_class_token" not in one.extra
    assert loaded.lines(one) == []
