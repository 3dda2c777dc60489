"""Reliance in an audit: a model that reads one patch is caught; what cannot be measured is said."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from auditor import AuditConfig, Subject, audit, open_data
from auditor.auditing.audit import Audit
from auditor.auditing.images import Answers, answers
from auditor.auditing.model_reliance import class_images, reliance, why_not
from auditor.auditing.second_opinions import Passes, involved, share_inside
from auditor.data.user_cache import KEY_FILE
from auditor.release.questions import believed, headline, reasons, to_look_at
from auditor.reliance import Boxes, Finding
from auditor.reports.audit_report import report_html

SIDE = 24


class Patch(nn.Module):
    """Says "marked" when the corner of 5 x 5 pixels is bright, whatever else is in the image."""

    def __init__(self):
        super().__init__()
        kernel = torch.zeros(1, 1, SIDE, SIDE)
        kernel[..., 1:6, 1:6] = 1 / 25
        self.layer = nn.Conv2d(1, 1, SIDE)
        self.layer.weight.data, self.layer.bias.data = kernel, torch.tensor([-0.7])
        self.relu = nn.ReLU()

    def forward(self, x):
        y = 20 * self.layer(x)[:, :, 0, 0]
        return torch.cat([self.relu(-y), self.relu(y)], 1)


def marked_images(n, rng):
    """Noise in two shades that has nothing to do with the class; class 1 has the mark."""
    images = rng.integers(0, 150, (n, SIDE, SIDE)).astype(np.uint8)
    labels = np.arange(n) % 2
    images[labels == 1, 1:6, 1:6] = np.where(np.indices((5, 5)).sum(0) % 2, 255, 225)
    return images, labels


@pytest.fixture(scope="module")
def subject():
    return Subject(Patch().eval(), input_shape=(1, SIDE, SIDE), class_names=["bare", "marked"])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("marked") / "marked.npz"
    images, labels = marked_images(60, np.random.default_rng(0))
    np.savez(path, images=images, labels=labels)
    return open_data(path)


@pytest.fixture(scope="module")
def caught(subject, data):
    return audit(subject, data, config=AuditConfig(images=20, layers=False))


def test_a_class_that_hangs_on_a_patch_is_found_and_named(caught):
    about = caught.reliance
    assert (about["status"], about["by_prediction"]) == ("measured", False)
    assert about["images"] == "60 of 60 images, 30 of each of 2 classes"
    assert about["passes_per_image"] <= 60
    marked = next(f for f in about["findings"] if f["name"] == "marked")
    assert marked["verdict"] == "found"
    assert len(marked["images"]) == len(marked["rows"]) == 6
    assert all(int(i) % 2 == 1 for i in marked["images"])  # the names of marked images
    assert marked["sentence"]
    assert marked["advice"]


def test_metrics_of_every_class_and_of_the_worst_have_nulls_and_counts(caught):
    m = caught.metrics
    assert m["model/reliance/found"].value >= 1
    worst, marked = m["model/reliance/worst/score"], m["model/reliance/marked/score"]
    assert worst.value == max(marked.value, m["model/reliance/bare/score"].value)
    assert worst.direction == "down"
    followed = m["model/reliance/marked/transplant_region"]
    assert followed.n >= 10
    assert followed.null is not None
    assert followed.low <= followed.value <= followed.high
    for name, measure in m.items():
        if name.startswith("model/reliance/worst/") and "place" not in name:
            of_classes = [m[f"model/reliance/{k}/{name.rpartition('/')[2]}"].value for k in ("bare", "marked")]
            assert measure.value == (max if measure.direction == "down" else min)(of_classes), name


def test_the_audit_comes_back_whole_and_an_old_one_says_that_it_was_not_measured(caught):
    again = Audit.from_json(caught.sealed())
    assert again.reliance == json.loads(json.dumps(caught.reliance))
    assert again.digest == caught.digest
    document = {k: v for k, v in caught.to_json().items() if k != "reliance"}
    old = Audit.from_json(document)
    assert old.reliance is None
    assert "reliance" not in old.to_json()
    assert headline(old)[0] != "good"
    page = report_html(old)
    assert "was not measured: the audit is of a release that could not" in page
    assert "Run it again" in page


def test_the_page_has_the_finding_before_any_word_on_explanations(caught):
    page = report_html(caught)
    sentence = caught.reliance["findings"][0]["sentence"].replace("'", "&#x27;")
    assert "verdict bad" in page.partition("</h2>")[0]
    assert page.index(sentence) < page.index("Can the explanations be believed?", page.index("</div>"))
    assert page.count('class="spot"') == 6 * sum(
        f["cause"] in ("box", "spot", "region", "pattern") for f in to_look_at(caught)
    )
    assert caught.reliance["findings"][0]["advice"].split(".")[0] in page
    level, text = headline(caught)
    assert level == "bad"
    assert text.startswith("Do not rely on this model yet: class")  # or classes
    assert "marked" in text
    assert believed(caught).level == "warn"  # nothing is attached: another question, answered apart
    assert all("explain" not in f.text for f in reasons(caught).sentences)


def honest_answers(n=40, right=40, classes=2):
    labels = torch.arange(n) % classes
    predicted = torch.where(torch.arange(n) < right, labels, (labels + 1) % classes)
    return Answers(nn.functional.one_hot(predicted, classes).float() * 5, labels, [str(i) for i in range(n)])


def test_a_model_that_is_right_by_chance_is_one_sentence():
    assert why_not(honest_answers(), (3, 64, 64)) == ""
    reason = why_not(honest_answers(right=20), (3, 64, 64))
    assert (
        "right on 50.0% of the labelled images, no better than always saying the most frequent class (50.0%)" in reason
    )
    assert "too small" in why_not(honest_answers(), (1, 8, 40))
    bare = Answers(torch.randn(9, 2), torch.full((9,), -1), [str(i) for i in range(9)])
    assert why_not(bare, (1, 16, 16)) == ""


def test_unlabelled_data_is_measured_against_predictions_and_said(subject, tmp_path):
    images, _ = marked_images(60, np.random.default_rng(1))
    np.savez(tmp_path / "bare.npz", images=images)
    bare = open_data(tmp_path / "bare.npz")
    metrics, about = reliance(subject, bare, answers(subject, bare), {})
    assert about["by_prediction"]
    assert "marked" in [f["name"] for f in about["findings"] if f["verdict"] == "found"]
    record = Audit(model={}, data={}, seed=0, metrics=metrics, reliance=about)
    assert any(
        "no labels, so this is what the model's own predictions hang on" in f.text for f in reasons(record).sentences
    )


def test_a_class_with_few_images_is_skipped_with_the_reason(subject, tmp_path):
    images, labels = marked_images(60, np.random.default_rng(1))
    keep = (labels == 0) | (np.arange(60) < 14)
    np.savez(tmp_path / "few.npz", images=images[keep], labels=labels[keep])
    few = open_data(tmp_path / "few.npz")
    metrics, about = reliance(subject, few, answers(subject, few), {})
    (marked,) = [f for f in about["findings"] if f["name"] == "marked"]
    assert marked["verdict"] == "skipped"
    assert "only 7 images" in marked["sentence"]
    assert metrics["model/reliance/marked/score"].status == "skipped"


def test_left_out_on_request(subject, data):
    left_out = audit(subject, data, config=AuditConfig(images=20, layers=False, reliance=False))
    assert left_out.reliance["status"] == "skipped"
    assert "--no-reliance" in left_out.reliance["reason"]
    assert left_out.metrics["model/reliance/worst/score"].status == "skipped"
    assert math.isnan(left_out.metrics["model/reliance/found"].value)
    assert headline(left_out)[0] != "good"


def test_an_interruption_after_reliance_does_not_measure_it_again(subject, data, tmp_path, monkeypatch):
    from auditor.auditing import audit as module

    def stopped(*_args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "pictures", stopped)
        patch.setattr(module.AuditCache, "clear", lambda _self: None)  # as if it ended just before
        with pytest.raises(KeyboardInterrupt):
            audit(subject, data, config=AuditConfig(images=20, layers=False), cache=tmp_path)
    monkeypatch.setattr(module, "reliance", stopped)
    again = audit(subject, data, config=AuditConfig(images=20, layers=False), cache=tmp_path)
    assert again.reliance["findings"][0]["verdict"] == "found"
    assert again.finding_pictures["marked"]
    assert [path.name for path in tmp_path.iterdir()] == [KEY_FILE]


def test_the_budget_draws_classes_when_there_are_too_many(tmp_path):
    n_classes = 9
    net = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, n_classes))
    many = Subject(net.eval(), input_shape=(1, SIDE, SIDE))
    labels = np.repeat(np.arange(n_classes), 14)
    labels[-6:] = 0  # the last class has 8
    np.savez(tmp_path / "m.npz", images=np.zeros((len(labels), SIDE, SIDE), dtype=np.uint8), labels=labels)
    data = open_data(tmp_path / "m.npz")
    model_answers = Answers(
        torch.zeros(len(labels), n_classes), torch.from_numpy(labels), [str(i) for i in range(len(labels))]
    )
    chosen = class_images(many, data, model_answers, 60, 0, 64)
    counts = torch.bincount(chosen.labels, minlength=n_classes).tolist()
    assert counts[-1] == 8  # too few: read, so that the reason can be said
    assert sorted(counts[:-1]) == [0, 0, 10, 10, 10, 10, 10, 10]
    assert [model_answers.ids[i] for i in chosen.rows] == chosen.ids
    everything = class_images(many, data, model_answers, 10_000, 0, 64)
    assert len(everything.ids) == len(labels)


def by_pixels(heatmap, box, fine=60):
    """Paint the map on a fine canvas and count."""
    h, w = heatmap.shape
    canvas = heatmap.double().repeat_interleave(fine, 0).repeat_interleave(fine, 1)
    y, x = (torch.arange(n * fine).double() / (n * fine) for n in (h, w))
    rows = (y >= box[0]) & (y < box[0] + box[2])
    columns = (x >= box[1]) & (x < box[1] + box[3])
    return float(canvas[rows][:, columns].sum() / canvas.sum())


@pytest.mark.parametrize("box", [(0.1, 0.25, 0.3, 0.5), (0.0, 0.0, 1.0, 1.0), (0.9, 0.05, 0.1, 0.2)])
def test_share_inside_a_box_is_what_counting_pixels_gives(box):
    heatmap = torch.rand(5, 4, generator=torch.Generator().manual_seed(1))
    assert share_inside(heatmap, box) == pytest.approx(by_pixels(heatmap, box), abs=0.02)  # one fine pixel at each edge


def test_concepts_are_named_when_their_heat_lies_in_the_boxes(tiny, tiny_npz):
    from auditor import fit

    concepts = fit("nmf", tiny, open_data(tiny_npz), rank=2, refits=1)
    images = next(iter(open_data(tiny_npz).batches(tiny, 6))).images
    whole = Boxes(*(torch.full((6,), v) for v in (0, 0, *images.shape[2:])), heat=torch.ones(6))
    finding = Finding(0, "a", "found", 1.0, "box", rows=tuple(range(6)), boxes=whole)
    assert (
        involved(tiny, {"c": concepts}, images, finding, Passes(1e9, 0)) == []
    )  # spread over the whole image is no spot
    assert involved(tiny, {"c": concepts}, images, Finding(0, "a", "nothing", 0.0), Passes(1e9, 0)) == []
