"""The Laplace evidence and its gradient against the re-optimised dense evidence, and against exact answers."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import gpytorch
import pytest
import torch
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.errors import ConvergenceWarning, NonFiniteError
from gpy_iterative.laplace.elbo import subspace_bound
from gpy_iterative.laplace.evidence import _indefinite_adjoint
from gpy_iterative.laplace.likelihoods.pointwise import NO_FLOOR
from gpy_iterative.laplace.mode import observed_data
from gpy_iterative.linear_operators import KernelProducts, latent_prior
from gpy_iterative.linear_operators.latent import LatentPrior
from gpy_iterative.mlls import LaplaceMarginalLogLikelihood
from gpy_iterative.solvers import LaplaceCholesky, LaplaceNewton, SolveStatus
from tests.laplace.cases import LIKELIHOODS, Case, LaplaceModel, add_constant, case
from tests.monte_carlo import assert_mean_within

#: Likelihoods whose latent functions also come with a shared kernel, correlated, or as a multitask prior.
LAYOUTS = [(name, "own") for name in LIKELIHOODS] + [
    ("softmax", "shared"),
    ("softmax", "multitask"),
    ("softmax", "coregionalised"),
]


def naive_evidence(problem: Case, start: Tensor | None = None) -> Tensor:
    """L at the mode of plain damped Newton steps on dense matrices; the reference of everything here.

    Steps begin at the prior mean, or at the weights v [n C] of a similar problem.
    """
    prior, likelihood = problem.prior(), problem.pointwise()
    kernel, mean = prior.operator.to_dense(), prior.mean
    v = torch.zeros_like(mean).flatten() if start is None else start
    f = mean + (kernel @ v).view_as(mean)

    def psi(f: Tensor, v: Tensor) -> float:
        return likelihood.total(f) - 0.5 * float(v @ (f - mean).flatten())

    def weights(f: Tensor) -> Tensor:
        return torch.block_diag(*likelihood.curvature(f, NO_FLOOR).blocks())

    for _ in range(200):
        w, g = weights(f), likelihood.gradient(f).flatten()
        new = torch.linalg.solve(torch.eye(len(w)) + w @ kernel, w @ (f - mean).flatten() + g)
        step, length = new - v, 1.0
        move = (kernel @ step).view_as(f)
        while length > 1e-9 and not psi(f + length * move, v + length * step) >= psi(f, v) - 1e-13 * abs(psi(f, v)):
            length /= 2
        f, v = f + length * move, v + length * step
        if float((length * move).abs().max()) < 1e-13:
            break
    assert float((likelihood.gradient(f).flatten() - v).abs().max()) < 1e-9
    logdet = torch.linalg.slogdet(torch.eye(len(kernel)) + weights(f) @ kernel)[1]
    return psi(f, v) - 0.5 * logdet


def gradients(problem: Case, mll: LaplaceMarginalLogLikelihood) -> tuple[float, dict[str, Tensor]]:
    """Value and gradient, not divided by n."""
    problem.model.train()
    problem.model.zero_grad()
    value = mll(problem.model(problem.x), problem.y)
    value.backward()
    size = len(problem.y)
    return value.item() * size, {
        name: p.grad * size for name, p in problem.model.named_parameters() if p.grad is not None
    }


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), LAYOUTS, ids=[f"{name}-{kind}" for name, kind in LAYOUTS])
def test_exact_gradient_is_that_of_the_reoptimised_evidence(name: str, kind: str) -> None:
    problem = case(name, n=18, kind=kind)
    mll = LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, solver=LaplaceCholesky(tolerance=1e-12))
    value, found = gradients(problem, mll)
    assert value == pytest.approx(float(naive_evidence(problem)), rel=1e-10)
    weights = mll._weights.flatten()
    step = 1e-4
    scale = max(float(gradient.abs().max()) for gradient in found.values())
    for name_, parameter in problem.model.named_parameters():
        flat = parameter.data.view(-1)
        for index in range(flat.numel()):
            ends = []
            for sign in (2, 1, -1, -2):
                kept = flat[index].item()
                flat[index] = kept + sign * step
                ends.append(float(naive_evidence(problem, weights)))
                flat[index] = kept
            difference = (8 * (ends[1] - ends[2]) - (ends[0] - ends[3])) / (12 * step)
            gradient = found[name_].flatten()[index].item() if name_ in found else 0.0
            assert gradient == pytest.approx(difference, rel=2e-6, abs=2e-6 * scale), (name_, index)


def test_gaussian_likelihood_is_the_exact_marginal() -> None:
    problem = case("gaussian", n=25)
    mll = LaplaceMarginalLogLikelihood(problem.likelihood, problem.model)
    value, found = gradients(problem, mll)
    assert mll.report.iterations == 1

    class Exact(gpytorch.models.ExactGP):
        def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
            return problem.model.forward(x)

    reference = Exact(problem.x, problem.y, problem.likelihood).train()
    exact = ExactMarginalLogLikelihood(problem.likelihood, reference)(reference(problem.x), problem.y)
    problem.model.zero_grad()
    exact.backward()
    assert value == pytest.approx(exact.item() * 25, abs=1e-10 * 25)
    for name, parameter in problem.model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad * 25, rtol=1e-9, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["logit", "student", "softmax"])
def test_stochastic_gradient_is_unbiased(name: str) -> None:
    problem = case(name, n=16)
    exact = LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, solver=LaplaceCholesky())
    value, expected = gradients(problem, exact)
    # Few actions, so that something is left to the probes; exact solves, so that their bias is not seen.
    mll = LaplaceMarginalLogLikelihood(
        problem.likelihood,
        problem.model,
        solver=LaplaceNewton(tolerance=1e-10, max_rank=5, max_outer=200),
        num_probes=40,
        tolerance=1e-9,
        generator=0,
    )
    samples: dict[str, list[Tensor]] = {key: [] for key in expected}
    values = []
    for _ in range(30):
        sampled, found = gradients(problem, mll)
        values.append(sampled)
        for key, gradient in found.items():
            samples[key].append(gradient)
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for key, gradient in expected.items():
        assert_mean_within(torch.stack(samples[key]), gradient, max_sem=0.1 * scale + 0.05, floor=1e-6 * scale)
    # The quadrature stops where its own error is about that of its probes: the reported error counts both.
    floor = 2 * float(mll.report.value_sem) * len(problem.y)
    assert_mean_within(torch.tensor(values).unsqueeze(-1), torch.tensor([value]), max_sem=0.2, floor=floor)


@pytest.mark.parametrize("name", ["logit", "student", "poisson-log"])
def test_a_large_term_does_not_hide_the_others(name: str) -> None:
    """The actions know the constant: neither solves nor probes may bring it back."""
    problem = case(name, n=120)
    add_constant(problem, 1e4)
    options = {"num_probes": 40, "generator": 0}
    exact = LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, solver=LaplaceCholesky())
    _, expected = gradients(problem, exact)
    mll = LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, solver=LaplaceNewton(), **options)
    _, found = gradients(problem, mll)
    assert mll.report.status is SolveStatus.CONVERGED
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=0, atol=0.1 * scale)


def test_exposures_over_orders_of_magnitude_take_few_steps() -> None:
    """A floor of the curvature relative to the largest took hundreds."""
    problem = case("poisson-log", n=60)
    exposures = torch.logspace(-1, 6, 60)
    model = problem.model
    model.set_train_data(problem.x, (exposures * problem.y.clamp_min(0.2)).round())
    prior = model(problem.x)
    prior = gpytorch.distributions.MultivariateNormal(prior.mean + exposures.log(), prior.lazy_covariance_matrix)
    mll = LaplaceMarginalLogLikelihood(problem.likelihood, model, solver=LaplaceCholesky(tolerance=1e-8))
    mll(prior, model.train_targets)
    assert mll.report.status is SolveStatus.CONVERGED
    assert mll.report.iterations <= 15


def test_everything_captured_leaves_no_noise() -> None:
    """With all of the space among the actions, nothing is left to the probes."""
    problem = case("poisson-log", n=20)
    _, expected = gradients(problem, LaplaceMarginalLogLikelihood(problem.likelihood, problem.model))
    solver = LaplaceNewton(tolerance=1e-10, num_covariance_actions=40)
    options = {"solver": solver, "num_probes": 1, "tolerance": 1e-10, "generator": 1}
    _, found = gradients(problem, LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, **options))
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["logit", "poisson-log", "softmax"])
def test_elbo_grows_with_the_subspace_and_is_near_the_evidence(name: str) -> None:
    problem = case(name, n=20)
    bounds = []
    for rank in (2, 6, 20 * problem.model.latents):
        solver = LaplaceNewton(tolerance=1e-8, max_rank=rank, max_outer=200, num_covariance_actions=60 * (rank >= 20))
        mll = LaplaceMarginalLogLikelihood(
            problem.likelihood, problem.model, objective="elbo", solver=solver, generator=0
        )
        bounds.append(gradients(problem, mll)[0])
    evidence = float(naive_evidence(problem))
    assert bounds[0] < bounds[1] < bounds[2]
    # Laplace's evidence is no bound itself, but near the truth here.
    assert bounds[2] < evidence + 0.5
    assert bounds[2] > evidence - 1.0


def test_a_bound_in_a_subspace_does_not_depend_on_earlier_steps() -> None:
    """Actions were those of a search from the last mode: few, and the bound was 75 nats smaller."""
    problem = case("poisson-log", n=60)
    solver = LaplaceNewton(max_inner=2)
    mll = LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, objective="elbo", solver=solver)
    first, _ = gradients(problem, mll)
    assert gradients(problem, mll)[0] == first
    problem.model.covar_module.outputscale = 3.0
    gradients(problem, mll)
    problem.model.covar_module.outputscale = 1.5
    assert gradients(problem, mll)[0] == pytest.approx(first, rel=1e-9)


def test_a_bound_in_a_subspace_is_that_of_float64_where_rounding_matters() -> None:
    """The search in float64 began where that in float32 ended: with fewer actions."""
    bounds = []
    for dtype in (torch.float32, torch.float64):
        problem = case("poisson-log", n=100, dtype=torch.float32)
        problem.model.covar_module.outputscale = 10.0
        x, y = problem.x.to(dtype), (2000 * problem.y).to(dtype)
        problem.model.to(dtype).set_train_data(x, y, strict=False)
        mll = LaplaceMarginalLogLikelihood(
            problem.likelihood, problem.model, objective="elbo", solver=LaplaceNewton(tolerance=1e-5)
        )
        bounds.append(mll(problem.model(x), y).item())
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-6)


def importance_sampled_evidence(problem: Case, draws: int = 40_000) -> tuple[float, float]:
    """Log p(y) and its standard error, proposals from Laplace's approximation; one latent function."""
    prior, likelihood = problem.prior(), problem.pointwise()
    kernel, mean = prior.operator.to_dense(), prior.mean
    kernel = kernel + 1e-8 * torch.eye(len(kernel))
    f = LaplaceCholesky().solve(prior, likelihood).latent
    w = likelihood.curvature(f, NO_FLOOR).blocks().flatten()
    covariance = torch.linalg.inv(torch.linalg.inv(kernel) + torch.diag(w))
    proposal = torch.distributions.MultivariateNormal(f.flatten(), covariance)
    target = torch.distributions.MultivariateNormal(mean.flatten(), kernel)
    base = torch.randn(draws, len(f), generator=torch.Generator().manual_seed(3))
    samples = f.flatten() + base @ torch.linalg.cholesky(covariance).mT
    log_lik = torch.stack([likelihood.log_prob(sample.unsqueeze(-1)).sum() for sample in samples]).detach()
    weights = log_lik + target.log_prob(samples) - proposal.log_prob(samples)
    scaled = (weights - weights.max()).exp()
    value = float(torch.logsumexp(weights, 0) - torch.tensor(float(draws)).log())
    return value, float(scaled.std() / scaled.mean() / draws**0.5)


