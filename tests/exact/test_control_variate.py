"""The score of the probes' density: its derivative, its mean of zero, and the noise that it takes away."""

import gc
import math
import weakref
from collections.abc import Callable

import gpytorch
import pytest
import torch
from gpytorch import kernels
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.exact.control_variate import ControlVariate
from gpy_iterative.exact.probes import Preconditioned, Probes
from gpy_iterative.fitting.choice import system_now
from gpy_iterative.linear_operators import NoisyLinearOperator
from gpy_iterative.preconditioners import LowRankPlusVecchia, Vecchia
from gpy_iterative.preconditioners.low_rank_plus_vecchia import LowRankPlusVecchiaFactor
from gpy_iterative.preconditioners.pivoted_cholesky import PivotedCholeskyFactor
from gpy_iterative.preconditioners.sparse_inverse_cholesky import SparseInverseCholesky
from gpy_iterative.solvers import Cholesky, ConjugateGradients
from tests.exact.gaussian_models import Case, Regression
from tests.exact.test_exact import value_and_gradients
from tests.exact.test_whitened import plane
from tests.monte_carlo import assert_mean_within

N, RANK, NEIGHBOURS = 60, 12, 5


class Bumps(kernels.Kernel):
    """A kernel of the user's own."""

    has_lengthscale = True

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params) -> Tensor:
        distance = self.covar_dist(x1 / self.lengthscale, x2 / self.lengthscale, diag=diag, square_dist=True)
        return (-distance).exp() / (1 + distance)


KERNELS: dict[str, Callable[[], kernels.Kernel]] = {
    "Matern-3/2": lambda: kernels.ScaleKernel(kernels.MaternKernel(nu=1.5, ard_num_dims=2)),
    "RBF": lambda: kernels.RBFKernel(ard_num_dims=2),
    "sum": lambda: kernels.ScaleKernel(kernels.MaternKernel(nu=2.5)) + kernels.ScaleKernel(kernels.RQKernel()),
    "user's own": lambda: kernels.ScaleKernel(Bumps()),
}


def case_of(kernel: kernels.Kernel, n: int = N, per_datum: bool = False) -> Case:
    x = torch.rand(n, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = torch.linspace(0.02, 0.1, n).double()
    likelihood = (
        gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise, learn_additional_noise=True)
        if per_datum
        else gpytorch.likelihoods.GaussianLikelihood()
    )
    y = torch.sin(5 * x[:, 0]) + x[:, 1]
    model = Regression(x, y, likelihood, kernel)
    model.double()
    for module in model.modules():
        if isinstance(module, kernels.Kernel) and module.has_lengthscale:
            module.lengthscale = 0.3
    return Case(model, likelihood, x, y)


def operator_of(case: Case) -> NoisyLinearOperator:
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, solver=ConjugateGradients())
    operator = system_now(mll).operator
    assert isinstance(operator, NoisyLinearOperator)
    return operator


def factor_of(recipe: Vecchia | LowRankPlusVecchia, operator: NoisyLinearOperator):
    with torch.no_grad():
        return recipe.build(operator, choices=recipe.choices(operator, torch.Generator().manual_seed(0)))


def density(matrix: Tensor, noise: Tensor, factor, vectors: Tensor) -> Tensor:
    """The mean of log N(xi_j; 0, S) by dense algebra, differentiable in K and noise; without 2 pi."""
    low_rank = torch.zeros_like(matrix)
    if not isinstance(factor, SparseInverseCholesky):
        pivots = factor.pivots[: factor.factor.shape[-1]]
        block = matrix[pivots][:, pivots]
        jitter = 1e-10 * block.detach().diagonal().max() * torch.eye(len(pivots)).double()
        low_rank = matrix[:, pivots] @ torch.linalg.solve(block + jitter, matrix[pivots])
    if isinstance(factor, PivotedCholeskyFactor):
        return mean_log_density(low_rank + noise.diag(), vectors)
    local = factor.local if isinstance(factor, LowRankPlusVecchiaFactor) else factor
    rest, rows = matrix - low_rank + noise.diag(), []
    for i, point in enumerate(local.order.tolist()):
        near = sorted(set(local.neighbours[i].tolist())) if i >= local.neighbours.shape[1] else range(i)
        chosen = [*local.order[list(near)].tolist(), point]
        last = torch.linalg.inv(rest[chosen][:, chosen])[-1]
        rows.append(torch.zeros(len(matrix)).double().index_put((torch.tensor(chosen),), last / last[-1].sqrt()))
    b = torch.stack(rows)
    return mean_log_density(low_rank + torch.linalg.inv(b.mT @ b), vectors)


