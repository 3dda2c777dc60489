import numpy as np
import pytest
import torch
from torch import nn

from auditor.data.source import open_data
from auditor.errors import DataError, NumericsError, OptionError
from auditor.explainers.base import Explainer
from auditor.explainers.coupled.explainer import CoupledExplainer
from auditor.network.above_layer import prepare_above_layer
from auditor.subject.subject import Subject


def small_net():
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(5, 7, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(7 * 6 * 4, 3),
    )


@pytest.fixture(scope="module")
def subject():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Subject(small_net(), input_shape=(2, 13, 9), class_names=["a", "b", "c"])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3
    images = rng.random((60, 13, 9, 2)) * 0.3
    for i, label in enumerate(labels):
        images[i, 4 * label : 4 * label + 4] += 0.7
    path = tmp_path_factory.mktemp("data") / "images.npz"
    np.savez(path, images=(images.clip(0, 1) * 255).astype(np.uint8), labels=labels)
    return open_data(str(path))


@pytest.fixture(scope="module")
def fitted(subject, data):
    return CoupledExplainer(layers=["1", "4"], rank=4, pool=3, max_iter=200).fit(subject, data)


def images_of(subject, data, n=7):
    return next(data.batches(subject, n)).images


def test_contributions_add_up_to_the_logit(subject, data, fitted):
    images = images_of(subject, data)
    explanations = fitted.explain(subject, images)
    assert max(e.gap() for e in explanations) < 1e-4
    assert len({round(e.target_value, 4) for e in explanations}) > 1
    assert explanations[0].concepts[0].heatmap.shape == (6, 4)
    torch.testing.assert_close(explanations[3].target_value, float(subject.logits(images)[3].max()))
    for one, many in zip(fitted.explain(subject, images[2:3]), explanations[2:3], strict=True):
        assert one.concepts[1].contribution == pytest.approx(many.concepts[1].contribution, rel=1e-3, abs=1e-4)


def test_an_affine_part_above_the_layer_says_the_same(subject, data, fitted):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        same = Subject(small_net(), input_shape=(2, 13, 9), class_names=["a", "b", "c"])
    assert prepare_above_layer(same, fitted.layer_).is_affine
    images = images_of(subject, data)
    for a, b in zip(fitted.explain(same, images), fitted.explain(subject, images), strict=True):
        got, want = (torch.tensor([c.contribution for c in e.concepts]) for e in (a, b))
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)  # float32, other orders
        assert float(want.abs().max()) > 1e-2


def test_blocks_errors_and_read_outs(fitted):
    assert [b.name for b in fitted.blocks_] == ["pixels 0", "pixels 1", "1", "4"]
    assert fitted.metrics["relative_error/4"] < 0.9
    assert fitted.metrics["purity"] > 0.6  # three classes that look different
    assert all(fitted.metrics[f"cka_lambda/{f}"] > 0.95 for f in ("0.1", "0.01", "0.001"))
    scores = fitted.sensitivity_[~fitted.sensitivity_.isnan()]
    assert scores.min() >= 0
    assert scores.max() <= 1
    assert fitted.latent_image(0).shape == (2, 13, 9)
    assert fitted.class_score_.shape == (4, 3)


def test_projection_of_fitted_examples_and_missing_blocks(subject, data, fitted):
    images = images_of(subject, data, 60)
    fitted_rows = [i for i in range(60) if i % 5 != 4]  # the others were held out
    again = fitted.latent(subject, images)[:, fitted_rows]
    assert float((again - fitted.F_).norm() / fitted.F_.norm()) < 0.1
    pixels_only = fitted.latent(subject, images, blocks=["pixels 0", "pixels 1"])[:, fitted_rows]
    near = torch.nn.functional.cosine_similarity(pixels_only, fitted.F_, dim=0)
    assert near.mean() > 0.8
    assert not torch.allclose(pixels_only, again)
    with pytest.raises(OptionError, match="no block 'layer9'"):
        fitted.latent(subject, images, blocks=["layer9"])