def test_elbo_is_a_lower_bound_on_the_true_evidence() -> None:
    problem = case("logit", n=20)
    truth, error = importance_sampled_evidence(problem, draws=8000)
    assert error < 0.02
    solver = LaplaceNewton(tolerance=1e-8, num_covariance_actions=40)
    mll = LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, objective="elbo", solver=solver)
    bound, _ = gradients(problem, mll)
    assert truth - 1.0 < bound < truth + 4 * error


def test_elbo_of_a_gaussian_likelihood_with_everything_captured_is_exact() -> None:
    problem = case("gaussian", n=15)
    exact, expected = gradients(problem, LaplaceMarginalLogLikelihood(problem.likelihood, problem.model))
    solver = LaplaceNewton(tolerance=1e-12, num_covariance_actions=30)
    mll = LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, objective="elbo", solver=solver)
    value, found = gradients(problem, mll)
    assert value == pytest.approx(exact, abs=1e-8)
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-6, atol=1e-6)


def assert_derivative(bound: Callable[[], Tensor], parameters: Iterable[Tensor], step: float = 1e-4) -> None:
    """The gradients that parameters have, in one direction that all of them share in: the bound's central difference."""
    moved = list(parameters)
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in moved]
    expected = sum(float((p.grad * direction).sum()) for p, direction in zip(moved, directions, strict=True))
    ends = []
    for sign in (1, -2):
        for parameter, direction in zip(moved, directions, strict=True):
            parameter.data += sign * step * direction
        ends.append(bound().item())
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), LAYOUTS)
def test_elbo_gradient_is_its_derivative(name: str, kind: str) -> None:
    """What the maximisation moves has no part in it."""
    problem = case(name, n=7, kind=kind)
    mll = LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, objective="elbo")
    bound = lambda: mll(problem.model(problem.x), problem.y) * 7
    problem.model.zero_grad()
    bound().backward()
    assert_derivative(bound, problem.model.parameters())


