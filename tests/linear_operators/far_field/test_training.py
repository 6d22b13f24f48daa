"""Marginal log likelihoods whose products pass through far fields: gradients, reports, and crude far fields."""

import warnings
from dataclasses import replace

import gpytorch
import pytest
import torch
from gpytorch import kernels
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.errors import ConvergenceWarning
from gpy_iterative.linear_operators import KernelProducts, kernel_operator
from gpy_iterative.linear_operators.extensions import far_field_error
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_solvers.default import default_solver
from gpy_iterative.linear_solvers.solution import SolveStatus
from tests.exact.gaussian_models import DeepKernelRegression, Regression

N = 2000
TIGHT = gpi.solvers.ConjugateGradients(tolerance=1e-5)
LOW_RANK = replace(TIGHT, preconditioner=gpi.preconditioners.RandomlyPivotedCholesky(rank=100))


def data(n: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, 2, generator=generator, dtype=torch.float64) * 4
    return x, (3 * x[:, 0]).sin() + 0.3 * torch.randn(n, generator=generator, dtype=torch.float64)


def model(kernel: kernels.Kernel) -> Regression:
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = 0.1
    return Regression(*data(), likelihood, kernel).double()


KERNELS = {
    "scaled, ARD": lambda: kernels.ScaleKernel(kernels.MaternKernel(nu=1.5, ard_num_dims=2)),
    "sum": lambda: kernels.ScaleKernel(kernels.MaternKernel(nu=0.5)) + kernels.ScaleKernel(kernels.RBFKernel()),
    "one coordinate": lambda: kernels.ScaleKernel(kernels.RQKernel(active_dims=(0,))),
}


def gradients(kernel: kernels.Kernel, mll_of: object) -> Tensor:
    """By all hyperparameters."""
    regression = model(kernel)
    mll = mll_of(regression)
    mll(regression(*regression.train_inputs), regression.train_targets).backward()
    return torch.cat([parameter.grad.reshape(-1) for parameter in regression.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_gradients_are_those_of_tiles(name: str) -> None:
    """With the same probes, those of a low rank: with a far field neighbours take its place."""

    def found(far_field: float | None) -> Tensor:
        products = KernelProducts(far_field=far_field)
        options = {"products": products, "solver": LOW_RANK, "generator": 0, "num_probes": 4}
        mll = lambda m: gpi.mlls.HutchinsonMarginalLogLikelihood(m.likelihood, m, **options)
        return gradients(KERNELS[name](), mll)

    tiles = found(None)
    assert (found(1e-7) - tiles).norm() < 2e-3 * tiles.norm()


def test_the_gradient_is_that_of_cholesky() -> None:
    """Up to the probes' noise, which many probes make small."""
    exact = gradients(KERNELS["scaled, ARD"](), lambda m: gpytorch.mlls.ExactMarginalLogLikelihood(m.likelihood, m))
    options = {"products": KernelProducts(far_field=1e-7), "solver": TIGHT, "generator": 0, "num_probes": 64}
    mll = lambda m: gpi.mlls.HutchinsonMarginalLogLikelihood(m.likelihood, m, **options)
    assert (gradients(KERNELS["scaled, ARD"](), mll) - exact).norm() < 0.05 * exact.norm()


def test_the_report_tells_the_error() -> None:
    regression = model(KERNELS["scaled, ARD"]())
    for wanted in (1e-7, None):
        mll = gpi.mlls.HutchinsonMarginalLogLikelihood(
            regression.likelihood, regression, products=KernelProducts(far_field=wanted), solver=TIGHT
        )
        mll(regression(*regression.train_inputs), regression.train_targets)
        error = mll.report.far_field_error
        assert ("far field" in str(mll.report)) == (wanted is not None)
        assert error is None if wanted is None else 0 < error <= 1e-7


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["native", "float32"])
def test_a_crude_far_field_is_not_converged_however_often_it_is_solved(precision: str) -> None:
    """True residuals on some rows tell, of the first solve and of those that begin at its solutions."""
    regression = model(KERNELS["scaled, ARD"]())
    for wanted, statuses in ((0.1, {"STAGNATED"}), (1e-7, {"CONVERGED"})):
        mll = gpi.mlls.HutchinsonMarginalLogLikelihood(
            regression.likelihood,
            regression,
            products=KernelProducts(far_field=wanted, precision=precision),
            solver=gpi.solvers.ConjugateGradients(tolerance=1e-4),
        )
        reports = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            for _ in range(3):
                mll(regression(*regression.train_inputs), regression.train_targets)
                reports.append(mll.report)
        assert {report.status.name for report in reports} == statuses
        assert all(report.far_field_error is not None for report in reports)


def test_the_warning_names_a_crude_far_field() -> None:
    regression = model(KERNELS["scaled, ARD"]())
    for wanted, cause in (
        (0.1, r"The cause is the far field.*measured relative error.*far_field=\d"),
        (None, "max_epochs"),
    ):
        mll = gpi.mlls.HutchinsonMarginalLogLikelihood(
            regression.likelihood,
            regression,
            products=KernelProducts(far_field=wanted),
            solver=gpi.solvers.ConjugateGradients(tolerance=1e-4, max_epochs=300 if wanted else 2),
        )
        with pytest.warns(ConvergenceWarning, match=cause) as found:
            mll(regression(*regression.train_inputs), regression.train_targets)
        assert ("The cause is the far field" in str(found[0].message)) == (wanted is not None)


def test_the_tolerance_that_is_suggested_converges() -> None:
    y, solver = data()[1], gpi.solvers.ConjugateGradients(tolerance=1e-4)
    crude = system(0.1)
    solution = solver.solve(crude, y)
    limit = solution.stats.far_field
    assert solution.status is SolveStatus.STAGNATED
    assert limit is not None
    assert limit.error == far_field_error(crude)
    assert limit.residual > limit.tolerance == 1e-4
    assert limit.suggested_tolerance is not None
    solution = solver.solve(system(limit.suggested_tolerance), y)
    assert solution.status is SolveStatus.CONVERGED
    assert solution.stats.far_field is None


def test_no_tolerance_is_suggested_that_cannot_suffice() -> None:
    solution = gpi.solvers.ConjugateGradients(tolerance=1e-9).solve(system(1e-9), data()[1])
    limit = solution.stats.far_field
    assert solution.status is SolveStatus.STAGNATED
    assert limit is not None
    assert limit.suggested_tolerance is None
    assert "far_field=None" in limit.advice
    assert "far_field=1e-09" not in limit.advice


def test_rounding_is_not_the_far_fields_fault() -> None:
    solution = gpi.solvers.ConjugateGradients(tolerance=1e-9).solve(system(1e-7, torch.float32), data()[1].float())
    assert solution.status is SolveStatus.STAGNATED
    assert solution.stats.far_field is None


def system(far_field: float, dtype: torch.dtype = torch.float64) -> NoisyLinearOperator:
    """A kernel matrix with noise, without gradients."""
    kernel = kernel_operator(
        kernels.MaternKernel(nu=1.5).to(dtype)(data()[0].to(dtype)), KernelProducts(far_field=far_field)
    )
    return NoisyLinearOperator(kernel.detach(), torch.full((N,), 0.1, dtype=dtype))


def test_derivatives_keep_the_tolerance_where_few_points_serve_for_values() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1000, 1, generator=generator, dtype=torch.float64) * 4
    vector = torch.randn(1000, generator=generator, dtype=torch.float64)
    kernel = kernels.MaternKernel(nu=0.5).double()
    kernel.lengthscale = 0.3
    found, exact = (
        kernel_operator(kernel(x.clone()), KernelProducts(far_field=tolerance)).scale_products(vector)
        for tolerance in (1e-7, None)
    )
    assert (found - exact).norm() < 1e-6 * exact.norm()


