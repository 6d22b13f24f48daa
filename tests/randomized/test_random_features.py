"""Random feature likelihoods: closed-form derivatives, exact expectations by enumeration, and the bias they remove."""

import dataclasses
import math

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch import kernels
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.linear_operators.prior_parts import KernelTerm
from gpy_iterative.randomized.random_features import FeatureDensity
from tests.exact.gaussian_models import CASES, Case, regression
from tests.exact.test_estimator import exact
from tests.exact.test_exact import value_and_gradients
from tests.monte_carlo import assert_mean_within

RFF = gpi.mlls.RFFMarginalLogLikelihood
SingleSample = gpi.mlls.SingleSampleRFFMarginalLogLikelihood
GRID = {"min_frequencies": 4, "frequency_step": 3, "max_frequencies": 13}  # 4, 7, 10, 13
WITH_FEATURES = [
    "rbf",
    "matern-3/2",
    "unscaled",
    "additive",
    "deep",
    "sum-in-forward",
    "fixed-noise",
    "priors",
    "linear",
]


@pytest.mark.parametrize("columns", [3, 8, 12, 16])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_density_and_derivatives_are_those_of_autograd(columns: int, batch: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*batch, *shape, generator=generator, dtype=torch.float64)
    features, residual = normal(12, 16).requires_grad_(), normal(12).requires_grad_()
    noise = (0.1 + normal(12).square()).requires_grad_()
    index = torch.randperm(16, generator=generator)[:columns]
    scale = torch.linspace(0.5, 2, columns, dtype=torch.float64)
    part = features[..., index] * scale
    covariance = part @ part.mT + torch.diag_embed(noise)
    normal_density = torch.distributions.MultivariateNormal(torch.zeros(12).double(), covariance)
    expected = normal_density.log_prob(residual)
    gradients = torch.autograd.grad(expected.sum(), (features, noise, residual))

    found = FeatureDensity(features, noise, residual).log_density(index, scale)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(torch.autograd.grad(found.sum(), (features, noise, residual)), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


def test_small_noise() -> None:
    """The quadratic form as two squares keeps its digits where the textbook's difference loses them."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(400, 40, generator=generator, dtype=torch.float64)
    residual = features @ torch.randn(40, generator=generator, dtype=torch.float64)
    residual += 1e-5 * torch.randn(400, generator=generator, dtype=torch.float64)
    noise = 1e-10
    left, values, _ = torch.linalg.svd(features, full_matrices=False)
    explained = left.T @ residual
    rest = residual - left @ explained
    quadratic = rest.square().sum() / noise + (explained.square() / (values.square() + noise)).sum()
    determinant = (values.square() + noise).log().sum() + 360 * math.log(noise)
    expected = -0.5 * (quadratic + determinant + 400 * math.log(2 * math.pi))
    density = FeatureDensity(features, torch.full((400,), noise, dtype=torch.float64), residual)
    found = density.log_density(torch.arange(40), torch.ones(40, dtype=torch.float64))
    assert abs(float(found / expected) - 1) < 1e-9


@pytest.mark.parametrize("num_frequencies", [28, 30])
def test_float32_keeps_its_digits_where_almost_all_data_are_explained(num_frequencies: int) -> None:
    """Little noise: what few data leave unexplained is a small difference."""
    found = {}
    for dtype in (torch.float64, torch.float32):
        case = rff_case(n=60, dtype=dtype)
        case.likelihood.noise_covar.register_constraint("raw_noise", gpytorch.constraints.GreaterThan(1e-7))
        case.likelihood.noise = 1e-4
        mll = RFF(case.likelihood, case.model, num_frequencies=num_frequencies, generator=0)
        value, gradients = value_and_gradients(mll, case)
        found[dtype] = [value.double(), *(gradient.double() for gradient in gradients.values())]
    for ours, theirs in zip(found[torch.float32], found[torch.float64], strict=True):
        assert (ours - theirs).norm() < 0.01 * theirs.norm()


def rff_case(n: int = 30, dtype: torch.dtype = torch.float64) -> Case:
    return regression(kernels.ScaleKernel(kernels.MaternKernel(nu=1.5, ard_num_dims=3)), n=n, dtype=dtype)


def features_of(case: Case, draws: dict[str, Tensor], count: int) -> Tensor:
    """Phi of the first `count` frequencies, by the textbook, for a scaled kernel of one radial term."""
    kernel = case.model.covar_module
    omega = draws["features.features.term0.base.normal"][:, :count]
    if isinstance(kernel.base_kernel, kernels.MaternKernel):
        chi_square = draws["features.features.term0.base.chi_square"][:count]
        omega = omega * (2 * kernel.base_kernel.nu / chi_square).sqrt()
    phase = case.x / kernel.base_kernel.lengthscale @ omega
    return (kernel.outputscale / count).sqrt() * torch.cat([phase.cos(), phase.sin()], dim=-1)


def naive_value(case: Case, draws: dict[str, Tensor], count: int) -> Tensor:
    """The likelihood of the first `count` frequencies divided by n, densely, with its graph."""
    features = features_of(case, draws, count)
    covariance = features @ features.T + case.likelihood.noise * torch.eye(len(case.y), dtype=case.y.dtype)
    return torch.distributions.MultivariateNormal(case.model.mean_module(case.x), covariance).log_prob(case.y) / len(
        case.y
    )


def gradients_of(case: Case, value: Tensor) -> dict[str, Tensor]:
    case.model.zero_grad()
    value.backward()
    return {name: p.grad.clone() for name, p in case.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("num_frequencies", [5, 15, 40])  # less than, just, and more than half of the data
@pytest.mark.parametrize("kernel", [kernels.RBFKernel, kernels.MaternKernel])
def test_rff_likelihood_is_the_dense_one(num_frequencies: int, kernel: type) -> None:
    case = regression(kernels.ScaleKernel(kernel(ard_num_dims=3)), n=30)
    mll = RFF(case.likelihood, case.model, num_frequencies=num_frequencies, generator=0)
    value, gradients = value_and_gradients(mll, case)
    expected = naive_value(case, mll.training_state(), num_frequencies)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-9, atol=1e-9)
    for name, gradient in gradients_of(case, expected).items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-7, atol=1e-9)
    assert mll.report.truncation.num_frequencies == num_frequencies
    assert mll.report.status is gpi.solvers.SolveStatus.CONVERGED


def inject(mll: gpytorch.mlls.MarginalLogLikelihood, state: dict[str, Tensor], index: int, probability: float) -> None:
    drawn = {"features.index": torch.tensor(index), "features.probability": torch.tensor(probability).double()}
    mll._run = mll._run.loaded({name: state[name] for name in state if name != "description"} | drawn)


@pytest.mark.parametrize("frequency_step", [3, 1])
def test_enumerated_increments_add_up_to_the_last_term(frequency_step: int) -> None:
    """For fixed frequencies, sum_k p_k f_k is the exact value and gradient."""
    case = rff_case()
    options = GRID | {"frequency_step": frequency_step}
    mll = SingleSample(case.likelihood, case.model, resample=False, generator=0, **options)
    mll(case.model(case.x), case.y)
    state = mll.training_state()
    full = RFF(case.likelihood, case.model, num_frequencies=13, generator=5)
    full(case.model(case.x), case.y)
    state |= {name: t for name, t in full.training_state().items() if name.startswith("features.")}
    grid = torch.arange(4, 14, frequency_step)
    p = (1 / grid[1:].double()) / (1 / grid[1:].double()).sum()
    torch.testing.assert_close(mll._probabilities(grid, mll._run), p)
    expected, expected_gradients = exact(case)
    value, gradients = torch.zeros_like(expected.detach()), {name: 0.0 for name in expected_gradients}
    for index, probability in enumerate(p.tolist(), start=1):
        inject(mll, state, index, probability)
        term, term_gradients = value_and_gradients(mll, case)
        report = mll.report.truncation
        assert (report.grid_index, report.is_exact) == (index, index == len(p))
        assert report.num_frequencies == (grid[index - 1] if report.is_exact else grid[index])
        value += probability * term
        for name, gradient in term_gradients.items():
            gradients[name] = gradients[name] + probability * gradient
    torch.testing.assert_close(value, expected.detach(), rtol=0, atol=1e-8)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-8)


def trace_terms(case: Case) -> float:
    """The largest entry of the log-determinant's share in the gradient: its scale, where the two terms cancel."""
    at_its_mean = dataclasses.replace(case, y=case.model.mean_module(case.x).detach())
    case.model.set_train_data(case.x, at_its_mean.y, strict=False)
    _, gradients = exact(at_its_mean)
    case.model.set_train_data(case.x, case.y, strict=False)
    return max(float(gradient.abs().max()) for gradient in gradients.values())


@pytest.mark.slow
@pytest.mark.parametrize("probabilities", ["inverse", "adaptive"])
def test_value_and_gradient_are_unbiased(probabilities: str) -> None:
    case = rff_case(n=40)
    case.likelihood.noise = 0.5
    expected, expected_gradients = exact(case)
    options = {"min_frequencies": 1000, "frequency_step": 250, "max_frequencies": 1750}
    mll = SingleSample(case.likelihood, case.model, probabilities=probabilities, generator=0, **options)
    biased = RFF(case.likelihood, case.model, num_frequencies=40, generator=0)
    values, biased_values, gradients = [], [], {}
    for _ in range(100):
        value, found = value_and_gradients(mll, case)
        values.append(value)
        for name, gradient in found.items():
            gradients.setdefault(name, []).append(gradient)
        biased_values.append(biased(case.model(case.x), case.y).detach())
    assert_mean_within(torch.stack(values), expected, max_sem=0.025 * abs(float(expected)))
    for name, samples in gradients.items():
        assert_mean_within(
            torch.stack(samples), expected_gradients[name], max_sem=0.025 * trace_terms(case), floor=1e-9
        )
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean_within(torch.stack(biased_values), expected, max_sem=math.inf)


@pytest.mark.slow
def test_adaptive_probabilities_lower_the_variance_and_do_not_look_ahead() -> None:
    spread = {}
    for probabilities in ("inverse", "adaptive"):
        case = rff_case(n=40)
        options = {"min_frequencies": 10, "frequency_step": 2, "max_frequencies": 20}
        mll = SingleSample(case.likelihood, case.model, probabilities=probabilities, generator=0, **options)
        values = [mll(case.model(case.x), case.y).detach() for _ in range(300)]
        spread[probabilities] = float(torch.stack(values[50:]).std())
    assert spread["adaptive"] < 0.8 * spread["inverse"]
    state = mll.training_state()
    before = mll._probabilities(torch.arange(10, 21, 2), mll._run)
    mll(case.model(case.x), case.y)
    index = mll.report.truncation.grid_index
    assert mll.report.truncation.probability == pytest.approx(float(before[index - 1]))
    assert mll.training_state()["increments.count"].sum() == state["increments.count"].sum() + 1


def test_every_increment_keeps_a_share_of_the_draws() -> None:
    case = rff_case(n=40)
    mll = SingleSample(case.likelihood, case.model, probabilities="adaptive", generator=0, **GRID)
    grid = mll._grid(40)
    size = len(grid) - 1
    assert float(mll._probabilities(grid, mll._run)[-1]) == pytest.approx(0.95 * 0.4 + 0.05 / size)  # the exact term's
    squares = torch.zeros(size, dtype=torch.float64)
    squares[1] = 1e30  # the others have been zero in a billion draws
    increments = {"count": torch.full_like(squares, 1e9), "squares": squares}
    found = mll._probabilities(grid, mll._run.having(increments=increments))
    expected = torch.full_like(squares, 0.05 / size)
    expected[1] += 0.95
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0)


