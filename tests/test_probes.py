"""tr(H^-1 dH) = E[(H^-1 xi)^T dH (S^-1 xi)], for every distribution; and what each costs in variance."""

import io
import itertools

import gpytorch
import pytest
import torch
from gpytorch import kernels

from gpy_iterative.errors import SpectralDensityMissingError
from gpy_iterative.linear_operators import KernelProducts, NoisyLinearOperator, kernel_terms, noisy_operator
from gpy_iterative.probes import (
    ExactPrior,
    Gaussian,
    Preconditioned,
    ProbeDistribution,
    Probes,
    Rademacher,
    RandomFeatures,
)
from tests.mlls.gaussian_models import data
from tests.monte_carlo import assert_mean_within

N = 40
DISTRIBUTIONS = {
    "rademacher": lambda s: Rademacher(num_probes=s),
    "gaussian": lambda s: Gaussian(num_probes=s),
    "preconditioned": lambda s: Preconditioned(num_probes=s, rank=5),
    "preconditioned, diagonal as it is": lambda s: Preconditioned(num_probes=s, rank=5, correct_diagonal=False),
    "features": lambda s: RandomFeatures(num_probes=s, num_frequencies=20),
    "exact prior": lambda s: ExactPrior(num_probes=s),
}


def system(noise: float = 0.1):
    """H, the prior's kernels, and dH for lengthscale (by differences) and noise."""
    x, _ = data(N)
    likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise * torch.linspace(0.5, 1.5, N).double())
    kernel = kernels.ScaleKernel(kernels.MaternKernel(nu=1.5)).double()

    def operator() -> NoisyLinearOperator:
        prior = gpytorch.distributions.MultivariateNormal(torch.zeros(N).double(), kernel(x))
        return noisy_operator(likelihood, prior, products=KernelProducts(tile_size=16))

    step = 1e-5
    middle = kernel.base_kernel.lengthscale.item()
    sides = []
    for sign in (1, -1):
        kernel.base_kernel.lengthscale = middle + sign * step
        sides.append(operator().to_dense().detach())
    kernel.base_kernel.lengthscale = middle
    derivatives = torch.stack([(sides[0] - sides[1]) / (2 * step), torch.eye(N).double()])
    return operator(), kernel_terms(kernel(x)), derivatives, kernel


def trace_samples(operator, derivatives: torch.Tensor, probes: Probes) -> torch.Tensor:
    """[s, derivatives]: what each probe says about tr(H^-1 dH)."""
    solutions = torch.linalg.solve(operator.to_dense().detach(), probes.vectors)
    dual = solutions if probes.dual is None else probes.dual
    return torch.einsum("is,kij,js->sk", solutions, derivatives, dual)


def truth(operator, derivatives: torch.Tensor) -> torch.Tensor:
    return torch.einsum("ij,kji->k", torch.linalg.inv(operator.to_dense().detach()), derivatives)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_trace_is_unbiased(name: str) -> None:
    operator, terms, derivatives, _ = system()
    distribution = DISTRIBUTIONS[name](4000)
    with torch.no_grad():
        draws = distribution.draw(operator, terms, torch.Generator().manual_seed(1))
        samples = trace_samples(operator, derivatives, distribution.probes(operator, terms, draws))
    exact = truth(operator, derivatives)
    assert_mean_within(samples, exact, max_sem=float(0.1 * exact.abs().max()))


def test_all_sign_vectors_average_to_the_trace() -> None:
    """Exact enumeration of the Rademacher distribution."""
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(8, 8, generator=generator).double()
    matrix, derivative = root @ root.mT + torch.eye(8), torch.randn(8, 8, generator=generator).double()
    signs = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=8))).double().mT
    estimates = (torch.linalg.solve(matrix, signs) * (derivative @ signs)).sum(0)
    torch.testing.assert_close(estimates.mean(), torch.linalg.solve(matrix, derivative).trace())


def test_given_the_frequencies_the_corrected_form_is_exact_and_the_published_one_is_not() -> None:
    """Over all of w and e (whose sample moment is made the identity), only the corrected form gives the trace."""
    operator, terms, derivatives, _ = system()
    exact = truth(operator, derivatives)
    errors = {}
    for corrected in (True, False):
        distribution = RandomFeatures(num_probes=1, num_frequencies=20, corrected=corrected)
        with torch.no_grad():
            draws = distribution.draw(operator, terms, torch.Generator().manual_seed(1))
            features = draws["weights"].shape[0]
            basis = torch.eye(features + N).double()
            draws |= {"weights": basis[:features], "noise_base": basis[features:]}
            probes = distribution.probes(operator, terms, draws)
            errors[corrected] = (trace_samples(operator, derivatives, probes).sum(0) - exact).abs().max()
    assert errors[True] < 1e-8 * exact.abs().max()
    assert errors[False] > 1e-2 * exact.abs().max()


def test_variances_are_those_of_the_theory() -> None:
    """Gaussian: tr(A^2) + |A|_F^2; exact prior: 2 tr(A^2), never more."""
    operator, terms, derivatives, _ = system()
    product = torch.linalg.solve(operator.to_dense().detach(), derivatives)
    squared = torch.einsum("kij,kji->k", product, product)
    expected = {"gaussian": squared + product.square().sum((1, 2)), "exact prior": 2 * squared}
    assert (expected["exact prior"] <= expected["gaussian"] * (1 + 1e-12)).all()
    for name, variance in expected.items():
        distribution = DISTRIBUTIONS[name](20_000)
        with torch.no_grad():
            draws = distribution.draw(operator, terms, torch.Generator().manual_seed(2))
            samples = trace_samples(operator, derivatives, distribution.probes(operator, terms, draws))
        deviations = (samples - truth(operator, derivatives)).square()
        assert_mean_within(deviations, variance, max_sem=float(0.05 * variance.max()))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_frozen_draws_are_smooth_saved_and_leave_the_global_generator_alone(name: str) -> None:
    operator, terms, _, kernel = system()
    distribution = DISTRIBUTIONS[name](3)
    state = torch.random.get_rng_state()
    with torch.no_grad():
        draws = distribution.draw(operator, terms, torch.Generator().manual_seed(3))
        again = distribution.draw(operator, terms, torch.Generator().manual_seed(3))
        assert all(torch.equal(draws[key], again[key]) for key in draws)
        file = io.BytesIO()
        torch.save(draws, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        before = distribution.probes(operator, terms, draws).vectors
        torch.testing.assert_close(distribution.probes(operator, terms, loaded).vectors, before, rtol=0, atol=0)
        kernel.base_kernel.lengthscale = kernel.base_kernel.lengthscale.item() + 1e-6
        x, _ = data(N)
        moved = NoisyLinearOperator(kernel(x).evaluate_kernel(), operator.noise)
        after = distribution.probes(moved, kernel_terms(kernel(x)), draws).vectors
    assert (after - before).abs().max() < 1e-3
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("distribution", [RandomFeatures(num_probes=2, num_frequencies=5), ExactPrior(num_probes=2)])
def test_prior_samples_need_a_prior(distribution: ProbeDistribution) -> None:
    operator, *_ = system()
    with pytest.raises(SpectralDensityMissingError, match="Hutchinson"):
        distribution.probes(operator.kernel, (), {})


@pytest.mark.parametrize("make", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_no_probes(make) -> None:
    with pytest.raises(ValueError, match="num_probes"):
        make(0)
