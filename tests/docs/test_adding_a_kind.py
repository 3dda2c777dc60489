"""The steps of docs/adding-a-kind.md: the page shows the example's own code, and the example is a kind like ours."""

import re
import textwrap
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from auditor import Explainer, Subject, fit, open_data
from auditor.errors import ArtifactError, OptionError
from auditor.explainers import kinds
from tests.conftest import Tiny

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding-a-kind.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "docs" / "examples" / "superpixel-ig"
pytest.importorskip("captum")


class Package:
    metadata = {"Name": "superpixel-ig"}  # noqa: RUF012


@pytest.fixture
def example(monkeypatch):
    """The example's module, announced as if it were installed."""
    monkeypatch.syspath_prepend(EXAMPLE / "src")
    point = EntryPoint("superpixel-ig", "superpixel_ig.explainer:SuperpixelExplainer", kinds.GROUP)
    vars(point).update(dist=Package())
    monkeypatch.setattr(kinds, "entry_points", lambda group: [point])
    kinds.forget_installed()
    import superpixel_ig

    yield superpixel_ig
    monkeypatch.undo()
    kinds.forget_installed()


def blocks(language: str) -> list[str]:
    return [_closed_up(b) for b in re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)]


def _closed_up(code: str) -> str:
    """Return code without a margin, and with one empty line where there are more: functions stand alone on a page."""
    return re.sub(r"\n{3,}", "\n\n", textwrap.dedent(code).strip("\n"))


def test_the_page_shows_the_code_of_the_example():
    source = (EXAMPLE / "src" / "superpixel_ig" / "explainer.py").read_text(encoding="utf-8")
    marked = re.findall(r"^ *# \[(\w+)\]\n(.*?)\n *# \[/\1\]", source, re.S | re.M)
    assert blocks("python") == [_closed_up(text) for _, text in marked]
    assert len(marked) == 7
    for text in blocks("toml"):
        assert text in (EXAMPLE / "pyproject.toml").read_text(encoding="utf-8")


def test_what_the_page_says_a_kind_can_answer_is_in_the_contract():
    table = PAGE.partition("## More that a kind can answer")[2].partition("Tests that bite")[0]
    names = re.findall(r"`(\w+)(?:\(\))?`", table)
    assert len(names) > 12
    for name in names:
        assert hasattr(Explainer, name), name


def subject_of(channels, size, classes=3):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = Tiny(channels, classes)
    return Subject(net, input_shape=(channels, *size), mean=0.4, std=0.3)


def data_of(tmp_path, channels, size, n=20):
    rng = np.random.default_rng(0)
    shape = (n, *size) if channels == 1 else (n, *size, channels)
    np.savez(tmp_path / "d.npz", images=rng.integers(0, 256, shape, dtype=np.uint8), labels=rng.integers(0, 3, n))
    return open_data(tmp_path / "d.npz")


def slow_contributions(subject, image, baseline, regions, target, n_points):
    """Riemann's sum by single steps: plainly right, and slow."""
    points, weights = np.polynomial.legendre.leggauss(n_points)
    total = torch.zeros_like(image, dtype=torch.float64)
    for t, w in zip((points + 1) / 2, weights / 2, strict=True):
        x = (baseline + t * (image - baseline)).float()[None].requires_grad_()
        (g,) = torch.autograd.grad(subject.logits(x)[0, target], x)
        total += w * g[0].double()
    pixels = ((image - baseline).double() * total).sum(0)
    return [float(pixels[regions == r].sum()) for r in range(int(regions.max()) + 1)]


@pytest.mark.parametrize(("channels", "size"), [(1, (13, 17)), (3, (9, 12))])
def test_contributions_are_the_path_integral_and_add_up(example, tmp_path, channels, size):
    subject, data = subject_of(channels, size), data_of(tmp_path, channels, size)
    explainer = fit("superpixel-ig", subject, data, n_regions=6, steps=24)
    images = next(data.batches(subject, 3)).images
    for target in (None, 1):
        for image, e in zip(images, explainer.explain(subject, images, target), strict=True):
            assert e.gap() < 1e-6
            assert e.target.index == (e.prediction.index if target is None else target)
            regions = example.superpixels(image, 6)
            slow = slow_contributions(subject, image, explainer.baseline_, regions, e.target.index, 24)
            assert [c.contribution for c in e.concepts[: len(slow)]] == pytest.approx(slow, abs=1e-5)
            assert np.std(slow) > 1e-3
            covered = torch.stack([c.heatmap for c in e.concepts]).sum(0)
            torch.testing.assert_close(covered, torch.ones(size))  # every pixel is in one region
            assert abs(e.residual) < 0.05 * max(1.0, abs(e.target_value))
    assert explainer.n_concepts == len(e.concepts)
    assert explainer.fitted_images.counts == {"learn": 16, "choose": 0, "report": 4}
    assert explainer.metrics["n_held_out"] == 4