@pytest.mark.parametrize("name", WITH_FEATURES)
def test_every_kernel_with_features(name: str) -> None:
    """With many frequencies the likelihood comes near the exact one; every parameter has its gradient."""
    case = CASES[name]()
    expected, expected_gradients = exact(case)
    mll = RFF(case.likelihood, case.model, num_frequencies=20_000, generator=0)
    value, gradients = value_and_gradients(mll, case)
    assert gradients.keys() == expected_gradients.keys()
    assert abs(float(value - expected)) < 0.05 * abs(float(expected)) + 0.02
    scale = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
    for parameter, gradient in gradients.items():
        assert float((gradient - expected_gradients[parameter]).abs().max()) < 0.1 * scale


def test_batch_has_a_value_each() -> None:
    case = CASES["batch"]()
    expected, _ = exact(case)
    mll = SingleSample(
        case.likelihood, case.model, min_frequencies=1000, frequency_step=1000, max_frequencies=2000, generator=0
    )
    value, gradients = value_and_gradients(mll, case)
    assert value.shape == expected.shape == (2,)
    # A grid of one increment whose upper end is exact is the exact likelihood.
    torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-8)
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())


def test_float32_agrees_with_float64() -> None:
    results = {}
    for dtype in (torch.float32, torch.float64):
        case = rff_case(n=60, dtype=dtype)
        mll = SingleSample(case.likelihood, case.model, generator=0, **GRID)
        value, gradients = value_and_gradients(mll, case)
        assert value.dtype == dtype
        results[dtype] = torch.cat([value[None], *(g.reshape(-1) for g in gradients.values())]).double()
    torch.testing.assert_close(results[torch.float32], results[torch.float64], rtol=1e-3, atol=1e-3)