@pytest.mark.parametrize(("name", "scale"), [("logit", 1e3), ("negative-binomial", 1e5)])
def test_elbo_of_a_wide_prior(name: str, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Natural steps overshoot, and some reach no Gaussian: halved ones must do."""
    monkeypatch.setattr("gpy_iterative.laplace.elbo.TOLERANCE", 1e-7)
    problem = case(name, n=30)
    problem.model.covar_module.outputscale = scale
    mll = LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, objective="elbo")
    bound = lambda: mll(problem.model(problem.x), problem.y) * 30
    problem.model.zero_grad()
    bound().backward()
    assert mll.report.status is SolveStatus.CONVERGED
    assert_derivative(bound, problem.model.parameters())


@pytest.mark.parametrize("objective", ["laplace", "elbo"])
@pytest.mark.parametrize("solver", [LaplaceCholesky(), LaplaceNewton()])
def test_means_may_have_any_memory_layout(objective: str, solver: gpi.solvers.LaplaceSolver) -> None:
    problem = case("softmax", n=12)
    prior = problem.model(problem.x)
    own = gpytorch.distributions.MultivariateNormal(prior.mean.contiguous(), prior.lazy_covariance_matrix)
    values = []
    for each in (prior, own):
        options = {"objective": objective, "solver": solver, "generator": 0}
        mll = LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, **options)
        values.append(mll(each, problem.y))
    assert not prior.mean.is_contiguous()
    torch.testing.assert_close(*values)


def test_elbo_begins_where_averages_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """At points without counts the mode's curvature is nearly zero, and the average of exp(f) overflows."""
    monkeypatch.setattr("gpy_iterative.laplace.elbo.MAX_STEPS", 1)
    problem = case("poisson-log", n=30)
    problem.model.covar_module.outputscale = 1e5
    mll = LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, objective="elbo")
    with pytest.warns(ConvergenceWarning, match="budget_exhausted"):
        assert torch.isfinite(mll(problem.model(problem.x), problem.y))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("poisson-log", "own"), ("student", "own"), *LAYOUTS[-4:]])
