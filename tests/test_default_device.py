"""No tensor of the package is placed by `torch.set_default_device`: on "meta", a tensor has no numbers to compute with."""

from collections.abc import Callable
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch import kernels

import gpy_iterative as gpi
from gpy_iterative.solvers import ConjugateGradients
from tests.exact.gaussian_models import CASES, Case, Regression, regression
from tests.features.feature_models import KERNELS as FEATURE_KERNELS
from tests.features.feature_models import feature_case
from tests.laplace.cases import case as laplace_case


def assert_independent(mll: gpytorch.mlls.MarginalLogLikelihood, *x: torch.Tensor, max_steps: int = 2) -> None:
    """A step, a fit, a saved state and predictions with tensors on the CPU, and with another device as default."""
    model: Any = mll.model
    with torch.device("meta"):
        mll(model(*model.train_inputs), model.train_targets).sum().backward()
        gpi.fit(mll, progress=False, max_steps=max_steps)
        mll.load_training_state(mll.training_state())
        posterior = mll.posterior()
        found = posterior(*x)
    for tensor in (found.mean, found.variance):
        assert torch.isfinite(tensor).all()


#: The noise needs arguments; GPyTorch's RBFKernelGrad itself is wrong under another default device.
OTHERS = {"heteroskedastic", "derivatives"}


@pytest.mark.parametrize("solver", [None, ConjugateGradients()])
@pytest.mark.parametrize("name", sorted(CASES.keys() - OTHERS))
def test_exact_models(name: str, solver: gpi.solvers.Solver | None) -> None:
    case = CASES[name]()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, generator=0, solver=solver)
    assert_independent(mll, *case.model.train_inputs)


def plane(n: int = 60) -> Case:
    return regression(kernels.ScaleKernel(kernels.MaternKernel(nu=1.5)), n=n)


@pytest.mark.parametrize(
    "preconditioner",
    [
        gpi.preconditioners.Vecchia(10),
        gpi.preconditioners.PivotedCholesky(10),
        gpi.preconditioners.RandomlyPivotedCholesky(10),
        gpi.preconditioners.Nystrom(10),
    ],
)
def test_preconditioners(preconditioner: gpi.preconditioners.PreconditionerRecipe) -> None:
    case, solver = plane(), ConjugateGradients(preconditioner=preconditioner)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, generator=0, solver=solver)
    assert_independent(mll, case.x)


def pathwise(case: Case) -> gpytorch.mlls.MarginalLogLikelihood:
    return gpi.mlls.PathwiseMarginalLogLikelihood(case.likelihood, case.model, generator=0)


def russian_roulette(case: Case) -> gpytorch.mlls.MarginalLogLikelihood:
    return gpi.mlls.RussianRouletteMarginalLogLikelihood(case.likelihood, case.model, generator=0)


def single_sample(case: Case) -> gpytorch.mlls.MarginalLogLikelihood:
    return gpi.mlls.SingleSampleRFFMarginalLogLikelihood(
        case.likelihood, case.model, generator=0, min_frequencies=10, frequency_step=5
    )


@pytest.mark.parametrize("make", [pathwise, russian_roulette, single_sample])
def test_other_estimators(make: Callable[[Case], gpytorch.mlls.MarginalLogLikelihood]) -> None:
    case = plane()
    assert_independent(make(case), case.x)


def test_subsets_observations_and_paths() -> None:
    case = plane()
    with torch.device("meta"):
        gpi.initialize_from_subsets(case.model, case.likelihood, 20, 2)
        posterior = gpi.prediction.PathwisePosterior(case.model, case.likelihood, exact_below=10, rank=8)
        posterior.variance_error(case.x)
        extended = posterior.condition_on_observations(case.x[:2] + 1, case.y[:2])
        found = extended.sample_paths(2)(case.x)
    assert torch.isfinite(found).all()


@pytest.mark.slow
def test_far_fields() -> None:
    x = torch.rand(4200, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    kernel = kernels.ScaleKernel(kernels.MaternKernel(nu=1.5))
    kernel.base_kernel.lengthscale = 0.2
    model = Regression(x, torch.sin(6 * x[:, 0]), likelihood, kernel).double()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model, generator=0)
    assert_independent(mll, x[:5], max_steps=1)
    assert mll.report.far_field_error is not None


@pytest.mark.parametrize("solver", [None, gpi.solvers.LaplaceNewton()])
@pytest.mark.parametrize("objective", ["laplace", "elbo"])
@pytest.mark.parametrize("name", ["logit", "softmax-mixed", "student"])
def test_laplace(name: str, objective: str, solver: gpi.solvers.LaplaceSolver | None) -> None:
    case = laplace_case(name, solver=solver)
    mll = gpi.mlls.LaplaceMarginalLogLikelihood(case.model.likelihood, case.model, generator=0, objective=objective)
    with torch.device("meta"):
        mll(case.model(case.x), case.y).sum().backward()
        gpi.fit(mll, progress=False, max_steps=1)
        found = mll.posterior().sample_paths(2)(case.x)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("kernel", ["fourier", "deep"])
@pytest.mark.parametrize(
    "make",
    [
        gpi.mlls.VariationalFeatureMarginalLogLikelihood,
        gpi.mlls.CompositionalMarginalLogLikelihood,
        gpi.mlls.MinimaxMarginalLogLikelihood,
        gpi.mlls.MinibatchMarginalLogLikelihood,
    ],
)
def test_features(make: Callable[..., gpytorch.mlls.MarginalLogLikelihood], kernel: str) -> None:
    case = feature_case(FEATURE_KERNELS[kernel]())
    assert_independent(make(case.likelihood, case.model, batch_size=10, generator=0), case.x)


@pytest.mark.parametrize("basis", ["fourier", "nystrom"])
def test_quadruply_stochastic(basis: str) -> None:
    x = torch.rand(60, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y, kernel = torch.sin(6 * x[:, 0]), kernels.ScaleKernel(kernels.RBFKernel()).double()
    made = (
        gpi.models.RandomFourierBasis(kernel, num_dims=2, num_features=40)
        if basis == "fourier"
        else gpi.models.NystromBasis(kernel, x[:20])
    )
    model = gpi.models.QuadruplyStochasticGP(made).double()
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    mll = gpi.mlls.QuadruplyStochasticELBO(likelihood, model, num_data=60, generator=0)
    with torch.device("meta"):
        mll(model(x), y).backward()  # PyTorch's optimisers themselves have tensors on the default device
        found = model.posterior(x)
    assert torch.isfinite(found.mean).all()