def test_exact_terms_of_float32_models_are_those_of_float64() -> None:
    """Beside a trend, float32 entries of the kernel matrix would give another exact density than features do."""
    kernel = kernels.ScaleKernel(kernels.RBFKernel()) + kernels.LinearKernel()
    case = regression(kernel, n=100, dtype=torch.float32)
    kernel.kernels[1].variance, case.likelihood.noise = 1e4, 0.01
    # The only increment ends at the exact density, with probability 1.
    mll = SingleSample(
        case.likelihood, case.model, min_frequencies=4, frequency_step=9, max_frequencies=13, generator=0
    )
    value, gradients = value_and_gradients(mll, case)
    assert value.dtype == torch.float32
    assert mll.report.truncation.is_exact
    case.model.double().set_train_data(case.x.double(), case.y.double(), strict=False)
    in_float64 = dataclasses.replace(case, x=case.x.double(), y=case.y.double())
    expected, expected_gradients = exact(in_float64)
    torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-4)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name].double(), gradient, rtol=1e-2, atol=1e-4)


def test_a_grid_of_one_increment_draws_it_always() -> None:
    case = rff_case()
    options = {"min_frequencies": 5, "frequency_step": 10, "max_frequencies": 20}
    mll = SingleSample(case.likelihood, case.model, generator=0, probabilities="adaptive", **options)
    for _ in range(2):
        assert torch.isfinite(mll(case.model(case.x), case.y))
        assert mll.report.truncation.probability == pytest.approx(1)
        assert mll.report.truncation.is_exact
        assert mll.training_state()["features.count"] == 5  # the exact term needs no features of its own


