"""The table of the paper: every method on one harvest, judged on unseen images."""

import math
from dataclasses import replace

import pytest
import torch

from auditor.data.source import open_data
from auditor.errors import DataError, OptionError
from auditor.explainers.fitted_images import FittedImages
from auditor.explainers.xnn.explainer import XnnConfig
from auditor.explainers.xnn.head_training import Examples
from auditor.explainers.xnn.paper_table import TableOptions, layer_rows, xnn_table
from auditor.explainers.xnn.table_methods import lasso

FEW = TableOptions(images_per_class=3)


def npz(tmp_path, subject, keep):
    import numpy as np
    from sklearn.datasets import load_digits

    d = load_digits()
    rows = np.flatnonzero(keep(d.target))
    file = tmp_path / "some.npz"
    np.savez(file, images=(d.images[rows] * 15.9).astype("uint8")[..., None], labels=d.target[rows])
    return open_data(str(file))


def test_table_of_the_paper_compares_all_methods_on_one_harvest(subject, digits):
    rows = xnn_table(subject, digits, XnnConfig(targets=[1, 3], max_epochs=15), options=FEW)
    by = {r.method: r for r in rows}
    assert list(by) == ["srae", "nn", "sae", "cae", "lasso", "z", "1-heatmap"]
    assert by["srae"].f_reg_train > 0
    assert math.isnan(by["z"].f_reg_train)
    assert 0 < by["lasso"].alive <= 5  # dimensions
    assert by["srae"].f_cls > 0.97
    assert by["srae"].f_reg < by["lasso"].f_reg
    assert by["srae"].f_reg < by["cae"].f_reg
    assert math.isnan(by["1-heatmap"].f_reg)
    assert all(0 <= r.locality <= math.log(16) + 1e-6 for r in rows)
    with pytest.raises(OptionError, match="unknown method 'shap'"):
        xnn_table(subject, digits, XnnConfig(), methods=["shap"])


def test_table_judged_on_the_held_out_images_as_a_set_of_their_own_is_the_same_table(subject, digits, tmp_path):
    import numpy as np

    from auditor.explainers.xnn.explainer import head_layer, read_examples

    cfg = XnnConfig(targets=[3], max_epochs=3)
    layer = head_layer(subject)
    held = read_examples(subject, digits, layer, subject.layout(layer), cfg).parts.report
    pairs = [(b.images, b.labels) for b in digits.batches(subject)]
    images, labels = torch.cat([x for x, _ in pairs])[held], torch.cat([y for _, y in pairs])[held]
    np.savez(tmp_path / "held.npz", images=images.permute(0, 2, 3, 1).numpy(), labels=labels.numpy())
    unseen = open_data(str(tmp_path / "held.npz"))
    (want,) = xnn_table(subject, digits, cfg, methods=["nn"], options=TableOptions(images_per_class=2))
    (got,) = xnn_table(subject, digits, cfg, methods=["nn"], options=TableOptions(images_per_class=2), judged_on=unseen)
    assert want.f_reg > 0
    for name in ("f_reg", "f_cls", "o1", "o2", "locality"):
        assert getattr(got, name) == pytest.approx(getattr(want, name), rel=1e-4, abs=1e-6)
    (other,) = xnn_table(
        subject, digits, cfg, methods=["nn"], options=TableOptions(images_per_class=2), judged_on=digits
    )
    assert other.f_reg != pytest.approx(want.f_reg, rel=1e-3)
    with pytest.raises(DataError, match="none of the asked classes"):
        xnn_table(subject, digits, cfg, methods=["nn"], judged_on=npz(tmp_path, subject, lambda y: y != 3))


def linear_examples(noise=0.05):
    g = torch.Generator().manual_seed(0)
    Z = torch.rand(90, 7, generator=g)
    y = Z @ torch.tensor([3.0, 0, -2, 0, 0.5, 0, 0]) + 1 + noise * torch.randn(90, generator=g)
    return Examples(Z, torch.stack([y * 0, y], 1), torch.zeros(90, dtype=torch.long), FittedImages.each(90, 5))


@pytest.mark.parametrize("alpha", [1e-3, 0.02, 0.1])
def test_lasso_meets_its_optimality_conditions(alpha):
    examples = linear_examples()
    w, c = lasso(examples, 1, alpha, n=3)
    Z, y, w = examples.Z.double(), examples.logits[:, 1].double(), w.double()
    error = Z @ w + c - y
    assert abs(float(error.mean())) < 1e-4
    slope = Z.T @ error / len(y)  # of the squared part: at most alpha, and -alpha sign(w) where w is used
    assert float(slope.abs().max()) <= alpha + 1e-4
    used = w != 0
    assert bool(used.any())
    torch.testing.assert_close(slope[used], -alpha * w[used].sign(), rtol=0, atol=1e-4)


def test_a_larger_penalty_than_every_correlation_leaves_the_mean():
    examples = linear_examples()
    w, c = lasso(examples, 1, 10.0, n=3)
    assert int(w.count_nonzero()) == 0
    assert c == pytest.approx(float(examples.logits[:, 1].mean()), abs=1e-5)


