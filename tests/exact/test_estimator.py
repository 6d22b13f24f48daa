"""The iterative path against dense truth: value, gradient, their errors, and the report."""

import dataclasses
import math

import gpytorch
import pytest
import torch
from gpytorch import kernels

import gpy_iterative as gpi
from tests.exact.gaussian_models import CASES, Case, regression
from tests.exact.test_exact import value_and_gradients
from tests.monte_carlo import assert_mean_within, assert_within

TIGHT = gpi.solvers.ConjugateGradients(tolerance=1e-9)
ITERATIVE = ["matern-3/2", "rational-quadratic", "additive", "deep", "sum-in-forward", "fixed-noise", "priors"]
ANY_KERNEL = [*ITERATIVE, "product", "spectral-mixture", "linear", "batch", "multitask", "inducing-points"]


def exact(case: Case) -> tuple[torch.Tensor, dict]:
    with gpytorch.settings.fast_computations(False, False, False):
        return value_and_gradients(gpytorch.mlls.ExactMarginalLogLikelihood(case.likelihood, case.model), case)


def of_low_rank(mll: gpi.mlls.HutchinsonMarginalLogLikelihood) -> gpi.mlls.HutchinsonMarginalLogLikelihood:
    """Rank 5 in place of 100: at the tests' sizes the default factor would be the whole matrix."""
    mll.probes = dataclasses.replace(mll.probes, recipe=gpi.preconditioners.PivotedCholesky(rank=5))
    mll.logdet_probes = dataclasses.replace(mll.logdet_probes, recipe=gpi.preconditioners.PivotedCholesky(rank=5))
    return mll


def monte_carlo(case: Case, mll: gpytorch.mlls.MarginalLogLikelihood, draws: int = 16) -> dict[str, torch.Tensor]:
    """[draws, ...] gradients of every parameter from fresh probes."""
    samples: dict[str, list] = {}
    for _ in range(draws):
        for name, gradient in value_and_gradients(mll, case)[1].items():
            samples.setdefault(name, []).append(gradient)
    return {name: torch.stack(gradients) for name, gradients in samples.items()}


def assert_unbiased(case: Case, mll: gpytorch.mlls.MarginalLogLikelihood) -> None:
    _, expected = exact(case)
    scale = max(gradient.abs().max().item() for gradient in expected.values())
    for parameter, samples in monte_carlo(case, mll).items():
        assert_mean_within(samples, expected[parameter], max_sem=0.3 * scale, floor=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ANY_KERNEL)
def test_hutchinson_gradient_is_unbiased(name: str) -> None:
    case = CASES[name]()
    mll = of_low_rank(
        gpi.mlls.HutchinsonMarginalLogLikelihood(
            case.likelihood, case.model, num_probes=40, solver=TIGHT, warm_start=False, generator=0
        )
    )
    assert_unbiased(case, mll)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ITERATIVE, "batch", "multitask", "spectral-mixture"])
def test_pathwise_gradient_is_unbiased_with_few_frequencies(name: str) -> None:
    case = CASES[name]()
    mll = gpi.mlls.PathwiseMarginalLogLikelihood(
        case.likelihood, case.model, num_probes=40, num_frequencies=50, solver=TIGHT, warm_start=False, generator=0
    )
    assert_unbiased(case, mll)


@pytest.mark.parametrize(
    "solver",
    [
        gpi.solvers.ConjugateGradients(tolerance=1e-6),
        gpi.solvers.AlternatingProjections(tolerance=1e-6, block_size=16),
        gpi.solvers.StochasticGradientDescent(tolerance=1e-4, batch_size=20, max_epochs=20_000),
    ],
)
@pytest.mark.parametrize(
    "mll_class", [gpi.mlls.HutchinsonMarginalLogLikelihood, gpi.mlls.PathwiseMarginalLogLikelihood]
)
def test_every_solver_serves_every_estimator(solver: gpi.solvers.Solver, mll_class: type) -> None:
    case = CASES["matern-3/2"]()
    expected, expected_gradients = exact(case)
    mll = mll_class(case.likelihood, case.model, num_probes=400, solver=solver, generator=1)
    value, gradients = value_and_gradients(mll, case)
    assert mll.report.status is gpi.solvers.SolveStatus.CONVERGED
    assert_within(value, expected, mll.report.value_sem, max_sem=0.02, floor=1e-3)
    for name, gradient in gradients.items():
        assert torch.linalg.vector_norm(gradient - expected_gradients[name]) <= 0.1 * max(
            torch.linalg.vector_norm(g) for g in expected_gradients.values()
        )