@pytest.mark.slow
def test_bias_has_the_sign_that_the_paper_proves() -> None:
    """Few frequencies: on average the quadratic form is too large and the log-determinant too small."""
    case = rff_case(n=30)
    dense = case.model(case.x).covariance_matrix.detach() + case.likelihood.noise.detach() * torch.eye(30).double()
    residual = (case.y - case.model.mean_module(case.x)).detach()
    quadratic, logdet = [], []
    mll = RFF(case.likelihood, case.model, num_frequencies=5, generator=0)
    for _ in range(200):
        mll(case.model(case.x), case.y)
        features = features_of(case, mll.training_state(), 5).detach()
        approximate = features @ features.T + case.likelihood.noise.detach() * torch.eye(30).double()
        quadratic.append(residual @ torch.linalg.solve(approximate, residual))
        logdet.append(torch.linalg.slogdet(approximate)[1])
    assert torch.stack(quadratic).mean() > residual @ torch.linalg.solve(dense, residual)
    assert torch.stack(logdet).mean() < torch.linalg.slogdet(dense)[1]


def test_redraw_freeze_resume_and_global_generator() -> None:
    before = torch.random.get_rng_state()
    case = rff_case()
    mll = SingleSample(case.likelihood, case.model, generator=0, probabilities="adaptive", **GRID)
    first, second = (float(mll(case.model(case.x), case.y).detach()) for _ in range(2))
    assert first != second
    resumed = SingleSample(case.likelihood, case.model, generator=9, probabilities="adaptive", **GRID)
    resumed.load_training_state(mll.training_state())
    for _ in range(3):
        assert torch.equal(resumed(case.model(case.x), case.y), mll(case.model(case.x), case.y))
    frozen = SingleSample(case.likelihood, case.model, generator=0, resample=False, **GRID)
    assert torch.equal(frozen(case.model(case.x), case.y), frozen(case.model(case.x), case.y))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputscale_that_underflows_to_zero(dtype: torch.dtype) -> None:
    case = rff_case(dtype=dtype)
    case.model.covar_module.raw_outputscale.data.fill_(-1e4)
    _, gradients = value_and_gradients(RFF(case.likelihood, case.model, num_frequencies=10, generator=0), case)
    assert len(gradients) == 4
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())


