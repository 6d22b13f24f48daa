"""tr(H^-1 dH) = E[(H^-1 xi)^T dH (S^-1 xi)], for every distribution; and what each costs in variance."""

import copy
import io
import itertools

import gpytorch
import pytest
import torch
from gpytorch import kernels
from linear_operator import to_linear_operator

from gpy_iterative.errors import SpectralDensityMissingError
from gpy_iterative.exact.probes import (
    ExactPrior,
    Gaussian,
    Preconditioned,
    ProbeDistribution,
    Probes,
    Rademacher,
    RandomFeatures,
    suited_to,
)
from gpy_iterative.linear_operators import KernelProducts, NoisyLinearOperator, kernel_operator, noisy_operator
from gpy_iterative.linear_operators.prior_parts import kernel_terms
from gpy_iterative.preconditioners import (
    LowRankPlusDiagonal,
    LowRankPlusVecchia,
    LowRankPlusVecchiaFactor,
    PivotedCholesky,
    PivotedCholeskyFactor,
    RandomlyPivotedCholesky,
    SparseInverseCholesky,
    Vecchia,
)
from gpy_iterative.solvers import AlternatingProjections, ConjugateGradients
from tests.exact.gaussian_models import data
from tests.monte_carlo import assert_mean_within
from tests.oracles import low_rank_plus_diagonal

