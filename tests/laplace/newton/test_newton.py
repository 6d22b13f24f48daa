"""The mode solvers against dense Newton steps, textbook iterations and one another."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.likelihoods import BernoulliLikelihood, Likelihood, StudentTLikelihood
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from torch import Tensor

from benchmarks.literal_newton import LiteralNewton
from gpy_iterative.errors import NonFiniteError
from gpy_iterative.laplace.likelihoods.curvature import BlockCurvature
from gpy_iterative.laplace.likelihoods.pointwise import NO_FLOOR
from gpy_iterative.laplace.newton import newton
from gpy_iterative.laplace.newton.base import LaplaceSolver, Problem
from gpy_iterative.laplace.newton.basis import ActionBasis, GalerkinSystem
from gpy_iterative.likelihoods import (
    LogitBernoulliLikelihood,
    PointwiseLikelihood,
    PoissonLogLikelihood,
    register_curvature,
)
from gpy_iterative.linear_operators import KernelProducts, RadialKernelLinearOperator
from gpy_iterative.linear_operators.latent import LatentPrior
from gpy_iterative.linear_operators.radial.functions import RBF
from gpy_iterative.solvers import LaplaceCholesky, LaplaceNewton, LaplaceSolution, SolveStatus
from tests.laplace.cases import LIKELIHOODS, Case, LaplaceModel, case, inputs

KINDS = [(name, "own") for name in LIKELIHOODS] + [("softmax", "shared"), ("softmax", "coregionalised")]


def poisson_problem(
    x: Tensor, y: Tensor, lengthscale: float, outputscale: float
) -> tuple[LatentPrior, PointwiseLikelihood]:
    operator = RadialKernelLinearOperator(
        x / lengthscale, torch.tensor(outputscale, dtype=x.dtype), function=RBF, products=KernelProducts()
    )
    prior = LatentPrior(operator, torch.zeros(len(x), 1, dtype=x.dtype))
    return prior, PointwiseLikelihood(PoissonLogLikelihood(), y, 1)


def dense_inverse(problem: Case, solution: LaplaceSolution) -> tuple[Tensor, Tensor]:
    """K and P = R (I + R^T K R)^-1 R^T at the solution's mode."""
    kernel = problem.prior().operator.to_dense()
    w = torch.block_diag(*problem.pointwise().curvature(solution.latent, NO_FLOOR).blocks())
    return kernel, torch.linalg.solve(torch.eye(len(w), dtype=w.dtype) + w @ kernel, w)


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_mode_is_stationary_and_full_rank_is_exact(name: str, kind: str) -> None:
    problem = case(name, n=20, kind=kind)
    prior, likelihood = problem.prior(), problem.pointwise()
    exact = LaplaceCholesky().solve(prior, likelihood)
    found = LaplaceNewton(tolerance=1e-10, num_covariance_actions=80, max_outer=100).solve(prior, likelihood)
    for solution in (exact, found):
        assert solution.converged
        assert (likelihood.gradient(solution.latent) - solution.value).abs().max() < 1e-8
        kernel, precision = dense_inverse(problem, solution)
        torch.testing.assert_close(solution.latent.flatten() - prior.mean.flatten(), kernel @ solution.value.flatten())
        reduction = solution.inverse.image_of_root @ solution.inverse.image_of_root.mT
        torch.testing.assert_close(reduction, kernel @ precision @ kernel, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(kernel @ solution.inverse.actions, solution.inverse.images, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(found.latent, exact.latent, rtol=1e-7, atol=1e-7)
    assert found.log_joint == pytest.approx(exact.log_joint, abs=1e-8)


@pytest.mark.parametrize(("n", "count", "outputscale"), [(200, 1e4, 1.0), (40, 1e7, 50.0), (40, 1e8, 1.0)])
def test_large_counts_with_a_log_link(n: int, count: float, outputscale: float) -> None:
    """The first step is as many times too long as counts are large; later ones change psi by less than its rounding."""
    x = torch.linspace(-2, 2, n, dtype=torch.float64).unsqueeze(-1)
    y = (count * torch.exp(torch.sin(3 * x[:, 0]))).round()
    prior, likelihood = poisson_problem(x, y, 0.5, outputscale)
    exact, found = LaplaceCholesky().solve(prior, likelihood), LaplaceNewton().solve(prior, likelihood)
    assert exact.stationarity < 1e-8
    assert found.converged
    for solution in (exact, found):
        torch.testing.assert_close(solution.latent[:, 0], y.log(), rtol=0, atol=0.02)


@pytest.mark.parametrize("outputscale", [1.0, 10.0])
def test_counts_of_mixed_size_take_few_steps(outputscale: float) -> None:
    """A floor of 1e-4 of the largest curvature holds small counts back: 50 steps were not enough."""
    x = torch.linspace(-2, 2, 40, dtype=torch.float64).unsqueeze(-1)
    y = torch.exp(torch.sin(3 * x[:, 0])).round()
    y[::10] = 1e5
    prior, likelihood = poisson_problem(x, y, 0.3, outputscale)
    exact, found = LaplaceCholesky().solve(prior, likelihood), LaplaceNewton().solve(prior, likelihood)
    assert found.converged
    assert found.num_outer <= 25
    torch.testing.assert_close(found.latent, exact.latent, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["counts", "outliers"])
def test_modes_end_at_the_rounding_of_latent_values(name: str) -> None:
    """Where latent values need all digits, the gradient has few: no step brings it below 1e-10."""
    x = torch.linspace(0, 1, 100, dtype=torch.float64).unsqueeze(-1)
    wave = torch.sin(6 * x[:, 0])
    prior, likelihood = poisson_problem(x, (1e8 * wave.exp()).round(), 0.003, 1.0)
    mean = torch.full((100, 1), 18.0, dtype=torch.float64)
    if name == "outliers":
        likelihood = PointwiseLikelihood(StudentTLikelihood().double(), 1e8 + wave, 1)
        mean = torch.full((100, 1), 1e8, dtype=torch.float64)
    solution = LaplaceCholesky().solve(LatentPrior(prior.operator, mean), likelihood)
    assert solution.converged
    assert 1e-10 < solution.stationarity < 1e-6
    assert solution.num_outer < 20


@pytest.mark.parametrize("solver", [LaplaceCholesky(), LaplaceNewton()])
def test_modes_among_outliers_take_few_steps(solver: LaplaceCholesky | LaplaceNewton) -> None:
    """Fisher information, which the covariance takes, is far from the Hessian there: its steps end far from the mode."""
    x = torch.linspace(-2, 2, 60, dtype=torch.float64).unsqueeze(-1)
    y = torch.sin(3 * x[:, 0]) + 0.01 * torch.cos(37 * x[:, 0])
    y[::4] += 10 * torch.cos(5 * x[::4, 0])
    student = StudentTLikelihood().double()
    student.noise, student.deg_free = 1e-4, 4.0
    prior = poisson_problem(x, y.abs().round(), 0.3, 1.0)[0]
    solution = solver.solve(prior, PointwiseLikelihood(student, y, 1))
    assert solution.converged
    assert solution.num_outer <= 30
    expected = PointwiseLikelihood(student, y, 1).curvature(solution.latent, NO_FLOOR)
    information = (student.deg_free + 1) / ((student.deg_free + 3) * student.noise)
    torch.testing.assert_close(solution.curvature.blocks(), expected.blocks())
    torch.testing.assert_close(expected.blocks().flatten(), information.detach().expand(60))


def test_unequal_class_kernels_need_the_range() -> None:
    """K + W^+ in the full space, as published, takes the unobserved sum of the classes for observed without noise."""
    problem = case("softmax", n=20)
    prior, likelihood = problem.prior(), problem.pointwise()
    solution = LaplaceNewton(tolerance=1e-10, num_covariance_actions=60).solve(prior, likelihood)
    kernel, precision = dense_inverse(problem, solution)
    exact = (kernel - kernel @ precision @ kernel).diagonal()
    ours = kernel.diagonal() - solution.inverse.image_of_root.square().sum(-1)
    torch.testing.assert_close(ours, exact, rtol=1e-6, atol=1e-6)
    pseudo_inverse = solution.curvature.pinv(torch.eye(60, dtype=torch.float64))
    published = (kernel - kernel @ torch.linalg.solve(kernel + pseudo_inverse, kernel)).diagonal()
    assert ((exact - published) / exact).max() > 0.2


def newton_system(problem: Case) -> tuple[Tensor, Tensor, Tensor]:
    """K, W (diagonal) and the right-hand side of the first Newton step from f = m."""
    prior, likelihood = problem.prior(), problem.pointwise()
    w = likelihood.curvature(prior.mean, NO_FLOOR).blocks().flatten()
    return prior.operator.to_dense(), w, likelihood.gradient(prior.mean).flatten() / w


def undamped(problem: Case, solver: LaplaceNewton) -> tuple[Tensor, int]:
    """The first Newton step, from f = m, and its kernel products."""
    posed = Problem(problem.prior(), problem.pointwise())
    steps, mean = solver._step_solver(posed), posed.mean
    curvature = posed.likelihood.step_curvature(posed.by_point(mean))
    return steps.step(posed.evaluated(mean, torch.zeros_like(mean)), curvature)[0], steps.num_products


def test_weighted_residuals_are_conjugate_gradients_on_the_whitened_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newton, "FORCING", 1e-12)
    problem = case("poisson-log", n=25)
    kernel, w, rhs = newton_system(problem)
    root = w.sqrt()
    matrix = torch.eye(25, dtype=torch.float64) + root[:, None] * kernel * root
    x, r = torch.zeros(25, dtype=torch.float64), root * rhs
    d = r.clone()
    for _ in range(6):
        image = matrix @ d
        length = (r @ r) / (d @ image)
        x, following = x + length * d, r - length * image
        d, r = following + (following @ following) / (r @ r) * d, following
    solver = LaplaceNewton(max_outer=1, max_inner=6)
    v, products = undamped(problem, solver)
    torch.testing.assert_close(v, root * x, rtol=1e-7, atol=1e-8)
    solution = solver.solve(problem.prior(), problem.pointwise())
    assert products == solution.num_kernel_products == 6
    assert solution.status is SolveStatus.BUDGET_EXHAUSTED


def test_published_residuals_are_conjugate_gradients() -> None:
    problem = case("poisson-log", n=25)
    kernel, w, rhs = newton_system(problem)
    matrix = kernel + torch.diag(1 / w)
    x, r = torch.zeros(25, dtype=torch.float64), rhs.clone()
    d = r.clone()
    for _ in range(6):
        image = matrix @ d
        length = (r @ r) / (d @ image)
        x, following = x + length * d, r - length * image
        d, r = following + (following @ following) / (r @ r) * d, following
    solution = LiteralNewton(max_outer=1, max_inner=6).solve(problem.prior(), problem.pointwise())
    torch.testing.assert_close(solution.value.flatten(), x, rtol=1e-7, atol=1e-8)
    assert solution.num_kernel_products == 13


def test_recycled_subspaces_are_solved_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newton, "FORCING", 1e-12)
    problem = case("poisson-log", n=25)
    prior, likelihood = problem.prior(), problem.pointwise()
    first = LaplaceNewton(max_outer=1, max_inner=6).solve(prior, likelihood)
    basis = ActionBasis(25, 10, prior.mean)
    basis.replace(first.inverse.actions, first.inverse.images)
    curvature = likelihood.curvature(prior.mean + 0.7, NO_FLOOR)
    system = GalerkinSystem(basis, curvature)
    rhs = torch.sin(torch.arange(25.0, dtype=torch.float64))
    v = basis.actions @ system.solve(rhs)
    residual = rhs - prior.operator.to_dense() @ v - curvature.pinv(v.unsqueeze(-1)).squeeze(-1)
    assert (basis.actions.mT @ residual).abs().max() < 1e-10
    # One by one, as the inner loop does.
    again = ActionBasis(25, 10, prior.mean)
    grown = GalerkinSystem(again, curvature)
    coefficients = torch.zeros(0, dtype=torch.float64)
    for action, image in zip(first.inverse.actions.mT, first.inverse.images.mT, strict=True):
        change = grown.append(action, image, rhs.unsqueeze(-1)).squeeze(-1)
        coefficients = torch.cat([coefficients, coefficients.new_zeros(1)]) + change
    torch.testing.assert_close(again.actions @ coefficients, v)


