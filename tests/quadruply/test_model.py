"""Predictions against dense algebra, the deferred prior, known limits, and what the model refuses."""

import copy
import math
import pickle
from functools import partial

import gpytorch
import pytest
import torch
from gpytorch import kernels
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.mlls import QuadruplyStochasticELBO
from gpy_iterative.models import (
    HeadNaturalGradient,
    InducingPointBasis,
    NystromBasis,
    QuadruplyStochasticGP,
    QuadruplyStochasticOptimizer,
    RandomFourierBasis,
    RelevanceVectorBasis,
)
from gpy_iterative.quadruply.model import DeferredPrediction
from gpy_iterative.quadruply.optimizers import NoiseNaturalGradient
from tests.quadruply.quadruply_models import fourier_problem, gaussian_likelihood, set_weights, weights_of
from tests.quadruply.test_elbo import dense_features, dense_root
from tests.quadruply.weight_space import best_weights, quasi_normal

NOISE = 0.2


def kernel_2d() -> kernels.ScaleKernel:
    kernel = kernels.ScaleKernel(kernels.RBFKernel(ard_num_dims=2)).double()
    kernel.base_kernel.lengthscale = 0.9
    return kernel


def data(n: int = 40) -> tuple[Tensor, Tensor]:
    x = quasi_normal(n, 2, root=2.0)
    return x, torch.sin(1.5 * x[:, 0]) + 0.3 * quasi_normal(n, root=11.0)


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("block_size", [6, 8192])
def test_predictions_are_exact_in_blocks(
    k: int, shared: bool, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpy_iterative.quadruply.model.BLOCK", block_size)
    model, x, _ = fourier_problem(num_dense_columns=k, shared_diagonal=shared)
    set_weights(model, *weights_of(40, k))
    model.mean_module = gpytorch.means.ConstantMean().double()
    model.mean_module.constant = 0.7
    prediction = model.eval().posterior(x)
    phi, root = dense_features(model, x), dense_root(model)
    covariance = phi @ root @ root.mT @ phi.mT
    torch.testing.assert_close(prediction.mean, phi @ model.weights.mean + 0.7)
    torch.testing.assert_close(prediction.variance, covariance.diagonal())
    torch.testing.assert_close(prediction.covariance_matrix, covariance)
    part = prediction.lazy_covariance_matrix[:5, :5]
    assert type(part) is type(prediction.lazy_covariance_matrix)  # not dense
    torch.testing.assert_close(part.to_dense(), covariance[:5, :5])
    torch.testing.assert_close(prediction.lazy_covariance_matrix[3:9, [0, 2]].to_dense(), covariance[3:9][:, [0, 2]])
    noisy = gaussian_likelihood(NOISE)(model(x))
    torch.testing.assert_close(noisy.variance, covariance.diagonal() + NOISE)
    assert noisy.rsample(torch.Size([3])).shape == (3, len(x))


def test_train_mode_evaluates_nothing_before_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, _ = fourier_problem()
    set_weights(model, *weights_of(40, 0))
    calls = []
    original = RandomFourierBasis.group_features
    monkeypatch.setattr(RandomFourierBasis, "group_features", lambda self, *a: calls.append(1) or original(self, *a))
    output = model(x)
    assert isinstance(output, DeferredPrediction)
    assert output.event_shape == (len(x),)
    assert not calls
    torch.testing.assert_close(output.mean, model.posterior(x).mean)
    torch.testing.assert_close(output.variance, model.posterior(x).variance)
    torch.testing.assert_close(output.covariance_matrix, model.posterior(x).covariance_matrix)


def test_what_is_derived_in_train_mode_is_that_of_the_prediction() -> None:
    model, x, _ = fourier_problem()
    set_weights(model, *weights_of(40, 0))
    output, known = model(x), model.posterior(x)
    noisy = gaussian_likelihood(NOISE)(output)
    torch.testing.assert_close(noisy.mean, known.mean)
    torch.testing.assert_close(noisy.variance, known.variance + NOISE)
    torch.testing.assert_close(output[3:9].covariance_matrix, known.covariance_matrix[3:9, 3:9])
    torch.testing.assert_close((output * 2 + 1).mean, 2 * known.mean + 1)
    torch.testing.assert_close(output.add_jitter(0.1).variance, known.variance + 0.1)
    torch.testing.assert_close(copy.deepcopy(output).mean, known.mean)


def test_predictions_have_gradients_in_the_inputs() -> None:
    model, x, _ = fourier_problem(num_dense_columns=2)
    set_weights(model, *weights_of(40, 2))
    model.eval()
    assert torch.autograd.gradcheck(lambda z: (model(z).mean, model(z).variance), x[:3].clone().requires_grad_())
    assert not model(x).mean.requires_grad


def test_the_nystrom_objective_is_that_of_titsias() -> None:
    x, y = data()
    kernel, likelihood = kernel_2d(), gaussian_likelihood(NOISE)
    basis = NystromBasis(kernel, x[:10])
    model = QuadruplyStochasticGP(basis, num_dense_columns=basis.num_head_features)
    head = basis.head_features(x).detach()
    set_weights(model, *best_weights(head, torch.eye(head.shape[1]).double(), y, NOISE, head.shape[1]))
    value = QuadruplyStochasticELBO(likelihood, model, generator=0).exact_value(x, y) * len(y)
    with torch.no_grad():
        noise = NOISE * torch.eye(len(y)).double()
        low_rank = torch.distributions.MultivariateNormal(torch.zeros_like(y), head @ head.mT + noise)
        left = (kernel(x).to_dense() - head @ head.mT).trace()
        torch.testing.assert_close(value, low_rank.log_prob(y) - left / (2 * NOISE), rtol=1e-9, atol=0)
        # Far from the points variances are the prior's.
        far = model.eval()(x + 100)
        torch.testing.assert_close(far.variance, kernel(x, diag=True))
        dense = model(x)
        torch.testing.assert_close(dense.covariance_matrix.diagonal(), dense.variance)
    mean_field = QuadruplyStochasticGP(basis)
    set_weights_of_head(mean_field, best_weights(head, torch.eye(head.shape[1]).double(), y, NOISE, 0))
    lower = QuadruplyStochasticELBO(likelihood, mean_field, generator=0).exact_value(x, y) * len(y)
    assert lower < value
    assert value - lower < 0.05 * abs(value)  # eigenfeatures are nearly independent


def set_weights_of_head(model: QuadruplyStochasticGP, weights: tuple[Tensor, Tensor]) -> None:
    mean, root = weights
    with torch.no_grad():
        model.weights.head_mean.copy_(mean)
        model.weights.head_log_diagonal.copy_(root.diagonal().log())
        model.weights.initialized.fill_(1)


def test_inducing_points_at_the_data_have_the_exact_mean() -> None:
    x, y = data(20)
    kernel = kernel_2d().requires_grad_(False)
    model = QuadruplyStochasticGP(InducingPointBasis(kernel, x))
    gram = kernel(x).to_dense()
    set_weights(model, *best_weights(gram, gram, y, NOISE, 0))
    z = quasi_normal(7, 2, root=23.0)
    cross = kernel(z, x).to_dense()
    exact = cross @ torch.linalg.solve(gram + NOISE * torch.eye(20).double(), y)
    model.eval()
    torch.testing.assert_close(model(z).mean, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_training_a_nystrom_model_by_natural_gradients() -> None:
    x, y = data(400)
    kernel, likelihood = kernel_2d().requires_grad_(False), gaussian_likelihood(NOISE).requires_grad_(False)
    basis = NystromBasis(kernel, x[:60], 40)
    model = QuadruplyStochasticGP(basis)
    mll = QuadruplyStochasticELBO(likelihood, model, num_feature_samples=10, num_data_samples=100, generator=0)
    optimizer = QuadruplyStochasticOptimizer(model, likelihood, num_data=400, num_steps=150)
    for _ in range(150):
        optimizer.zero_grad()
        (-mll(model(x), y)).backward()
        optimizer.step()
    gram = kernel(x).to_dense()
    exact = gram @ torch.linalg.solve(gram + NOISE * torch.eye(400).double(), y)
    latent = model.eval()(x)
    assert float((latent.mean - exact).square().mean().sqrt()) < 0.05
    head = basis.head_features(x)
    best = 1 / (1 + head.square().sum(0) / NOISE)
    torch.testing.assert_close(model.weights.head_variances.detach(), best, rtol=0.1, atol=0)


@pytest.mark.parametrize("k", [0, 10])
def test_natural_gradients_bear_outlying_rows_and_dense_columns(k: int) -> None:
    # A feature that lives on one row has n / b times its curvature in a batch with it, and none in the others.
    generator = torch.Generator().manual_seed(2)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    x = torch.cat([0.1 * draw(900, 2), 3 * draw(100, 2)])
    y = torch.sin(x[:, 0]) + 0.1 * draw(1000)
    kernel, likelihood = kernel_2d().requires_grad_(False), gaussian_likelihood(0.01).requires_grad_(False)
    kernel.base_kernel.lengthscale = 1.5
    basis = NystromBasis(kernel, torch.cat([x[:900:20], x[900::2]]))
    model = QuadruplyStochasticGP(basis, num_dense_columns=k)
    mll = QuadruplyStochasticELBO(likelihood, model, num_data_samples=50, generator=0)
    optimizer = QuadruplyStochasticOptimizer(model, likelihood, num_data=1000, num_steps=120)
    for _ in range(120):
        optimizer.zero_grad()
        (-mll(model(x), y)).backward()
        optimizer.step()
    head = basis.head_features(x)
    best, _ = best_weights(head, torch.eye(head.shape[1]).double(), y, 0.01, 0)
    assert float((head @ best - model.eval()(x).mean).square().mean().sqrt()) < 0.1


def trained(model: QuadruplyStochasticGP, mll: QuadruplyStochasticELBO, x: Tensor, y: Tensor, steps: int) -> None:
    optimizer = QuadruplyStochasticOptimizer(model, num_data=len(x), num_steps=steps)
    for _ in range(steps):
        optimizer.zero_grad()
        (-mll(model(x), y)).backward()
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["noises", "skewed", "small batches"])
def test_natural_gradients_approach_the_optimum_whatever_a_row_weighs(kind: str) -> None:
    # Features that are orthogonal on all data are far from it on a batch, or where noise variances differ by 10^4.
    generator = torch.Generator().manual_seed(2)
    uniform = torch.rand(1000, 2, generator=generator).double()
    x = -(uniform.log() ** 2) if kind == "skewed" else uniform
    truth = torch.sin(4 * x[:, 0]) * torch.cos(3 * x[:, 1])
    noise = (
        10 ** (-4 * uniform[torch.randperm(1000, generator=generator), 0]) if kind == "noises" else torch.tensor(0.01)
    )
    noise = noise.double().expand(1000).clone()
    y = truth + noise.sqrt() * torch.randn(1000, generator=generator, dtype=torch.float64)
    kernel = kernel_2d().requires_grad_(False)
    kernel.base_kernel.lengthscale = 0.3
    model = QuadruplyStochasticGP(NystromBasis(kernel, x[:150]))
    likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise)
    mll = QuadruplyStochasticELBO(likelihood, model, num_data_samples=200 if kind == "noises" else 20, generator=0)
    trained(model, mll, x, y, 200)
    head = model.head_features(x)
    precision = head.mT @ (head / noise.unsqueeze(-1)) + torch.eye(150).double()
    best = head @ torch.linalg.solve(precision, head.mT @ (y / noise))
    assert float((model.eval()(x).mean - best).square().mean().sqrt()) < 0.2


