"""Explaining from a shared pass gives what explaining alone gives, row by row, target by target."""

import pytest
import torch


def same(a, b):
    assert (a.kind, a.name, a.prediction.index, a.target.index) == (b.kind, b.name, b.prediction.index, b.target.index)
    for field in ("target_value", "bias", "residual"):
        assert getattr(a, field) == pytest.approx(getattr(b, field), rel=1e-5, abs=1e-5)
    assert [c.index for c in a.concepts] == [c.index for c in b.concepts]
    for one, two in zip(a.concepts, b.concepts, strict=True):
        assert one.contribution == pytest.approx(two.contribution, rel=1e-4, abs=1e-4)
        assert one.activation == pytest.approx(two.activation, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("kind", ["nmf", "xnn"])
def test_mixed_targets_in_one_batch_equal_single_calls(kind, digits, images, concepts, heads):
    explainer = concepts if kind == "nmf" else heads
    targets = [None, 3, 7, None, 3, 0, 9]
    with torch.no_grad():
        logits, layer_outputs = digits.run(images, explainer.layers())
    together = explainer.explain_from(digits, images, logits, layer_outputs, targets)
    assert len({e.target.index for e in together}) > 3
    for i, target in enumerate(targets):
        alone = explainer.explain(digits, images[i : i + 1], target)[0]
        same(together[i], alone)
        assert together[i].gap() < 1e-4
        for one, two in zip(together[i].concepts, alone.concepts, strict=True):
            torch.testing.assert_close(one.heatmap, two.heatmap, rtol=1e-3, atol=1e-4)  # batched float32 sums


@pytest.fixture(scope="module")
def one_of_each(trained, concepts, heads):
    """Every kind that does not search, each fitted in a moment on the digits."""
    from auditor import fit, open_data

    data, subject = open_data("sklearn:digits", limit=80), trained[0]
    small = {"layer": "features.6", "seed": 0}
    return {
        "nmf": concepts,
        "xnn": heads,
        "coupled": fit("coupled", subject, data, rank=3, max_iter=5, lambda_table=False, **small),
        "tree": fit("tree", subject, data, n_features=8, epochs=2, **small),
        "tuned tree": fit("tree", subject, data, n_features=8, epochs=1, fine_tune=True, train_batch=16, **small),
        "deepfacto": fit("deepfacto", subject, data, rank=3, epochs=1, refits=0, **small),
    }


KINDS = ["nmf", "xnn", "coupled", "tree", "tuned tree", "deepfacto"]


@pytest.fixture
def forward_passes(digits, monkeypatch):
    """Count the batches that go through the subject, by whatever door."""
    calls = []
    whole = digits.forward
    monkeypatch.setattr(digits, "forward", lambda x: (calls.append(len(x)), whole(x))[1])
    return calls


@pytest.mark.parametrize("name", KINDS)
def test_one_forward_pass_of_the_subject_per_batch(name, one_of_each, digits, images, forward_passes, monkeypatch):
    explainer = one_of_each[name]
    explainer.prepare(digits)
    explainer.explain(digits, images)  # what is traced once
    monkeypatch.setattr(explainer, "config", explainer.config.model_copy(update={"batch_size": 3}))
    forward_passes.clear()
    alone = explainer.explain(digits, images)
    assert forward_passes == [3, 3, 1]
    with torch.no_grad():
        logits, layer_outputs = digits.run(images, explainer.reads().layers)
    forward_passes.clear()
    shared = explainer.explain_from(digits, images, logits, layer_outputs, [None] * len(images))
    assert forward_passes == []
    for a, b in zip(alone, shared, strict=True):
        same(a, b)
        assert b.gap() < 1e-4


@pytest.mark.parametrize("name", KINDS)
def test_further_outputs_of_a_shared_pass_are_what_the_kind_computes_itself(name, one_of_each, digits, images):
    explainer = one_of_each[name]
    reads = explainer.reads()
    assert len(set(reads.keys)) == len(reads.keys)
    with torch.no_grad():
        logits, layer_outputs = digits.run(images, reads.layers)
        values = {None: digits.normalise(images), **layer_outputs}
        further = {output.key: output.module(digits)(values[output.layer]) for output in reads.outputs}
    assert bool(further) == (name in ("tuned tree", "deepfacto"))
    alone = explainer.explain_from(digits, images, logits, layer_outputs, [None] * len(images))
    shared = explainer.explain_from(digits, images, logits, {**layer_outputs, **further}, [None] * len(images))
    for a, b in zip(alone, shared, strict=True):
        same(a, b)
    # the outputs are read, not recomputed: other values give another answer
    wrong = {key: value * 0 + 0.3 for key, value in further.items()}
    other = explainer.explain_from(digits, images, logits, {**layer_outputs, **wrong}, [None] * len(images))
    differ = any(
        x.activation != y.activation
        for a, b in zip(alone, other, strict=True)
        for x, y in zip(a.concepts, b.concepts, strict=False)
    )
    assert differ == bool(further)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_takes_a_target_per_row(name, one_of_each, digits, images):
    explainer, targets = one_of_each[name], [None, 3, 7, None, 3, 0, 9]
    with torch.no_grad():
        logits, layer_outputs = digits.run(images, explainer.reads().layers)
    together = explainer.explain_from(digits, images, logits, layer_outputs, targets)
    for i, target in enumerate(targets):
        same(together[i], explainer.explain(digits, images[i : i + 1], target)[0])


def test_without_heatmaps_the_numbers_stay(digits, images, heads):
    with torch.no_grad():
        logits, layer_outputs = digits.run(images, heads.layers())
    with_maps = heads.explain_from(digits, images, logits, layer_outputs, [None] * 7)
    without = heads.explain_from(digits, images, logits, layer_outputs, [None] * 7, heatmaps=False)
    for a, b in zip(with_maps, without, strict=True):
        same(a, b)
        assert any(c.heatmap is not None for c in a.concepts)
        assert all(c.heatmap is None for c in b.concepts)


def test_a_kind_that_reads_no_layer_groups_rows_by_target(digits, images):
    from auditor.explainers.base import Explainer

    calls = []

    class Echo(Explainer):
        kind = "echo"

        def fit(self, subject, data, progress=None):
            return self

        def explain(self, subject, images, target=None, **options):
            calls.append((target, len(images), options))
            return [(target, float(image.sum())) for image in images]

        def tensors(self):
            return {}

        def restore(self, tensors, state, files):
            pass

    explanations = Echo().explain_from(
        digits, images, torch.zeros(7, 10), {}, [None, 1, None, 2, 1, None, 2], timeout_s=1.0
    )
    assert [t for t, _ in explanations] == [None, 1, None, 2, 1, None, 2]
    assert [s for _, s in explanations] == [float(image.sum()) for image in images]
    assert sorted(calls, key=str) == sorted(
        [(None, 3, {"timeout_s": 1.0}), (1, 2, {"timeout_s": 1.0}), (2, 2, {"timeout_s": 1.0})], key=str
    )


def test_heads_that_lend_their_weights_draw_what_they_draw_alone(digits, images, heads):
    """Only the first head is traced; the maps of the others must be those of their own trace."""
    shared = {k: heads.heatmaps(digits, images[:2], k) for k in (0, 4)}
    for k, maps in shared.items():
        heads._engines.clear()
        alone = heads.heatmaps(digits, images[:2], k)
        torch.testing.assert_close(maps.maps, alone.maps)
    assert not torch.allclose(shared[0].maps, shared[4].maps)
    heads._engines.clear()
