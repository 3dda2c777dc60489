"""The attribute probe: names matched in every way, accuracy by a plain pipeline, the majority by counting."""

import math

import numpy as np
import pytest
import torch
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC

from auditor.errors import DataError
from auditor.metrics.attribute_probe import (
    Attributes,
    labels_as_attributes,
    majority_accuracy,
    pooled_features,
    principal_scores,
    probe_accuracy,
    read_attributes,
)

IDS, LABELS, CLASSES = ["red/1.png", "blue/2.png", "red/3.png"], torch.tensor([0, 1, 0]), ["Red", "Blue"]


def read(tmp_path, text, threshold=0.5, labels=LABELS):
    (tmp_path / "a.csv").write_text(text)
    return read_attributes(tmp_path / "a.csv", IDS, labels, CLASSES, threshold)


@pytest.mark.parametrize(
    "rows",
    [
        "red/1.png,1,0\nblue/2.png,0,1\nred/3.png,1,1\n",
        "1.png,1,0\n2.png,0,1\n3.png,1,1\n",
        "else/3.png,1,1\nelse/1.png,1,0\nelse/2.png,0,1\nelse/4.png,0,0\n",  # last parts, more rows than images
    ],
    ids=["whole names", "last parts", "last parts of paths"],
)
def test_rows_per_image(tmp_path, rows):
    attributes = read(tmp_path, "image,wing,beak\n" + rows)
    assert attributes.names == ("wing", "beak")
    assert attributes.values.tolist() == [[1, 0], [0, 1], [1, 1]]


@pytest.mark.parametrize("names", [("Red", "Blue"), ("0", "1"), ("red", "blue")], ids=["class", "number", "folder"])
def test_rows_per_class(tmp_path, names):
    attributes = read(tmp_path, f"class,wing\n{names[0]},80\n\n{names[1]},50\n", threshold=50)
    assert attributes.values.tolist() == [[1], [0], [1]]  # yes is above the threshold, not at it


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("image,wing\n1.png,1\n2.png,0\n", r"names neither the images \(such as 'red/1.png'\) nor the classes"),
        ("image,wing\n1.png,1\n2.png\n3.png,1\n", "every row needs a name and 1 numbers"),
        ("image\n1.png\n2.png\n3.png\n", "every row needs a name and 0 numbers"),
        ("image,wing\n1.png,yes\n", "want a CSV file with a header.* could not convert"),
        ("", "want a CSV file with a header"),
        ("image,wing\na/1.png,1\nb/1.png,0\n2.png,1\n3.png,1\n", "names neither"),  # whose last part is not unique
    ],
)
def test_files_that_do_not_fit(tmp_path, text, sentence):
    with pytest.raises(DataError, match=sentence):
        read(tmp_path, text)


def test_classes_need_labels(tmp_path):
    with pytest.raises(DataError, match="names neither"):
        read(tmp_path, "class,wing\nRed,1\nBlue,0\n", labels=torch.tensor([0, -1, 0]))
    with pytest.raises(DataError, match="'Red' has no row, the nearest is 'Redd'"):
        read(tmp_path, "class,wing\nRedd,1\nBlue,0\n")
    with pytest.raises(DataError, match="want a CSV file"):
        read_attributes(tmp_path / "none.csv", IDS, LABELS, CLASSES, 0.5)


def test_labels_are_one_attribute_with_many_values():
    attributes = labels_as_attributes(torch.tensor([2, 0, -1]))
    assert attributes.names == ("label",)
    assert attributes.values.tolist() == [[2], [0], [-1]]


def test_features_are_mean_and_maximum_over_positions():
    S = torch.rand(4, 3, 5)
    assert torch.equal(pooled_features(S), torch.cat([S.mean(2), S.max(2).values], 1))
    assert torch.equal(pooled_features(S[:, :, :1]), S[:, :, 0])
    assert pooled_features(S[:, :, :2]).shape == (4, 6)