@pytest.mark.parametrize("rate", [2.0, 20.0, 300.0])
def test_natural_gradients_bear_counts(rate: float) -> None:
    # exp(f) outgrows any curvature that was seen before the step.
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(500, 2, generator=generator).double()
    log_rate = torch.sin(6 * x[:, 0]) + math.log(rate)
    y = torch.poisson(log_rate.exp(), generator=generator)
    kernel = kernel_2d().requires_grad_(False)
    kernel.base_kernel.lengthscale = 0.5
    model = QuadruplyStochasticGP(NystromBasis(kernel, x[:60]))
    mll = QuadruplyStochasticELBO(gpi.likelihoods.PoissonLogLikelihood(), model, num_data_samples=100, generator=0)
    trained(model, mll, x, y, 100)
    assert float((model.eval()(x).mean - log_rate).square().mean().sqrt()) < 0.4


def test_a_natural_gradient_is_of_all_rows_whose_gradients_it_sums() -> None:
    # Two halves, each with half the loss, are one batch.
    x, y = data(200)
    kernel, likelihood = kernel_2d().requires_grad_(False), gaussian_likelihood(NOISE)
    means = []
    for parts in ([x], x.chunk(2)):
        model = QuadruplyStochasticGP(NystromBasis(kernel, x[:40]))
        set_weights(model, *weights_of(40, 0))
        mll = QuadruplyStochasticELBO(likelihood, model, num_data=200, generator=0)
        optimizer = HeadNaturalGradient(model.weights, num_data=200)
        (-mll(model(x), y)).backward()  # forgotten
        optimizer.zero_grad()
        for part, target in zip(parts, y.chunk(len(parts)), strict=True):
            (-mll(model(part), target) / len(parts)).backward()
        copy.deepcopy(pickle.loads(pickle.dumps(model)))
        optimizer.step()
        means.append(model.weights.mean)
        with pytest.raises(RuntimeError, match="before every step"):
            optimizer.step()
    torch.testing.assert_close(*means)