def test_elbo_gradient_in_a_subspace_is_its_derivative(name: str, kind: str) -> None:
    """For fixed actions."""
    problem = case(name, n=7, kind=kind)
    likelihood = problem.pointwise()
    solution = LaplaceNewton(max_rank=4).solve(problem.prior(), likelihood)

    def bound() -> Tensor:
        live = latent_prior(problem.model(problem.x), KernelProducts())
        fixed = replace(
            solution, inverse=replace(solution.inverse, images=(live.operator @ solution.inverse.actions).detach())
        )
        return subspace_bound(LatentPrior(live.operator, live.mean.detach()), likelihood, fixed).with_gradient(
            live, likelihood
        )

    problem.model.zero_grad()
    bound().backward()
    assert_derivative(bound, problem.model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("solver", [None, LaplaceNewton(max_rank=8)], ids=["dense", "newton"])
def test_training_raises_the_bound(solver: LaplaceNewton | None) -> None:
    problem = case("poisson-log", n=15)
    problem.model.covar_module.outputscale = 20.0
    mll = LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, objective="elbo", solver=solver, generator=0)
    optimiser = torch.optim.Adam(problem.model.parameters(), lr=0.1)
    values = []
    for _ in range(4):
        optimiser.zero_grad()
        loss = -mll(problem.model(problem.x), problem.y)
        loss.backward()
        optimiser.step()
        values.append(-loss.item())
    assert values == sorted(values)
    assert mll.report.status is SolveStatus.CONVERGED
    assert "± 0; converged" in str(mll.report)