def mean_log_density(covariance: Tensor, vectors: Tensor) -> Tensor:
    quadratic = (vectors * torch.linalg.solve(covariance, vectors)).sum(0).mean()
    return -0.5 * (quadratic + torch.logdet(covariance))


@pytest.fixture(params=["Vecchia", "low rank", "sum"])
def recipe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Vecchia | LowRankPlusVecchia:
    module = "gpy_iterative.preconditioners.low_rank_plus_vecchia"
    monkeypatch.setattr(f"{module}.LARGEST_LEFT", math.inf if request.param == "low rank" else 0.0)
    monkeypatch.setattr(f"{module}.NEIGHBOURS", (NEIGHBOURS, NEIGHBOURS))
    return Vecchia(NEIGHBOURS) if request.param == "Vecchia" else LowRankPlusVecchia(RANK)


@pytest.mark.parametrize("name", [*KERNELS, "noise of every datum"])
def test_derivatives_are_those_of_the_dense_density(name: str, recipe: Vecchia | LowRankPlusVecchia) -> None:
    case = case_of(KERNELS.get(name, KERNELS["Matern-3/2"])(), per_datum=name not in KERNELS)
    operator = operator_of(case)
    factor = factor_of(recipe, operator)
    base = torch.randn(factor.num_signs, 3, generator=torch.Generator().manual_seed(1)).double()
    vectors, dual = factor.sample(base)
    control = ControlVariate.of(Probes(vectors, dual, factor), operator)
    assert control is not None
    found = control.mean_score(operator)
    moving = [tensor for tensor in operator.representation() if tensor.requires_grad]
    value = sum((tensor * part).sum() for tensor, part in zip(moving, found, strict=True))
    parameters = [parameter for parameter in case.model.parameters() if parameter.requires_grad]
    derivative = torch.autograd.grad(value, parameters, allow_unused=True)
    dense = case.model.covar_module(case.x).to_dense()
    noise = case.likelihood(case.model(case.x)).covariance_matrix.diagonal() - dense.diagonal()
    twin = density(dense, noise, factor, vectors)
    for one, other in zip(derivative, torch.autograd.grad(twin, parameters, allow_unused=True), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6 * N)


def test_the_mean_score_is_zero(recipe: Vecchia | LowRankPlusVecchia) -> None:
    """By base vectors whose mean square is the identity."""
    operator = operator_of(case_of(KERNELS["Matern-3/2"]()))
    factor = factor_of(recipe, operator)
    count = factor.num_signs
    control = ControlVariate.of(Probes(*factor.sample(count**0.5 * torch.eye(count).double()), factor), operator)
    assert control is not None
    one = ControlVariate(control.vectors[:, -1:], control.dual[:, -1:], factor).mean_score(operator)
    for mean, single in zip(control.mean_score(operator), one, strict=True):
        assert mean.abs().max() < 1e-8 * single.abs().max()


@pytest.mark.parametrize("part", ["kernel", "noise", "mean"])
def test_frozen_parameters_have_no_derivative(part: str, recipe: Vecchia | LowRankPlusVecchia) -> None:
    case = plane(200)
    trained = {"kernel": case.model.covar_module, "noise": case.likelihood, "mean": case.model.mean_module}[part]
    case.model.requires_grad_(False)
    trained.requires_grad_(True)
    solver = ConjugateGradients(preconditioner=recipe)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, solver=solver, generator=0)
    mll(case.model(case.x), case.y).backward()
    for name, parameter in case.model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name