@pytest.mark.parametrize(("lengthscale", "outputscale"), [(30.0, 1e4), (300.0, 1e6)])
def test_nearly_equal_entries_are_told_apart(lengthscale: float, outputscale: float) -> None:
    """A smooth trend: the data's part of the gradient by the log lengthscales had errors of 5 and of 400."""
    kernel = kernels.ScaleKernel(kernels.MaternKernel(nu=1.5, ard_num_dims=2)).double()
    kernel.outputscale, kernel.base_kernel.lengthscale = outputscale, lengthscale
    x, _ = data()
    matrix = kernel(x).to_dense()
    noisy = matrix.detach() + 0.1 * torch.eye(N, dtype=torch.float64)
    white = torch.randn(N, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights = torch.linalg.solve_triangular(torch.linalg.cholesky(noisy).mT, white, upper=True)
    operator = kernel_operator(kernel(x), KernelProducts(far_field=1e-6))
    assert far_field_error(operator) is not None
    raw = kernel.base_kernel.raw_lengthscale
    found, exact = (torch.autograd.grad((weights * (k @ weights)).sum() / 2, raw)[0] for k in (operator, matrix))
    torch.testing.assert_close(found * lengthscale, exact * lengthscale, rtol=0, atol=1.0)


def test_conjugate_gradients_are_the_default_solver() -> None:
    x = data(4000)[0]
    operator = lambda wanted: kernel_operator(kernels.RBFKernel().double()(x), KernelProducts(far_field=wanted))
    assert isinstance(default_solver(operator(1e-4)), gpi.solvers.ConjugateGradients)
    assert isinstance(default_solver(operator(None)), gpi.solvers.AlternatingProjections)


def test_learned_inputs_have_tiles() -> None:
    x, y = data(600)
    deep = DeepKernelRegression(x, y, gpytorch.likelihoods.GaussianLikelihood()).double()
    covariance = deep(x).lazy_covariance_matrix
    assert far_field_error(kernel_operator(covariance, KernelProducts(far_field=1e-3))) is None