def test_a_bound_that_is_not_the_largest_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = case("poisson-log", n=15)
    monkeypatch.setattr("gpy_iterative.laplace.elbo.MAX_STEPS", 1)
    mll = LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, objective="elbo")
    with pytest.warns(ConvergenceWarning, match="largest lower bound ended with status budget_exhausted"):
        mll(problem.model(problem.x), problem.y)


def test_an_adjoint_that_takes_too_many_products_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = case("negative-binomial", n=30)
    monkeypatch.setattr("gpy_iterative.laplace.evidence.MAX_ADJOINT_PRODUCTS", 3)
    mll = LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, solver=LaplaceNewton(), generator=0)
    with pytest.warns(ConvergenceWarning, match="solve for the gradient ended with status budget_exhausted"):
        mll(problem.model(problem.x), problem.y)


def test_there_is_no_adjoint_where_no_mode_is() -> None:
    prior = case("negative-binomial", n=30).prior()
    for curvature, expected in ((-0.1, SolveStatus.CONVERGED), (-10.0, SolveStatus.DIVERGED)):
        hessian = torch.full((30, 1, 1), curvature, dtype=torch.float64)
        source = torch.cos(torch.arange(30.0, dtype=torch.float64))
        adjoint, _, status = _indefinite_adjoint(prior, hessian, source, 1e-10)
        assert status is expected
        assert torch.isfinite(adjoint).all()
        if status is SolveStatus.CONVERGED:
            whole = torch.eye(30, dtype=torch.float64) + curvature * prior.operator.to_dense()
            torch.testing.assert_close(whole @ adjoint, source)


def test_a_search_that_finds_no_higher_bound_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = case("logit", n=30)
    problem.model.covar_module.outputscale = 1e3
    monkeypatch.setattr("gpy_iterative.laplace.elbo.MAX_HALVINGS", 0)  # full steps overshoot
    mll = LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, objective="elbo")
    with pytest.warns(ConvergenceWarning, match="largest lower bound ended with status stagnated"):
        mll(problem.model(problem.x), problem.y)
    assert mll.report.status is SolveStatus.STAGNATED


def test_a_bound_that_is_not_finite() -> None:
    problem = case("poisson-log", n=15)
    problem.model.covar_module.outputscale = 1e7
    mll = LaplaceMarginalLogLikelihood(
        problem.likelihood, problem.model, objective="elbo", solver=LaplaceNewton(max_rank=1)
    )
    with pytest.raises(NonFiniteError, match="not finite at the mode"):
        mll(problem.model(problem.x), problem.y)


