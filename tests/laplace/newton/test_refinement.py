"""Refinements against a dense twin of the fixed point, its variational bound, and the exact posterior's moments."""

import math
from collections.abc import Callable
from functools import cache

import gpytorch.likelihoods as gl
import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from gpy_iterative.laplace.likelihoods.quadrature import normal_rule
from gpy_iterative.likelihoods import LogitBernoulliLikelihood, PointwiseLikelihood, SmoothedLikelihood
from gpy_iterative.linear_operators.latent import LatentPrior
from gpy_iterative.solvers import LaplaceCholesky, LaplaceNewton, LaplaceSolution
from tests.laplace.cases import Case, case, inputs

FULL = LaplaceNewton(tolerance=1e-11, max_rank=60, num_covariance_actions=60)


def _student(y: Tensor, f: Tensor, problem: Case) -> Tensor:
    nu, scale = problem.likelihood.deg_free.detach(), problem.likelihood.noise.detach().sqrt()
    return torch.distributions.StudentT(nu, f[..., 0], scale).log_prob(y)


def _student_information(problem: Case) -> Tensor:
    nu = problem.likelihood.deg_free.detach()
    return (nu + 1) / ((nu + 3) * problem.likelihood.noise.detach())


#: name -> log p(y | f) for latents [*s, n, C], written down once more
LOG_PROBS: dict[str, Callable[[Tensor, Tensor, Case], Tensor]] = {
    "probit": lambda y, f, _: torch.special.log_ndtr((2 * y - 1) * f[..., 0]),
    "logit": lambda y, f, _: -torch.log1p(torch.exp((1 - 2 * y) * f[..., 0])),
    "poisson-log": lambda y, f, _: y * f[..., 0] - f[..., 0].exp() - torch.lgamma(y + 1),
    "student": _student,
    "softmax": lambda y, f, _: f[..., range(len(y)), y] - torch.logsumexp(f, -1),
}


def refine(
    solver: LaplaceCholesky | LaplaceNewton, prior: LatentPrior, point: PointwiseLikelihood, solution: LaplaceSolution
) -> LaplaceSolution:
    smoothed = SmoothedLikelihood(point, solution.inverse.covariance_blocks(prior))
    return solver.solve(prior, smoothed, initial_solution=solution)


def refined(
    prior: LatentPrior, point: PointwiseLikelihood, count: int, solver: LaplaceCholesky | LaplaceNewton
) -> list[LaplaceSolution]:
    """Laplace's solution, and `count` refinements."""
    solutions = [solver.solve(prior, point)]
    for _ in range(count):
        solutions.append(refine(solver, prior, point, solutions[-1]))
    return solutions


def covariance(prior: LatentPrior, solution: LaplaceSolution) -> Tensor:
    """[n C, n C] at the training points."""
    return prior.operator.to_dense().double() - solution.inverse.image_of_root @ solution.inverse.image_of_root.mT


def wide(name: str) -> Case:
    """Few points, unequal kernels, and latent variances that a refinement notices."""
    problem = case(name, n=9)
    problem.model.covar_module.outputscale = 4 * problem.model.covar_module.outputscale.detach()
    return problem


@cache
def twin(name: str, count: int) -> list[tuple[Tensor, Tensor]]:
    """Mean and covariance of Laplace's approximation and of `count` refinements: Newton's method on dense matrices, with
    derivatives by autograd.
    """
    problem = wide(name)
    prior, latents = problem.prior(), problem.model.latents

    def log_prob(f: Tensor) -> Tensor:
        return LOG_PROBS[name](problem.y, f, problem)

    kernel, m = prior.operator.to_dense(), prior.mean.flatten()
    nodes, weights = normal_rule(latents)
    found: list[tuple[Tensor, Tensor]] = []
    f, root = m.clone(), torch.zeros(len(prior.mean), latents, latents, dtype=torch.float64)
    for _ in range(count + 1):

        def smoothed(flat: Tensor, root: Tensor = root) -> Tensor:
            shifts = torch.einsum("ncd,sd->snc", root, nodes)
            return (weights[:, None] * log_prob(flat.view(-1, latents) + shifts)).sum()

        for _ in range(30):
            gradient = torch.func.grad(smoothed)(f)
            curvature = -torch.func.hessian(smoothed)(f)
            if isinstance(problem.likelihood, gl.StudentTLikelihood):
                curvature = torch.eye(len(f), dtype=torch.float64) * _student_information(problem)
            system = torch.eye(len(f), dtype=torch.float64) + kernel @ curvature
            full = torch.linalg.solve(system, kernel @ (gradient + curvature @ (f - m))) - (f - m)
            f = f + full / max(1.0, float(full.abs().max()) / 2)
            if float(full.abs().max()) < 1e-9:
                break
        known = torch.linalg.solve(system, kernel)
        found.append((f, known))
        blocks = torch.stack([known[i : i + latents, i : i + latents] for i in range(0, len(f), latents)])
        values, vectors = torch.linalg.eigh((blocks + blocks.mT) / 2)
        root = vectors @ torch.diag_embed(values.sqrt()) @ vectors.mT
    return found