@pytest.mark.parametrize(("lr", "n"), [(1.0, 200), (0.3, 200), (1.0, 15)])
def test_a_natural_step_from_the_prior_adds_its_rate_of_the_data(
    lr: float, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all rows and Gaussian noise, at rate 1: the posterior mean, and deviations of one over its precision's root."""
    factored = []
    original = torch.linalg.cholesky
    monkeypatch.setattr(torch.linalg, "cholesky", lambda matrix: factored.append(len(matrix)) or original(matrix))
    points, y = data(200)
    x, y = points[:n], y[:n]
    model = QuadruplyStochasticGP(NystromBasis(kernel_2d().requires_grad_(False), points[:40]))
    set_weights(model, torch.zeros(40).double(), torch.eye(40).double())
    mll = QuadruplyStochasticELBO(gaussian_likelihood(NOISE), model, num_data=n, generator=0)
    optimizer = HeadNaturalGradient(model.weights, num_data=n, lr=lr)
    (-mll(model(x), y)).backward()
    optimizer.step()
    features = model.head_features(x).detach()
    precision = torch.eye(40).double() + lr * features.mT @ features / NOISE
    torch.testing.assert_close(model.weights.mean, torch.linalg.solve(precision, lr * features.mT @ y / NOISE))
    torch.testing.assert_close(model.weights.variance, 1 / precision.diagonal())
    assert factored == [min(n, 40)]


def test_a_curvature_below_zero_by_rounding_is_none() -> None:
    """A Laplace likelihood's far from its kink: products with one slope, which cancel but for a rounding error."""
    x, y = data()
    model = QuadruplyStochasticGP(NystromBasis(kernel_2d().requires_grad_(False), x[:10]))
    mll = QuadruplyStochasticELBO(gaussian_likelihood(NOISE), model, generator=0)
    optimizer = HeadNaturalGradient(model.weights, num_data=40)
    means = []
    for curvature in (0.0, -1e-20):
        set_weights(model, torch.zeros(10).double(), torch.eye(10).double())
        optimizer.zero_grad()
        (-mll(model(x), y)).backward()
        model.weights.seen[0].curvature[3] = curvature
        optimizer.step()
        means.append(model.weights.mean)
    torch.testing.assert_close(*means)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "inducing", "relevance"])