def test_a_step_of_training_improves_and_warm_starts() -> None:
    problem = case("poisson-log", n=60, solver=LaplaceNewton())
    mll = LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, solver=LaplaceNewton(), generator=0)
    optimiser = torch.optim.Adam(problem.model.parameters(), lr=0.05)
    values, products = [], []
    for _ in range(15):
        optimiser.zero_grad()
        loss = -mll(problem.model(problem.x), problem.y)
        loss.backward()
        optimiser.step()
        values.append(loss.item())
        products.append(mll.report.epochs)
    assert values[-1] < values[0]
    assert max(products[1:]) <= products[0]
    assert "kernel products" in str(mll.report)
    posterior = mll.posterior()
    assert not problem.model.training
    torch.testing.assert_close(problem.model(problem.x).mean, posterior(problem.x).mean)


@pytest.mark.parametrize("name", ["logit", "softmax"])
def test_the_bound_does_not_depend_on_the_call_before(name: str) -> None:
    """The second call starts at the mode that the first has found."""
    problem = case(name, n=25)
    mll = LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, objective="elbo", generator=0)
    first, second = (gradients(problem, mll)[0] for _ in range(2))
    assert second == pytest.approx(first, abs=1e-7)


def test_the_posterior_is_that_of_the_training() -> None:
    problem = case("logit", n=30)
    solver = LaplaceNewton(max_rank=6, num_covariance_actions=0)
    products = gpi.linear_operators.KernelProducts(tile_size=512)
    mll = LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, solver=solver, products=products)
    mll(problem.model(problem.x), problem.y)
    posterior = mll.posterior()  # at the very hyperparameters of the mode that it starts from
    assert 1 <= posterior.solution.inverse.actions.shape[-1] <= 6
    assert problem.model.posterior() is posterior
    assert posterior._products is products
    left = posterior(problem.x).variance / problem.model.covar_module.outputscale
    assert left.mean() < 0.9
    other = case("logit", n=30)
    with pytest.raises(ValueError, match="not the model's own"):
        LaplaceMarginalLogLikelihood(problem.likelihood, other.model)


def test_targets_are_a_tensor() -> None:
    problem = case("logit", n=8)
    mll = LaplaceMarginalLogLikelihood(problem.likelihood, problem.model)
    with pytest.raises(ValueError, match="targets must be a tensor, got list"):
        mll(problem.model(problem.x), problem.y.tolist())
    with pytest.raises(TypeError, match="targets must be a tensor, got list"):
        problem.model.set_train_data(targets=problem.y.tolist())
    with pytest.raises(TypeError, match="inputs must be a tensor, or several of them, got ndarray"):
        problem.model.set_train_data(problem.x.numpy())
    assert mll(problem.model(problem.x), problem.y).isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("solver", [None, LaplaceNewton()])
def test_inference_mode_gives_the_value(dtype: torch.dtype, solver: LaplaceNewton | None) -> None:
    problem = case("poisson-log", n=20, dtype=dtype)
    for objective in ("laplace", "elbo"):
        options = {"objective": objective, "solver": solver, "generator": 0}
        mll = LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, **options)
        with torch.inference_mode():
            inside = float(mll(problem.model(problem.x), problem.y.clone()))
        again = LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, **options)
        value = again(problem.model(problem.x), problem.y)
        assert inside == pytest.approx(value.item(), abs=1e-4)
        mll(problem.model(problem.x), problem.y).backward()


def test_a_run_resumes_exactly() -> None:
    def run(steps: int, problem: Case, mll: LaplaceMarginalLogLikelihood) -> list[float]:
        return [gradients(problem, mll)[0] for _ in range(steps)]

    options = {"solver": LaplaceNewton(max_rank=5), "generator": 3}
    problem = case("logit", n=30)
    mll = LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, **options)
    run(2, problem, mll)
    state = mll.training_state()
    expected = run(2, problem, mll)
    again = case("logit", n=30)
    resumed = LaplaceMarginalLogLikelihood(again.likelihood, again.model, **options)
    resumed.load_training_state(state)
    assert run(2, again, resumed) == expected
    kept = resumed.training_state()
    for changed in (
        {"weights": torch.zeros(3)},
        kept | {"generator": 3},
        kept | {"mode.weights": torch.zeros(30, 1, dtype=torch.bool)},
        kept | {"mode.weights": 0.5},
        kept | {"mode.actions": torch.zeros(30, 1)},
        kept | {"probes": torch.zeros(3)},
    ):
        with pytest.raises(ValueError, match="no training state"):
            resumed.load_training_state(changed)
    assert all(torch.equal(tensor, kept[key]) for key, tensor in resumed.training_state().items())


