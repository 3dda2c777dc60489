"""The objective of explanation heads, against closed forms: PCA, least squares, equal weights."""

import pytest
import torch

from auditor.explainers.xnn.head_objective import (
    FEW_INPUTS,
    Problem,
    SraeConfig,
    class_generator,
    fit_predictor,
    normalise,
    objective,
    start_state,
    train,
    weights_of,
)
from auditor.explainers.xnn.heads import XHeads


def test_linear_autoencoder_reaches_the_error_of_pca():
    g = torch.Generator().manual_seed(0)
    Z = torch.rand(200, 3, generator=g) @ torch.eye(3).repeat(1, 2) + 0.1 * torch.rand(200, 6, generator=g)
    heads = XHeads(1, 6, (), 3, activation="identity", signed_output=True, generator=g)
    problem = Problem.of(Z, Z.sum(1)[None], torch.ones(1, 200))
    config = SraeConfig(variant="cae", lr=3e-2, weight_decay=0, batch=200, beta=1.0, epochs=1200)
    state = start_state(heads, problem, config)
    for _, _s in zip(range(1200), train(state, config), strict=False):
        pass
    scaled = Z / heads.scale
    with torch.no_grad():
        got = float((heads.decode(heads.embed(heads.rows(Z)))[0] - scaled).square().mean())
    centred = scaled - scaled.mean(0)  # the decoder has a bias, so PCA may centre too
    s = torch.linalg.svdvals(centred)
    assert abs(got - float(s[3:].square().sum()) / scaled.numel()) < 1e-3


def test_nn_with_identity_finds_a_linear_logit_and_least_squares_agrees():
    g = torch.Generator().manual_seed(0)
    Z = torch.rand(300, 5, generator=g)
    y = Z @ torch.tensor([1.0, -2, 3, 0, 0.5]) - 1
    heads = XHeads(1, 5, (), 4, activation="identity", generator=g)
    problem = Problem.of(Z, y[None], torch.ones(1, 300))
    config = SraeConfig(variant="nn", lr=4e-2, weight_decay=0, epochs=300)
    state = start_state(heads, problem, config)
    for _, _s in zip(range(300), train(state, config), strict=False):
        pass
    with torch.no_grad():
        assert float((heads.predict(heads.encode(Z))[0] - y).abs().mean()) < 1e-2
        before = float((heads.predict(heads.encode(Z))[0] - y).square().mean())
        fit_predictor(heads, problem)
        assert float((heads.predict(heads.encode(Z))[0] - y).square().mean()) <= before * 1.001 + 1e-9


def test_weights_give_positives_and_negatives_the_same_total():
    positive = torch.rand(3, 50, generator=torch.Generator().manual_seed(0)) < 0.2
    w = weights_of(positive)
    torch.testing.assert_close(w.mean(1), torch.ones(3))
    torch.testing.assert_close((w * positive).sum(1), (w * ~positive).sum(1))


