"""Contributions against the closed form of the path integral on polynomials, and how many points are spent on it."""

import pytest
import torch
from torch import nn

from auditor import Subject
from auditor.explainers.contributions import POINTS, TOLERANCE, contributions, gauss_legendre
from auditor.network.above_layer import prepare_above_layer
from auditor.subject.layers import Deviations, Layout

BIAS = torch.tensor([0.25, -0.5], dtype=torch.float64)
V = torch.rand(2, 3, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 0.3


class Power(nn.Module):
    """Logits  <v_k, z>^power + b_k  of a layer z with 3 channels on 2 x 3 positions."""

    def __init__(self, power: int) -> None:
        super().__init__()
        self.z, self.power, self.rows = nn.Conv2d(1, 3, 1).double(), power, []
        self.register_buffer("v", V)
        self.register_buffer("b", BIAS)

    def forward(self, x):
        z = self.z(x)
        self.rows.append(len(z))
        q = (z[:, None] * self.v).sum((2, 3, 4))
        return q**self.power + self.b


def subject_of(power: int) -> Subject:
    torch.manual_seed(1)
    return Subject(Power(power), input_shape=(1, 2, 3))


def scores(batch: int, seed: int = 2):
    g = torch.Generator().manual_seed(seed)
    W = torch.rand(3, 4, generator=g, dtype=torch.float64)
    return W, torch.rand(batch, 4, 6, generator=g, dtype=torch.float64)


def shares_of(W, S, targets):
    """What each concept adds to  <v_k, W S>:  written out, (batch, concepts)."""
    got = torch.zeros(S.shape[:2], dtype=torch.float64)
    for b, k in enumerate(targets):
        for concept in range(S.shape[1]):
            for channel in range(3):
                for p in range(6):
                    got[b, concept] += V[k, channel, p // 3, p % 3] * W[channel, concept] * S[b, concept, p]
    return got


def run(subject: Subject, W, S, targets, logits=None):
    """Contributions for an activation that is the reconstruction plus something unexplained."""
    z = (W @ S).view(len(S), 3, 2, 3) + 0.1
    with torch.no_grad():
        logits = subject.forward_from("z", z) if logits is None else logits
    return contributions(subject, "z", subject.layout("z"), z, logits, W, S, targets), logits


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("power", [1, 2, 3, 4])
def test_a_polynomial_of_one_number_has_a_closed_form(power, prepared):
    """q^n  along  t q  has the integral  q^(n-1) q_k  for the part q_k of concept k."""
    subject = subject_of(power)
    if prepared:
        assert prepare_above_layer(subject, "z").is_affine == (power == 1)
    W, S = scores(3)
    targets = [1, 0, 1]
    result, logits = run(subject, W, S, targets)
    q_k = shares_of(W, S, targets)
    q = q_k.sum(1, keepdim=True)
    want = q ** (power - 1) * q_k
    # one point is exact for lines, three for all that come next; then so is the result
    torch.testing.assert_close(result.contributions, want, rtol=1e-12, atol=1e-12)
    assert float(result.error.max()) < 1e-12
    torch.testing.assert_close(result.bias, BIAS[targets])
    torch.testing.assert_close(result.logits_hat, (W @ S).view(3, 1, 3, 2, 3).mul(V).sum((2, 3, 4)) ** power + BIAS)
    f = logits[torch.arange(3), targets]
    torch.testing.assert_close(result.residual, f - result.logits_hat[torch.arange(3), targets])
    whole = result.bias + result.contributions.sum(1) + result.residual
    torch.testing.assert_close(whole, f, rtol=1e-12, atol=1e-12)  # complete, whatever the error was


def integral_of(power: int, n_points: int) -> float:
    """What the rule makes of the integral of  power t^(power - 1)  over [0, 1], which is 1."""
    return sum(w * power * t ** (power - 1) for t, w in zip(*gauss_legendre(n_points), strict=True))


@pytest.mark.parametrize("n_points", [1, 3, 8, 20])
def test_a_rule_of_n_points_is_exact_up_to_degree_2n_minus_1(n_points):
    assert integral_of(2 * n_points, n_points) == pytest.approx(1, rel=1e-12)
    assert n_points == 20 or abs(integral_of(2 * n_points + 1, n_points) - 1) > 1e-10
    assert all(0 < t < 1 for t in gauss_legendre(n_points)[0])


@pytest.mark.parametrize(
    ("rise", "logit"), [(1.0, 1.0), (1.0, -10.0), (-1.0, 3.0), (0.003, 1.0), (0.0, 1.0), (1e3, 1.0)]
)
def test_the_next_rule_is_taken_until_the_error_is_below_the_tolerance(rise, logit):
    """q^9 asks for five points; the rules before that leave what is written out here."""
    subject = subject_of(9)
    W, S = scores(1)
    q = float(shares_of(W, S, [0]).sum())
    scale = abs(rise) ** (1 / 9) / q * (-1 if rise < 0 else 1)
    result, _ = run(subject, W, S * scale, [0], torch.full((1, 2), logit, dtype=torch.float64))
    left = [abs(rise) * abs(1 - integral_of(9, n)) for n in POINTS]
    used = next((e for e in left if e <= TOLERANCE * max(1.0, abs(logit))), left[-1])
    assert float(result.error) == pytest.approx(used, rel=1e-6, abs=1e-12)
    assert float(result.contributions.sum()) == pytest.approx(rise, rel=1e-12, abs=1e-15)


def test_a_step_in_the_path_leaves_an_error_that_is_known_exactly():
    """A ReLU that opens on the way: no rule of few points is right, and the error is what is missing."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.z = nn.Conv2d(1, 3, 1).double()

        def forward(self, x):
            z = self.z(x).sum((1, 2, 3))
            return torch.stack([(z - 0.37).clamp_min(0), z], 1)

    W, S = torch.full((3, 2), 0.5, dtype=torch.float64), torch.full((1, 2, 6), 0.2, dtype=torch.float64)
    subject = Subject(Step(), input_shape=(1, 2, 3))
    result, _ = run(subject, W, S, [0])
    total = float((W @ S).sum())
    opens = [t for t, _ in zip(*gauss_legendre(POINTS[-1]), strict=True)]
    slope = sum(w for t, w in zip(opens, gauss_legendre(POINTS[-1])[1], strict=True) if t * total > 0.37)
    assert float(result.error) == pytest.approx(abs(total - 0.37 - total * slope), rel=1e-6)
    torch.testing.assert_close(result.contributions[0], torch.full((2,), (total - 0.37) / 2, dtype=torch.float64))


def test_an_image_that_is_done_is_left_alone_and_a_batch_equals_its_images():
    subject = subject_of(9)
    W, S = scores(3)
    S = S * torch.tensor([0.05, 2.0, 1.0], dtype=torch.float64).view(3, 1, 1)
    together, _ = run(subject, W, S, [0, 1, 1])
    assert float(together.error[0]) != float(together.error[1])
    for i, k in enumerate([0, 1, 1]):
        alone, _ = run(subject, W, S[i : i + 1], [k])
        torch.testing.assert_close(alone.contributions[0], together.contributions[i], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(alone.error[0], together.error[i], rtol=1e-9, atol=1e-12)


def test_what_is_left_is_shared_out_in_proportion_to_the_size_of_the_parts():
    subject = subject_of(9)
    W, S = scores(1)
    W[:, 1] *= -1
    z = (W @ S).view(1, 3, 2, 3)
    logits = torch.ones(1, 2, dtype=torch.float64)
    result = contributions(subject, "z", subject.layout("z"), z, logits, W, S, [1], points=(1,))
    q_k = shares_of(W, S, [1])
    assert float(q_k.min()) < 0 < float(q_k.max())  # parts of both signs
    q = float(q_k.sum())
    exact = q**8 * q_k * integral_of(9, 1)
    left = q**9 - float(exact.sum())
    assert abs(left) > 0.1 * abs(q**9)
    torch.testing.assert_close(
        result.contributions, exact + left * exact.abs() / exact.abs().sum(), rtol=1e-8, atol=1e-12
    )


@pytest.mark.parametrize(("rows", "numbers", "largest"), [(4, 10**6, 4), (64, 54, 3), (64, 1, 1), (2, 10**6, 2)])
def test_many_points_go_through_in_turns(rows, numbers, largest, monkeypatch):
    subject = subject_of(9)
    W, S = scores(1)
    whole, _ = run(subject, W, S, [0])
    monkeypatch.setattr("auditor.explainers.contributions.MAX_ROWS", rows)
    monkeypatch.setattr("auditor.explainers.contributions.MAX_NUMBERS", numbers)  # 18 numbers at the layer
    calls = []
    forward = subject.forward_from
    monkeypatch.setattr(subject, "forward_from", lambda layer, z: calls.append(len(z)) or forward(layer, z))
    turns, _ = run(subject, W, S, [0], whole.logits_hat * 0 + 1)
    assert max(calls) == largest
    torch.testing.assert_close(turns.contributions.sum(), whole.contributions.sum(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("prepared", [False, True])
def test_a_class_token_stays_and_belongs_to_the_bias(prepared):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.z = nn.Linear(4, 15).double(), nn.Linear(3, 3).double()
            self.head = nn.Linear(3, 2).double()

        def forward(self, x):
            tokens = self.z(self.embed(x.flatten(1)).view(-1, 5, 3))
            return self.head(tokens[:, 0] * 3.0 + tokens[:, 1:].mean(1))

    torch.manual_seed(3)
    net = Net()
    subject = Subject(net, input_shape=(1, 2, 2))
    if prepared:
        assert prepare_above_layer(subject, "z") is not None
    layout = Layout("tokens", 3, (2, 2), 1)
    g = torch.Generator().manual_seed(4)
    W, S = torch.rand(3, 2, generator=g, dtype=torch.float64), torch.rand(2, 2, 4, generator=g, dtype=torch.float64)
    z = torch.randn(2, 5, 3, generator=g, dtype=torch.float64)
    with torch.no_grad():
        logits = net.head(z[:, 0] * 3.0 + z[:, 1:].mean(1))
        bias = net.head(z[:, 0] * 3.0)
        result = contributions(subject, "z", layout, z, logits, W, S, [0, 1])
        want = torch.stack([S[i].mean(1) * (W.T @ net.head.weight[k]) for i, k in enumerate([0, 1])])
    torch.testing.assert_close(result.bias, bias[[0, 1], [0, 1]])
    assert abs(float(result.bias[0] - bias[1, 0])) > 1e-3  # another for every image
    torch.testing.assert_close(result.contributions, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("prepared", [False, True])
def test_deviations_walk_from_their_start_and_tokens_have_their_part(prepared):
    """A class token that counts three times as much as the mean of the cells, and a cube above them."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.z = nn.Linear(4, 15).double(), nn.Linear(3, 3).double()
            self.head = nn.Linear(3, 2).double()

        def forward(self, x):
            tokens = self.z(self.embed(x.flatten(1)).view(-1, 5, 3))
            return self.head(tokens[:, 0] * 3.0 + tokens[:, 1:].mean(1)) ** 3

    torch.manual_seed(3)
    net = Net()
    subject = Subject(net, input_shape=(1, 2, 2))
    if prepared:
        assert prepare_above_layer(subject, "z") is not None
    g = torch.Generator().manual_seed(4)
    z = torch.randn(2, 5, 3, generator=g, dtype=torch.float64)
    reading = Deviations.of(Layout("tokens", 3, (2, 2), 1), 0.3 * torch.randn(3, 5, generator=g, dtype=torch.float64))
    W, S = torch.rand(3, 2, generator=g, dtype=torch.float64), torch.rand(2, 2, 5, generator=g, dtype=torch.float64)

    def above(tokens):
        return net.head(tokens[:, 0] * 3.0 + tokens[:, 1:].mean(1)) ** 3

    with torch.no_grad():
        start, hat = reading.from_positions(torch.zeros(2, 3, 5).double(), z), reading.from_positions(W @ S, z)
        result = contributions(subject, "z", reading, z, above(z), W, S, [0, 1])
        torch.testing.assert_close(result.bias, above(start)[[0, 1], [0, 1]])
        torch.testing.assert_close(result.logits_hat, above(hat))
        linear = torch.stack([W.T @ net.head.weight[k] for k in (0, 1)])
        by_token, by_cells = 3 * S[..., 0] * linear, S[..., 1:].mean(-1) * linear
        at = [torch.linspace(0, 1, 20001, dtype=torch.float64)[:, None]]
        v0, v1 = (net.head(t[:, 0] * 3.0 + t[:, 1:].mean(1))[[0, 1], [0, 1]] for t in (start, hat))
        slope = (3 * (v0 + at[0] * (v1 - v0)) ** 2).mean(0)  # of the cube, over the walk
    torch.testing.assert_close(result.contributions, slope[:, None] * (by_token + by_cells), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(result.by_tokens, by_token.abs() / (by_token.abs() + by_cells.abs()))
    torch.testing.assert_close(
        result.bias + result.contributions.sum(1) + result.residual, above(z)[[0, 1], [0, 1]].detach()
    )


def test_an_affine_part_above_needs_no_integration(monkeypatch):
    subject = subject_of(1)
    assert prepare_above_layer(subject, "z").is_affine
    monkeypatch.setattr("auditor.explainers.contributions.gauss_legendre", None)  # calling it would raise
    W, S = scores(3)
    result, _ = run(subject, W, S, [1, 0, 1])
    torch.testing.assert_close(result.contributions, shares_of(W, S, [1, 0, 1]), rtol=1e-12, atol=1e-12)
    assert float(result.error.max()) < 1e-12


def test_every_image_may_have_a_basis_of_its_own():
    subject = subject_of(3)
    W, S = scores(2)
    other = W.flip(1) * 0.7
    each, _ = run(subject, torch.stack([W, other]), S, [0, 1])
    for i, basis in enumerate((W, other)):
        alone, _ = run(subject, basis, S[i : i + 1], [i])
        torch.testing.assert_close(each.contributions[i], alone.contributions[0], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(each.residual[i], alone.residual[0], rtol=1e-9, atol=1e-12)