N = 40
DISTRIBUTIONS = {
    "rademacher": lambda s: Rademacher(num_probes=s),
    "gaussian": lambda s: Gaussian(num_probes=s),
    "preconditioned": lambda s: Preconditioned(num_probes=s, recipe=PivotedCholesky(rank=5)),
    "preconditioned, diagonal as it is": lambda s: Preconditioned(
        num_probes=s, recipe=PivotedCholesky(rank=5), correct_diagonal=False
    ),
    "preconditioned, random pivots": lambda s: Preconditioned(num_probes=s, recipe=RandomlyPivotedCholesky(rank=5)),
    "whitened": lambda s: Preconditioned(num_probes=s, recipe=Vecchia(5)),
    "whitened, low rank": lambda s: Preconditioned(num_probes=s, recipe=LowRankPlusVecchia(20)),
    "whitened, low rank plus neighbours": lambda s: Preconditioned(num_probes=s, recipe=LowRankPlusVecchia(2)),
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


def identity_draws(draws: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same draws with base vectors whose second moment is the identity: as many probes as base entries.

    A sum over these probes is the expectation over the base vectors, given everything else (frequencies, pivots).
    """
    bases = [name for name in BASES if name in draws]
    sizes = [draws[name].shape[-2] for name in bases]
    basis = torch.eye(sum(sizes), dtype=torch.float64)
    batch = draws[bases[0]].shape[:-2]
    return draws | {
        name: rows.expand(*batch, *rows.shape) for name, rows in zip(bases, basis.split(sizes), strict=True)
    }


#: Names under which distributions keep vectors of identity covariance.
BASES = ("base", "weights", "noise_base")


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_expectation_given_frequencies_and_pivots_is_exactly_the_trace(name: str) -> None:
    operator, terms, derivatives, _ = system()
    distribution = DISTRIBUTIONS[name](1)
    with torch.no_grad():
        draws = identity_draws(distribution.draw(operator, terms, torch.Generator().manual_seed(1)))
        probes = distribution.probes(operator, terms, draws)
        trace = trace_samples(operator, derivatives, probes).sum(0)
    exact = truth(operator, derivatives)
    torch.testing.assert_close(trace, exact, rtol=0, atol=1e-8 * float(exact.abs().max()))
    if probes.covariance is not None:
        covariance = probes.vectors @ probes.vectors.mT
        torch.testing.assert_close(probes.covariance.solve(covariance), torch.eye(N).double())


def test_pivots_that_rounding_has_made_dependent_leave_the_expectation_exact() -> None:
    operator, _, derivatives, _ = system()
    distribution = Preconditioned(num_probes=1, recipe=PivotedCholesky(rank=20))
    with torch.no_grad():
        draws = identity_draws(distribution.draw(operator, None, torch.Generator().manual_seed(1)))
        # A smooth kernel with errors, in which half of the pivots carry something.
        place = torch.linspace(0, 10, N).double()
        errors = torch.randn(N, N, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        kernel = torch.exp(-(place[:, None] - place).square() / 8) + 1e-6 * (errors + errors.mT)
        operator = NoisyLinearOperator(to_linear_operator(kernel), operator.noise)
        probes = distribution.probes(operator, None, draws)
        trace = trace_samples(operator, derivatives, probes).sum(0)
    assert torch.linalg.eigvalsh(kernel[draws["pivots"]][:, draws["pivots"]])[0] < -1e-6
    exact = truth(operator, derivatives)
    torch.testing.assert_close(trace, exact, rtol=0, atol=1e-8 * float(exact.abs().max()))


def test_the_published_form_is_off_for_given_frequencies_and_right_on_average_over_them() -> None:
    operator, terms, derivatives, _ = system()
    exact = truth(operator, derivatives)
    distribution = RandomFeatures(num_probes=1, num_frequencies=20, corrected=False)
    generator, traces = torch.Generator().manual_seed(1), []
    with torch.no_grad():
        for _ in range(300):
            draws = identity_draws(distribution.draw(operator, terms, generator))
            probes = distribution.probes(operator, terms, draws)
            assert probes.dual is None
            traces.append(trace_samples(operator, derivatives, probes).sum(0))
    samples = torch.stack(traces)
    off = (samples - exact).abs().amax(-1) > 1e-2 * exact.abs().max()
    assert off.double().mean() > 0.9
    assert_mean_within(samples, exact, max_sem=float(0.05 * exact.abs().max()))


@pytest.mark.parametrize("name", [name for name in DISTRIBUTIONS if "whitened" not in name])
def test_batches_hold_members_of_their_own(name: str) -> None:
    """The expectation is exact for every member of a batch of systems with a noise of their own."""
    x, _ = data(N)
    kernel = kernels.ScaleKernel(
        kernels.MaternKernel(nu=1.5, batch_shape=torch.Size([2])), batch_shape=torch.Size([2])
    ).double()
    kernel.base_kernel.lengthscale = torch.tensor([[[0.5]], [[2.0]]])
    kernel.outputscale = torch.tensor([1.0, 3.0])
    lazy = kernel(x)
    noise = 0.1 * torch.linspace(0.5, 1.5, 2 * N).double().reshape(2, N)
    operator = NoisyLinearOperator(kernel_operator(lazy, KernelProducts(tile_size=16)), noise)
    derivatives = torch.stack([torch.eye(N), torch.ones(N, N)]).double()
    distribution = DISTRIBUTIONS[name](2)
    with torch.no_grad():
        draws = distribution.draw(operator, kernel_terms(lazy), torch.Generator().manual_seed(1))
        vectors = distribution.probes(operator, kernel_terms(lazy), draws).vectors
        assert vectors.shape == (2, N, 2)
        assert not torch.allclose(vectors[0], vectors[1])
        probes = distribution.probes(operator, kernel_terms(lazy), identity_draws(draws))
        for index in range(2):
            dual = None if probes.dual is None else probes.dual[index].expand_as(probes.vectors[index])
            trace = trace_samples(operator[index], derivatives, Probes(probes.vectors[index], dual)).sum(0)
            exact = truth(operator[index], derivatives)
            torch.testing.assert_close(trace, exact, rtol=0, atol=1e-8 * float(exact.abs().max()))


@pytest.mark.parametrize("name", ["rademacher", "gaussian", "preconditioned"])
def test_any_positive_definite_operator_has_probes(name: str) -> None:
    operator, _, derivatives, _ = system()
    opaque = to_linear_operator(operator.to_dense().detach())
    distribution = DISTRIBUTIONS[name](1)
    draws = identity_draws(distribution.draw(opaque, None, torch.Generator().manual_seed(1)))
    trace = trace_samples(opaque, derivatives, distribution.probes(opaque, None, draws)).sum(0)
    torch.testing.assert_close(trace, truth(opaque, derivatives))


def test_the_functions_behind_the_probes_are_the_same_at_other_inputs() -> None:
    """Xi = f(X) + sqrt(noise) e, and f at test points covaries with it as Phi Phi^T says."""
    operator, terms, _, kernel = system()
    distribution = RandomFeatures(num_probes=3, num_frequencies=20)
    draws = distribution.draw(operator, terms, torch.Generator().manual_seed(1))
    xi = distribution.probes(operator, terms, draws).vectors
    noise = operator.noise.sqrt().unsqueeze(-1) * draws["noise_base"]
    torch.testing.assert_close(distribution.prior_sample(terms, draws) + noise, xi)
    test_x = data(50)[0][N:]
    everywhere = distribution.prior_sample(kernel_terms(kernel(data(50)[0])), draws)
    torch.testing.assert_close(distribution.prior_sample(kernel_terms(kernel(test_x)), draws), everywhere[N:])
    torch.testing.assert_close(everywhere[:N] + noise, xi)


def test_the_corrected_form_in_float32() -> None:
    """S^-1 xi keeps its digits at a condition number of 1e6."""
    operator, terms, _, kernel = system(noise=1e-4)
    distribution = RandomFeatures(num_probes=8, num_frequencies=100)
    draws = distribution.draw(operator, terms, torch.Generator().manual_seed(1))
    wide = distribution.probes(operator, terms, draws)
    narrow_draws = {name: draw if name.startswith("features.") else draw.float() for name, draw in draws.items()}
    x = data(N)[0].float()
    single = copy.deepcopy(kernel).float()
    narrow_operator = NoisyLinearOperator(kernel_operator(single(x), KernelProducts()), operator.noise.float())
    narrow = distribution.probes(narrow_operator, kernel_terms(single(x)), narrow_draws)
    assert wide.dual is not None
    assert narrow.dual is not None
    assert narrow.dual.dtype == torch.float32
    for found, right in ((narrow.vectors, wide.vectors), (narrow.dual, wide.dual)):
        assert (found.double() - right).norm() < 1e-3 * right.norm()


def test_the_corrected_variance_is_that_of_the_theory_and_falls_with_more_frequencies() -> None:
    """tr(A^2) + tr(S A S^-1 A^T) given the frequencies, which the exact prior's 2 tr(A^2) bounds from below."""
    operator, terms, derivatives, _ = system(noise=0.02)
    product = torch.linalg.solve(operator.to_dense().detach(), derivatives)
    squared = torch.einsum("kij,kji->k", product, product)
    expected = {}
    for count in (10, 500):
        distribution = RandomFeatures(num_probes=5000, num_frequencies=count)
        with torch.no_grad():
            draws = distribution.draw(operator, terms, torch.Generator().manual_seed(2))
            probes = distribution.probes(operator, terms, draws)
            samples = trace_samples(operator, derivatives, probes)
        assert probes.covariance is not None
        assert isinstance(probes.covariance, LowRankPlusDiagonal)
        s = low_rank_plus_diagonal(probes.covariance, torch.eye(N).double())
        expected[count] = squared + torch.einsum("kij,kij->k", s @ product, product @ torch.linalg.inv(s))
        deviations = (samples - truth(operator, derivatives)).square()
        assert_mean_within(deviations, expected[count], max_sem=float(0.1 * expected[count].max()))
    assert (expected[10] > expected[500]).all()
    assert (expected[500] < 1.5 * 2 * squared).all()
    assert (expected[500] >= 2 * squared).all()


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
        moved = NoisyLinearOperator(kernel_operator(kernel(x), KernelProducts()), operator.noise)
        after = distribution.probes(moved, kernel_terms(kernel(x)), draws).vectors
    assert (after - before).abs().max() < 1e-3
    assert torch.equal(torch.random.get_rng_state(), state)


def test_all_sign_vectors_of_a_whitened_system_average_to_the_trace() -> None:
    """Exact enumeration of M w = z with M = B H B^T, tr(H^-1 dH) = E[w^T B dH B^T z]."""
    x, _ = data(8)
    operator = NoisyLinearOperator(
        kernel_operator(kernels.MaternKernel(nu=1.5).double()(x), KernelProducts()), torch.full((8,), 0.1).double()
    )
    derivative = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).double()
    distribution = Preconditioned(num_probes=1, recipe=Vecchia(2))
    signs = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=8))).double().mT
    with torch.no_grad():
        draws = distribution.draw(operator, None, torch.Generator().manual_seed(1)) | {"base": signs}
        probes = distribution.probes(operator, None, draws)
        factor, matrix = probes.covariance, operator.to_dense()
        assert isinstance(factor, SparseInverseCholesky)
        b = factor.whiten(torch.eye(8).double())
        w = torch.linalg.solve(b @ matrix @ b.mT, signs)
        whitened = (w * (b @ derivative @ b.mT @ signs)).sum(0)
        estimates = trace_samples(operator, derivative.unsqueeze(0), probes).squeeze(-1)
        # The value's log-determinant: that of M, and of B.
        logdet = torch.logdet(b @ matrix @ b.mT) - 2 * factor.diagonal.log().sum()
    torch.testing.assert_close(estimates, whitened)
    torch.testing.assert_close(estimates.mean(), torch.linalg.solve(matrix, derivative).trace())
    torch.testing.assert_close(logdet, torch.logdet(matrix))


