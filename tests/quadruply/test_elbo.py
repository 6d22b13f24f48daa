"""The mll against dense references: values, gradients, Monte Carlo, bounds, control state, resume."""

import copy
import itertools
import math
import warnings

import gpytorch
import pytest
import torch
from gpytorch import kernels
from gpytorch.distributions import base_distributions
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.errors import ApproximationWarning
from gpy_iterative.mlls import QuadruplyStochasticELBO
from gpy_iterative.models import NystromBasis, QuadruplyStochasticGP
from gpy_iterative.quadruply.data_terms import Rows, site_bound
from gpy_iterative.quadruply.samples import Sample
from gpy_iterative.training.likelihood_forms import expected_log_prob
from tests.monte_carlo import assert_mean_within
from tests.quadruply.quadruply_models import (
    TableBasis,
    fourier_problem,
    gaussian_likelihood,
    known_latent,
    random_features,
    row_numbers,
    set_weights,
    weights_of,
)
from tests.quadruply.weight_space import best_weights, elbo_terms, log_marginal, quasi_normal, subsets

NOISE = 0.2


def dense_features(model: QuadruplyStochasticGP, x: Tensor) -> Tensor:
    """Phi in the order of the parameters."""
    head = model.head_features(x)
    groups = torch.arange(model.num_tail_groups)
    tail = torch.empty(len(x), model.weights.num_tail, dtype=x.dtype)
    tail[:, model.basis.feature_index(groups)] = model.tail_features(x, head, groups)
    return torch.cat([head, tail], dim=-1).detach()


def dense_root(model: QuadruplyStochasticGP) -> Tensor:
    weights, k = model.weights, model.weights.num_dense_columns
    tail = weights.tail_log_diagonal.squeeze(-1).expand(weights.num_tail)
    root = torch.diag(torch.cat([weights.head_log_diagonal, tail]).exp())
    root[:, :k] = torch.cat([weights.dense_head_columns, weights.tail_columns])
    return root.detach()


def test_full_columns_at_the_optimum_give_the_exact_marginal_likelihood() -> None:
    model, x, y = fourier_problem(num_dense_columns=40)
    likelihood = gaussian_likelihood(NOISE)
    phi = dense_features(model, x)
    prior = torch.eye(40).double()
    set_weights(model, *best_weights(phi, prior, y, NOISE, 40))
    mll = QuadruplyStochasticELBO(likelihood, model, generator=0)
    exact = log_marginal(phi, prior, y, likelihood.noise.item())
    torch.testing.assert_close(mll.exact_value(x, y) * len(y), exact, rtol=1e-9, atol=0)

    # The same from GPyTorch, with the features as a linear kernel.
    class Linear(gpytorch.models.ExactGP):
        def __init__(self) -> None:
            super().__init__(phi, y, likelihood)
            self.covar_module = gpytorch.kernels.LinearKernel().double()
            self.covar_module.variance = 1.0

        def forward(self, features: Tensor) -> gpytorch.distributions.MultivariateNormal:
            return gpytorch.distributions.MultivariateNormal(torch.zeros_like(y), self.covar_module(features))

    linear = Linear()
    reference = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, linear)(linear(phi), y)
    torch.testing.assert_close(mll.exact_value(x, y), reference, rtol=1e-9, atol=0)


class Penalty(gpytorch.mlls.AddedLossTerm):
    def loss(self) -> Tensor:
        return torch.tensor(0.25).double()


def test_priors_and_added_loss_terms_count_as_in_gpytorch() -> None:
    """See `gpytorch.mlls.VariationalELBO`."""
    model, x, y = fourier_problem()
    likelihood = gaussian_likelihood(NOISE)
    plain = QuadruplyStochasticELBO(likelihood, model, generator=0).exact_value(x, y)
    prior = gpytorch.priors.GammaPrior(2.0, 3.0)
    likelihood.register_prior("noise_prior", prior, lambda module: module.noise, lambda module, value: None)
    model.register_added_loss_term("penalty")
    model.update_added_loss_term("penalty", Penalty())
    with_both = QuadruplyStochasticELBO(likelihood, model, generator=0).exact_value(x, y)
    expected = plain + prior.log_prob(likelihood.noise).sum() / len(y) - 0.25
    torch.testing.assert_close(with_both, expected)


def test_the_exact_value_is_that_of_all_data() -> None:
    model, x, y = fourier_problem()
    mll = QuadruplyStochasticELBO(gaussian_likelihood(NOISE), model, num_data=60, generator=0)
    with pytest.raises(ValueError, match="num_data is 60, but 30 rows were passed"):
        mll.exact_value(x[:30], y[:30])