def test_training_dense_columns_of_correlated_features(kind: str) -> None:
    # Natural gradients are for nearly orthogonal features; on these they diverge within a few steps.
    x, y = data(100)
    kernel, likelihood = kernel_2d().requires_grad_(False), gaussian_likelihood(NOISE).requires_grad_(False)
    make = {
        "random": lambda: RandomFourierBasis(kernel, 60),
        "inducing": lambda: InducingPointBasis(kernel, x[:40]),
        "relevance": lambda: RelevanceVectorBasis(kernel, x[:40]),
    }
    model = QuadruplyStochasticGP(make[kind](), num_dense_columns=20)
    mll = QuadruplyStochasticELBO(likelihood, model, num_feature_samples=10, generator=0)
    optimizer = QuadruplyStochasticOptimizer(model, likelihood, num_data=100, num_steps=120)
    before = mll.exact_value(x, y).item()
    for _ in range(120):
        optimizer.zero_grad()
        (-mll(model(x), y)).backward()
        optimizer.step()
    assert mll.exact_value(x, y).item() > before + 0.5


def test_noise_is_learned_after_the_frozen_start() -> None:
    x, y = data(200)
    model, likelihood = QuadruplyStochasticGP(NystromBasis(kernel_2d(), x[:40])), gaussian_likelihood(1.0)
    model.basis.requires_grad_(False)
    mll = QuadruplyStochasticELBO(likelihood, model, num_data_samples=100, generator=0)
    options = {"num_data": 200, "num_steps": 200, "hyper_learning_rate": 0.1}
    optimizer = QuadruplyStochasticOptimizer(model, likelihood, **options)
    for step in range(200):
        optimizer.zero_grad()
        (-mll(model(x), y)).backward()
        optimizer.step()
        assert (likelihood.noise.item() == pytest.approx(1.0, abs=1e-12)) == (step < 20)
    assert 0.04 < likelihood.noise.item() < 0.2  # the truth is about 0.09


