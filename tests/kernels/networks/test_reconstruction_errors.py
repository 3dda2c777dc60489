"""The fused errors against the plain ones, values and gradients."""

import pytest
import torch

from auditor.kernels.networks.reconstruction_errors import reconstruction_errors
from auditor.kernels.networks.reconstruction_losses import dimension_errors


def stack(classes, rows, width, dims, seed=0):
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    return draw(classes, rows, width), draw(classes, width, dims), draw(classes, 1, dims), draw(rows, dims)


@pytest.mark.parametrize("nonnegative", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 7, 2, 13), (2, 5, 6, 4)])
def test_values_and_gradients_are_those_of_the_plain_form(shape, nonnegative):
    A, W, b, Z = stack(*shape)
    weight = torch.rand(shape[0], shape[3], dtype=torch.float64) + 0.5  # every dimension pulls with its own force
    gradients = []
    for fused in (True, False):
        leaves = [t.clone().requires_grad_(True) for t in (A, W, b)]
        if fused:
            Q = reconstruction_errors(*leaves, Z, nonnegative=nonnegative)
        else:
            P = leaves[0] @ leaves[1] + leaves[2]
            Q = dimension_errors(P.relu() if nonnegative else P, Z)
        (weight * torch.log1p(3 * Q)).sum().backward()
        gradients.append([Q.detach(), *(leaf.grad for leaf in leaves)])
    for fused, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-12, atol=1e-12)  # float64, sums of at most 13 terms
    assert shape == (1, 1, 1, 1) or all(float(g.abs().max()) > 0 for g in gradients[0])


def test_a_transposed_weight_gives_the_same():
    A, W, b, Z = stack(2, 6, 3, 5)
    other = W.transpose(1, 2).contiguous().transpose(1, 2)
    assert not other.is_contiguous()
    a = reconstruction_errors(A, W, b, Z, nonnegative=True)
    torch.testing.assert_close(reconstruction_errors(A, other, b, Z, nonnegative=True), a)


def test_many_chunks_are_one_stack(monkeypatch):
    A, W, b, Z = stack(5, 6, 3, 4)
    whole = reconstruction_errors(A, W, b, Z, nonnegative=True)
    for at_once in (1, 2 * 24, 10_000):  # numbers: one class, two classes, all of them
        monkeypatch.setattr("auditor.kernels.networks.reconstruction_errors.IN_CACHE", at_once)
        assert torch.autograd.gradcheck(
            lambda *t: reconstruction_errors(*t, Z, nonnegative=True), [t.requires_grad_(True) for t in (A, W, b)]
        )
        torch.testing.assert_close(reconstruction_errors(A, W, b, Z, nonnegative=True), whole)


def test_what_the_relu_cuts_off_pulls_on_nothing():
    A, W, b, Z = stack(1, 4, 2, 3)
    b = b.sub(100).requires_grad_(True)
    reconstruction_errors(A, W, b, Z, nonnegative=True).sum().backward()
    assert float(b.grad.abs().max()) == 0