def test_an_action_that_is_nearly_known_is_solved_with_the_others() -> None:
    """One kernel function and hardly any noise: a second action adds rounding, unless all are factored again."""
    noise, kernel = 1e-12, torch.full((6, 6), 1e3, dtype=torch.float64)
    curvature, actions = BlockCurvature(torch.full((6, 1), 1 / noise).double()), torch.eye(6, dtype=torch.float64)
    rhs = torch.sin(torch.arange(6.0, dtype=torch.float64)).unsqueeze(-1)
    system = GalerkinSystem(ActionBasis(6, 6, kernel), curvature)
    coefficients = rhs.new_zeros(0, 1)
    for action, image in zip(actions[:2], kernel[:2], strict=True):
        coefficients = torch.cat([coefficients, rhs.new_zeros(1, 1)]) + system.append(action, image, rhs)
    torch.testing.assert_close(coefficients, system.solve(rhs))
    mean = (rhs[0] + rhs[1]) / 4e3  # each half of the least norm's solution
    torch.testing.assert_close(coefficients, mean.expand(2, 1), check_stride=False)


def test_computational_uncertainty_is_never_negative_and_shrinks() -> None:
    problem = case("logit", n=25)
    prior, likelihood = problem.prior(), problem.pointwise()
    solution = LaplaceNewton(tolerance=1e-8).solve(prior, likelihood)
    kernel, precision = dense_inverse(problem, solution)
    basis = ActionBasis(25, 25, prior.mean)
    system = GalerkinSystem(basis, solution.curvature)
    before = kernel
    for action, image in zip(solution.inverse.actions.mT, solution.inverse.images.mT, strict=True):
        system.append(action, image, torch.zeros(25, dtype=torch.float64))
        root = basis.images @ system.transform
        now = kernel - root @ root.mT
        assert torch.linalg.eigvalsh(now - (kernel - kernel @ precision @ kernel)).min() > -1e-8
        assert torch.linalg.eigvalsh(before - now).min() > -1e-8
        before = now


