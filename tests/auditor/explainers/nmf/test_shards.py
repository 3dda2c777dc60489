"""Every position of the images of a fit, again on every pass; what is held out is left out."""

import torch

from auditor import open_data
from auditor.explainers.fitted_images import FittedImages
from auditor.explainers.layer_activations import as_columns
from auditor.explainers.nmf.shards import Shards


def test_all_columns_to_learn_from_come_in_order_on_every_pass(tiny, tiny_npz):
    data, layout, said = open_data(tiny_npz), tiny.layout("relu"), []
    parts = FittedImages.each(len(data), 4)
    shards = Shards(tiny, data, "relu", layout, parts, 5, 2, lambda stage, *_: said.append(stage))
    x = torch.cat([b.images for b in data.batches(tiny)])
    with torch.no_grad():
        want = as_columns(layout, tiny.activations(x[parts.learn], ["relu"])["relu"])
    for _ in range(2):
        torch.testing.assert_close(torch.cat(list(shards()), 1), want, rtol=1e-5, atol=1e-6)
    assert set(said) == {"pass 1 of 3 over all positions"}


def test_refining_lowers_the_error_of_a_basis(tiny, tiny_npz):
    data, layout = open_data(tiny_npz), tiny.layout("relu")
    shards = Shards(tiny, data, "relu", layout, FittedImages.each(len(data), 4), 5, 3, lambda *_: None)
    W = torch.rand(layout.channels, 2, generator=torch.Generator().manual_seed(0))
    X = torch.cat(list(shards()), 1)
    from auditor.explainers.nmf.basis_choice import relative_error

    fit = shards.refine(W, signed=False, tol=1e-6)
    assert fit.W.shape == W.shape
    assert relative_error(X, fit.W) < relative_error(X, W)