def random_problem(n_classes=2, n=60, dims=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    Z = torch.rand(n, dims, generator=g)
    y = torch.randn(n_classes, dims, generator=g) @ Z.T + 1
    return Problem.of(Z, y, weights_of(y > y.median(1, keepdim=True).values))


def epochs(state, config, n):
    for _, _s in zip(range(n), train(state, config), strict=False):
        pass


@pytest.mark.parametrize("share", [0, 50])
def test_a_class_without_positives_or_negatives_has_finite_weights(share):
    w = weights_of((torch.arange(50) < share)[None])
    torch.testing.assert_close(w, torch.ones(1, 50))


def test_the_start_is_the_mean_logit_and_the_scale_of_the_activations():
    problem = random_problem()
    problem.Z[:, 2] = 0  # a silent dimension is not divided by zero
    heads = XHeads(2, 5, (), 3, generator=torch.Generator().manual_seed(0))
    before = heads.v.detach().clone()
    start_state(heads, problem, SraeConfig())
    rms = problem.Z.square().mean(0).sqrt()
    rms[2] = 1
    torch.testing.assert_close(heads.scale, rms)
    torch.testing.assert_close(heads.c.detach(), problem.y.mean(1))
    torch.testing.assert_close(heads.v.detach(), before * problem.y.std(1).view(2, 1, 1))


def test_channels_of_a_map_are_scaled_over_all_positions():
    Z = torch.rand(4, 3, 2, 5, generator=torch.Generator().manual_seed(0))
    heads = XHeads(1, 3, (), 2, cells=4)
    start_state(heads, Problem.of(Z, torch.rand(1, 4), torch.ones(1, 4)), SraeConfig())
    torch.testing.assert_close(heads.scale, Z.square().mean((0, 2, 3)).sqrt())


@pytest.mark.parametrize("variant", ["srae", "nn", "sae", "cae"])
def test_classes_trained_together_are_those_trained_alone(variant):
    problem = random_problem()
    config = SraeConfig(variant=variant, batch=20, lr=1e-2)
    together = XHeads(2, 5, (4,), 3, activation="tanh", generator=torch.Generator().manual_seed(0))
    start = {name: p.detach().clone() for name, p in together.named_parameters()}
    state = start_state(together, problem, config)
    epochs(state, config, 5)
    for k in range(2):
        alone = XHeads(1, 5, (4,), 3, activation="tanh")
        with torch.no_grad():
            for name, p in alone.named_parameters():
                p.copy_(start[name][k : k + 1])
        one = Problem.of(problem.Z, problem.y[k : k + 1], problem.w[k : k + 1])
        single = start_state(alone, one, config)
        epochs(single, config, 5)
        with torch.no_grad():
            E = together.encode(problem.Z)
            torch.testing.assert_close(E[k], alone.encode(problem.Z)[0], rtol=1e-3, atol=1e-4)  # float32, 15 steps
            assert float(E[k].std()) > 1e-2
        for name, loss in single.losses.items():
            torch.testing.assert_close(loss[0], state.losses[name][k], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("variant", "terms"),
    [
        ("srae", {"faithfulness", "reconstruction", "pull_away"}),
        ("nn", {"faithfulness"}),
        ("sae", {"faithfulness", "reconstruction"}),
        ("cae", {"reconstruction"}),
    ],
)
def test_a_baseline_lacks_the_terms_it_is_defined_without(variant, terms):
    problem, config = random_problem(), SraeConfig(variant=variant)
    state = start_state(XHeads(2, 5, (), 3, generator=torch.Generator().manual_seed(0)), problem, config)
    epochs(state, config, 1)
    assert {name for name, loss in state.losses.items() if bool((loss > 0).all())} == terms
    assert all(float(state.losses[name].abs().max()) == 0 for name in set(state.losses) - terms)


def test_weights_of_the_terms_multiply_them():
    losses = {}
    for beta, eta in ((1.0, 1.0), (3.0, 0.5)):
        problem, config = random_problem(), SraeConfig(beta=beta, eta=eta, lr=1e-12, batch=60, weight_decay=0)
        state = start_state(XHeads(2, 5, (), 3, generator=torch.Generator().manual_seed(0)), problem, config)
        epochs(state, config, 1)
        losses[beta] = state.losses
    torch.testing.assert_close(losses[3.0]["reconstruction"], 3 * losses[1.0]["reconstruction"])
    torch.testing.assert_close(losses[3.0]["pull_away"], 0.5 * losses[1.0]["pull_away"])
    torch.testing.assert_close(losses[3.0]["faithfulness"], losses[1.0]["faithfulness"])


def test_extreme_activations_break_a_class_and_leave_the_others_alone():
    problem = random_problem()
    problem.y[1, 3] = torch.inf
    heads = XHeads(2, 5, (), 3, generator=torch.Generator().manual_seed(0))
    state = start_state(heads, problem, SraeConfig())
    epochs(state, SraeConfig(), 2)
    assert state.broken.tolist() == [False, True]
    assert torch.isfinite(heads.v[0]).all()
    state.keep(torch.tensor([0]))
    epochs(state, SraeConfig(), 1)
    assert state.broken.tolist() == [False]


def plain_training(heads, problem, config, k, n_epochs):
    """One head trained alone by the text book: plain layers, plain losses, torch's plain Adam; returns its parts."""
    z = problem.Z.double() / problem.Z.double().square().mean(0).sqrt()
    w, b = heads.encoder_w[0][k].double().clone(), heads.encoder_b[0][k, 0].double().clone()
    d, e = heads.decoder_w[0][k].double().clone(), heads.decoder_b[0][k, 0].double().clone()
    y, weight = problem.y[k].double(), problem.w[k].double()
    v, c = heads.v[k, :, 0].double().clone() * y.std(), y.mean().reshape(1).clone()
    parts = [p.detach().requires_grad_(True) for p in (w, b, d, e, v, c)]
    w, b, d, e, v, c = parts
    shares = [min(1.0, FEW_INPUTS / w.shape[1]), 1, 1, 1, 1, 1]
    groups = [{"params": [p], "share": share} for p, share in zip(parts, shares, strict=True)]
    adam = torch.optim.Adam(groups, weight_decay=config.weight_decay)
    generator = torch.Generator().manual_seed(config.seed + 1)
    Q_running = torch.ones(z.shape[1]).double()
    for epoch in range(1, n_epochs + 1):
        for group in adam.param_groups:
            group["lr"] = config.step_size(epoch) * group["share"]
        for rows in torch.randperm(len(z), generator=generator).tensor_split(round(len(z) / config.batch)):
            E = torch.relu(z[rows] @ w.T + b)
            Q = (torch.relu(E @ d.T + e) - z[rows]).square().mean(0)
            keep = 0.9 if epoch > 1 else 0.5
            Q_running = keep * Q_running + (1 - keep) * Q.detach()
            loss = (weight[rows] * (E @ v + c - y[rows]).square()).mean()
            loss = loss + config.beta * (config.q / (1 + config.q * Q_running) * Q).mean()
            cosines = [
                (E[:, i] @ E[:, j] / (E[:, i].norm() * E[:, j].norm())).square()
                for i in range(len(v))
                for j in range(len(v))
                if i != j
            ]
            loss = loss + config.eta * torch.stack(cosines).mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
    return [p.detach().float() for p in parts]


def test_the_batched_program_gives_the_weights_of_one_head_at_a_time():
    problem, config = random_problem(n_classes=4, n=90, dims=70), SraeConfig(batch=30, lr=2e-3, epochs=4)
    heads = XHeads(4, 70, (), 3, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        heads.encoder_w[0].abs_()
    alone = [plain_training(heads, problem, config, k, 4) for k in range(4)]
    before = heads.encoder_w[0].detach().clone()
    state = start_state(heads, problem, config)
    epochs(state, config, 2)
    state.keep(torch.tensor([3, 1]))  # what leaves does not change what stays
    epochs(state, config, 2)
    assert int(state.reseeded.sum()) == 0
    for row, k in enumerate((3, 1)):
        w, b, d, e, v, c = alone[k]
        for got, want in (
            (heads.encoder_w[0][row], w), (heads.encoder_b[0][row, 0], b), (heads.decoder_w[0][row], d),
            (heads.decoder_b[0][row, 0], e), (heads.v[row, :, 0], v), (heads.c[row : row + 1], c),
        ):  # fmt: skip
            torch.testing.assert_close(got.detach(), want, rtol=1e-3, atol=2e-4)  # float32 against float64, 12 steps
        assert float((heads.encoder_w[0][row].detach() - before[k]).abs().max()) > 5e-3


def test_the_objective_is_the_sum_of_its_terms():
    from auditor.kernels.networks.reconstruction_losses import faithfulness, pull_away, sparse_reconstruction

    problem, config = random_problem(), SraeConfig(beta=0.3, eta=0.7)
    heads = XHeads(2, 5, (), 3, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        E = heads.embed(heads.rows(problem.Z))
        Q = (heads.decode(E) - heads.rows(problem.Z)).square().mean(1)
        fs = faithfulness(heads.predict(heads.encode(problem.Z)), problem.y, problem.w)
        want = fs + 0.3 * sparse_reconstruction(Q, config.q) + 0.7 * pull_away(E)
    torch.testing.assert_close(objective(heads, problem, config), want)
    torch.testing.assert_close(objective(heads, problem, SraeConfig(variant="nn")), fs)
    sae, cae = SraeConfig(variant="sae", beta=0.3), SraeConfig(variant="cae", beta=0.3)
    torch.testing.assert_close(objective(heads, problem, sae), fs + 0.3 * Q.mean(-1))
    torch.testing.assert_close(objective(heads, problem, cae), 0.3 * Q.mean(-1))


def test_examples_that_do_not_count_change_nothing():
    problem, rows = random_problem(), torch.arange(0, 60, 2)
    part = Problem(problem.Z, problem.y[:, rows], problem.w[:, rows], rows)
    alone = Problem.of(problem.Z[rows].clone(), problem.y[:, rows], problem.w[:, rows])
    problem.Z[1::2] = 1e9
    weights = []
    for one in (part, alone):
        heads = XHeads(2, 5, (), 3, generator=torch.Generator().manual_seed(0))
        epochs(start_state(heads, one, SraeConfig(batch=10)), SraeConfig(batch=10), 2)
        weights.append(heads.v.detach())
    assert torch.equal(*weights)


def test_half_precision_is_read_as_float():
    problem = random_problem()
    half = Problem.of(problem.Z.half(), problem.y, problem.w)
    assert half.activations(torch.tensor([3, 1])).dtype == torch.float32
    torch.testing.assert_close(half.activations(torch.tensor([3, 1])), problem.Z[[3, 1]], rtol=1e-3, atol=1e-3)


def test_steps_fall_along_a_cosine():
    config = SraeConfig(lr=1.0, epochs=11)
    sizes = [config.step_size(epoch) for epoch in range(1, 15)]
    assert sizes[0] == 1.0
    assert sizes[5] == pytest.approx(0.51)
    assert sizes[10:] == pytest.approx([0.02] * 4)
    assert sizes[:11] == sorted(sizes[:11], reverse=True)


def test_randomness_of_a_class_is_its_own():
    draw = lambda *key: torch.rand(3, generator=class_generator(*key)).tolist()  # noqa: E731
    assert draw(0, 5) == draw(0, 5)
    assert len({tuple(draw(*key)) for key in [(0, 5), (1, 5), (0, 6), (0, 5, 1)]}) == 4


def test_the_predictor_is_weighted_least_squares():
    problem = random_problem(n=80)
    heads = XHeads(2, 5, (4,), 3, generator=torch.Generator().manual_seed(3))
    fit_predictor(heads, problem)
    with torch.no_grad():
        E = heads.encode(problem.Z)[..., 0].double()
        for k in range(2):
            root = problem.w[k].double().sqrt()[:, None]
            A = torch.cat([E[k], torch.ones(80, 1)], 1)
            error = heads.predict(heads.encode(problem.Z))[k].double() - problem.y[k]
            slope = A.T @ (problem.w[k].double() * error)  # zero at the minimum
            assert float(slope.abs().max()) < 1e-3 * 80
            best = torch.linalg.lstsq(A * root, problem.y[k].double()[:, None] * root, driver="gelsd").solution
            least = (root[:, 0] * (A @ best)[:, 0] - root[:, 0] * problem.y[k]).square().sum()
            assert float((root[:, 0] * error).square().sum()) <= float(least) * (1 + 1e-4) + 1e-6


@pytest.mark.parametrize("cells", [1, 4])
def test_normalising_changes_scales_and_nothing_else(cells):
    heads = XHeads(2, 5, (4,), 3, cells=cells, generator=torch.Generator().manual_seed(3))
    g = torch.Generator().manual_seed(0)
    Z = torch.rand(30, 5, generator=g) if cells == 1 else torch.rand(30, 5, 3, 4, generator=g)
    with torch.no_grad():
        heads.encoder_w[-1][0, 1], heads.encoder_b[-1][0, 0, 1] = 0.0, -1.0  # a dead feature stays as it is
        logits, decoded = heads.predict(heads.encode(Z)), heads.decode(heads.embed(heads.rows(Z)))
        before = heads.embed(heads.rows(Z))
        normalise(heads, Problem.of(Z, torch.zeros(2, 30), torch.ones(2, 30)))
        after = heads.embed(heads.rows(Z))
        torch.testing.assert_close(heads.predict(heads.encode(Z)), logits, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(heads.decode(after), decoded, rtol=1e-4, atol=1e-5)
        alive = (before > 0).any(1)
        assert not bool(alive[0, 1])
        assert int(alive.sum()) >= 3
        torch.testing.assert_close(after.square().mean(1).sqrt(), alive.float())


def test_bounded_features_keep_their_scale():
    heads = XHeads(2, 5, (), 3, activation="tanh", generator=torch.Generator().manual_seed(3))
    before = {name: p.detach().clone() for name, p in heads.named_parameters()}
    normalise(heads, Problem.of(torch.rand(30, 5), torch.zeros(2, 30), torch.ones(2, 30)))
    assert all(torch.equal(before[name], p) for name, p in heads.named_parameters())