def test_compression_keeps_the_mean_and_most_of_the_variance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newton, "FORCING", 1e-12)
    problem = case("poisson-log", n=40)
    prior, likelihood = problem.prior(), problem.pointwise()
    solution = LaplaceNewton(max_outer=1, max_inner=20).solve(prior, likelihood)
    curvature = likelihood.curvature(prior.mean, NO_FLOOR)
    kernel, rhs = prior.operator.to_dense(), torch.sin(torch.arange(40.0, dtype=torch.float64))

    def system() -> GalerkinSystem:
        basis = ActionBasis(40, 20, prior.mean)
        basis.replace(solution.inverse.actions, solution.inverse.images)
        return GalerkinSystem(basis, curvature)

    def reduction(galerkin: GalerkinSystem) -> float:
        return float((galerkin.basis.images @ galerkin.transform).square().sum())

    whole = system()
    mean = whole.basis.actions @ whole.solve(rhs)
    best = torch.linalg.svdvals(whole.basis.images @ whole.transform).square()
    for rank in (5, 1):
        smaller = system()
        smaller.compress(rhs, rank)
        assert smaller.basis.count == rank
        torch.testing.assert_close(kernel @ smaller.basis.actions, smaller.basis.images)
        identity = torch.eye(rank, dtype=torch.float64)
        torch.testing.assert_close(smaller.basis.actions.mT @ smaller.basis.actions, identity)
        torch.testing.assert_close(smaller.basis.actions @ smaller.solve(rhs), mean, rtol=1e-8, atol=1e-8)
        # The mean's direction takes the place of the least of the directions that matter most to the variance.
        assert best[: rank - 1].sum() - 1e-9 <= reduction(smaller) <= best[:rank].sum() + 1e-9