def test_save_and_load_is_identity(subject, data, fitted, tmp_path):
    digest = fitted.save(tmp_path / "one")
    loaded = Explainer.load(tmp_path / "one", subject)
    images = images_of(subject, data)
    a, b = fitted.explain(subject, images), loaded.explain(subject, images)
    assert [x.to_json() for x in a] == [x.to_json() for x in b]
    again = CoupledExplainer(layers="1,4", rank=4, pool=3, max_iter=200).fit(subject, data)
    assert again.save(tmp_path / "two") == digest


@pytest.mark.parametrize("options", [{"variant": "group"}, {"variant": "tv"}, {"solver": "mu"}, {"logits": True}])
def test_variants_fit_and_explain(subject, data, options):
    fit = CoupledExplainer(layer="4", rank=3, max_iter=60, lambda_table=False, **options).fit(subject, data)
    assert max(e.gap() for e in fit.explain(subject, images_of(subject, data))) < 1e-4
    assert fit.metrics["relative_error/4"] < 1
    if options.get("logits"):
        assert fit.blocks_[-1].signed


def test_rank_above_the_data_is_one_sentence(subject, data):
    with pytest.raises(NumericsError, match="rank must be 1 to 48"):
        CoupledExplainer(rank=1000, lambda_table=False).fit(subject, data)


def test_numbers_beyond_the_models_classes_are_labels_of_their_own(subject, tmp_path):
    rng = np.random.default_rng(1)
    labels = np.arange(40) % 7
    np.savez(tmp_path / "probe.npz", images=rng.integers(0, 256, (40, 13, 9, 2), dtype=np.uint8), labels=labels)
    options = {"rank": 2, "pool": 2, "max_iter": 5, "lambda_table": False}
    probe = CoupledExplainer(**options).fit(subject, open_data(tmp_path / "probe.npz"))
    assert probe.label_names_ == tuple("0123456")
    assert probe.class_score_.shape == (2, 7)
    assert probe.sensitivity_.shape == (2, 3)
    probe.save(tmp_path / "artifact")
    again = Explainer.load(tmp_path / "artifact", subject)
    assert again.label_names_ == probe.label_names_
    near = again.explain(subject, torch.rand(1, 2, 13, 9))[0].extra["neighbours"][0]
    assert near["label"] == -1
    assert near["label_name"] in probe.label_names_


def test_without_labels_the_total_variation_goes_along_the_activations(subject, data, tmp_path):
    options = {"layers": ["1", "4"], "rank": 3, "pool": 3, "max_iter": 30, "variant": "tv"}
    images = next(data.batches(subject, 60)).images
    shuffled = torch.randperm(60, generator=torch.Generator().manual_seed(3))
    bare = CoupledExplainer(**options).fit(subject, images[shuffled])
    kinds = torch.tensor([int(shuffled[int(name)]) % 3 for name in bare.ids_])
    assert int((kinds[1:] != kinds[:-1]).sum()) == 2  # images of one kind stand together
    by_label = CoupledExplainer(**options).fit(subject, data)
    assert by_label.labels_.tolist() == sorted(by_label.labels_.tolist())
    other = CoupledExplainer(**options, order="activations").fit(subject, data)
    assert int((other.labels_[1:] != other.labels_[:-1]).sum()) == 2
    with pytest.raises(DataError, match="order=labels needs labels"):
        CoupledExplainer(**options, order="labels").fit(subject, images)


def test_superclasses_name_the_concepts_on_the_page(subject, data, tmp_path):
    from auditor.explainers.coupled.page import CoupledPage

    (tmp_path / "super.csv").write_text("label,superclass\na,early\nb,late\nc,late\n")
    fitted = CoupledExplainer(
        layers=["1", "4"], rank=3, pool=3, max_iter=40, superclasses=str(tmp_path / "super.csv")
    ).fit(subject, data)
    (section,) = [s for s in CoupledPage(fitted, subject).sections() if "top super-classes" in s.columns]
    assert len(section.table) == 3
    assert {row[2].split(", ")[0] for row in section.table} == {"early", "late"}
    fitted.save(tmp_path / "kept")
    again = Explainer.load(tmp_path / "kept", subject)
    assert again.superclasses_ == ("early", "late", "late")
    assert len({f"cka_lambda/{k}" for k in ("0.1", "0.1/0.01", "0.01/0.001")} & set(fitted.metrics)) == 3