def test_draws_of_another_grid_are_refused() -> None:
    case = rff_case()
    state = SingleSample(case.likelihood, case.model, **GRID).training_state()
    with pytest.raises(ValueError, match="max_frequencies is"):
        SingleSample(case.likelihood, case.model, **(GRID | {"max_frequencies": 10})).load_training_state(state)


def test_predictions_are_those_of_the_kernel() -> None:
    case = rff_case()
    mll = RFF(case.likelihood, case.model, num_frequencies=5, generator=0)
    mll(case.model(case.x), case.y)
    x = case.x[::4] + 0.1
    prediction = mll.posterior()(x)
    case.model.eval()
    case.model.prediction_strategy = None
    with torch.no_grad(), gpytorch.settings.fast_computations(False, False, False):
        expected = case.model(x)
    torch.testing.assert_close(prediction.mean, expected.mean, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mll_class", [RFF, SingleSample])
def test_kernels_without_features_or_without_a_gradient_through_them(mll_class: type) -> None:
    options = {"num_frequencies": 10} if mll_class is RFF else GRID
    case = CASES["product"]()
    with pytest.raises(gpi.errors.SpectralDensityMissingError, match="PeriodicKernel"):
        mll_class(case.likelihood, case.model, **options)(case.model(case.x), case.y)
    case = CASES["rational-quadratic"]()
    mll = mll_class(case.likelihood, case.model, **options)
    with pytest.raises(gpi.errors.SpectralDensityMissingError, match=r"RQKernel.*raw_alpha"):
        mll(case.model(case.x), case.y)
    case.model.covar_module.base_kernel.raw_alpha.requires_grad_(False)
    assert torch.isfinite(mll(case.model(case.x), case.y))
    case = CASES["multitask-low-rank-noise"]()
    with pytest.raises(gpi.errors.UnsupportedLikelihoodError, match=r"diagonal[\s\S]*Hutchinson"):
        mll_class(case.likelihood, case.model, **options)(case.model(case.x), case.y)


def test_a_failed_step_leaves_no_trace() -> None:
    case = rff_case()
    mll = SingleSample(case.likelihood, case.model, min_frequencies=500)
    before = mll.training_state()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"grid of frequencies is empty.*500"):
            mll(case.model(case.x), case.y)
    after = mll.training_state()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("mll_class", [RFF, SingleSample])
def test_overflow_is_an_error_and_leaves_no_trace(mll_class: type) -> None:
    case = rff_case(dtype=torch.float32)
    mll = mll_class(case.likelihood, case.model, **({"num_frequencies": 10} if mll_class is RFF else GRID))
    before = mll.training_state()
    with pytest.raises(gpi.errors.NonFiniteError, match="not finite"):
        mll(case.model(case.x), 1e25 * case.y)
    after = mll.training_state()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("mll_class", [RFF, SingleSample])