def test_relevance_vectors_of_a_sinc() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-10, 10, 200, dtype=torch.float64).unsqueeze(-1)
    truth = torch.sinc(x[:, 0] / torch.pi)
    y = truth + 0.1 * torch.randn(200, generator=generator, dtype=torch.float64)
    kernel = kernels.RBFKernel().double().requires_grad_(False)
    kernel.lengthscale = 1.0
    basis = RelevanceVectorBasis(kernel, x)
    model = QuadruplyStochasticGP(basis)
    phi = kernel(x).to_dense()
    for _ in range(100):  # the mean-field optimum, and MacKay's update
        set_weights(model, *best_weights(phi, torch.diag(basis.precision), y, 0.01, 0))
        basis.update_precision(model.weights.mean, model.weights.variance)
    assert len(basis.relevant()) <= 20
    pruned = gpi.models.prune_relevance_vectors(model.eval())
    assert not pruned.training
    assert pruned.basis.num_features == len(basis.relevant())
    mean = pruned(x).mean
    assert float((mean - truth).square().mean().sqrt()) < 0.05
    assert float((mean - model.eval()(x).mean).abs().max()) < 1e-2


def test_relevance_precisions_are_trained_with_the_weights() -> None:
    x, y = data(60)
    likelihood = gaussian_likelihood(NOISE).requires_grad_(False)
    model = QuadruplyStochasticGP(RelevanceVectorBasis(kernel_2d().requires_grad_(False), x))
    mll = QuadruplyStochasticELBO(likelihood, model, num_feature_samples=20, generator=0)
    optimizer = QuadruplyStochasticOptimizer(model, likelihood, num_data=60, num_steps=100)
    with torch.no_grad():
        mll(model(x), y)
        before = mll.exact_value(x, y)
    for _ in range(100):
        optimizer.zero_grad()
        (-mll(model(x), y)).backward()
        assert model.basis.log_precision.grad.is_sparse
        optimizer.step()
    assert mll.exact_value(x, y) > before + 0.1
    assert model.basis.precision.std() > 0.03


