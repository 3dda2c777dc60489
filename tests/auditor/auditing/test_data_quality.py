"""What an audit says of its data: labels that the model contradicts, pictures that a fit knows already."""

from types import SimpleNamespace

import numpy as np
import torch

from auditor.auditing.data_quality import data_quality, sentences
from auditor.auditing.images import Answers, HeldOut, answers
from auditor.data.source import open_data
from auditor.explainers.base import Explainer
from auditor.explainers.nmf.explainer import NmfExplainer


def test_planted_wrong_labels_and_copies_are_named(tiny, tmp_path):
    g = torch.Generator().manual_seed(0)
    n = 60
    logits = 4 * torch.nn.functional.one_hot(torch.arange(n) % 3, 3).float() + 0.1 * torch.randn(n, 3, generator=g)
    labels = torch.arange(n) % 3
    labels[7] = 2
    logits[7, 1] += 2
    hashes = torch.rand(n, 256, generator=g) < 0.5
    model_answers = Answers(logits, labels, [f"{i}.png" for i in range(n)], hashes)
    rows = torch.arange(n) % 2 == 1
    fit = SimpleNamespace(fingerprints_=torch.cat([hashes[~rows], hashes[[9]]]))
    old = SimpleNamespace(fingerprints_=None)
    held = dict.fromkeys(("new", "old"), HeldOut(rows, "record"))
    about = data_quality(tiny, model_answers, {"new": fit, "old": old}, held)
    assert about["suspicious_labels"]["images"] == 1
    assert about["suspicious_labels"]["of"] == n
    worst = about["suspicious_labels"]["worst"][0]
    assert (worst["id"], worst["label"], worst["suggested"]) == ("7.png", tiny.class_names[2], tiny.class_names[1])
    assert about["near_duplicates"]["new"] == {"images": 1, "of": 30, "ids": ["9.png"]}
    assert about["near_duplicates"]["old"]["images"] is None
    lines = sentences(about)
    assert "1 of 60 labels are contradicted" in lines[0]
    assert lines[1] == "1 of the 30 images held out of new are near-duplicates of images it was fitted on (9.png)."
    assert len(lines) == 2
    assert sentences({}) == []  # an audit of an earlier release


def test_a_fit_keeps_fingerprints_of_what_it_used_and_finds_the_copies(tiny, tmp_path):
    rng = np.random.default_rng(0)
    images = np.kron(rng.integers(0, 256, (60, 4, 5), dtype=np.uint8), np.ones((4, 4), np.uint8))[:, :13, :17]
    np.savez(tmp_path / "fit.npz", images=images[:40], labels=np.arange(40) % 3)
    np.savez(tmp_path / "audit.npz", images=images[30:], labels=np.arange(30) % 3)
    fit = NmfExplainer(rank=2, refits=1, max_iter=5, held_out_every=4).fit(tiny, open_data(tmp_path / "fit.npz"))
    assert fit.fingerprints_.shape == (30, 256)
    fit.save(tmp_path / "artifact")
    again = Explainer.load(tmp_path / "artifact", tiny)
    assert torch.equal(again.fingerprints_, fit.fingerprints_)
    model_answers = answers(tiny, open_data(tmp_path / "audit.npz"))
    held = {"fit": HeldOut(torch.ones(30, dtype=torch.bool), "other data")}
    copies = data_quality(tiny, model_answers, {"fit": again}, held)["near_duplicates"]["fit"]
    used = fit.fitted_images.used[30:]
    assert copies["ids"] == [str(i) for i in used.nonzero()[:, 0].tolist()]