@pytest.mark.slow
def test_value_has_the_error_it_reports() -> None:
    """Over many generators, value - truth is within 4 standard errors and the reported error is of the right size."""
    case = CASES["matern-3/2"]()
    expected, _ = exact(case)
    values, sems = [], []
    for seed in range(40):
        mll = of_low_rank(
            gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, solver=TIGHT, generator=seed)
        )
        values.append(value_and_gradients(mll, case)[0])
        sems.append(mll.report.value_sem)
    values, sems = torch.stack(values), torch.stack(sems)
    assert_mean_within(values, expected, max_sem=0.01, floor=1e-7)
    spread = (values - expected).square().mean().sqrt()
    assert 0.3 * spread <= sems.square().mean().sqrt() <= 3 * spread + 1e-9


def test_published_form_is_the_uncorrected_one() -> None:
    """With frozen few frequencies the published gradient is far off, the corrected one is not."""
    case = CASES["matern-3/2"]()
    _, expected = exact(case)
    errors = {}
    for corrected in (True, False):
        mll = gpi.mlls.PathwiseMarginalLogLikelihood(
            case.likelihood,
            case.model,
            num_probes=2000,
            num_frequencies=10,
            corrected=corrected,
            solver=TIGHT,
            generator=0,
        )
        _, gradients = value_and_gradients(mll, case)
        errors[corrected] = math.sqrt(sum(((gradients[k] - expected[k]) ** 2).sum().item() for k in expected))
    assert errors[True] < 0.5 * errors[False]


def test_exact_prior_probes() -> None:
    case = CASES["product"]()
    mll = gpi.mlls.PathwiseMarginalLogLikelihood(
        case.likelihood, case.model, prior="exact", num_probes=64, solver=TIGHT, warm_start=False, generator=0
    )
    assert_unbiased(case, mll)


def test_kernel_without_spectral_density_names_the_ways_out() -> None:
    case = CASES["product"]()
    mll = gpi.mlls.PathwiseMarginalLogLikelihood(case.likelihood, case.model, solver=TIGHT)
    with pytest.raises(gpi.errors.SpectralDensityMissingError, match=r"PeriodicKernel[\s\S]*Hutchinson"):
        mll(case.model(case.x), case.y)


def test_budget_is_a_status_and_one_warning() -> None:
    case = regression(kernels.ScaleKernel(kernels.MaternKernel(nu=1.5)))
    solver = gpi.solvers.AlternatingProjections(tolerance=1e-8, max_epochs=1, block_size=8)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, solver=solver, generator=0)
    with pytest.warns(gpi.errors.ConvergenceWarning, match="budget"):
        mll(case.model(case.x), case.y)
    assert mll.report.status is gpi.solvers.SolveStatus.BUDGET_EXHAUSTED
    mll(case.model(case.x), case.y)  # a second warning would be an error here


def test_float32_agrees_with_float64() -> None:
    results = {}
    for dtype in (torch.float32, torch.float64):
        case = regression(kernels.ScaleKernel(kernels.MaternKernel(nu=1.5, ard_num_dims=3)), dtype=dtype)
        mll = gpi.mlls.HutchinsonMarginalLogLikelihood(
            case.likelihood,
            case.model,
            solver=gpi.solvers.ConjugateGradients(tolerance=1e-4),
            num_probes=2000,
            generator=0,
        )
        value, gradients = value_and_gradients(mll, case)
        assert value.dtype == dtype
        results[dtype] = torch.cat([value[None], *(g.reshape(-1) for g in gradients.values())]).double()
    torch.testing.assert_close(results[torch.float32], results[torch.float64], rtol=0.05, atol=0.02)