def test_parameters_are_told_apart() -> None:
    model, _, _ = fourier_problem(num_dense_columns=2)
    variational = {name for name, _ in model.named_variational_parameters()}
    assert all(name.startswith("weights.") for name in variational)
    assert {name for name, _ in model.named_hyperparameters()} == {
        name for name, _ in model.named_parameters()
    } - variational


def test_state_dict_and_copies() -> None:
    model, x, y = fourier_problem(num_dense_columns=2)
    set_weights(model, *weights_of(40, 2))
    other, _, _ = fourier_problem(num_dense_columns=2)
    other.load_state_dict(model.state_dict())
    twin = copy.deepcopy(model)
    for each in (other, twin):
        torch.testing.assert_close(each.eval()(x).mean, model.eval()(x).mean)
    # What has been trained is not initialised again.
    model.train()
    other.train()
    QuadruplyStochasticELBO(gaussian_likelihood(NOISE), other, generator=0)(other(x), y)
    assert torch.equal(other.weights.head_log_diagonal, model.weights.head_log_diagonal)


def test_weights_that_were_set_are_left_by_the_first_step() -> None:
    model, x, y = fourier_problem()
    prior = gpytorch.distributions.MultivariateNormal(torch.ones(40).double(), torch.eye(40).double() / 4)
    model.weights.initialize_variational_distribution(prior)
    QuadruplyStochasticELBO(gaussian_likelihood(NOISE), model, generator=0)(model(x), y)
    torch.testing.assert_close(model.weights.variance, prior.variance)
    torch.testing.assert_close(model.weights.mean, prior.mean)


def test_empty_and_single_inputs() -> None:
    model, x, y = fourier_problem()
    set_weights(model, *weights_of(40, 0))
    assert model.eval()(x[:0]).mean.shape == (0,)
    assert model(x[:1]).variance.shape == (1,)
    one = QuadruplyStochasticGP(RandomFourierBasis(kernels.RBFKernel(ard_num_dims=1).double(), 2))
    value = QuadruplyStochasticELBO(gaussian_likelihood(NOISE), one.double(), generator=0)(one(x[:1, 0]), y[:1])
    assert torch.isfinite(value)