@pytest.mark.parametrize("k", [0, 4, 40])
def test_best_chevrons_rise_to_it(k: int) -> None:
    model, x, y = fourier_problem(num_dense_columns=k, shared_diagonal=False)
    phi, prior = dense_features(model, x), torch.eye(40).double()
    set_weights(model, *best_weights(phi, prior, y, NOISE, k))
    mll = QuadruplyStochasticELBO(gaussian_likelihood(NOISE), model, generator=0)
    value = mll.exact_value(x, y)
    expected = -elbo_terms(phi, prior, y, NOISE, *best_weights(phi, prior, y, NOISE, k)).sum() / 2
    torch.testing.assert_close(value * len(y), expected, rtol=1e-9, atol=0)
    assert value * len(y) <= log_marginal(phi, prior, y, NOISE) + 1e-9
    value.backward()
    for name, parameter in model.named_variational_parameters():
        assert parameter.grad is None or (parameter.grad.abs() < 1e-9).all(), name


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("shared", [True, False])
def test_value_of_moved_weights(k: int, shared: bool) -> None:
    model, x, y = fourier_problem(num_dense_columns=k, shared_diagonal=shared)
    set_weights(model, *weights_of(40, k))
    mll = QuadruplyStochasticELBO(gaussian_likelihood(NOISE), model, generator=0)
    phi, root = dense_features(model, x), dense_root(model)
    expected = -elbo_terms(phi, torch.eye(40).double(), y, NOISE, model.weights.mean, root).sum() / (2 * len(y))
    torch.testing.assert_close(mll.exact_value(x, y), expected, rtol=1e-10, atol=0)
    covariance = model.weights().covariance_matrix
    torch.testing.assert_close(covariance, root @ root.mT)
    torch.testing.assert_close(model.weights.variance, covariance.diagonal())


@pytest.mark.parametrize("k", [0, 4])
def test_gradients_against_finite_differences(k: int) -> None:
    model, x, y = fourier_problem(n=20, m=12, num_dense_columns=k)
    set_weights(model, *weights_of(12, k))
    likelihood = gaussian_likelihood(NOISE)
    mll = QuadruplyStochasticELBO(likelihood, model, generator=0)
    parameters = [p for p in (*model.parameters(), *likelihood.parameters()) if p.numel()]
    gradients = torch.autograd.grad(mll.exact_value(x, y), parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        entry = parameter.numel() - 1
        slope, step = [], 1e-5
        for sign in (1, -1):
            with torch.no_grad():
                parameter.view(-1)[entry] += sign * step
                slope.append(mll.exact_value(x, y))
                parameter.view(-1)[entry] -= sign * step
        expected = (slope[0] - slope[1]) / (2 * step)
        found = torch.zeros(()) if gradient is None else gradient.view(-1)[entry]
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("ring", [True, False])
def test_the_estimate_is_unbiased(ring: bool) -> None:
    model, x, y = fourier_problem(num_dense_columns=4)
    set_weights(model, *best_weights(dense_features(model, x), torch.eye(40).double(), y, NOISE, 4))
    likelihood = gaussian_likelihood(NOISE)
    model.basis.exchangeable = ring
    options = {"num_feature_samples": 12, "num_data_samples": 20, "num_control_points": 30}
    mll = QuadruplyStochasticELBO(likelihood, model, generator=0, **options)
    truth = mll.exact_value(x, y)
    parameters = [model.weights.head_mean, model.weights.tail_mean, likelihood.raw_noise]
    exact = torch.cat([g.flatten() for g in torch.autograd.grad(truth, parameters)])
    draws = []
    for _ in range(250):
        value = mll(model(x), y)
        gradients = torch.autograd.grad(value, parameters)
        draws.append(torch.cat([value.detach().view(1), *(g.to_dense().flatten() for g in gradients)]))
    samples = torch.stack(draws)
    assert_mean_within(samples[:, :1], truth.detach(), max_sem=0.05 * abs(truth.item()))
    assert_mean_within(samples[:, 1:], exact, max_sem=1.0)


def test_batches_of_a_loader_estimate_the_same() -> None:
    model, x, y = fourier_problem()
    set_weights(model, *weights_of(40, 0))
    mll = QuadruplyStochasticELBO(gaussian_likelihood(NOISE), model, num_data=60, generator=0)
    values = torch.stack([mll(model(x[i : i + 15]), y[i : i + 15]) for i in range(0, 60, 15)])
    torch.testing.assert_close(values.mean(), mll.exact_value(x, y), rtol=1e-10, atol=0)


def test_a_noise_that_is_passed_is_sampled_with_the_rows() -> None:
    # GPyTorch's GaussianLikelihood takes it in the place of its own.
    noise = torch.linspace(0.1, 0.4, 60).double()
    fixed, own = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise).double(), gaussian_likelihood(NOISE)
    found = []
    for likelihood, kwargs in ((fixed, {}), (own, {"noise": noise})):
        model, x, y = fourier_problem()
        set_weights(model, *weights_of(40, 0))
        mll = QuadruplyStochasticELBO(likelihood, model, num_data_samples=20, generator=0)
        found.append(mll(model(x), y, **kwargs).item())
        with pytest.raises(ValueError, match="noise variances of shape"):
            mll(model(x), y, noise=noise[:20])
    assert found[0] == pytest.approx(found[1])


