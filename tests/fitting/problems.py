"""Small regressions, and dense twins of the marginal log likelihood and its average information."""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_dense
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.fitting.coordinates import Coordinates
from tests.exact.gaussian_models import Case, Regression

ITERATIVE = gpi.solvers.ConjugateGradients()
#: Nearly exact for so few rows.
LOW_RANK = gpi.solvers.ConjugateGradients(preconditioner=gpi.preconditioners.RandomlyPivotedCholesky(rank=100))
TIGHT = gpi.solvers.ConjugateGradients(tolerance=1e-8, probe_tolerance=1e-8)


def data(n: int = 300, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs [n, 3], the last of which does not matter, and targets [n]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 3, generator=generator, dtype=torch.float64)
    noise = 0.2 * torch.randn(n, generator=generator, dtype=torch.float64)
    return x, torch.sin(5 * x[:, 0]) + x[:, 1].square() + noise


def kernel() -> gpytorch.kernels.Kernel:
    return gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=3))


def regression(
    n: int = 300,
    *,
    covariance: gpytorch.kernels.Kernel | None = None,
    likelihood: gpytorch.likelihoods.Likelihood | None = None,
    **options: object,
) -> gpi.mlls.HutchinsonMarginalLogLikelihood:
    """A marginal log likelihood, exact at this size unless a solver is given."""
    x, y = data(n)
    likelihood = gpytorch.likelihoods.GaussianLikelihood() if likelihood is None else likelihood
    model = Regression(x, y, likelihood, kernel() if covariance is None else covariance).double()
    return gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model, **{"generator": 0, **options})


def quiet(mll: Any, **options: Any) -> gpi.fitting.FitResult:
    return gpi.fit(mll, progress=False, **options)


def features(n: int = 200) -> gpi.mlls.VariationalFeatureMarginalLogLikelihood:
    x, y = data(n)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Regression(x, y, likelihood, gpytorch.kernels.ScaleKernel(gpytorch.kernels.LinearKernel())).double()
    return gpi.mlls.VariationalFeatureMarginalLogLikelihood(likelihood, model, batch_size=50, generator=0)


def parameters(mll: torch.nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in mll.parameters()]


@contextmanager
def failing_evaluations(
    mll: gpi.mlls.HutchinsonMarginalLogLikelihood, error: BaseException, *, after: int, times: float = math.inf
) -> Iterator[None]:
    """After some, so many evaluations raise an error in the model's own code."""
    forward, done = mll.model.forward, itertools.count()

    def raising(x: Tensor) -> MultivariateNormal:
        if after <= next(done) < after + times:
            raise error
        return forward(x)

    mll.model.forward = raising
    yield
    mll.model.forward = forward


def marginal(case: Case) -> MultivariateNormal:
    """The distribution of the targets, by GPyTorch."""
    with torch.no_grad():
        return case.likelihood(case.model(*case.model.train_inputs), *case.params)


def dense_information(case: Case, coordinates: Coordinates, step: float = 1e-5) -> Tensor:
    """A [p, p] without priors: dH/dt and dm/dt by central differences of dense matrices, and a dense solve."""
    start, system = coordinates.read(), marginal(case)
    matrix = to_dense(system.lazy_covariance_matrix).clone()
    targets = case.model.train_targets
    residual = (targets.flatten(-2) if system.loc.dim() < targets.dim() else targets) - system.loc
    weights = torch.linalg.solve(matrix, residual.unsqueeze(-1))
    of_matrix, of_mean = [], []
    for entry in torch.eye(len(coordinates), dtype=torch.float64):
        sides = []
        for sign in (1, -1):
            coordinates.write(start + sign * step * entry)
            moved = marginal(case)
            sides.append((to_dense(moved.lazy_covariance_matrix).clone(), moved.loc.clone()))
        (above, mean_above), (below, mean_below) = sides
        of_matrix.append(((above - below) / (2 * step) @ weights).expand(*residual.shape, 1))
        of_mean.append(((mean_above - mean_below) / (2 * step)).expand_as(residual).unsqueeze(-1))
    coordinates.write(start)
    q, m = torch.cat(of_matrix, dim=-1), torch.cat(of_mean, dim=-1)
    found = 0.5 * q.mT @ torch.linalg.solve(matrix, q) + m.mT @ torch.linalg.solve(matrix, m)
    return found.reshape(-1, len(coordinates), len(coordinates)).sum(0).detach()


def dense_value(mll: gpytorch.mlls.MarginalLogLikelihood) -> float:
    """The log marginal likelihood in nats, priors included, by GPyTorch with a Cholesky factor."""
    exact = gpytorch.mlls.ExactMarginalLogLikelihood(mll.likelihood, mll.model)
    size = len(mll.model.train_targets)
    with torch.no_grad(), gpytorch.settings.max_cholesky_size(10_000):
        return float(exact(mll.model(*mll.model.train_inputs), mll.model.train_targets)) * size


def dense_optimum(mll: gpytorch.mlls.MarginalLogLikelihood) -> float:
    """The value that L-BFGS reaches from where the mll is, on exact values; moves the parameters."""
    exact = gpytorch.mlls.ExactMarginalLogLikelihood(mll.likelihood, mll.model)

    def evaluate() -> Tensor:
        with gpytorch.settings.max_cholesky_size(10_000):
            return exact(mll.model(*mll.model.train_inputs), mll.model.train_targets)

    climb(mll, evaluate, max_iter=400, tolerance_change=1e-12)
    value = dense_value(mll)
    assert math.isfinite(value)
    return value


def climb(module: torch.nn.Module, evaluate: Callable[[], Tensor], **options: float) -> None:
    """Moves the free parameters to a larger value, by torch's L-BFGS."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.LBFGS(parameters, line_search_fn="strong_wolfe", **options)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -evaluate()
        loss.backward()
        return loss

    optimizer.step(closure)