@pytest.mark.slow
@pytest.mark.parametrize("solver", [LaplaceCholesky(tolerance=1e-12), FULL], ids=["dense", "newton"])
@pytest.mark.parametrize("name", LOG_PROBS)
def test_refinements_are_those_of_a_dense_twin(name: str, solver: LaplaceCholesky | LaplaceNewton) -> None:
    problem = wide(name)
    prior, expected = problem.prior(), twin(name, 2)
    found = refined(prior, problem.pointwise(), 2, solver)
    assert (expected[1][0] - expected[0][0]).abs().max() > 1e-2
    for (mean, known), solution in zip(expected, found, strict=True):
        assert solution.converged
        torch.testing.assert_close(solution.latent.flatten(), mean, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(covariance(prior, solution), known, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["own", "shared", "multitask", "coregionalised"])
def test_marginals_are_blocks_of_the_covariance(kind: str) -> None:
    problem = case("softmax", n=10, kind=kind)
    prior = problem.prior()
    solution = LaplaceNewton(max_rank=7).solve(prior, problem.pointwise())
    whole = covariance(prior, solution)
    blocks = torch.stack([whole[i : i + 3, i : i + 3] for i in range(0, 30, 3)])
    torch.testing.assert_close(solution.inverse.covariance_blocks(prior), blocks)


@pytest.mark.parametrize("solver", [LaplaceCholesky(), FULL], ids=["dense", "newton"])
def test_gaussian_noise_needs_no_refinement(solver: LaplaceCholesky | LaplaceNewton) -> None:
    problem = case("gaussian", n=20)
    prior, tasks = problem.prior(), case("softmax", n=10)
    likelihood = gl.MultitaskGaussianLikelihood(num_tasks=3).double()
    several = PointwiseLikelihood(likelihood, torch.stack([tasks.x[:, 0], tasks.x[:, 1], tasks.y - 1.0], -1), 3)
    for prior, point in ((problem.prior(), problem.pointwise()), (tasks.prior(), several)):
        first, second = refined(prior, point, 1, solver)
        torch.testing.assert_close(second.latent, first.latent, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(covariance(prior, second), covariance(prior, first), rtol=1e-10, atol=1e-10)
        assert second.stats.iterations == 0


def binary(n: int, outputscale: float) -> tuple[LatentPrior, PointwiseLikelihood, Tensor]:
    """A prior with Matern-1/2 covariance, labels with a logit link, and the dense K."""
    x = inputs(n)
    y = (torch.sin(1.5 * x[:, 0]) + 0.5 * x[:, 1] > 0).double()
    y[::7] = 1 - y[::7]
    kernel = outputscale * torch.exp(-torch.cdist(x, x) / 1.5)
    problem = case("logit", n=n)
    problem.model.covar_module = _Fixed(kernel)
    return problem.prior(), PointwiseLikelihood(LogitBernoulliLikelihood(), y, 1), kernel


class _Fixed(torch.nn.Module):
    """A covariance that does not look at its inputs."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.matrix = matrix

    def forward(self, x: Tensor) -> Tensor:
        return self.matrix


def bound(prior: LatentPrior, point: PointwiseLikelihood, kernel: Tensor, solution: LaplaceSolution) -> float:
    """E log p(y | f) - KL(q | p), by the trapezoidal rule and by PyTorch."""
    s = covariance(prior, solution)
    q = MultivariateNormal(solution.latent.flatten(), s)
    p = MultivariateNormal(prior.mean.flatten(), kernel)
    grid = torch.linspace(-10, 10, 2001, dtype=torch.float64)
    weights = torch.exp(-0.5 * grid.square()) / math.sqrt(2 * math.pi) * (grid[1] - grid[0])
    f = solution.latent.flatten() + s.diagonal().sqrt() * grid[:, None]
    values = torch.nn.functional.logsigmoid((2 * point.targets - 1) * f)
    return float((weights @ values).sum() - torch.distributions.kl_divergence(q, p))


@pytest.mark.slow
@pytest.mark.parametrize("outputscale", [3.0, 30.0, 300.0])
def test_the_bound_rises(outputscale: float) -> None:
    prior, point, kernel = binary(20, outputscale)
    bounds = [bound(prior, point, kernel, s) for s in refined(prior, point, 6, LaplaceCholesky())]
    assert bounds[1] > bounds[0] + 0.01
    assert bounds[2] > bounds[1]
    assert bounds[-1] == pytest.approx(bounds[-2], abs=1e-3)


def test_moments_are_closer_to_the_exact_ones() -> None:
    prior, point, kernel = binary(20, 30.0)
    laplace, once, twice = refined(prior, point, 2, LaplaceCholesky())
    # Importance sampling from a Student-t distribution around the refined Gaussian, whose tails cover the posterior's.
    generator, count, freedom = torch.Generator().manual_seed(0), 100_000, 8.0
    root = torch.linalg.cholesky(1.3 * covariance(prior, twice))
    base = torch.randn(count, 20, generator=generator, dtype=torch.float64)
    chi = torch.randn(count, int(freedom), generator=generator, dtype=torch.float64).square().sum(-1, keepdim=True)
    samples = twice.latent.flatten() + (base * (freedom / chi).sqrt()) @ root.mT
    distance = torch.linalg.solve_triangular(root, (samples - twice.latent.flatten()).mT, upper=False).square().sum(0)
    log_proposal = -0.5 * (freedom + 20) * torch.log1p(distance / freedom)
    log_likelihood = torch.nn.functional.logsigmoid((2 * point.targets - 1) * samples).sum(-1)
    log_prior = MultivariateNormal(prior.mean.flatten(), kernel).log_prob(samples)
    weights = torch.softmax(log_likelihood + log_prior - log_proposal, 0)
    assert 1 / weights.square().sum() > 2000  # effective samples
    mean = weights @ samples
    variance = weights @ (samples - mean).square()

    def errors(solution: LaplaceSolution) -> tuple[float, float]:
        ratio = covariance(prior, solution).diagonal() / variance
        return float((solution.latent.flatten() - mean).norm() / mean.norm()), float(ratio.log().abs().mean())

    for better in (once, twice):
        assert errors(better)[0] < 0.2 * errors(laplace)[0]
        assert errors(better)[1] < 0.75 * errors(laplace)[1]


def test_products_are_used_again() -> None:
    problem = case("softmax", n=30)
    problem.model.covar_module.outputscale = 10.0
    prior, point = problem.prior(), problem.pointwise()
    solver = LaplaceNewton(tolerance=1e-6)
    first, second = refined(prior, point, 1, solver)
    again = refine(solver, prior, point, first)
    assert torch.equal(again.latent, second.latent)
    assert second.inverse.actions.shape[-1] == first.inverse.actions.shape[-1] + second.num_kernel_products
    torch.testing.assert_close(second.inverse.images, prior.matmul(second.inverse.actions), rtol=1e-9, atol=1e-9)
    everything = LaplaceNewton(tolerance=1e-6, num_covariance_actions=60)  # all that three classes see of 30 points
    full = everything.solve(prior, point)
    assert full.inverse.actions.shape[-1] == 60
    assert refine(everything, prior, point, full).num_kernel_products == 0


def test_initial_solutions_that_are_refused() -> None:
    problem, other = case("softmax", n=10), case("softmax", n=11)
    dense = LaplaceCholesky().solve(problem.prior(), problem.pointwise())
    with pytest.raises(ValueError, match="not orthonormal"):
        LaplaceNewton().solve(problem.prior(), problem.pointwise(), initial_solution=dense)
    for solver in (LaplaceCholesky(), LaplaceNewton()):
        found = solver.solve(problem.prior(), problem.pointwise())
        with pytest.raises(ValueError, match=r"latent values \(10, 3\), the prior for \(11, 3\)"):
            solver.solve(other.prior(), other.pointwise(), initial_solution=found)