def test_what_the_model_refuses() -> None:
    x, _ = data()
    basis = RandomFourierBasis(kernel_2d(), 8)
    with pytest.raises(ValueError, match="at most 8, the features"):
        QuadruplyStochasticGP(basis, num_dense_columns=10)
    with pytest.raises(ValueError, match="multiple of 2"):
        QuadruplyStochasticGP(basis, num_dense_columns=3)
    nystrom = NystromBasis(kernel_2d(), x[:3], 8)
    with pytest.raises(ValueError, match="the head of the NystromBasis"):
        QuadruplyStochasticGP(nystrom, num_dense_columns=nystrom.num_head_features + 2)
    with pytest.raises(TypeError, match="FeatureBasis"):
        QuadruplyStochasticGP(kernel_2d())
    model = QuadruplyStochasticGP(basis)
    with pytest.raises(ValueError, match="batch of models"):
        model(x.unsqueeze(0))
    with pytest.raises(ValueError, match="dtype"):
        model(x.float())
    with pytest.raises(ValueError, match="must be a tensor"):
        model(x.tolist())
    broken = x.clone()
    broken[3, 1] = torch.nan
    with pytest.raises(ValueError, match=r"x\[3, 1\] is nan"):
        model.eval()(broken)
    for mean in (
        gpytorch.means.ConstantMean(batch_shape=torch.Size([2])),
        gpytorch.means.LinearMean(2, torch.Size([1])),
    ):
        other = QuadruplyStochasticGP(basis, mean.double())
        with pytest.raises(ValueError, match="batch of models"):
            other.posterior(x)
        with pytest.raises(ValueError, match="batch of models"):
            QuadruplyStochasticELBO(gaussian_likelihood(NOISE), other, generator=0)(other(x), x[:, 0])
    for options in (
        {"num_data": 0},
        {"num_steps": 0},
        {"learning_rate": 0.0},
        {"hyper_learning_rate": -1.0},
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            QuadruplyStochasticOptimizer(model, **({"num_data": 5, "num_steps": 10} | options))


def test_a_prediction_does_not_mix_old_and_new_weights() -> None:
    model, x, _ = fourier_problem(num_dense_columns=0, shared_diagonal=False)
    set_weights(model, *weights_of(40, 0))
    model.eval()
    prediction, known = model.posterior(x), model.posterior(x)
    covariance = known.covariance_matrix
    with torch.no_grad():
        model.weights.tail_log_diagonal += 0.3
    with pytest.raises(RuntimeError, match="predict again"):
        prediction.covariance_matrix  # noqa: B018
    torch.testing.assert_close(known.covariance_matrix, covariance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dense", [True, False])
def test_rounding_of_a_prior_that_the_head_explains_is_no_change_of_weights(dtype: torch.dtype, dense: bool) -> None:
    torch.manual_seed(0)
    x = torch.rand(100, 2, dtype=dtype)
    kernel = kernels.RBFKernel().to(dtype).requires_grad_(False)
    kernel.lengthscale = 1.0
    basis = NystromBasis(kernel, x[:60])
    model = QuadruplyStochasticGP(basis, num_dense_columns=basis.num_head_features if dense else 0).eval()
    error = 100 * torch.finfo(dtype).eps
    with torch.no_grad():
        model.weights.head_log_diagonal.fill_(-7.0)
        for size in (1, 7, 60, 100):
            covariance, half = model(x[:size]).lazy_covariance_matrix, size // 2 + 1
            variances, diagonal = covariance.diagonal(), covariance.to_dense().diagonal()
            assert (diagonal >= 0).all()
            assert (diagonal - variances).abs().max() <= error
            assert (covariance[:half, :half].to_dense().diagonal() - variances[:half]).abs().max() <= error


@pytest.mark.parametrize("lengthscale", [0.05, 3.0])
@pytest.mark.parametrize("num_tail_features", [0, 20])
def test_a_basis_made_before_its_hyperparameters_are_set_has_all_features(
    lengthscale: float, num_tail_features: int
) -> None:
    torch.manual_seed(0)
    x, y = torch.rand(60, 2), torch.randn(60)
    predictions = []
    for is_set_before in (True, False):
        kernel = kernels.RBFKernel().requires_grad_(False)
        set_kernel = partial(kernel.initialize, lengthscale=lengthscale)
        if is_set_before:
            set_kernel()
        model = QuadruplyStochasticGP(NystromBasis(kernel, x[:40], num_tail_features))
        likelihood = gaussian_likelihood(NOISE).float()
        optimizer = QuadruplyStochasticOptimizer(model, num_data=60, num_steps=30)
        set_kernel()
        mll = QuadruplyStochasticELBO(likelihood, model, generator=0, num_data_samples=30)
        for _ in range(3):
            optimizer.zero_grad()
            (-mll(model(x), y)).backward()
            optimizer.step()
        predictions.append(model.eval()(x))
    after, before = predictions
    torch.testing.assert_close(after.mean, before.mean)
    torch.testing.assert_close(after.variance, before.variance)


def test_states_of_other_optimisers_change_nothing() -> None:
    model, *_ = fourier_problem(num_dense_columns=0, shared_diagonal=False)
    options = {"num_steps": 10, "num_data": 20}
    ours = QuadruplyStochasticOptimizer(model, **options)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    other = QuadruplyStochasticOptimizer(model, likelihood, **options)
    other.optimizers[0].param_groups[0]["lr"] = 0.5
    before = ours.state_dict()["optimizers"][0]["param_groups"][0]["lr"]
    with pytest.raises(ValueError, match="options of that run"):
        ours.load_state_dict(other.state_dict())
    assert ours.state_dict()["optimizers"][0]["param_groups"][0]["lr"] == before
    ours.load_state_dict(ours.state_dict())
    of_another_run = QuadruplyStochasticOptimizer(model, **(options | {"num_data": 21}))
    with pytest.raises(ValueError, match=r"run: .*num_data is 21 in it"):
        ours.load_state_dict(of_another_run.state_dict())
    of_a_longer_run = QuadruplyStochasticOptimizer(model, **(options | {"num_steps": 11}))
    ours.load_state_dict(of_a_longer_run.state_dict())
    for garbled in (None, {}, {"kinds": 3}, ours.state_dict() | {"more": 1}):
        with pytest.raises(ValueError, match="take it from state_dict"):
            ours.load_state_dict(garbled)
    with pytest.raises(ValueError, match="no further parameters"):
        ours.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})