def test_whitened_probes_have_a_fraction_of_the_variance_of_plain_ones() -> None:
    """On a field of the plane with little noise."""
    x = torch.rand(400, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4
    kernel, noise = kernels.MaternKernel(nu=1.5).double(), torch.full((400,), 1e-3).double()

    def operator(lengthscale: float) -> NoisyLinearOperator:
        kernel.lengthscale = lengthscale
        return NoisyLinearOperator(kernel_operator(kernel(x), KernelProducts()), noise)

    with torch.no_grad():
        derivative = (operator(0.801).to_dense() - operator(0.799).to_dense()) / 0.002
        variances = {}
        for name, distribution in (
            ("plain", Rademacher(num_probes=1000)),
            ("whitened", Preconditioned(num_probes=1000, recipe=Vecchia(20))),
        ):
            draws = distribution.draw(operator(0.8), None, torch.Generator().manual_seed(1))
            probes = distribution.probes(operator(0.8), None, draws)
            samples = trace_samples(operator(0.8), derivative.unsqueeze(0), probes)
            assert_mean_within(samples, truth(operator(0.8), derivative.unsqueeze(0)), max_sem=5.0)
            variances[name] = float(samples.var())
    assert variances["whitened"] < 0.4 * variances["plain"]


def test_probes_take_the_covariance_of_the_solver_s_vecchia_preconditioner() -> None:
    operator, *_ = system()
    plain, vecchia = Preconditioned(num_probes=3), ConjugateGradients(preconditioner=Vecchia(5))
    assert suited_to(plain, vecchia, operator) == Preconditioned(num_probes=3, recipe=Vecchia(5))
    low_rank = ConjugateGradients(preconditioner=RandomlyPivotedCholesky())
    for solver in (low_rank, ConjugateGradients(preconditioner=None), AlternatingProjections()):
        assert suited_to(plain, solver, operator) is plain
    for other in (Rademacher(num_probes=3), RandomFeatures(num_probes=3, num_frequencies=5)):
        assert suited_to(other, vecchia, operator) is other


def test_probes_take_the_covariance_of_the_default_preconditioner() -> None:
    operator, *_ = system()
    plain, solver = Preconditioned(num_probes=3), ConjugateGradients(preconditioner=LowRankPlusVecchia(5))
    whitened = suited_to(plain, solver, operator)
    assert whitened == Preconditioned(num_probes=3, recipe=LowRankPlusVecchia(5))
    batch = NoisyLinearOperator(operator.kernel.expand(2, N, N), operator.noise.expand(2, N))
    assert suited_to(plain, solver, batch) is plain  # without neighbours


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("whitened", SparseInverseCholesky),
        ("whitened, low rank", PivotedCholeskyFactor),
        ("whitened, low rank plus neighbours", LowRankPlusVecchiaFactor),
    ],
)
def test_draws_of_one_preconditioner_are_none_of_another(name: str, kind: type) -> None:
    operator, *_ = system()
    with torch.no_grad():
        draws = DISTRIBUTIONS[name](2).draw(operator, None, torch.Generator().manual_seed(1))
        assert isinstance(DISTRIBUTIONS[name](2).probes(operator, None, draws).covariance, kind)
    assert DISTRIBUTIONS[name](2).has_drawn(draws)
    assert DISTRIBUTIONS["whitened"](2).has_drawn(draws) == (kind is SparseInverseCholesky)
    assert DISTRIBUTIONS["whitened, low rank"](2).has_drawn(draws) == (kind is not SparseInverseCholesky)
    assert not DISTRIBUTIONS["preconditioned"](2).has_drawn(draws)