def test_float32_agrees_with_float64() -> None:
    torch.set_default_dtype(torch.float32)
    for name in ("logit", "softmax", "poisson-log"):
        low, high = case(name, n=40, dtype=torch.float32), case(name, n=40)
        for solver in (None, LaplaceNewton(max_rank=100, num_covariance_actions=20)):
            options = {"solver": solver, "num_probes": 64, "generator": 0}
            values = [
                gradients(problem, LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, **options))
                for problem in (low, high)
            ]
            assert values[0][0] == pytest.approx(values[1][0], abs=0.3 if solver else 1e-3)
            assert all(gradient.dtype == torch.float32 for gradient in values[0][1].values())


def test_masked_points_are_dropped() -> None:
    problem = case("poisson-log", n=20)
    missing = problem.y.clone()
    missing[[3, 11]] = torch.nan
    mll = LaplaceMarginalLogLikelihood(problem.likelihood, problem.model)
    with pytest.raises(ValueError, match=r"targets\[3\] is nan"):
        mll(problem.model(problem.x), missing)
    kept = torch.isfinite(missing)
    smaller = case("poisson-log", n=20)
    smaller.model.set_train_data(problem.x[kept], problem.y[kept])
    with gpytorch.settings.observation_nan_policy("mask"):
        value = mll(problem.model(problem.x), missing).item() * 20
        problem.model.set_train_data(targets=missing)
        prediction = problem.model.eval()(problem.x[:4])
    reference = LaplaceMarginalLogLikelihood(smaller.likelihood, smaller.model)
    assert value == pytest.approx(reference(smaller.model(problem.x[kept]), problem.y[kept]).item() * 18, abs=1e-9)
    expected = smaller.model.eval()(problem.x[:4])
    torch.testing.assert_close(prediction.mean, expected.mean)
    torch.testing.assert_close(prediction.variance, expected.variance)