def test_fixed_noise() -> None:
    model, x, y = fourier_problem()
    noise = torch.linspace(0.1, 0.4, 60).double()
    likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise, learn_additional_noise=True).double()
    set_weights(model, *weights_of(40, 0))
    mll = QuadruplyStochasticELBO(likelihood, model, num_feature_samples=20, num_data_samples=20, generator=0)
    phi, root = dense_features(model, x), dense_root(model)
    variance = noise + likelihood.second_noise.detach()
    latent = base_distributions.Normal(phi @ model.weights.mean, (phi @ root).square().sum(-1).sqrt())
    log_prob = -0.5 * (((y - latent.mean).square() + latent.variance) / variance + (2 * math.pi * variance).log())
    prior = torch.distributions.MultivariateNormal(torch.zeros(40).double(), torch.eye(40).double())
    posterior = torch.distributions.MultivariateNormal(model.weights.mean, root @ root.mT)
    expected = (log_prob.sum() - torch.distributions.kl_divergence(posterior, prior)) / 60
    torch.testing.assert_close(mll.exact_value(x, y), expected)
    draws = torch.stack([mll(model(x), y).detach() for _ in range(200)])
    assert_mean_within(draws, expected, max_sem=0.1 * abs(expected.item()))
    part = QuadruplyStochasticELBO(likelihood, model, num_data=60, generator=0)
    with pytest.raises(ValueError, match="pass its own"):
        part(model(x[:20]), y[:20])
    assert torch.isfinite(part(model(x[:20]), y[:20], noise=noise[:20]))


LIKELIHOODS = {
    "logistic": gpi.likelihoods.LogitBernoulliLikelihood(),
    "laplace": gpytorch.likelihoods.LaplaceLikelihood().double(),
}


@pytest.mark.parametrize("name", list(LIKELIHOODS))
@pytest.mark.parametrize("k", [0, 2])
def test_the_site_bound_is_a_bound_and_exact_for_all_features(name: str, k: int) -> None:
    n, m, likelihood = 8, 6, LIKELIHOODS[name]
    phi, y = random_features(n, m)
    phi = 1.5 * phi
    target = (y > 0).double() if name == "logistic" else y
    model = QuadruplyStochasticGP(TableBasis(phi), num_dense_columns=k)
    mean, root = weights_of(m, k)
    set_weights(model, mean, root)
    rows = Rows(row_numbers(n), target, torch.zeros_like(target), None, 1.0)
    latent = base_distributions.Normal(phi @ mean, (phi @ root).square().sum(-1).sqrt())
    exact = expected_log_prob(likelihood, target, latent).sum().detach()
    averages = []
    for size in range(2, m - k + 1, 2):
        values = [
            site_bound(likelihood, model, rows, Sample(model, torch.tensor(i), sparse=False)).detach()
            for i in subsets(range(m - k), size)
        ]
        averages.append(torch.stack(values).mean())
    assert all(low <= high + 1e-12 for low, high in itertools.pairwise(averages))
    assert averages[0] < exact - 1e-3
    torch.testing.assert_close(averages[-1], exact, rtol=1e-12, atol=0)
    # With variances where deviations belong, as printed, it is no bound.
    printed = base_distributions.Normal(latent.mean, (0.3 * latent.stddev).square())
    small = base_distributions.Normal(latent.mean, 0.3 * latent.stddev)
    too_high = expected_log_prob(likelihood, target, printed).sum()
    assert too_high > expected_log_prob(likelihood, target, small).sum() + 1e-4