@pytest.mark.parametrize("max_rank", [1, 4])
def test_small_ranks_reach_the_mode(max_rank: int) -> None:
    problem = case("logit", n=40)
    prior, likelihood = problem.prior(), problem.pointwise()
    exact = LaplaceCholesky().solve(prior, likelihood)
    solver = LaplaceNewton(max_rank=max_rank, tolerance=1e-7, max_outer=200)
    found = solver.solve(prior, likelihood)
    assert found.converged
    assert found.inverse.actions.shape[-1] <= max_rank
    torch.testing.assert_close(found.latent, exact.latent, rtol=1e-5, atol=1e-5)


def poisson_draw(seed: int) -> tuple[Tensor, Tensor]:
    """The published study's setting: 100 points on [0, 1], RBF with lengthscale .1 and outputscale 5."""
    x = torch.linspace(0, 1, 100, dtype=torch.float64).unsqueeze(-1)
    kernel = 5 * torch.exp(-0.5 * (x - x.mT).square() / 0.01) + 1e-8 * torch.eye(100, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    f = torch.linalg.cholesky(kernel) @ torch.randn(100, generator=generator, dtype=torch.float64)
    return x, torch.poisson(f.exp(), generator=generator)


@pytest.mark.parametrize("max_inner", [5, 10, 20, 1])
def test_hard_counts_converge_from_the_prior_mean(max_inner: int) -> None:
    x, y = poisson_draw(0)
    y = y * (280 / y.max())
    y = y.round()
    prior, likelihood = poisson_problem(x, y, 0.1, 5.0)
    solution = LaplaceNewton(max_inner=max_inner, max_outer=100, tolerance=1e-6).solve(prior, likelihood)
    assert solution.converged
    assert torch.isfinite(solution.latent).all()
    exact = LaplaceCholesky().solve(prior, likelihood)
    torch.testing.assert_close(solution.latent, exact.latent, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["probit", "logit", "softmax"])
def test_degenerate_data(name: str) -> None:
    for n in (1, 3, 8):
        problem = case(name, n=n)
        problem.y = torch.ones_like(problem.y)  # all of one class
        for solver in (LaplaceCholesky(), LaplaceNewton()):
            assert solver.solve(problem.prior(), problem.pointwise()).converged
    problem = case("logit", n=16)
    problem.x[8:] = problem.x[:8]
    problem.y[:8], problem.y[8:] = 0.0, 1.0  # every input twice, with both labels
    problem.model.mean_module.initialize(constant=0.0)
    for solver in (LaplaceCholesky(), LaplaceNewton()):
        solution = solver.solve(problem.prior(), problem.pointwise())
        assert solution.latent.abs().max() < 1e-6


@pytest.mark.parametrize("noise", [1e-2, 1e-4, 1e-6])
def test_little_noise_is_no_obstacle_to_dense_steps(noise: float) -> None:
    problem = case("gaussian", n=40)
    problem.likelihood.noise_covar.register_constraint("raw_noise", GreaterThan(1e-8))
    problem.likelihood.noise = noise
    solution = LaplaceCholesky().solve(problem.prior(), problem.pointwise())
    assert solution.converged
    system = problem.prior().operator.to_dense() + noise * torch.eye(40, dtype=torch.float64)
    exact = torch.linalg.solve(system, problem.y - problem.prior().mean.flatten())
    torch.testing.assert_close(solution.value.flatten(), exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))