@pytest.mark.parametrize("solver", [LaplaceCholesky(), LaplaceNewton(tolerance=1e-10, num_covariance_actions=30)])
def test_gaussian_noise_that_is_not_learned(solver: LaplaceCholesky | LaplaceNewton) -> None:
    """The curvature then depends on nothing, and the evidence is exact."""
    problem = case("gaussian")
    problem.likelihood.requires_grad_(False)
    _, found = gradients(problem, LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, solver=solver))
    problem.model.zero_grad()
    noisy = problem.likelihood(gpytorch.Module.__call__(problem.model, problem.x))
    noisy.log_prob(problem.y).backward()
    expected = {name: p.grad for name, p in problem.model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_rows_that_are_missing_in_part_are_refused() -> None:
    """Dropping them whole would lose values without a word."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(12, 1, generator=generator, dtype=torch.float64)
    y = torch.cat([torch.sin(6 * x), torch.cos(6 * x)], dim=-1)
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2).double()
    mean = gpytorch.means.MultitaskMean(gpytorch.means.ZeroMean(), num_tasks=2)
    kernel = gpytorch.kernels.MultitaskKernel(gpytorch.kernels.RBFKernel(), num_tasks=2).double()
    prior = gpytorch.distributions.MultitaskMultivariateNormal(mean(x), kernel(x))
    targets = y.clone()
    targets[4] = torch.nan
    with gpytorch.settings.observation_nan_policy("mask"):
        observed, *_ = observed_data(targets, ())
        assert observed is not None
        assert (~observed).nonzero().tolist() == [[4]]
        targets[7, 1] = torch.nan
        model = LaplaceModel(x, y, likelihood)
        with pytest.raises(ValueError, match="Row 7 of the targets is missing in part"):
            LaplaceMarginalLogLikelihood(likelihood, model)(prior, targets)


def test_arguments_that_would_be_ignored_are_refused() -> None:
    problem = case("poisson-log", n=8)
    mll = LaplaceMarginalLogLikelihood(problem.likelihood, problem.model)
    with pytest.raises(ValueError, match="takes no arguments, and would ignore"):
        mll(problem.model(problem.x), problem.y, torch.ones(8))


def test_arguments_of_other_points_are_refused() -> None:
    class Exposed(gpi.likelihoods.PoissonLogLikelihood):
        def forward(self, function_samples: torch.Tensor, *params: torch.Tensor) -> torch.distributions.Poisson:
            return torch.distributions.Poisson(params[0] * function_samples.exp())

    problem, likelihood = case("poisson-log", n=8), Exposed()
    problem.model.likelihood = likelihood
    mll = LaplaceMarginalLogLikelihood(likelihood, problem.model)
    for params, shapes in ((torch.ones(5),), r"1 arguments \(\(5,\)\)"), ((), r"0 arguments \(\)"):
        with pytest.raises(ValueError, match=rf"Exposed.forward fails at 8 points with {shapes}"):
            mll(problem.model(problem.x), problem.y, *params)


def test_full_memory_is_not_blamed_on_arguments() -> None:
    class Greedy(gpi.likelihoods.PoissonLogLikelihood):
        def forward(self, function_samples: torch.Tensor) -> torch.distributions.Poisson:
            raise torch.OutOfMemoryError

    problem, likelihood = case("poisson-log", n=8), Greedy()
    problem.model.likelihood = likelihood
    with pytest.raises(torch.OutOfMemoryError):
        LaplaceMarginalLogLikelihood(likelihood, problem.model)(problem.model(problem.x), problem.y)


def test_a_bound_that_failed_draws_again(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = case("logit", n=20)
    solver = LaplaceNewton(num_covariance_actions=5)
    mll = LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, objective="elbo", solver=solver, generator=0)
    before = mll.training_state()["generator"].clone()
    with monkeypatch.context() as patch:
        patch.setattr("gpy_iterative.laplace.mll.subspace_bound", lambda *_: torch.tensor([])[0])
        with pytest.raises(IndexError):
            mll(problem.model(problem.x), problem.y)
    assert torch.equal(mll.training_state()["generator"], before)
    mll(problem.model(problem.x), problem.y)
    assert not torch.equal(mll.training_state()["generator"], before)


@pytest.mark.parametrize(
    "solver",
    [LaplaceNewton(num_covariance_actions=5), LaplaceNewton(preconditioner=gpi.preconditioners.Nystrom(rank=5))],
    ids=["actions", "preconditioner"],
)
def test_bounds_of_the_same_hyperparameters_are_equal(solver: LaplaceNewton) -> None:
    problem = case("logit", n=60)
    options = {"objective": "elbo", "solver": solver, "generator": 0}
    mll = LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, **options)
    first = mll(problem.model(problem.x), problem.y)
    assert torch.equal(mll(problem.model(problem.x), problem.y), first)
    resumed = LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, **options | {"generator": 1})
    assert not torch.equal(resumed(problem.model(problem.x), problem.y), first)
    resumed.load_training_state(mll.training_state())
    assert torch.equal(resumed(problem.model(problem.x), problem.y), first)


def test_a_batch_of_one_kernel_serves_all_functions() -> None:
    problem = case("softmax", n=20, kind="shared")
    values = []
    for batch in (torch.Size([]), torch.Size([1])):
        model = problem.model
        model.covar_module = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.RBFKernel(batch_shape=batch), batch_shape=batch
        )
        model.double()
        mll = LaplaceMarginalLogLikelihood(problem.likelihood, model, solver=LaplaceNewton(), generator=0)
        values.append(mll(model(problem.x), problem.y).reshape(()))
    torch.testing.assert_close(values[0], values[1], rtol=1e-3, atol=1e-3)


def test_layers_of_chance_are_refused() -> None:
    """Values would be noisy while their standard error is zero."""
    problem = case("logit", n=15)
    problem.model.dropout = torch.nn.Dropout(0.3)
    mll = LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, generator=0)
    with pytest.raises(ValueError, match="The layer dropout, a Dropout in training mode"):
        mll(problem.model(problem.x), problem.y)
    problem.model.dropout.eval()
    mll(problem.model(problem.x), problem.y)