def samples(case: Case, solver: ConjugateGradients, draws: int) -> dict[str, Tensor]:
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(
        case.likelihood, case.model, num_probes=4, solver=solver, warm_start=False, generator=0
    )
    found = [value_and_gradients(mll, case)[1] for _ in range(draws)]
    return {name: torch.stack([each[name] for each in found]) for name in found[0]}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("recipe", "enough"),
    [(Vecchia(20), 0.0), (LowRankPlusVecchia(20), 0.0), (LowRankPlusVecchia(270), math.inf)],
    ids=["Vecchia", "sum", "low rank"],
)
def test_the_gradient_is_unbiased_with_a_fifth_of_the_noise(
    recipe: Vecchia | LowRankPlusVecchia, enough: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpy_iterative.preconditioners.low_rank_plus_vecchia.LARGEST_LEFT", enough)
    case = plane(300, dtype=dtype)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, solver=Cholesky())
    _, expected = value_and_gradients(mll, case)
    solver = ConjugateGradients(preconditioner=recipe, tolerance=1e-4, probe_tolerance=1e-4)
    controlled = samples(case, solver, 12)
    monkeypatch.setattr(ControlVariate, "of", classmethod(lambda *_: None))
    plain = samples(case, solver, 12)
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, found in controlled.items():
        assert_mean_within(found, expected[name], max_sem=0.01 * scale, floor=1e-3 * scale)
    noise = [sum(float(each.var(0).sum()) for each in found.values()) ** 0.5 for found in (controlled, plain)]
    assert noise[0] < noise[1] / 5


def test_a_zero_kernel_has_no_derivative_by_columns(recipe: Vecchia | LowRankPlusVecchia) -> None:
    case = case_of(KERNELS["Matern-3/2"]())
    solver = ConjugateGradients(preconditioner=recipe)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, solver=solver, generator=0)
    value_and_gradients(mll, case)
    case.model.covar_module.raw_outputscale.data.fill_(-800.0)  # softplus underflows
    _, gradients = value_and_gradients(mll, case)
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())


def test_there_is_none_for_many_inputs_and_other_covariances() -> None:
    case, x = plane(100), torch.rand(100, 4).double()
    operator = operator_of(case)
    signs = torch.ones(100, 2).double()
    assert ControlVariate.of(Probes(signs, signs), operator) is None
    many = Regression(x, case.y, case.likelihood, kernels.ScaleKernel(kernels.MaternKernel(nu=1.5))).double()
    wide = operator_of(Case(many, case.likelihood, x, case.y))
    whitened = Preconditioned(num_probes=2, recipe=Vecchia(5))
    probes = whitened.probes(wide, None, whitened.draw(wide, None, torch.Generator().manual_seed(0)))
    assert ControlVariate.of(probes, wide) is None


def test_there_is_none_beside_correlated_task_noise() -> None:
    class Gradients(gpytorch.models.ExactGP):
        def __init__(self, x: Tensor, y: Tensor, likelihood: gpytorch.likelihoods.Likelihood) -> None:
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ConstantMeanGrad()
            self.covar_module = kernels.ScaleKernel(kernels.RBFKernelGrad())

        def forward(self, x: Tensor) -> gpytorch.distributions.MultitaskMultivariateNormal:
            return gpytorch.distributions.MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))

    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(40, 2, generator=generator).double(), torch.randn(40, 3, generator=generator).double()
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=3, rank=1)
    model = Gradients(x, y, likelihood).double()
    solver = ConjugateGradients(preconditioner=Vecchia(10))
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model, solver=solver, generator=0)
    mll(model(x), y).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_kept_losses_keep_no_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    case, found, of = plane(100), [], ControlVariate.of

    def watched(probes: Probes, operator: NoisyLinearOperator) -> ControlVariate | None:
        control = of(probes, operator)
        found.append(weakref.ref(control))
        return control

    monkeypatch.setattr(ControlVariate, "of", watched)
    solver = ConjugateGradients(preconditioner=Vecchia(10))
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, solver=solver, generator=0)
    losses = []
    for _ in range(3):
        losses.append(-mll(case.model(case.x), case.y))
        losses[-1].backward()
    gc.collect()
    assert [control() for control in found] == [None, None, None]
