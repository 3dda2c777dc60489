"""What a fit with a basis per class measures, against the same computed image by image."""

import pytest
import torch

from auditor import fit, open_data
from auditor.kernels.factorization.projection import project
from tests.auditor.explainers.nmf.photo_like import N_CLASSES, subject, write


@pytest.fixture(scope="module")
def model():
    return subject()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return open_data(write(tmp_path_factory.mktemp("photos") / "x.npz", 5))


@pytest.fixture(scope="module")
def fitted(model, data):
    return fit("nmf", model, data, bases="class", rank=3, refits=1, top_images=2)


def held_out(fitted, model, data):
    x = torch.cat([b.images for b in data.batches(model)])[fitted.fitted_images.report]
    with torch.no_grad():
        logits, taken = model.run(x, [fitted.layer_])
    return logits, taken[fitted.layer_]


def test_metrics_equal_a_plain_computation(fitted, model, data):
    logits, z = held_out(fitted, model, data)
    layout, own = model.layout(fitted.layer_), [b.index for b in fitted.bases_.parts[1:]]
    agree, error, wins, without, turned = [], [], [], [], []
    for i in range(len(z)):
        k = int(logits[i].argmax())

        def logits_by(target, i=i):
            with torch.no_grad():
                return model.forward_from(fitted.layer_, fitted.reconstructed(layout, z[i : i + 1], [target]))[0]

        agree.append(int(logits_by(k).argmax()) == k)
        error.append(float((logits_by(k) - logits[i]).abs().mean()))
        nearest = sorted(own, key=lambda c, i=i: -float(logits[i, c]))
        for classes, survived in ((nearest[:5], wins), ([c for c in nearest if c != k][:5], without)):
            bases = [fitted.bases_.for_class(c) for c in classes]
            W = torch.cat([fitted.directions(b) for b in bases], 1)
            d = torch.stack([fitted.weights_[fitted.bases_.parts.index(b)] for b in bases]).mean(0)[:, None]
            hat = W @ project(d * layout.to_positions(z[i : i + 1])[0], d * W)
            with torch.no_grad():
                said = model.forward_from(fitted.layer_, layout.from_positions(hat[None], z[i : i + 1]))[0]
            survived.append(int(said.argmax()) == k)
        turned.append(int(logits_by(nearest[1]).argmax()) == nearest[1])
    m, n = fitted.metrics, len(z)
    assert m["n_held_out"] == n == N_CLASSES
    assert m["f_cls"] == pytest.approx(sum(agree) / n)
    assert m["f_reg"] == pytest.approx(sum(error) / n, rel=1e-3)
    assert m["f_cls_contested"] == pytest.approx(sum(wins) / n)
    assert m["f_cls_without"] == pytest.approx(sum(without) / n)
    assert m["f_cls_runner_up"] == pytest.approx(sum(turned) / n)


def test_the_stand_in_of_an_audit_is_the_contested_one(fitted, model, data):
    x = torch.cat([b.images for b in data.batches(model)])[fitted.fitted_images.report]
    with torch.no_grad():
        said = model.logits(x).argmax(1)
    same = float((fitted.stand_in(model, x).argmax(1) == said).double().mean())
    assert same == pytest.approx(fitted.metrics["f_cls_contested"])


def test_concepts_of_a_class_come_the_most_important_first(fitted):
    for basis in fitted.bases_.parts[1:]:
        sizes = fitted.importance_[basis.first : basis.stop]
        assert bool((sizes[:-1] >= sizes[1:] - 1e-6).all())
        assert float(sizes[0]) > 0
    assert sorted(k for part in fitted.groups for k in part) == list(range(fitted.n_concepts))


def test_sections_are_the_bases_in_order(fitted):
    titles = [title for title, _ in fitted.sections]
    assert titles[0].startswith("concepts shared by all classes")
    assert titles[1] == "concepts of kind 0 (4 images)"
    assert [k for _, some in fitted.sections for k in some] == list(range(fitted.n_concepts))


def test_the_page_has_a_part_per_class(fitted, model, tmp_path):
    text = fitted.write_page(model, tmp_path / "p.html").read_text()
    assert text.count("<details") == 1 + N_CLASSES
    assert "concepts of kind 7 (4 images)" in text
    assert text.count('<section id="concept-') == fitted.n_concepts
    assert "data:image/jpeg" in text
    from PIL import Image

    sheet = Image.open(fitted.write_page(model, tmp_path / "p.png"))
    assert sheet.height < 106 * 151 + 50  # the first concepts only, and it says so