@pytest.mark.parametrize(
    "options",
    [{"corrected": True, "num_frequencies": 50}, {"corrected": False, "num_frequencies": 50}, {"prior": "exact"}],
)
def test_pathwise_probes_for_a_batch_of_targets_on_one_prior(options: dict) -> None:
    case = regression(kernels.ScaleKernel(kernels.RBFKernel()), n=30)
    targets = torch.stack([case.y, 2 * case.y, case.y.flip(0)])
    solver = gpi.solvers.ConjugateGradients(tolerance=1e-8)
    mll = gpi.mlls.PathwiseMarginalLogLikelihood(case.likelihood, case.model, solver=solver, generator=0, **options)
    value = mll(case.model(case.x), targets)
    value.sum().backward()
    constant = case.model.mean_module.raw_constant
    estimated = constant.grad.clone()
    constant.grad = None
    exact = gpi.mlls.PathwiseMarginalLogLikelihood(case.likelihood, case.model)(case.model(case.x), targets)
    exact.sum().backward()
    torch.testing.assert_close(estimated, constant.grad)  # the mean's gradient has no probes in it
    assert_within(value, exact, mll.report.value_sem, max_sem=0.02, floor=1e-6)


def test_probes_of_a_known_covariance_are_solved_to_below_their_noise() -> None:
    """Those that are weighted by their own solution, as published, need the targets' tolerance."""
    case, solver = CASES["matern-3/2"](), gpi.solvers.ConjugateGradients(tolerance=1e-4, preconditioner=None)
    residuals = {}
    for corrected in (True, False):
        mll = gpi.mlls.PathwiseMarginalLogLikelihood(
            case.likelihood, case.model, corrected=corrected, solver=solver, generator=0
        )
        mll(case.model(case.x), case.y)
        residuals[corrected] = mll.report.residual_probes
    assert residuals[False] <= 1e-4 < residuals[True] <= 0.05


@pytest.mark.slow
def test_a_large_term_does_not_hide_the_others() -> None:
    """The probes' norm is nearly all that of the constant: a plain relative residual says little of the Matérn term."""
    constant = kernels.ConstantKernel()
    case = regression(constant + kernels.ScaleKernel(kernels.MaternKernel(nu=1.5)), n=200)
    constant.constant = torch.tensor(1e4)  # `regression` moves all parameters
    _, expected = exact(case)
    mll = of_low_rank(
        gpi.mlls.HutchinsonMarginalLogLikelihood(
            case.likelihood,
            case.model,
            solver=gpi.solvers.AlternatingProjections(tolerance=1e-6, block_size=50),
            warm_start=False,
            generator=0,
        )
    )
    scale = max(gradient.abs().max().item() for gradient in expected.values())
    for parameter, samples in monte_carlo(case, mll).items():
        assert_mean_within(samples, expected[parameter], max_sem=0.1 * scale)
    assert mll.report.status is gpi.solvers.SolveStatus.CONVERGED


def test_values_of_targets_far_from_zero() -> None:
    """The targets' norm is nearly all that of their mean, which the constant kernel explains."""
    constant = kernels.ConstantKernel()
    case = regression(constant + kernels.ScaleKernel(kernels.MaternKernel(nu=1.5)), n=200)
    constant.constant = torch.tensor(1e6)
    case = dataclasses.replace(case, y=case.y + 1000)
    case.model.set_train_data(case.x, case.y)
    expected, _ = exact(case)
    mll = of_low_rank(
        gpi.mlls.HutchinsonMarginalLogLikelihood(
            case.likelihood, case.model, solver=gpi.solvers.ConjugateGradients(preconditioner=None), generator=0
        )
    )
    found = mll(case.model(case.x), case.y)
    assert (found - expected).abs() <= 4 * mll.report.value_sem
    assert mll.report.value_sem <= 0.05


def test_the_preconditioner_tells_what_a_loose_solve_leaves_out() -> None:
    """Here it is the system itself, so the value is exact after one iteration."""
    case = CASES["matern-3/2"]()
    size = len(case.y)
    recipe = gpi.preconditioners.PivotedCholesky(rank=size)
    solver = gpi.solvers.ConjugateGradients(tolerance=0.5, stopping="mean", preconditioner=None)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, solver=solver, generator=0)
    mll.logdet_probes = dataclasses.replace(mll.logdet_probes, recipe=recipe)
    value = mll(case.model(case.x), case.y)
    assert mll.report is not None
    assert mll.report.residual_targets > 0.1
    torch.testing.assert_close(value, exact(case)[0], rtol=0, atol=1e-5)
    assert 1e-4 < mll.report.value_sem < 1