@pytest.mark.parametrize("n", [1, 2])
def test_the_penalty_is_chosen_so_that_about_n_dimensions_are_used(n):
    w, _ = lasso(linear_examples(), 1, None, n)
    chosen = set(w.nonzero().flatten().tolist())
    assert chosen == set([0, 2, 4][:n])  # the strongest first


def test_the_class_asked_for_is_the_one_that_is_fitted():
    examples = linear_examples()
    swapped = replace(examples, logits=examples.logits.flip(1))
    assert torch.equal(lasso(examples, 1, 0.02, 3)[0], lasso(swapped, 0, 0.02, 3)[0])


def test_on_a_layer_with_positions_heads_are_convolutions_and_dimensions_channels(subject, digits, tmp_path):
    cfg, options = XnnConfig(layer="4", target=3, max_epochs=1, max_images=120), TableOptions(images_per_class=1)
    rows = {r.method: r for r in xnn_table(subject, digits, cfg, methods=["nn", "lasso"], options=options)}
    assert rows["nn"].f_reg > 0
    assert rows["lasso"].alive >= 1
    assert all(0 < row.locality <= math.log(16) for row in rows.values())
    options = replace(options, figures=tmp_path / "figures", part_names=("upper left",))
    xnn_table(subject, digits, cfg, methods=["1-heatmap"], options=options)
    assert [p.name for p in (tmp_path / "figures").iterdir()] == ["3-1-heatmap.png"]


def test_one_map_of_the_logit_has_no_partner_and_parts_are_those_given(subject, digits):
    requests = []

    def halves(name, size):
        requests.append((name, size))
        masks = torch.zeros(2, *size)
        masks[0, : size[0] // 2] = 1
        masks[1, size[0] // 2 :] = 1
        return masks

    calls = []
    (row,) = xnn_table(
        subject,
        digits,
        XnnConfig(target=3),
        methods=["1-heatmap"],
        options=TableOptions(images_per_class=2),
        parts=halves,
        progress=lambda stage, done, total: calls.append((stage, done, total)),
    )
    assert row.method == "1-heatmap"
    assert 0 <= row.locality <= math.log(2) + 1e-6
    assert all(math.isnan(value) for value in (row.f_reg, row.f_cls, row.o1, row.o2, row.alive, row.pull_away))
    assert [size for _, size in requests] == [(8, 8), (8, 8)]
    assert len({name for name, _ in requests}) == 2
    assert calls[-2:] == [("method 1-heatmap", 0, 1), ("done", 1, 1)]


def test_lasso_is_swept_and_images_are_masked(subject, digits):
    options = TableOptions(images_per_class=2, lasso_alphas=(0.01, 1.0), masking=(5, 64))
    rows = xnn_table(
        subject, digits, XnnConfig(target=3, max_epochs=2), methods=["lasso", "1-heatmap"], options=options
    )
    assert [r.method for r in rows] == ["lasso 0.01", "lasso 1", "1-heatmap"]
    assert rows[0].alive > rows[1].alive
    assert rows[0].f_reg < rows[1].f_reg
    heat = rows[2]
    assert heat.masked.keys() == {5, 64}
    assert heat.masked[64] == 1.0  # all pixels kept, and the images shown are of the class
    assert heat.to_json()["kept_5"] == heat.masked[5] <= 1
    with pytest.raises(OptionError, match="pixels kept must be 1 to 64, the size of an image, got 65"):
        xnn_table(subject, digits, XnnConfig(), options=TableOptions(masking=(65,)))


def test_hyper_parameters_by_cross_validation(subject, digits):
    options = TableOptions(images_per_class=1, folds=2)
    cfg = XnnConfig(target=3, max_epochs=1, max_images=200)
    rows = {r.method: r for r in xnn_table(subject, digits, cfg, methods=["sae", "nn", "lasso"], options=options)}
    assert rows["sae"].settings.startswith("beta ")
    assert rows["lasso"].settings.startswith("alpha ")
    assert rows["nn"].settings == ""
    with pytest.raises(OptionError, match="at least 2 folds"):
        xnn_table(subject, digits, cfg, methods=["sae"], options=TableOptions(folds=1))


def test_a_row_per_layer_with_positions(subject, digits):
    rows = layer_rows(subject, digits, XnnConfig(target=3, max_epochs=1, max_images=150, hidden=[8]), ["1", "4"])
    assert [r.method for r in rows] == ["srae on 1", "srae on 4"]
    assert all(r.f_reg > 0 and 0 <= r.f_cls <= 1 for r in rows)


def test_inactive_maps_are_no_heat():
    from types import SimpleNamespace

    from auditor.explainers.xnn.table_methods import Heat

    maps = SimpleNamespace(maps=torch.rand(3, 2, 4, 5, generator=torch.Generator().manual_seed(0)))
    counts = torch.tensor([[True, True], [True, False], [False, False]])
    heat = Heat(0, maps, counts)
    assert not bool(heat.counted[1, 1].any())
    assert not bool(heat.union()[2].any())
    torch.testing.assert_close(heat.union()[1], maps.maps[1, 0] / maps.maps[1, 0].max())
    assert float(heat.union()[0].max()) == 1