@pytest.mark.parametrize("n", [60, 200])
def test_steps_that_overshoot_below_the_rounding_of_the_density(n: int) -> None:
    """Fisher's information is not the Hessian: full steps would circle around the mode where psi cannot tell any more."""
    problem = case("beta", n=n)
    prior, likelihood = problem.prior(), problem.pointwise()
    for solver in (LaplaceCholesky(), LaplaceNewton(tolerance=1e-9, max_outer=100)):
        assert solver.solve(prior, likelihood).converged


class Pairs(Likelihood):
    """Two independent counts for each point."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> torch.distributions.Independent:
        return torch.distributions.Independent(torch.distributions.Poisson(function_samples.exp()), 1)


@pytest.mark.parametrize("share", [0.3, 0.5])
@pytest.mark.parametrize("solver", [LaplaceCholesky(), LaplaceNewton(tolerance=1e-10)])
def test_a_curvature_below_the_hessian(share: float, solver: LaplaceSolver) -> None:
    """At a half, full steps reflect at the maximum: psi hardly rises. Below, they overshoot even where psi is rounding."""
    register_curvature(
        Pairs,
        lambda _, f, y: (y * f - f.exp()).sum(-1),
        fisher=lambda _, f, y: torch.diag_embed(share * f.exp()),
        log_concave=False,
        num_latents=2,
    )
    x = inputs(20)
    signal = torch.stack([torch.sin(1.5 * x[:, 0]), 0.5 * x[:, 1]], dim=-1)
    y = (signal + 3 + 0.3 * torch.cos(37.0 * torch.arange(40.0).view(20, 2))).exp().round()
    problem = Case(LaplaceModel(x, y, Pairs(), 2, "multitask"), x, y)
    assert solver.solve(problem.prior(), problem.pointwise()).converged


class Amounts(_OneDimensionalLikelihood):
    """Gamma with mean exp(f), whose rate torch refuses where it underflows to zero."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> torch.distributions.Gamma:
        rate = torch.exp(-function_samples)
        return torch.distributions.Gamma(torch.ones_like(rate), rate, validate_args=True)  # torch.compile turns it off