def test_second_derivatives_are_refused(mll_class: type) -> None:
    case = rff_case()
    mll = mll_class(case.likelihood, case.model, **({"num_frequencies": 10} if mll_class is RFF else GRID))
    value = mll(case.model(case.x), case.y)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(value, list(case.model.parameters()), create_graph=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_frequencies": 0}, "min_frequencies.*0"),
        ({"frequency_step": 0}, "frequency_step.*0"),
        ({"max_frequencies": 5}, "no increment up to 5 .max_frequencies.*raise max_frequencies"),
        ({"max_frequencies": 0}, "max_frequencies.*0"),
        ({"max_frequencies": 12.5}, r"max_frequencies.*12\.5"),
        ({"max_frequencies": "13"}, "max_frequencies.*'13'"),
        ({"probabilities": np.full(3, 1 / 3)}, "adaptive, got array"),
        ({"probabilities": "equal"}, "equal"),
        ({"probabilities": "adaptive", "resample": False}, "resample=False"),
    ],
)
def test_options_outside_their_range(options: dict, said: str) -> None:
    case = rff_case()
    with pytest.raises(ValueError, match=said):
        SingleSample(case.likelihood, case.model, **(GRID | options))


def test_other_refusals() -> None:
    case = rff_case()
    with pytest.raises(ValueError, match=r"num_frequencies.*0"):
        RFF(case.likelihood, case.model, num_frequencies=0)
    with pytest.raises(gpi.errors.UnsupportedLikelihoodError, match="BernoulliLikelihood"):
        RFF(gpytorch.likelihoods.BernoulliLikelihood(), case.model)
    huge = dataclasses.replace(case, y=1e200 * case.y)
    mll = RFF(case.likelihood, case.model, num_frequencies=10)
    with pytest.raises(ValueError, match="inf"):
        mll(case.model(case.x), huge.y * 1e200)


def test_leading_frequencies_of_sums_and_exact_features() -> None:
    """Each summand keeps its first frequencies; a linear kernel keeps all of its features."""
    kernel = kernels.ScaleKernel(kernels.RBFKernel()) + kernels.LinearKernel() + kernels.MaternKernel(nu=2.5)
    case = regression(kernel, n=20)
    with torch.no_grad():
        terms = [KernelTerm(case.model.covar_module, case.x)]
        features = gpi.spectral.RandomFourierFeatures(6)
        draws = features.draw(terms, torch.Generator().manual_seed(0))
        columns, scales = features.leading(terms, 2)
        found = features.features(terms, draws)[:, columns] * scales
        short = {name: t[..., :2] if t.shape[-1] == 6 else t for name, t in draws.items()}
        torch.testing.assert_close(found, gpi.spectral.RandomFourierFeatures(2).features(terms, short))
    for count in (0, 7):
        with pytest.raises(ValueError, match=str(count)):
            features.leading(terms, count)
    assert columns.tolist()[:4] == [0, 1, 6, 7]


def test_frozen_draws_in_float32_and_evaluation_without_autograd() -> None:
    case = rff_case(dtype=torch.float32)
    frozen = SingleSample(case.likelihood, case.model, generator=0, resample=False, **GRID)
    value = frozen(case.model(case.x), case.y)
    with torch.no_grad():
        without = frozen(case.model(case.x), case.y)
    assert not without.requires_grad
    torch.testing.assert_close(without, value.detach())
    with torch.inference_mode():
        torch.testing.assert_close(frozen(case.model(case.x), case.y), value.detach())


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (gpi.mlls.RFFMarginalLogLikelihood, {"num_frequencies": 8}),
        (gpi.mlls.SingleSampleRFFMarginalLogLikelihood, {"min_frequencies": 8, "frequency_step": 4}),
    ],
)
def test_evaluations_in_inference_mode_leave_training_as_it_is(method: type, options: dict) -> None:
    case = CASES["matern-3/2"]()
    mll = method(case.likelihood, case.model, generator=0, **options)
    with torch.inference_mode():
        value = mll(case.model(case.x), case.y)
    assert torch.isfinite(value)
    (-mll(case.model(case.x), case.y)).backward()