def small_training() -> tuple[QuadruplyStochasticELBO, QuadruplyStochasticOptimizer, Tensor, Tensor]:
    x, y = data(60)
    model, likelihood = QuadruplyStochasticGP(NystromBasis(kernel_2d(), x[:20], 40)), gaussian_likelihood(0.5)
    model.basis.requires_grad_(False)
    mll = QuadruplyStochasticELBO(likelihood, model, num_feature_samples=20, num_data_samples=30, generator=0)
    options = {"num_data": 60, "num_steps": 20, "hyper_learning_rate": 0.1}
    return mll, QuadruplyStochasticOptimizer(model, likelihood, **options), x, y


def losses_of(
    mll: QuadruplyStochasticELBO, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, steps: int
) -> list[float]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -mll(mll.model(x), y)
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(steps)]


def test_the_optimiser_is_one_of_torchs() -> None:
    """Closures, gradients that are zeroed, schedulers that change its rates, and pickles, from which training goes on."""
    mll, optimizer, x, y = small_training()
    losses = losses_of(mll, optimizer, x, y, 5)
    optimizer.zero_grad(set_to_none=False)
    gradients = [p.grad for p in (*mll.model.parameters(), *mll.likelihood.parameters()) if p.grad is not None]
    assert gradients
    assert not any(gradient.to_dense().any() for gradient in gradients)
    mll, optimizer, x, y = small_training()
    assert losses_of(mll, optimizer, x, y, 3) == losses[:3]
    again, its_optimizer = pickle.loads(pickle.dumps((mll, optimizer)))
    expected = losses_of(mll, optimizer, x, y, 2)
    torch.testing.assert_close(losses_of(again, its_optimizer, x, y, 2), expected)
    torch.testing.assert_close(again.model.weights.mean, mll.model.weights.mean)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before = copy.deepcopy(mll.state_dict())
    losses_of(mll, optimizer, x, y, 1)
    scheduler.step()
    assert all(torch.equal(before[name], value) for name, value in mll.state_dict().items())
    pickle.dumps(optimizer)  # whose step the scheduler has wrapped


def test_rates_fall_to_a_hundredth() -> None:
    mll, optimizer, x, y = small_training()
    rates = []
    for inner in optimizer.optimizers:
        inner.register_step_pre_hook(lambda inner, *_: rates.append(inner.param_groups[0]["lr"]))
    losses_of(mll, optimizer, x, y, 22)
    head, tail, hyper = (torch.tensor(rates[start::3]) for start in range(3))
    decay = 0.01 ** (torch.arange(22) / 20).clamp_max(1)
    torch.testing.assert_close(head, 0.5 * decay)
    torch.testing.assert_close(tail, 0.1 * decay)
    torch.testing.assert_close(hyper, 0.1 * decay * (torch.arange(22) >= 2))
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1, 0.1]


@pytest.mark.parametrize("constraint", [gpytorch.constraints.Interval(1e-4, 0.05), gpytorch.constraints.LessThan(0.05)])
def test_the_noise_stays_below_its_upper_bound(constraint: gpytorch.constraints.Interval) -> None:
    """Beyond it the raw value is NaN."""
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=constraint)
    likelihood.noise = 0.02
    optimizer = NoiseNaturalGradient(likelihood)
    optimizer.param_groups[0]["lr"] = 1.0
    for _ in range(3):
        likelihood.noise_covar.raw_noise.grad = torch.full((1,), -100.0)
        optimizer.step()
    assert 0.0499 < likelihood.noise.item() < 0.05
