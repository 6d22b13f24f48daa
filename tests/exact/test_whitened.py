"""Training with Vecchia's preconditioner, whose covariance the probes take: gradient, value, report, and other solvers."""

import dataclasses
import math
from collections.abc import Callable

import gpytorch
import pytest
import torch
from gpytorch import kernels
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.exact.control_variate import ControlVariate
from gpy_iterative.exact.probes import Probes
from gpy_iterative.linear_operators import NoisyLinearOperator
from gpy_iterative.preconditioners import Vecchia, vecchia
from gpy_iterative.solvers import AlternatingProjections, Cholesky, ConjugateGradients, SolveStatus
from tests.exact.gaussian_models import Case, Regression, regression
from tests.exact.test_exact import value_and_gradients
from tests.monte_carlo import assert_mean_within, assert_within

SOLVER = ConjugateGradients(preconditioner=Vecchia(20), tolerance=1e-3, probe_tolerance=1e-2)


def plane(
    n: int, likelihood: gpytorch.likelihoods.Likelihood | None = None, dtype: torch.dtype = torch.float64
) -> Case:
    """A Matern field of the plane."""
    x = torch.rand(n, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4 - 2
    noise = 0.1 * torch.randn(n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.sin(3 * x[:, 0]) + torch.cos(2 * x[:, 1] + x[:, 0]) + noise
    likelihood = gpytorch.likelihoods.GaussianLikelihood() if likelihood is None else likelihood
    model = Regression(x, y, likelihood, kernels.ScaleKernel(kernels.MaternKernel(nu=1.5, ard_num_dims=2)))
    model.covar_module.base_kernel.lengthscale = torch.tensor([[0.4, 0.6]])
    if isinstance(likelihood, gpytorch.likelihoods.GaussianLikelihood):
        likelihood.noise = 0.01
    model.to(dtype)
    return Case(model, likelihood, x.to(dtype), y.to(dtype))


def hutchinson(case: Case, **options) -> gpi.mlls.HutchinsonMarginalLogLikelihood:
    return gpi.mlls.HutchinsonMarginalLogLikelihood(
        case.likelihood, case.model, **{"solver": SOLVER, "generator": 0, "num_probes": 16} | options
    )


def samples_of(case: Case, mll: gpi.mlls.HutchinsonMarginalLogLikelihood, draws: int) -> dict[str, Tensor]:
    found = [value_and_gradients(mll, case)[1] for _ in range(draws)]
    return {name: torch.stack([each[name] for each in found]) for name in found[0]}


def test_gradient_and_value_of_a_field_are_those_of_cholesky() -> None:
    case = plane(2000)
    value, expected = value_and_gradients(hutchinson(case, solver=Cholesky()), case)
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    mll = hutchinson(case, warm_start=False)
    for name, samples in samples_of(case, mll, 4).items():
        assert_mean_within(samples, expected[name], max_sem=0.02 * scale, floor=1e-3 * scale)
    assert mll.report.status is SolveStatus.CONVERGED
    assert mll.report.iterations <= 10
    assert_within(mll.report.value, value, mll.report.value_sem, max_sem=0.01, floor=0.003)


FIXED_NOISE = torch.linspace(0.005, 0.05, 200).double()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_case", "max_sem"),
    [
        (lambda: plane(200, gpytorch.likelihoods.FixedNoiseGaussianLikelihood(FIXED_NOISE)), 0.05),
        (lambda: plane(200), 0.05),
        (lambda: regression(kernels.ScaleKernel(kernels.RBFKernel() * kernels.PeriodicKernel())), 0.3),
        (lambda: regression(kernels.ScaleKernel(kernels.RQKernel())), 0.3),
    ],
    ids=["fixed noise", "one noise", "product kernel", "rational quadratic kernel"],
)
def test_the_gradient_is_unbiased(make_case: Callable[[], Case], max_sem: float) -> None:
    case = make_case()
    _, expected = value_and_gradients(hutchinson(case, solver=Cholesky()), case)
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    tight = dataclasses.replace(SOLVER, tolerance=1e-9, probe_tolerance=1e-9, preconditioner=Vecchia(5))
    for name, samples in samples_of(case, hutchinson(case, solver=tight, warm_start=False), 20).items():
        assert_mean_within(samples, expected[name], max_sem=max_sem * scale, floor=1e-8)


@pytest.mark.parametrize("warm_start", ["extrapolated", False])
@pytest.mark.parametrize("probes", ["preconditioned", "rademacher", "features"])
def test_one_factor_a_step_serves_probes_value_and_solver(
    probes: str, warm_start, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, built, rows = plane(300), [], vecchia._rows
    monkeypatch.setattr(vecchia, "_rows", lambda *inputs: built.append(1) or rows(*inputs))
    if probes == "features":
        mll = gpi.mlls.PathwiseMarginalLogLikelihood(
            case.likelihood, case.model, solver=SOLVER, num_frequencies=20, warm_start=warm_start, generator=0
        )
    else:
        mll = hutchinson(case, warm_start=warm_start, probes=probes)
    for step in range(1, 4):
        value_and_gradients(mll, case)
        assert len(built) == step


def test_training_in_float32_goes_on_from_warm_starts() -> None:
    case = plane(600, dtype=torch.float32)
    mll = hutchinson(case, solver=ConjugateGradients(preconditioner=Vecchia(20)))
    optimizer = torch.optim.Adam(case.model.parameters(), lr=0.02)
    iterations, values = [], []
    for _ in range(8):
        optimizer.zero_grad()
        value = mll(case.model(case.x), case.y)
        (-value).backward()
        optimizer.step()
        values.append(value.item())
        iterations.append(mll.report.iterations)
        assert mll.report.status is SolveStatus.CONVERGED
    assert max(iterations) <= 6
    assert max(iterations[2:]) <= iterations[0]
    assert values[-1] > values[0]


def test_a_change_of_solver_draws_other_probes_and_a_change_back_too() -> None:
    case = plane(200)
    first = hutchinson(case)
    expected = value_and_gradients(first.variant(solver=Cholesky()), case)
    assert "order" not in (first._run.parts.get("probes") or {})
    value_and_gradients(first, case)
    assert "order" in first._run.parts.get("probes")
    low_rank = first.variant(solver=ConjugateGradients(tolerance=1e-6))
    for mll in (low_rank, low_rank.variant(solver=SOLVER)):
        value, _ = value_and_gradients(mll, case)
        assert_within(value, expected[0], mll.report.value_sem, max_sem=0.03, floor=0.003)
    assert "pivots" in low_rank._run.parts.get("probes")


def test_predictions_after_training() -> None:
    case = plane(300)
    mll = hutchinson(case)
    value_and_gradients(mll, case)
    test_x = torch.tensor([[0.1, 0.2], [-1.0, 1.5]]).double()
    with torch.no_grad():
        found = mll.posterior()(test_x)
        expected = hutchinson(case, solver=Cholesky()).posterior()(test_x)
    torch.testing.assert_close(found.mean, expected.mean, rtol=0, atol=1e-2)
    torch.testing.assert_close(found.variance, expected.variance, rtol=0.05, atol=1e-4)


def test_models_that_it_cannot_serve() -> None:
    linear = regression(kernels.ScaleKernel(kernels.LinearKernel()))
    with pytest.raises(ValueError, match="needs the inputs of a kernel"):
        value_and_gradients(hutchinson(linear), linear)
    with pytest.raises(TypeError, match="LowRankRecipe"):
        gpi.solvers.LaplaceNewton(preconditioner=Vecchia())


def test_without_a_solver_neighbours_are_looked_at_once_a_low_rank_leaves_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpy_iterative.linear_solvers.default.EXACT_BELOW", 100)
    limit = "gpy_iterative.exact.base.MOST_LEFT"
    case = plane(300)

    def sees_neighbours(mll: gpi.mlls.HutchinsonMarginalLogLikelihood) -> bool:
        value_and_gradients(mll, case)
        assert mll.report.status is SolveStatus.CONVERGED
        return any(name.startswith("logdet") and name.endswith("order") for name in mll.training_state())

    default, alternating = hutchinson(case, solver=None), hutchinson(case, solver=AlternatingProjections())
    for most_left, expected in ((math.inf, False), (1e-6, True), (math.inf, True)):  # once chosen, it stays
        monkeypatch.setattr(limit, most_left)
        assert sees_neighbours(default) == expected
        assert not sees_neighbours(alternating)
    assert default.report.iterations <= 3  # from a warm start


@pytest.mark.slow
def test_plain_loops_keep_their_neighbours_and_tolerances(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 neighbours on tiles, 30 with a far field, from the first step on."""
    monkeypatch.setattr("gpy_iterative.exact.base.MOST_LEFT", 1e-6)
    monkeypatch.setattr("gpy_iterative.preconditioners.low_rank_plus_vecchia.LARGEST_LEFT", 0.0)
    found, of = [], ControlVariate.of

    def watched(probes: Probes, operator: NoisyLinearOperator) -> ControlVariate | None:
        covariance = probes.covariance
        found.append(getattr(covariance, "local", covariance).neighbours.shape[-1])
        return of(probes, operator)

    monkeypatch.setattr(ControlVariate, "of", watched)
    case = plane(3100)
    for far_field, count in ((None, 80), (1e-6, 30)):
        found.clear()
        mll = hutchinson(case, solver=None, products=gpi.linear_operators.KernelProducts(far_field=far_field))
        for _ in range(2):
            mll(case.model(case.x), case.y).backward()
            assert max(mll.report.residual_targets, mll.report.residual_probes) <= 0.004
            assert (mll.report.far_field_error is None) == (far_field is None)
        assert found == [count, count]