def cloud(n=90, width=4, noise=1.5, seed=0):
    """Features of unlike scales that tell the first attribute with some noise and the second not at all."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, (n, 2))
    X = rng.normal(size=(n, width)) * noise
    X[:, 0] += 2 * y[:, 0]
    return torch.tensor(X * [1, 100, 0.01, 1] + 5), y


def slow_probe(X, held, values, seed=0):
    """The probe written out: scale, choose C by three folds over all attributes, fit and test each."""
    scaler = StandardScaler().fit(X[~held])
    fit, test = scaler.transform(X[~held]), scaler.transform(X[held])
    usable = [
        (c[~held], c[held]) for c in values.T if len(set(c[~held][c[~held] >= 0])) > 1 and any(v >= 0 for v in c[held])
    ]

    def svm(C):
        return LinearSVC(C=C, dual=False, max_iter=20_000, random_state=seed)

    best = (-1.0, 0.0)
    for C in (0.01, 0.1, 1.0):
        total = 0.0
        for y, _ in usable:
            labelled = np.flatnonzero(y >= 0)
            fold = np.random.default_rng(seed).permutation(len(labelled)) % 3
            for k in range(3):
                a, b = labelled[fold != k], labelled[fold == k]
                total += (svm(C).fit(fit[a], y[a]).predict(fit[b]) == y[b]).mean()
        if total > best[0]:
            best = (total, C)
    scores = []
    for y, truth in usable:
        model = svm(best[1]).fit(fit[y >= 0], y[y >= 0])
        scores.append((model.predict(test[truth >= 0]) == truth[truth >= 0]).mean())
    return float(np.mean(scores))


@pytest.mark.parametrize("seed", range(4))
def test_accuracy_is_the_plain_pipeline(seed):
    X, y = cloud(seed=seed)
    held = torch.arange(90) % 3 == 2
    y[::7, 0] = -1  # unknown
    attributes = Attributes(("a", "b"), y)
    accuracy = probe_accuracy(X, held, attributes, seed)
    assert accuracy == pytest.approx(slow_probe(X.numpy(), held.numpy(), y, seed), abs=1e-12)
    assert 0.4 < accuracy < 1


def test_what_is_linear_is_read_and_noise_is_not():
    y = torch.arange(60) % 3
    scores = torch.nn.functional.one_hot(y, 3).float()[:, :, None].repeat(1, 1, 4)
    held = torch.arange(60) % 5 == 4
    labels = labels_as_attributes(y)
    assert probe_accuracy(pooled_features(scores), held, labels) == 1.0
    noise = torch.rand(60, 3, 4, generator=torch.Generator().manual_seed(5))
    assert probe_accuracy(pooled_features(noise), held, labels) < 0.8


def test_attributes_that_do_not_vary_or_are_unknown_are_left_out():
    X, y = cloud()
    held = torch.arange(90) % 3 == 2
    constant = np.where(held.numpy(), y[:, 0], 1)  # varies in the held-out part only
    unknown = np.where(held.numpy(), -1, y[:, 0])  # unknown in the held-out part
    alone = probe_accuracy(X, held, Attributes(("a",), y[:, :1]))
    together = Attributes(("a", "b", "c"), np.stack([y[:, 0], constant, unknown], 1))
    assert probe_accuracy(X, held, together) == alone
    assert majority_accuracy(held, together) == majority_accuracy(held, Attributes(("a",), y[:, :1]))
    nothing = Attributes(("b", "c"), np.stack([constant, unknown], 1))
    assert math.isnan(probe_accuracy(X, held, nothing))
    assert math.isnan(majority_accuracy(held, nothing))


def test_the_majority_is_counted_on_the_fit_and_tested_on_the_rest():
    held = torch.tensor([False, False, False, False, True, True, True, True])
    column = np.array([1, 1, 0, -1, 0, 1, 1, -1])
    other = np.array([2, 0, 2, 1, 2, 2, 0, 1])
    assert majority_accuracy(held, Attributes(("a",), column[:, None])) == pytest.approx(2 / 3)
    both = Attributes(("a", "b"), np.stack([column, other], 1))
    assert majority_accuracy(held, both) == pytest.approx((2 / 3 + 2 / 4) / 2)


def test_principal_scores_are_those_of_numpy_on_the_images_of_the_fit():
    g = torch.Generator().manual_seed(0)
    Z = torch.rand(9, 6, 4, generator=g, dtype=torch.float64) * torch.tensor([5.0, 1, 3, 1, 1, 2])[None, :, None]
    held = torch.arange(9) % 3 == 2
    scores = principal_scores(Z, held, 2)
    columns = Z[~held].permute(1, 0, 2).reshape(6, -1).numpy()
    mean = columns.mean(1, keepdims=True)
    U = np.linalg.svd(columns - mean)[0][:, :2]
    for i in range(9):
        plain = U.T @ (Z[i].numpy() - mean)
        np.testing.assert_allclose(np.abs(scores[i].numpy()), np.abs(plain[::-1]), atol=1e-9)  # smallest first


def test_the_softness_is_tried_on_some_rows_and_attributes(monkeypatch):
    """With a fifth of the rows and half of the attributes the choice is that of the cross-validation on those."""
    from auditor.metrics import attribute_probe

    X, y = cloud(90)
    values = np.concatenate([y, 1 - y], 1)  # four attributes; every second one is tried: 0 and 2
    held = torch.arange(90) % 3 == 2
    fitted = []
    real = attribute_probe._svm

    def watched(softness, seed):
        svm = real(softness, seed)
        fit = svm.fit
        svm.fit = lambda X, y: (fitted.append((softness, len(X))), fit(X, y))[1]
        return svm

    monkeypatch.setattr(attribute_probe, "_svm", watched)
    monkeypatch.setattr(attribute_probe, "TRIAL_ROWS", 15)
    monkeypatch.setattr(attribute_probe, "TRIAL_ATTRIBUTES", 2)
    probe_accuracy(X, held, Attributes(("a", "b", "c", "d"), values))
    trials, final = fitted[:-4], fitted[-4:]
    assert len(trials) == 2 * 3 * 3  # attributes, folds, values of C
    assert {n for _, n in trials} == {10}  # two thirds of every fourth of sixty rows
    assert {n for _, n in final} == {60}
    assert len({c for c, _ in final}) == 1