def test_a_linear_model_is_explained_exactly(example, tmp_path):
    net = nn.Sequential(nn.Flatten(), nn.Linear(6 * 7, 2))
    subject = Subject(net, input_shape=(1, 6, 7))
    explainer = fit("superpixel-ig", subject, data_of(tmp_path, 1, (6, 7)), n_regions=4, baseline="black", steps=2)
    image = torch.rand(1, 1, 6, 7, generator=torch.Generator().manual_seed(3))
    (e,) = explainer.explain(subject, image, 1)
    w = net[1].weight.detach()[1].reshape(6, 7)
    regions = example.superpixels(image[0], 4)
    truth = [float((w * image[0, 0])[regions == r].sum()) for r in range(4)]
    assert [c.contribution for c in e.concepts] == pytest.approx(truth, abs=1e-5)
    assert (e.bias, e.residual) == pytest.approx((float(net[1].bias.detach()[1]), 0.0), abs=1e-5)


def test_superpixels_follow_an_edge_and_keep_their_places(example):
    image = torch.zeros(1, 8, 8)
    image[:, :, 5:] = 1.0
    regions = example.superpixels(image, 2, compactness=0.1)
    assert torch.equal(regions, torch.tensor([0] * 5 + [1] * 3).expand(8, 8))  # the edge is at 5, the grid's at 4
    grid = example.superpixels(image, 2, compactness=1e6)
    assert torch.equal(grid, torch.tensor([0] * 4 + [1] * 4).expand(8, 8))


def test_a_shared_pass_gives_what_explaining_alone_gives(example, tmp_path, monkeypatch):
    subject, data = subject_of(1, (13, 17)), data_of(tmp_path, 1, (13, 17))
    explainer = fit("superpixel-ig", subject, data, n_regions=4, steps=8)
    images = next(data.batches(subject, 5)).images
    with torch.no_grad():
        logits = subject.logits(images)
    targets = [None, 2, 0, None, 2]
    shared = explainer.explain_from(subject, images, logits, {}, targets, heatmaps=False)
    for i, target in enumerate(targets):
        (alone,) = explainer.explain(subject, images[i : i + 1], target)
        assert shared[i].target.index == alone.target.index
        assert [c.contribution for c in shared[i].concepts] == pytest.approx(
            [c.contribution for c in alone.concepts], abs=1e-5
        )
        assert all(c.heatmap is None for c in shared[i].concepts)


def test_it_is_stored_and_without_the_package_the_sentence_says_what_to_install(example, tmp_path, monkeypatch):
    subject, data = subject_of(1, (13, 17)), data_of(tmp_path, 1, (13, 17))
    explainer = fit("superpixel-ig", subject, data, n_regions=4, steps=4)
    explainer.rename(2, "the beak")
    explainer.save(tmp_path / "a")
    images = next(data.batches(subject, 2)).images
    loaded = Explainer.load(tmp_path / "a", subject)
    before, after = explainer.explain(subject, images), loaded.explain(subject, images)
    assert [e.to_json() for e in before] == [e.to_json() for e in after]
    assert after[0].concepts[2].label == "the beak"
    assert loaded.write_page(subject, tmp_path / "page.html").stat().st_size > 1000
    assert {p.suffix for p in (tmp_path / "a").iterdir()} == {".json", ".safetensors"}
    with pytest.raises(OptionError, match="takes no layer"):
        fit("superpixel-ig", subject, data, layer="conv")
    monkeypatch.setattr(kinds, "entry_points", lambda group: [])
    kinds.forget_installed()
    with pytest.raises(ArtifactError, match=r"kind 'superpixel-ig' comes from the package superpixel-ig, which is not"):
        Explainer.load(tmp_path / "a", subject)