@pytest.mark.parametrize(
    "name", ["preconditioned", "whitened", "whitened, low rank", "whitened, low rank plus neighbours"]
)
def test_one_factor_serves_two_sets_of_probes(name: str) -> None:
    operator, *_ = system()
    distribution = DISTRIBUTIONS[name](3)
    with torch.no_grad():
        draws = distribution.draw(operator, None, torch.Generator().manual_seed(1))
        probes = distribution.probes(operator, None, draws)
        others = distribution.draw(operator, None, torch.Generator().manual_seed(2), others=draws)
        second = distribution.probes(operator, None, others, others=probes)
        alone = distribution.probes(operator, None, others)
    assert not torch.allclose(second.vectors, probes.vectors)
    torch.testing.assert_close(second.vectors, alone.vectors)
    if name != "preconditioned":
        assert second.covariance is probes.covariance


@pytest.mark.parametrize("distribution", [RandomFeatures(num_probes=2, num_frequencies=5), ExactPrior(num_probes=2)])
def test_prior_samples_need_a_prior(distribution: ProbeDistribution) -> None:
    operator, *_ = system()
    with pytest.raises(SpectralDensityMissingError, match="Hutchinson"):
        distribution.probes(operator.kernel, (), {})


@pytest.mark.parametrize("make", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_no_probes(make) -> None:
    with pytest.raises(ValueError, match="num_probes"):
        make(0)
