import pytest
import torch

from auditor.kernels.trees.quantiser import Range, quantise, quantise_reference, range_of, step_and_zero


def scale(lo, hi):
    return Range(torch.tensor(float(lo)), torch.tensor(float(hi)))


@pytest.mark.parametrize(("x", "codes", "zero"), [((0, 1, 2, 3), (0, 1, 2, 3), 0), ((-1, 0, 1, 2), (0, 1, 2, 3), 1)])
def test_known_answers(x, codes, zero):
    x = torch.tensor(x, dtype=torch.float32)
    assert quantise(x, 2, range_of(x[None])).tolist() == list(codes)
    assert float(step_and_zero(2, range_of(x[None]))[1]) == zero


def test_the_zero_fix():
    x = torch.tensor([5.0, 6.0])
    assert quantise(x, 2, range_of(x[None])).tolist() == [3, 3]  # the listing as printed
    fixed = range_of(x[None]).holding_zero()
    assert float(step_and_zero(2, fixed)[0]) == 2
    assert quantise(x, 2, fixed).tolist() == [2, 3]  # 2.5 rounds to even


def test_straight_through_gradient():
    x = torch.tensor([0.0, 1.0, 2.0, 3.0, 9.0, -4.0], requires_grad=True)
    quantise(x, 2, scale(0, 3)).sum().backward()
    assert x.grad.tolist() == [0, 1, 1, 0, 0, 0]
    x = torch.tensor([0.1, 0.5], requires_grad=True)
    quantise(x, 4, scale(0, 3)).sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([5.0, 5.0]))  # 1 / s


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("per_feature", [False, True])
@pytest.mark.parametrize("shape", [(13, 17), (1, 1), (200, 3)])
def test_equals_the_reference_forward_and_backward(bits, per_feature, shape):
    g = torch.Generator().manual_seed(bits)
    x = torch.randn(*shape, generator=g, dtype=torch.float64)
    r = range_of(x * 0.7, per_feature=per_feature).holding_zero()
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    weight = torch.randn(*shape, generator=g, dtype=torch.float64)
    fast, plain = quantise(a, bits, r), quantise_reference(b, bits, r)
    torch.testing.assert_close(fast, plain, rtol=0, atol=0)
    (fast * weight).sum().backward()
    (plain * weight).sum().backward()
    torch.testing.assert_close(a.grad, b.grad)
    assert ((fast >= 0) & (fast <= 2**bits - 1) & (fast == fast.round())).all()


def test_a_dead_batch_has_one_code_and_no_nan():
    x = torch.zeros(5, 3)
    codes = quantise(x, 4, range_of(x).holding_zero())
    assert (codes == 0).all()
    assert torch.isfinite(codes).all()


def test_frozen_ranges_make_codes_independent_of_the_batch():
    g = torch.Generator().manual_seed(0)
    x = torch.rand(40, 6, generator=g)
    frozen = range_of(x)
    whole = quantise(x, 4, frozen)
    torch.testing.assert_close(torch.cat([quantise(row[None], 4, frozen) for row in x]), whole, rtol=0, atol=0)
    assert not torch.equal(quantise(x[:1], 4, range_of(x[:1])), whole[:1])  # its own range would


def test_percentile_ignores_an_outlier():
    x = torch.rand(2000, 1, generator=torch.Generator().manual_seed(0))
    x[7] = 1e6
    assert float(range_of(x, percentile=99.9).hi) <= 1
    assert float(range_of(x).hi) == pytest.approx(1e6)


def test_average_of_ranges():
    mixed = scale(0, 10).towards(scale(-1, 20), 0.9)
    assert float(mixed.lo) == pytest.approx(-0.1)
    assert float(mixed.hi) == pytest.approx(11)


@pytest.mark.parametrize(("lo", "hi", "want"), [(0.5, 2, (0, 2)), (-3, -0.5, (-3, 0)), (-1, 0.5, (-1, 0.5))])
def test_a_range_is_widened_to_hold_zero(lo, hi, want):
    held = scale(lo, hi).holding_zero()
    assert (float(held.lo), float(held.hi)) == want


def test_percentiles_are_ranks_from_both_ends():
    x = torch.arange(10.0)[:, None] * torch.tensor([1.0, -2.0])
    r = range_of(x, per_feature=True, percentile=80)
    assert r.lo.tolist() == [2, -14]
    assert r.hi.tolist() == [7, -4]
    whole = range_of(x, percentile=100)
    assert (float(whole.lo), float(whole.hi)) == (-18, 9)
    assert float(range_of(torch.arange(3.0)[:, None], percentile=1).hi) == 0  # at least one value


@pytest.mark.parametrize("form", [quantise, quantise_reference])
def test_ends_of_the_range_pass_no_gradient_in_either_form(form):
    x = torch.tensor([-1.0, -0.999, 1.999, 2.0], requires_grad=True)
    form(x, 2, scale(-1, 2)).sum().backward()
    assert x.grad.tolist() == [0, 1, 1, 0]