@pytest.mark.parametrize("solver", [LaplaceCholesky(), LaplaceNewton()])
def test_steps_that_the_likelihood_refuses_are_shortened(
    solver: LaplaceCholesky | LaplaceNewton, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.linspace(-2, 2, 30, dtype=torch.float64).unsqueeze(-1)
    y, refused, forward = torch.exp(10 * torch.sin(3 * x[:, 0]) - 14), [], Amounts.forward

    def watched(likelihood: Amounts, function_samples: Tensor) -> torch.distributions.Gamma:
        try:
            return forward(likelihood, function_samples)
        except ValueError:
            refused.append(function_samples)
            raise

    monkeypatch.setattr(Amounts, "forward", watched)
    prior, _ = poisson_problem(x, torch.zeros_like(y), 0.5, 1e6)
    likelihood = PointwiseLikelihood(Amounts(), y, 1)
    solution = solver.solve(prior, likelihood)
    assert refused
    assert solution.converged
    far = LatentPrior(prior.operator, torch.full_like(prior.mean, 1e3))
    with pytest.raises(ValueError, match="parameter rate"):
        solver.solve(far, likelihood)


def test_huge_outputscale_and_wrong_labels() -> None:
    problem = case("probit", n=150)
    problem.model.covar_module.outputscale = 1e5
    problem.model.covar_module.base_kernel.lengthscale = 0.3
    problem.y[::9] = 1 - problem.y[::9]
    prior, likelihood = problem.prior(), problem.pointwise()
    # As for more points, few inner steps are far from the full Newton step: some seventy steps are necessary.
    found = LaplaceNewton(max_inner=2).solve(prior, likelihood)
    assert found.converged
    exact = LaplaceCholesky().solve(prior, likelihood)
    assert found.log_joint == pytest.approx(exact.log_joint, rel=1e-6)


def test_float32_products_reach_their_tolerance() -> None:
    problem = case("softmax", n=50, dtype=torch.float32)
    found = LaplaceNewton(tolerance=1e-4).solve(problem.prior(), problem.pointwise())
    assert found.converged
    assert found.value.dtype == torch.float64
    high = case("softmax", n=50)
    exact = LaplaceCholesky().solve(high.prior(), high.pointwise())
    torch.testing.assert_close(found.latent, exact.latent, rtol=1e-2, atol=1e-2)


def test_rounding_of_float32_products_leaves_nothing_unsolved_within_the_subspace() -> None:
    """The search stagnated after hundreds of products: rounding makes S^T K S asymmetric."""
    problem = case("poisson-log", n=800, dtype=torch.float32)
    problem.y = 1000 * problem.y
    problem.model.mean_module.initialize(constant=problem.y.mean().log())
    found = LaplaceNewton().solve(problem.prior(), problem.pointwise())
    assert found.converged
    assert found.num_kernel_products < 200


def test_warm_starts_and_their_absence() -> None:
    problem = case("logit", n=30)
    prior, likelihood = problem.prior(), problem.pointwise()
    solver = LaplaceNewton()
    cold = solver.solve(prior, likelihood)
    warm = solver.solve(prior, likelihood, initial_weights=cold.value)
    assert warm.num_outer == 0
    assert warm.num_kernel_products <= 1 + solver.max_inner
    for bad in (torch.full_like(cold.value, torch.nan), cold.value[:3], 1e6 * cold.value):
        assert solver.solve(prior, likelihood, initial_weights=bad).converged


@pytest.mark.parametrize("name", ["logit", "softmax"])
def test_the_covariance_does_not_depend_on_where_the_mode_was_looked_for(name: str) -> None:
    """A start at the mode needs no Newton step."""
    problem = case(name, n=30)
    prior, likelihood = problem.prior(), problem.pointwise()
    solver = LaplaceNewton(max_inner=30)
    cold = solver.solve(prior, likelihood)
    warm = solver.solve(prior, likelihood, initial_weights=cold.value)
    reductions = [float(solution.inverse.image_of_root.square().sum()) for solution in (cold, warm)]
    assert reductions[1] > 0.9 * reductions[0]


def test_actions_that_span_everything_are_orthonormal() -> None:
    """The last ones are nearly in the span of the others: one orthogonalisation would not find where the space ends."""
    x = inputs(60)
    problem = poisson_problem(x, (1 + x[:, 0]).exp().round(), 1.0, 5.0)
    solution = LaplaceNewton(num_covariance_actions=120).solve(*problem)
    actions = solution.inverse.actions
    assert solution.inverse.rank == 60
    torch.testing.assert_close(actions.mT @ actions, torch.eye(60, dtype=torch.float64), rtol=0, atol=1e-13)


@pytest.mark.parametrize("solver", [LaplaceCholesky(), LaplaceNewton()])
def test_a_warm_start_below_the_prior_mean_is_not_taken(solver: LaplaceCholesky | LaplaceNewton) -> None:
    """Weights of short lengthscales are latent values far too large at long ones, where the rate overflows."""
    x = inputs(100)
    y = (1 + x[:, 0]).exp().round()
    prior, likelihood = poisson_problem(x, y, 1.0, 1.0)
    weights = solver.solve(prior, likelihood).value
    prior, likelihood = poisson_problem(x, y, 10.0, 10.0)
    cold, warm = (solver.solve(prior, likelihood, initial_weights=start) for start in (None, weights))
    assert warm.converged
    assert warm.num_outer == cold.num_outer
    torch.testing.assert_close(warm.latent, cold.latent)


def test_few_actions_know_the_variance_of_saturated_points_in_float32() -> None:
    """Beside W^+ of saturated points as large as in float64, actions that mix points would count as mere noise."""
    x = inputs(200)
    labels = (x.sum(-1) > 0).float()
    labels[::20] = 1 - labels[::20]
    operator = poisson_problem(x.float(), labels, 1.0, 1e3)[0].operator
    prior = LatentPrior(operator, torch.zeros(200, 1))
    likelihood = PointwiseLikelihood(BernoulliLikelihood(), labels, 1)
    found = LaplaceNewton().solve(prior, likelihood)
    exact = LaplaceCholesky().solve(LaplaceCholesky().prior_for(prior), likelihood)
    ours, true = (float(each.inverse.covariance_blocks(prior).mean()) for each in (found, exact))
    assert ours < 1.6 * true


def test_large_counts_of_a_float32_model_are_searched_in_float64() -> None:
    """Beside curvatures of 1e5, rounding of K in float32 is noise: a search ended 100 nats off after 50 steps."""
    x = inputs(100)
    y = (11 + x[:, 0]).exp().round()
    problem, exact = poisson_problem(x.float(), y, 0.3, 20.0), poisson_problem(x.float().double(), y, 0.3, 20.0)
    solver, generator = LaplaceNewton(), torch.Generator()
    hidden = solver.solve(*problem)
    assert hidden.status is SolveStatus.STAGNATED
    assert "float64" in solver.advice(hidden, torch.float32)
    prior, found = solver.mode(*problem, initial_weights=None, generator=generator, callback=None)
    expected = LaplaceCholesky().solve(*exact)
    assert found.converged
    assert prior.operator.dtype == prior.mean.dtype == torch.float64
    torch.testing.assert_close(found.latent, expected.latent, rtol=1e-6, atol=1e-6)
    assert Problem(*problem).is_rounded(found.curvature)
    # Refinements stay in the mode's precision.
    assert not Problem(*problem, initial_solution=found).is_rounded(found.curvature)
    few, few_likelihood = poisson_problem(x.float(), (1 + x[:, 0]).exp().round(), 0.3, 20.0)
    prior, found = solver.mode(few, few_likelihood, initial_weights=None, generator=generator, callback=None)
    assert found.converged
    assert prior is few


def test_callbacks_are_told() -> None:
    problem = case("logit", n=30)
    told = []
    solution = LaplaceNewton().solve(problem.prior(), problem.pointwise(), callback=told.append)
    assert [step.iteration for step in told] == list(range(1, solution.num_outer + 1))
    assert told[-1].epochs == solution.num_kernel_products
    assert told[-1].residual_norms["mode"] == solution.stationarity


def test_published_algorithms_overflow_where_they_do() -> None:
    x, y = poisson_draw(0)
    prior, likelihood = poisson_problem(x, (y * (280 / y.max())).round(), 0.1, 5.0)
    with pytest.raises(NonFiniteError):
        LiteralNewton(max_inner=5, max_outer=20).solve(prior, likelihood)


def test_published_algorithms_converge_where_they_do() -> None:
    problem = case("logit", n=30)
    prior, likelihood = problem.prior(), problem.pointwise()
    literal = LiteralNewton(tolerance=1e-6, max_inner=30).solve(prior, likelihood)
    assert literal.converged
    exact = LaplaceCholesky().solve(prior, likelihood)
    torch.testing.assert_close(literal.latent, exact.latent, rtol=1e-3, atol=1e-3)
    root = literal.inverse.root
    torch.testing.assert_close(literal.inverse.image_of_root, prior.operator.to_dense() @ root, rtol=1e-5, atol=1e-6)
    ranked = LiteralNewton(max_inner=30, max_rank=5).solve(prior, likelihood)
    assert ranked.converged


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_outer": 0}, "max_outer"),
        ({"max_inner": 0}, "max_inner"),
        ({"max_rank": 0}, "max_rank"),
        ({"tolerance": 0.0}, "tolerance"),
        ({"tolerance": 1.5}, "tolerance"),
        ({"num_covariance_actions": -1}, "num_covariance_actions"),
    ],
)
def test_options_out_of_range(options: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        LaplaceNewton(**options)


def test_numbers_that_are_not_finite() -> None:
    problem = case("logit", n=10)
    prior, likelihood = problem.prior(), problem.pointwise()
    broken = RadialKernelLinearOperator(
        torch.full((10, 1), torch.nan, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64), function=RBF
    )
    with pytest.raises(NonFiniteError, match="product with the kernel"):
        LaplaceNewton().solve(replace(prior, operator=broken), likelihood)
    with pytest.raises(NonFiniteError, match="kernel matrix is not finite"):
        LaplaceCholesky().solve(replace(prior, operator=broken), likelihood)
    counts = case("poisson-log", n=10)
    mean = prior.mean.clone()
    mean[3] = 1000.0
    with pytest.raises(NonFiniteError, match=r"not finite at datum 3 \(latent value 1e\+03\): .* the prior's mean"):
        LaplaceNewton().solve(replace(counts.prior(), mean=mean), counts.pointwise())
    mean[3] = 0.0
    mean[4] = torch.zeros(()).log()  # of an exposure
    for solver in (LaplaceNewton(), LaplaceCholesky()):
        with pytest.raises(
            NonFiniteError, match=r"mean is -inf at datum 4: .* leave out rows whose exposure is not above"
        ):
            solver.solve(replace(counts.prior(), mean=mean), counts.pointwise())


def test_logit_is_what_it_says() -> None:
    f = torch.tensor([[1.2]], dtype=torch.float64)
    likelihood = PointwiseLikelihood(LogitBernoulliLikelihood(), torch.ones(1), 1)
    p = torch.sigmoid(f)
    torch.testing.assert_close(likelihood.gradient(f), 1 - p)
    torch.testing.assert_close(likelihood.hessian(f).detach().flatten(), (p * (1 - p)).flatten())
