"""No test points at all: every question has an empty answer."""

import pytest
import torch
from gpytorch import kernels

from gpy_iterative.prediction import PathwisePosterior
from gpy_iterative.solvers import Cholesky, ConjugateGradients
from tests.exact.gaussian_models import regression

#: A complete projection, and one with a local part.
ROUTES = [{"solver": Cholesky()}, {"solver": ConjugateGradients(), "exact_below": 0, "rank": 5, "num_neighbours": 4}]


@pytest.mark.parametrize("options", ROUTES, ids=["exact", "local"])
@pytest.mark.parametrize("shape", [(0,), (2, 0)])
@pytest.mark.parametrize("grad", [False, True])
def test_moments_and_samples(options: dict, shape: tuple[int, ...], grad: bool) -> None:
    case = regression(kernels.ScaleKernel(kernels.RBFKernel()))
    posterior = PathwisePosterior(case.model, case.likelihood, **options)
    x = torch.empty(*shape, 3, dtype=torch.float64, requires_grad=grad)
    prediction = posterior(x)
    assert prediction.mean.shape == prediction.variance.shape == shape
    assert prediction.covariance_matrix.shape == (*shape, 0)
    assert posterior(x).rsample(torch.Size([3])).shape == (3, *shape)
    assert case.likelihood(posterior(x)).variance.shape == shape


@pytest.mark.parametrize("options", ROUTES, ids=["exact", "local"])
@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_through_the_model(options: dict, shape: tuple[int, ...]) -> None:
    case = regression(kernels.ScaleKernel(kernels.RBFKernel()))
    PathwisePosterior(case.model, case.likelihood, **options).install()
    prediction = case.likelihood(case.model(case.x.new_empty(*shape, 3)))
    assert prediction.mean.shape == prediction.variance.shape == shape