def test_the_divergence_of_a_bound_is_unbiased_for_a_dense_prior(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without features the data term is the same for every set; all pairs of sets are enumerated.
    m = 6
    root = quasi_normal(m, m, root=19.0)
    basis = TableBasis(torch.zeros(8, m).double(), root @ root.mT + torch.eye(m).double())
    model, x = QuadruplyStochasticGP(basis, num_dense_columns=2), row_numbers(8)
    set_weights(model, *weights_of(m, 2))
    mll = QuadruplyStochasticELBO(LIKELIHOODS["logistic"], model, num_feature_samples=2, generator=0)
    target = torch.ones(8).double()
    pairs = list(itertools.product([torch.tensor(groups) for groups in subsets(range(m - 2), 2)], repeat=2))
    drawn = itertools.chain.from_iterable(pairs)
    monkeypatch.setattr("gpy_iterative.quadruply.elbo.draw_set", lambda *_, **__: next(drawn))
    with torch.no_grad():
        values = torch.stack([mll(model(x), target) for _ in pairs])
        torch.testing.assert_close(values.mean(), mll.exact_value(x, target), rtol=1e-10, atol=0)
    assert values.std() > 0.1
    assert next(drawn, None) is None


def test_the_noise_has_no_gradient_through_the_control_variate() -> None:
    # Multiplied along with the path through the state, it would be biased.
    slopes = []
    for points in (0, 30):
        model, x, y = fourier_problem()
        set_weights(model, *weights_of(40, 0))
        likelihood = gaussian_likelihood(NOISE)
        options = {"num_feature_samples": 10, "num_control_points": points, "generator": 0}
        mll = QuadruplyStochasticELBO(likelihood, model, **options)
        value = mll(model(x), y)
        slopes.append((value.item(), torch.autograd.grad(value, likelihood.raw_noise)[0]))
    assert slopes[0][0] != slopes[1][0]
    torch.testing.assert_close(slopes[0][1], slopes[1][1])


def train(
    mll: QuadruplyStochasticELBO, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer, steps: int
) -> list[float]:
    values = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = -mll(mll.model(x), y)
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


def control_error(mll: QuadruplyStochasticELBO) -> float:
    """How far the known latent values, brought to the current weights, are from those of all features."""
    mll.training_state()
    before = known_latent(mll).total
    mll.refresh()
    return float((before - known_latent(mll).total).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_control_state_follows_adagrad(k: int, dtype: torch.dtype) -> None:
    model, x, y = fourier_problem(m=80, num_dense_columns=k)
    model, x, y = model.to(dtype), x.to(dtype), y.to(dtype)
    likelihood = gaussian_likelihood(NOISE).to(dtype)
    mll = QuadruplyStochasticELBO(likelihood, model, num_feature_samples=20, num_control_points=30, generator=0)
    optimizer = torch.optim.Adagrad(model.variational_parameters(), lr=0.1)
    train(mll, x, y, optimizer, 80)
    assert model.weights.mean.abs().max() > 0.05
    assert control_error(mll) < (1e-4 if dtype == torch.float32 else 1e-12)


def test_the_control_state_survives_accumulated_gradients_and_idle_evaluations() -> None:
    model, x, y = fourier_problem(m=80)
    mll = QuadruplyStochasticELBO(gaussian_likelihood(NOISE), model, num_feature_samples=20, generator=0)
    optimizer = torch.optim.Adagrad(model.variational_parameters(), lr=0.1)
    for step in range(12):
        optimizer.zero_grad()
        for _ in range(12 if step == 5 else 2):
            (-mll(model(x), y)).backward()
        with torch.no_grad():
            mll(model(x), y)
        optimizer.step()
    assert control_error(mll) < 1e-12


def adagrad(model: QuadruplyStochasticGP) -> torch.optim.Adagrad:
    return torch.optim.Adagrad(model.variational_parameters(), lr=0.1)


def test_the_control_state_follows_what_is_loaded() -> None:
    model, x, y = fourier_problem(m=2000)
    model.basis.requires_grad_(False)
    mll = QuadruplyStochasticELBO(
        gaussian_likelihood(NOISE).requires_grad_(False), model, num_feature_samples=20, generator=0
    )
    train(mll, x, y, adagrad(model), 1)
    best = copy.deepcopy(model.state_dict())
    train(mll, x, y, adagrad(model), 3)
    model.load_state_dict(best)
    with torch.no_grad():
        mll(model(x), y)
    assert control_error(mll) < 1e-12


def test_the_control_state_follows_steps_of_another_objective() -> None:
    model, x, y = fourier_problem(m=2000)
    model.basis.requires_grad_(False)
    first, second = (
        QuadruplyStochasticELBO(
            gaussian_likelihood(NOISE).requires_grad_(False),
            model,
            num_feature_samples=20,
            num_control_points=points,
            generator=points,
        )
        for points in (60, 0)
    )
    for mll in (first, second, first):
        train(mll, x, y, adagrad(model), 2)
    assert control_error(first) < 1e-12
    with torch.no_grad():
        second(model(x), y)
        run = first._run
        first(model(x), y)
    assert first._run is run  # an evaluation moves nothing


def test_training_goes_on_as_if_inference_mode_had_been_no_grad() -> None:
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        model, x, y = fourier_problem(m=80, num_dense_columns=2)
        likelihood = gaussian_likelihood(NOISE)
        mll = QuadruplyStochasticELBO(likelihood, model, num_data=60, num_feature_samples=20, generator=0)
        with mode():
            values = [mll(model(x.clone()), y.clone()).item()]
        values += train(mll, x, y, adagrad(model), 3)
        with mode():
            mll.refresh()
            mll.training_state()
            values.append(mll.exact_value(x, y).item())
        found.append(values + train(mll, x, y, adagrad(model), 3))
    assert found[0] == found[1]


@pytest.mark.parametrize("options", [{"num_steps_per_batch": 3}, {"num_control_points": 20}])
def test_what_is_known_follows_an_optimiser_that_moves_rows_that_were_not_sampled(options: dict) -> None:
    mll, x, y = kept_problem(sparse_gradients=False, **options)
    optimizer = torch.optim.Adam(mll.model.variational_parameters(), lr=0.01)  # with momentum
    for _ in range(5):
        train(mll, x, y, optimizer, 2)
        assert state_error(mll, x, y) < 1e-12


def test_dense_gradients_are_clipped_by_their_norm() -> None:
    model, x, y = fourier_problem(m=80)
    options = {"num_feature_samples": 8, "sparse_gradients": False, "generator": 0}
    mll = QuadruplyStochasticELBO(gaussian_likelihood(NOISE), model, **options)
    (-mll(model(x), y)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    norms = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(norms.norm().item(), 1e-3, rtol=1e-4, atol=0)


def test_too_many_features_for_free_hyperparameters_are_told() -> None:
    for frozen in (False, True):
        model, x, y = fourier_problem(m=800)
        likelihood = gaussian_likelihood(NOISE)
        if frozen:
            model.basis.requires_grad_(False)
            likelihood.requires_grad_(False)
        mll = QuadruplyStochasticELBO(likelihood, model, generator=0)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            mll(model(x), y)
        assert any(issubclass(w.category, ApproximationWarning) for w in found) != frozen


@pytest.mark.parametrize("constant", [1.0, 1e4])
def test_a_head_that_omits_more_than_the_noise_allows_is_told(constant: float) -> None:
    x = torch.rand(60, 2, generator=torch.Generator().manual_seed(0))
    kernel = kernels.ScaleKernel(kernels.RBFKernel()) + kernels.ScaleKernel(kernels.ConstantKernel())
    kernel.kernels[1].outputscale = constant
    model = QuadruplyStochasticGP(NystromBasis(kernel.requires_grad_(False), x))
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = 0.01
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        QuadruplyStochasticELBO(likelihood, model, generator=0)(model(x), x[:, 0])
    assert any("omits" in str(w.message) for w in found) == (constant > 1)


def test_a_copy_goes_on_by_itself() -> None:
    model, x, y = fourier_problem(m=80)
    mll = QuadruplyStochasticELBO(gaussian_likelihood(NOISE), model, num_feature_samples=20, generator=0)
    train(mll, x, y, torch.optim.Adagrad(model.variational_parameters(), lr=0.1), 3)
    twin = copy.deepcopy(mll)
    first = train(mll, x, y, torch.optim.Adagrad(model.variational_parameters(), lr=0.1), 3)
    second = train(twin, x, y, torch.optim.Adagrad(twin.model.variational_parameters(), lr=0.1), 3)
    assert first == pytest.approx(second, rel=1e-12)
    assert control_error(twin) < 1e-12


@pytest.mark.parametrize("points", [10, None])
def test_a_step_touches_samples_alone(points: int | None) -> None:
    model, x, y = fourier_problem(n=50, m=100_000)
    model.basis.requires_grad_(False)
    options = {"num_feature_samples": 100, "num_data_samples": 10, "num_control_points": points, "generator": 0}
    mll = QuadruplyStochasticELBO(gaussian_likelihood(NOISE).requires_grad_(False), model, **options)
    evaluated = []
    original = type(model.basis).group_features

    def counted(self: object, rows: Tensor, head: Tensor, groups: Tensor) -> Tensor:
        evaluated.append(len(rows) * len(groups) * 2)
        return original(self, rows, head, groups)

    optimizer = torch.optim.Adagrad(model.variational_parameters(), lr=0.1)
    train(mll, x, y, optimizer, 1)
    before = model.weights.tail_mean.detach().clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.basis), "group_features", counted)
        train(mll, x, y, optimizer, 1)
    assert sum(evaluated) == (2 * 100 * (10 + 10) if points else 100 * 10)
    assert model.weights.tail_mean.grad.is_sparse
    assert int((model.weights.tail_mean != before).sum()) <= (200 if points else 100)


@pytest.mark.slow
def test_training_converges_and_the_control_variate_helps() -> None:
    errors = {}
    for points in (0, 60):
        model, x, y = fourier_problem(n=200, m=100)
        phi = dense_features(model, x)
        best, _ = best_weights(phi, torch.eye(100).double(), y, NOISE, 0)
        options = {"num_feature_samples": 20, "num_data_samples": 60, "num_control_points": points, "generator": 0}
        mll = QuadruplyStochasticELBO(gaussian_likelihood(NOISE), model, **options)
        optimizer = torch.optim.Adagrad(model.variational_parameters(), lr=0.1)
        for step in range(250):
            optimizer.param_groups[0]["lr"] = 0.1 * 0.01 ** (step / 250)
            train(mll, x, y, optimizer, 1)
        difference = phi @ (model.weights.mean - best)
        errors[points] = float(difference.square().mean().sqrt())
    assert errors[60] < min(0.15, errors[0])


def kept_problem(**options) -> tuple[QuadruplyStochasticELBO, Tensor, Tensor]:
    """200 random features, of which a step samples 40, and a kernel that stays."""
    model, x, y = fourier_problem(n=150, m=200, num_dense_columns=options.pop("k", 0))
    model.basis.requires_grad_(False)
    sizes = {"num_feature_samples": 40, "num_data_samples": 50, "generator": 0} | options
    return QuadruplyStochasticELBO(gaussian_likelihood(NOISE), model, **sizes), x, y


@pytest.mark.parametrize("k", [0, 4])
def test_rows_are_kept_and_stay_known(k: int) -> None:
    mll, x, y = kept_problem(num_steps_per_batch=4, k=k)
    optimizer = adagrad(mll.model)
    drawn = []
    for _ in range(12):
        train(mll, x, y, optimizer, 1)
        drawn.append(mll._run.parts["kept"]["index"])
        assert torch.equal(known_latent(mll).x, x[drawn[-1]])
        assert control_error(mll) < 1e-12
    for start in (0, 4, 8):
        assert all(torch.equal(drawn[start], index) for index in drawn[start : start + 4])
    assert not torch.equal(drawn[3], drawn[4])
    assert mll.report.num_steps_per_batch == 4
    assert mll.report.num_control_points == 0


@pytest.mark.parametrize("accumulated", [1, 3])
def test_rows_change_between_evaluations_of_one_step(accumulated: int) -> None:
    mll, x, y = kept_problem(num_steps_per_batch=2)
    optimizer = adagrad(mll.model)
    for _ in range(6):
        optimizer.zero_grad()
        for _ in range(accumulated):
            (-mll(mll.model(x), y)).backward()
        with torch.no_grad():
            mll(mll.model(x), y)
        optimizer.step()
        assert control_error(mll) < 1e-12


def test_how_long_rows_are_kept_by_default() -> None:
    mll, x, y = kept_problem()
    assert mll.num_steps_per_batch == 20  # every feature four times
    mll(mll.model(x), y)
    assert mll.report.num_steps_per_batch == 20
    mll.model.requires_grad_(True)
    mll(mll.model(x), y)  # of a kernel that is learned, features at kept rows would change
    assert mll.report.num_steps_per_batch == 1
    assert mll.report.num_control_points == 150
    batches, _, _ = kept_problem(num_data=150)
    batches(batches.model(x[:100]), y[:100])
    assert batches.report.num_steps_per_batch == 1
    batches(batches.model(x), y)
    assert batches.report.num_steps_per_batch == 20
    for options in ({"num_control_points": 10}, {"num_control_points": 0}, {"num_feature_samples": 200}):
        assert kept_problem(**options)[0].num_steps_per_batch == 1
    kernel = mll.model.basis.kernel
    nystrom = QuadruplyStochasticGP(gpi.models.NystromBasis(kernel.requires_grad_(False), x[:20], 100))
    likelihood = gaussian_likelihood(NOISE)
    assert QuadruplyStochasticELBO(likelihood, nystrom, num_feature_samples=20).num_steps_per_batch == 1
    asked = QuadruplyStochasticELBO(likelihood, nystrom, num_feature_samples=20, num_steps_per_batch=3, generator=0)
    asked(nystrom(x), y)
    assert asked.report.num_steps_per_batch == 3


def test_rows_of_data_in_another_order() -> None:
    mll, x, y = kept_problem(num_data=150, num_steps_per_batch=5)
    train(mll, x, y, adagrad(mll.model), 1)
    order = torch.arange(149, -1, -1)
    mll(mll.model(x[order]), y[order])
    kept = mll._run.parts["kept"]
    assert torch.equal(known_latent(mll).x, x[order][kept["index"]])
    assert kept["count"] == 1
    shuffled, _, _ = kept_problem(num_data=150)  # not asked to keep them, it goes without
    for _ in range(3):
        order = order.roll(1)
        shuffled(shuffled.model(x[order]), y[order])
    assert shuffled.report.num_steps_per_batch == 1
    assert shuffled.report.num_control_points == 150


def test_features_that_are_changed_by_hand_are_not_known_any_more() -> None:
    mll, x, y = kept_problem()
    mll(mll.model(x), y)
    mll.model.basis.kernel.outputscale = 2.0
    mll(mll.model(x), y)
    assert mll._run.parts["kept"]["count"] == 1
    assert torch.equal(mll._run.parts["basis"]["kernel.raw_outputscale"], mll.model.basis.kernel.raw_outputscale)
    mll(mll.model(x), y)
    assert mll._run.parts["kept"]["count"] == 2
    set_weights(mll.model, *weights_of(200, 0))
    mll.refresh()
    before = known_latent(mll).total
    for assign in (False, True):  # writes, and other tensors
        scaled = {name: 1.5 * value for name, value in mll.model.basis.state_dict().items()}
        mll.model.basis.load_state_dict(scaled, assign=assign)
        mll(mll.model(x), y)
        assert (known_latent(mll).total - before).abs().max() > 1e-2
        assert control_error(mll) < 1e-12
        before = known_latent(mll).total


def test_inputs_with_a_gradient_have_it() -> None:
    mll, x, y = kept_problem()
    set_weights(mll.model, *weights_of(200, 0))
    inputs = x.clone().requires_grad_()
    mll(mll.model(inputs), y).backward()
    assert inputs.grad.abs().max() > 1e-3
    asked, _, _ = kept_problem(num_steps_per_batch=2)
    with pytest.raises(ValueError, match="inputs take a gradient"):
        asked(asked.model(inputs), y)


def state_error(mll: QuadruplyStochasticELBO, x: Tensor, y: Tensor) -> float:
    """How far the next evaluation's state is from what the features give."""
    with torch.no_grad():
        mll(mll.model(x), y)
    return control_error(mll)


#: What is evaluated, with or without a gradient, before one step of the optimiser.
BEFORE_A_STEP = {
    "all, then a batch": ["all", "batch"],
    "a batch, then all": ["batch", "all"],
    "a refresh": ["all", "refresh"],
    "a look at all": ["all", "look"],
    "looks until rows change": ["all", "look", "look", "look"],
    "a look at a batch": ["all", "look at batch"],
    "many": ["all"] * 12,
}


@pytest.mark.parametrize("name", list(BEFORE_A_STEP))
def test_what_is_known_survives_all_that_may_happen_before_a_step(name: str) -> None:
    model, x, y = fourier_problem(n=150, m=4000)
    model.basis.requires_grad_(False)
    mll = QuadruplyStochasticELBO(
        gaussian_likelihood(NOISE).requires_grad_(False),
        model,
        num_data=150,
        num_feature_samples=40,
        num_data_samples=50,
        generator=0,
    )
    mll._points.num_steps_per_batch = 3  # as by default, not as asked for, so that batches are taken too
    optimizer = adagrad(model)
    part = slice(100)
    for _ in range(4):
        optimizer.zero_grad()
        for what in BEFORE_A_STEP[name]:
            if what in ("all", "batch"):
                rows = part if what == "batch" else slice(None)
                (-mll(model(x[rows]), y[rows])).backward()
            elif what == "refresh":
                mll.refresh()
            else:
                rows = part if "batch" in what else slice(None)
                with torch.no_grad():
                    mll(model(x[rows]), y[rows])
        optimizer.step()
        assert state_error(mll, x, y) < 1e-12
    assert model.weights.mean.abs().max() > 0.05


@pytest.mark.parametrize("when", ["between two evaluations", "before a step", "after a step"])
def test_a_weight_that_is_set_by_hand_is_known(when: str) -> None:
    mll, x, y = kept_problem(num_steps_per_batch=20)
    optimizer = adagrad(mll.model)
    for _ in range(3):
        train(mll, x, y, optimizer, 2)
        optimizer.zero_grad()
        (-mll(mll.model(x), y)).backward()
        others = torch.arange(mll.model.weights.num_tail)
        others = others[~torch.isin(others, known_latent(mll).sampled)]
        if when == "after a step":
            optimizer.step()
        with torch.no_grad():
            mll.model.weights.tail_mean[others[7]] += 1
        if when == "before a step":
            optimizer.step()
        assert state_error(mll, x, y) < 1e-12


def test_what_is_known_survives_a_step_of_two_objectives() -> None:
    model, x, y = fourier_problem(n=150, m=4000)
    model.basis.requires_grad_(False)
    sizes = {"num_feature_samples": 40, "num_data_samples": 50}
    likelihood = gaussian_likelihood(NOISE).requires_grad_(False)
    first, second = (QuadruplyStochasticELBO(likelihood, model, generator=seed, **sizes) for seed in (0, 1))
    optimizer = adagrad(model)
    for mll in (second, first):
        (-mll(model(x), y)).backward()
    optimizer.step()
    assert state_error(first, x, y) < 1e-12


def test_rows_that_are_all_stay() -> None:
    mll, x, y = kept_problem(num_data_samples=150, num_steps_per_batch=2)
    train(mll, x, y, adagrad(mll.model), 5)
    assert mll._run.parts["kept"]["count"] == 5
    assert control_error(mll) < 1e-12


@pytest.mark.parametrize("name", list(LIKELIHOODS))
def test_known_rows_leave_nothing_to_jensens_inequality(name: str) -> None:
    model, x, y = fourier_problem(m=80)
    model.basis.requires_grad_(False)
    set_weights(model, *weights_of(80, 0))
    target = (y > 0).double() if name == "logistic" else y
    options = {"num_feature_samples": 8, "generator": 0}
    with torch.no_grad():
        known = QuadruplyStochasticELBO(LIKELIHOODS[name], model, **options)
        truth = known.exact_value(x, target)
        draws = torch.stack([known(model(x), target) for _ in range(150)])
        assert_mean_within(draws, truth, max_sem=0.05 * abs(truth.item()))
        assert known.report.is_unbiased
        sampled = QuadruplyStochasticELBO(LIKELIHOODS[name], model, num_steps_per_batch=1, **options)
        below = torch.stack([sampled(model(x), target) for _ in range(150)]).mean()
        assert below < truth - 5 * draws.std() / 150**0.5
        assert not sampled.report.is_unbiased
        own, _, _ = fourier_problem(m=80, shared_diagonal=False)
        own.basis.requires_grad_(False)
        bound = QuadruplyStochasticELBO(LIKELIHOODS[name], own, **options)
        bound(own(x), target)
        assert bound.report.num_steps_per_batch > 1
        assert not bound.report.is_unbiased


@pytest.mark.parametrize("sampled", [None, 8])
def test_a_bound_from_all_features_is_reported_as_exact(sampled: int | None) -> None:
    model, x, y = fourier_problem()
    kernel = model.basis.kernel.requires_grad_(False)
    nystrom = QuadruplyStochasticGP(gpi.models.NystromBasis(kernel, x[:20], 0 if sampled is None else 40))
    mll = QuadruplyStochasticELBO(LIKELIHOODS["logistic"], nystrom, num_feature_samples=sampled, generator=0)
    value = mll(nystrom(x), (y > 0).double())
    assert mll.report.is_unbiased == (sampled is None)
    if sampled is None:
        torch.testing.assert_close(value, mll.exact_value(x, (y > 0).double()))


#: Models whose training differs in what a step keeps.
LOOKED_AT = {
    "rows kept": {"num_steps_per_batch": 3},
    "control points": {"num_control_points": 30},
    "batches": {"num_control_points": 30},
    "another likelihood": {"likelihood": LIKELIHOODS["logistic"]},
    "free hyperparameters": {"free": True},
    "weights of their own": {"shared_diagonal": False},
}


@pytest.mark.parametrize("name", list(LOOKED_AT))
def test_a_look_without_gradients_changes_nothing_of_the_training(name: str) -> None:
    found, values = [], []
    for looks in (False, True):
        options = dict(LOOKED_AT[name])
        shared = options.pop("shared_diagonal", True)
        model, x, y = fourier_problem(n=150, m=200, shared_diagonal=shared)
        model.basis.requires_grad_(options.pop("free", False))
        likelihood = options.pop("likelihood", gaussian_likelihood(NOISE).requires_grad_(False))
        target = (y > 0).double() if isinstance(likelihood, gpi.likelihoods.LogitBernoulliLikelihood) else y
        sizes = {"num_data": 150, "num_feature_samples": 40, "num_data_samples": 50}
        mll = QuadruplyStochasticELBO(likelihood, model, generator=0, **sizes, **options)

        @torch.no_grad()
        def look(mll=mll, model=model, x=x, target=target) -> None:
            values.extend(mll(model(x[rows]), target[rows]).item() for rows in (slice(None), torch.arange(149, -1, -1)))

        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        trajectory = []
        for step in range(8):
            if looks:
                look()
            optimizer.zero_grad()
            rows = slice(100) if name == "batches" and step % 2 else slice(None)
            loss = -mll(model(x[rows]), target[rows])
            loss.backward()
            if looks:
                look()
            optimizer.step()
            trajectory.append(loss.item())
        found.append((trajectory, model.weights.mean.tolist(), model.weights.variance.tolist()))
    assert found[0] == found[1]
    assert len(set(values)) > len(values) / 2  # looks differ, as draws do


@pytest.mark.slow
def test_known_rows_train_better_than_sampled_residuals() -> None:
    errors = {}
    for kept in (1, 8):
        mll, x, y = kept_problem(num_steps_per_batch=kept)
        phi = dense_features(mll.model, x)
        best, _ = best_weights(phi, torch.eye(200).double(), y, NOISE, 0)
        optimizer = adagrad(mll.model)
        for step in range(240):
            optimizer.param_groups[0]["lr"] = 0.2 * 0.01 ** (step / 240)
            train(mll, x, y, optimizer, 1)
        errors[kept] = float((phi @ (mll.model.weights.mean - best)).square().mean().sqrt())
    assert errors[8] < min(0.1, 0.8 * errors[1]), errors


def test_a_control_variate_starts_anew() -> None:
    model, x, y = fourier_problem(m=2000)
    model.basis.requires_grad_(False)
    mll = QuadruplyStochasticELBO(
        gaussian_likelihood(NOISE).requires_grad_(False),
        model,
        num_feature_samples=20,
        num_control_points=30,
        generator=0,
    )
    train(mll, x, y, adagrad(model), 2)
    before = mll.training_state()
    mll.reset_control_variate()
    train(mll, x, y, adagrad(model), 1)
    after = mll.training_state()
    assert not torch.equal(after["control.y"], before["control.y"])
    assert not torch.equal(after["latent.x"], before["latent.x"])
    assert control_error(mll) < 1e-12


def test_a_step_that_evaluates_all_features_has_dense_gradients() -> None:
    """Which every optimiser takes, such as Adam for the head alone."""
    model, x, y = fourier_problem()
    head_alone = QuadruplyStochasticGP(NystromBasis(model.basis.kernel, x[:10]))
    for each in (head_alone, model):
        mll = QuadruplyStochasticELBO(gaussian_likelihood(0.2), each, generator=0)
        optimizer = torch.optim.Adam(mll.parameters(), lr=0.01)
        (-mll(each(x), y)).backward()
        optimizer.step()
        assert not any(parameter.grad.is_sparse for parameter in mll.parameters() if parameter.grad is not None)
